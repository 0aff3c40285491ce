"""The first screen of the page: what people ask of accumulation, answered in a row each from the numbers that are there.

A question without data has no row. Advice stands beside the numbers that earned it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pandas as pd

from accumulation_harness.analysis import batch_norm, convergence, faults, optimizers, wastefulness
from accumulation_harness.analysis.content import number, share
from accumulation_harness.analysis.load import Results
from accumulation_harness.analysis.question import made_of
from accumulation_harness.analysis.wastefulness import Wasteful
from accumulation_harness.judge.cause import Cause
from accumulation_harness.results.cells import spread

MOST_ROWS = 10
POINT = batch_norm.MARGIN  # percentage points of held-out error: what counts as a loss of accuracy


@dataclass(frozen=True)
class Advice:
    """One row: the question, the answer in some words, the number with its interval or range, and what to do."""

    question: str
    answer: str
    number: str
    action: str
    experiment: str  # whose page has the details


def advice(results: Results) -> list[Advice]:
    """The rows that the results suffice for, in order of interest; at most MOST_ROWS."""
    found = []
    for ask in ROWS:
        name = ask.__name__.replace("_", " ")
        row = made_of(partial(ask, results), f"the answer on {name}", lambda reason: None)
        found += [row] if row is not None else []
    return found[:MOST_ROWS]


def may_i_accumulate(results: Results) -> Advice | None:
    """Of the experiment on equivalence: arms without batch statistics."""
    arms = _accumulated(results.of("equivalence").arms)
    free = arms[arms["norm"] != "batch"]
    if free.empty:
        return None
    same = free[free["verdict"] == "equivalent"]
    return Advice(
        "May I accumulate instead of a large batch?",
        "Yes, where no layer and no loss couples the samples" if len(same) == len(free) else "Not in every case",
        f"{share(len(same), len(free))} runs without BatchNorm are the same computation; largest difference of their gradients "
        f"in double precision {number(float(same['algebra_error'].max()))}",
        "Accumulate. Compare gradients and not losses when you check your own loop.",
        "equivalence",
    )


def and_with_batch_norm(results: Results) -> Advice | None:
    """Of the experiments on BatchNorm: accuracy lost over b."""
    lost = batch_norm_losses(results)
    if lost.empty:
        return None
    cells = [
        f"b = {row['b']}: {row['mean']:.1f} points ({row['low']:.1f} to {row['high']:.1f}; {row['model']}, "
        f"B = {row['effective_batch']})"
        for row in lost.to_dict("records")
    ]
    costly = lost[lost["costs"]]["b"]
    return Advice(
        "And with BatchNorm, at my b?",
        "It is another computation, however small the loss of accuracy",
        "Held-out error above the large batch's, where it is largest (95% intervals): " + "; ".join(cells),
        f"It costs accuracy up to b = {costly.max()} (t tests, Holm over all models and B): there try norm=as_is,group on your "
        "model. Of a trained one the statistics can be frozen."
        if len(costly)
        else "No loss was shown at these b; GroupNorm avoids the question.",
        "batchnorm" if "batchnorm" in results.experiments else "groupnorm",
    )


def batch_norm_losses(results: Results) -> pd.DataFrame:
    """For each b the model and B that lose most against their large batch: `mean`, `low`, `high` in points, over n seeds.

    `costs`: whether some model and B loses at that b for certain, Holm-corrected over all.
    """
    parts = [batch_norm.trained(results.of(name)) for name in ("batchnorm", "groupnorm")]
    rows = pd.concat([part for part in parts if len(part)]) if any(map(len, parts)) else pd.DataFrame()
    cells = batch_norm.against_full(rows[rows["norm"] == "batch"], POINT) if len(rows) else rows
    if cells.empty:
        return cells
    most = cells.loc[cells.groupby("b")["mean"].idxmax(), ["b", "model", "effective_batch", "mean", "low", "high", "n"]]
    return most.assign(costs=most["b"].isin(cells[cells["costs"]]["b"]))


def is_group_norm_better(results: Results) -> Advice | None:
    """Of the experiment on GroupNorm."""
    rows = batch_norm.trained(results.of("groupnorm"))
    gains = batch_norm.between_norms(batch_norm.fixed_batch(rows)) if len(rows) else rows
    if gains.empty:
        return None
    small = gains[gains["b"] == gains["b"].min()]
    told = "; ".join(
        f"{row.model}, b = {row.b}: {row.gain:+.1f} points ({row.low:.1f} to {row.high:.1f})" for row in small.itertuples()
    )
    wins = small["low"] > 0
    return Advice(
        "Is GroupNorm the better choice?",
        f"For {', '.join(small[wins]['model'])} at b = {int(small['b'].min())}" if wins.any() else "Not shown here",
        f"It is exact at every N. Error that it saves at fixed B: {told}",
        "Compare both on your own model with norm=as_is,group: exactness is certain, accuracy depends on the model.",
        "groupnorm",
    )


def and_with_in_batch_negatives(results: Results) -> Advice | None:
    """Of the experiment on contrastive losses: gradients over N, beside GradCache's."""
    rows = results.of("contrastive").study("negatives")
    rows = rows[rows["dropout"] == 0] if len(rows) else rows
    plain, cached = (rows[rows["arm"] == arm] if len(rows) else rows for arm in ("accumulated", "grad_cache"))
    if plain.empty or cached.empty:
        return None
    over = plain.groupby("accumulation_steps")["gradient_error"].median()
    told = ", ".join(f"{number(float(error))} at N = {num:g}" for num, error in over.items())
    return Advice(
        "And with in-batch negatives (CLIP, retrieval)?",
        "It is another loss: fewer negatives",
        f"Gradient off the large batch's by {told}; GradCache's by at most {number(float(cached['gradient_error'].max()))}",
        "Use GradCache: representations of the whole window first, then a second forward per micro-batch.",
        "contrastive",
    )


def do_i_change_rate_or_momentum(results: Results) -> Advice | None:
    """Of the experiments on momentum and Adam: state of the accumulated arms, and half-lives in samples."""
    parts = [results.of(name) for name in ("momentum", "adam")]
    right = pd.concat([optimizers.long_runs(part, 1) for part in parts if not part.is_empty] or [pd.DataFrame()])
    if right.empty:
        return None
    error = optimizers.largest_error(right[right["arm"] == "accumulated"], "state_error", "parameter_error")
    return Advice(
        "Do I change learning rate, momentum or β₂?",
        "No, while B = N·b stays what it was",
        f"After up to {int(right['after_steps'].max())} steps, optimizer state and weights are at most {number(error)} off the "
        "large batch's",
        "When one step takes N times more samples than before, a momentum β remembers N times more samples: β^N keeps the memory "
        "(0.9 → 0.43 at N = 8). Tune the learning rate again.",
        "momentum",
    )


def what_is_the_loss_divided_by(results: Results) -> Advice | None:
    """Planted means of means, beside correct arms, wherever they were run."""
    arms = results.arms
    wrong = arms[(arms["arm"] == Cause.mean_of_means) & (arms["verdict"] == "different")]
    twice = arms[(arms["arm"] == Cause.loss_not_divided) & (arms["verdict"] == "different")]
    if wrong.empty and twice.empty:
        return None
    sizes = []
    if len(wrong):
        sizes.append(f"means of micro-batch means: gradient off by {spread(wrong['algebra_error'])} ({len(wrong)} runs)")
    if len(twice):
        sizes.append(f"not divided: off by {spread(twice['algebra_error'])} ({len(twice)} runs)")
    return Advice(
        "What must the loss be divided by?",
        "By the loss terms (tokens, rows) of the whole window",
        "; ".join(sizes).capitalize(),
        "Sum the loss of each micro-batch and divide by the window's terms, counted before its first backward. Dividing means "
        "by N is the same only where all micro-batches hold equally many terms.",
        "normalisation_of_loss",
    )


def does_half_precision_hold(results: Results) -> Advice | None:
    """Of the experiment on equivalence: rounding error over that of the large batch, by precision."""
    arms = _accumulated(results.of("equivalence").arms)
    arms = arms[(arms["norm"] != "batch") & arms["precision"].isin(["float16", "bfloat16"])]
    if arms.empty:
        return None
    told = [
        f"{name}: {own['rounding_ratio'].median():.2g} ({own['rounding_ratio'].min():.2g} to {own['rounding_ratio'].max():.2g})"
        for name, own in arms.groupby("precision")
    ]
    same = arms["verdict"] == "equivalent"
    return Advice(
        "Does it hold in float16 or bfloat16?",
        "Yes, with a float32 accumulator" if same.all() else f"In {share(int(same.sum()), len(same))} runs",
        f"Rounding error over that of the large batch, median (range): {'; '.join(told)}",
        "Keep parameters and .grad in float32 (autocast does). With float16: unscale once per window, then clip, then step; "
        "never update the scaler inside a window.",
        "precision",
    )


def is_my_trainer_right(results: Results) -> Advice | None:
    """Of all faults planted anywhere."""
    wrong = faults.catalogue(results.arms)
    wrong = wrong[wrong["changes"]] if len(wrong) else wrong
    if wrong.empty:
        return None
    trials = wrong.groupby("trial")["detected"].all()
    return Advice(
        "Is my trainer right?",
        "Audit it: one function call",
        f"{share(int(wrong['detected'].sum()), len(wrong))} planted faults that change the computation were found, in "
        f"{share(int(trials.sum()), len(trials))} trials all of them",
        "accumulation-harness audit FILE.py:FUNCTION names the cause and the fix; docs/audit.md has the recipe for Hugging Face.",
        "fault_matrix",
    )


def what_does_it_cost(results: Results) -> Advice | None:
    """Of the experiment on memory and time: over N at fixed B."""
    rows = results.of("memory_and_time").study("memory_and_time")
    if rows.empty:
        return None
    wide = rows.pivot_table(index="trial", columns="accumulation_steps", values=["total_bytes", "seconds"])
    told = [
        f"N = {num:.0f}: memory {spread(wide['total_bytes', num] / wide['total_bytes', 1])}, "
        f"time {spread(wide['seconds', num] / wide['seconds', 1])}"
        for num in sorted({4, rows["accumulation_steps"].max()} & set(rows["accumulation_steps"]))
    ]
    return Advice(
        "What does it save, and cost?",
        "It saves activations and costs time",
        f"Times those of one batch of B, on this machine ({len(wide)} small models): {'; '.join(told)}",
        "Take the largest b that fits: accumulation-harness plan finds it. Parameters, gradients and optimizer state stay whole.",
        "memory_and_time",
    )


def is_accumulating_wasteful(results: Results) -> Advice | None:
    """Of the experiment on convergence: small batches of b beside N accumulated micro-batches of b, where any decides."""
    rows = convergence.trainings(results.of("convergence"))
    judged = convergence.judged(rows) if len(rows) else rows
    found = wastefulness.instead_of_accumulating(rows, judged) if len(judged) else []
    said = wastefulness.verdicts(found)
    action = wastefulness.advice(found, said)
    told = [
        f"{one.name} ({one.setting[0]}, {one.setting[1]}): {wastefulness.times(one.costs['seconds'])}"
        for one, verdict in zip(found, said, strict=True)
        if verdict != Wasteful.undecided
    ]
    if not told:
        return None
    return Advice(
        "Is accumulating wasteful on one device?",
        wastefulness.counted(said),
        f"Seconds to the same loss over those of accumulation at the same b, where decided: {'; '.join(told)}",
        action[0].upper() + action[1:],
        "convergence",
    )


def _accumulated(arms: pd.DataFrame) -> pd.DataFrame:
    return arms[arms["arm"] == "accumulated"]


ROWS: tuple[Callable[[Results], Advice | None], ...] = (
    may_i_accumulate,
    and_with_batch_norm,
    is_group_norm_better,
    and_with_in_batch_negatives,
    do_i_change_rate_or_momentum,
    what_is_the_loss_divided_by,
    does_half_precision_hold,
    is_my_trainer_right,
    what_does_it_cost,
    is_accumulating_wasteful,
)
