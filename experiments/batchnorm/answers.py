"""What does BatchNorm do to an accumulated step, and what can be done about it?"""

from __future__ import annotations

import pandas as pd
from pandas import DataFrame, Series

from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    Advice,
    ClaimResult,
    Experiment,
    Results,
    Unmeasured,
    claim,
    names,
    spread,
    undecided,
)
from accumulation_harness.experiments.batchnorm import sections as shown
from accumulation_harness.experiments.batchnorm.factors import b_and_n, factors, in_words
from accumulation_harness.experiments.batchnorm.tables import (
    LEVEL,
    MARGIN,
    REMEDIED,
    TRAINED,
    against_full,
    exact_rows,
    expected_momentum,
    trained,
)
from accumulation_harness.experiments.batchnorm.which_remedy import from_a_trained_model, which_remedy

GATE = f"≤ {ALGEBRA_GATE:.0e}"
APART = 1e-3  # relative error of another gradient: nine decades above the gate, well below what one norm layer does (4 %)
# The samples of a micro-batch of 2 can have nearly the same value, and BatchNorm then magnifies their last bits. By how much is
# measured by moving all weights by one unit in the last place; rounding at every layer may do as much a few times over.
CONDITIONING = 10.0
FEWEST_SEEDS = 4  # accuracies of 297 images are discrete: two or three seeds can agree by chance, as if nothing varied


@claim(
    "B1",
    CONFIRMED,
    f"Confirmed when every accumulated gradient is more than {APART:g} off the full batch's, and within the gate of L0 "
    "of Ghost BatchNorm's (or within ten times what one unit in the last place changes it by, where that is more).",
)
def sees_micro_batches(results: Results) -> ClaimResult:
    """B1: compares accumulated gradients with the full batch's, and with those of a full batch normalised in the same chunks."""
    rows = exact_rows(results, "accumulated")
    smallest, largest = rows["gradient_error"].min(), rows["gradient_error"].max()
    oracle = rows[["oracle_error", "oracle_statistics_error"]].max().max()
    limits = (CONDITIONING * rows["oracle_floor"]).clip(lower=ALGEBRA_GATE)
    explained = bool((rows["oracle_error"] <= limits).all() and (rows["oracle_statistics_error"] <= ALGEBRA_GATE).all())
    return ClaimResult(
        verdict=CONFIRMED if smallest > APART and explained else REFUTED if largest <= ALGEBRA_GATE else CONDITIONAL,
        condition="as a fact; the micro-batch's statistics do not explain all of it",
        measured=smallest,
        threshold=f"> {APART:g}, oracle {GATE} or 10 x its floor",
        n=len(rows),
        explanation=f"Accumulated gradients are {spread((smallest, largest))} off the full batch's (relative, float64); a full "
        f"batch that normalises in the same chunks (Ghost BatchNorm) reproduces gradient and running statistics to {oracle:.0e}.",
    )


@claim(
    "B2",
    CONDITIONAL,
    "Conditional when pooled running statistics and the two-pass gradient are within the gate of L0 of the full "
    "batch's, and the gradient of a single pass is not.",
)
def cannot_be_accumulated(results: Results) -> ClaimResult:
    """B2: tests what pooled running statistics and two-pass statistics each restore of the full batch."""
    pooled, exact = exact_rows(results, "window_statistics"), exact_rows(results, "two_pass_statistics")
    running = pooled["first_statistics_error"].max()
    left = pooled["gradient_error"].min()
    mended = exact[["gradient_error", "statistics_error"]].max().max()
    pooled_right, stays_off = running <= ALGEBRA_GATE, left > APART
    both = pooled_right and stays_off and mended <= ALGEBRA_GATE
    least, most = exact["forwards"].min(), exact["forwards"].max()
    passes = f"{most:.0f}" if least == most else f"{least:.0f} to {most:.0f}"
    return ClaimResult(
        verdict=CONDITIONAL if both else REFUTED if pooled_right and not stays_off else CONFIRMED,
        condition="in one pass: two passes over the window can",
        measured=mended,
        threshold=f"pooled and two-pass {GATE}, one pass > {APART:g}",
        n=len(pooled) + len(exact),
        explanation="Running statistics can be pooled in the one pass (law of total variance; first layer, "
        f"{running:.0e}), which leaves the gradient {left:.2g} or more off. What a training forward normalises by cannot; "
        f"with a statistics and a reduction pass for each layer it can: the gradient is the full batch's to {mended:.0e} "
        f"(measured), at {passes} forwards instead of 1.",
    )


@claim(
    "B5",
    CONFIRMED,
    f"Confirmed when effective momenta are within {ALGEBRA_GATE:.0e} of 1 - (1 - m)^N, corrected ones of m, and the "
    "correction leaves the gradient as it was.",
)
def effective_momentum(results: Results) -> ClaimResult:
    """B5: compares how the buffers forget with 1 - (1 - m)^N and, under the corrected momentum, with m."""
    plain, corrected = (exact_rows(results, arm, all_momenta=True) for arm in ("accumulated", "corrected_momentum"))
    off = (plain["effective_momentum"] - expected_momentum(plain)).abs().max()
    corrected_off = (corrected["effective_momentum"] - corrected["momentum"]).abs().max()
    telling = (expected_momentum(plain) - plain["momentum"]).min()
    same_gradient = corrected["change"].max() <= ALGEBRA_GATE and corrected["gradient_error"].min() > APART
    holds = off <= ALGEBRA_GATE and corrected_off <= ALGEBRA_GATE and same_gradient and telling > APART
    return ClaimResult(
        verdict=CONFIRMED if holds else REFUTED,
        measured=off,
        threshold=f"|measured - formula| {GATE}",
        n=len(plain) + len(corrected),
        explanation=f"The buffers forget as 1 - (1 - m)^N says, to {off:.0e}, for m = "
        f"{', '.join(f'{m:g}' for m in sorted(plain['momentum'].unique()))}; with 1 - (1 - m)^(1/N) they forget m a window, to "
        f"{corrected_off:.0e}. That concerns evaluation alone: the gradient stays as far off as it was.",
    )


@claim(
    "B4",
    CONDITIONAL,
    "Over all models, b and N that were trained, each a cell, paired by seed: a cell loses when its error is above "
    f"the full batch's (t test, Holm), and is spared when it does not and is within {MARGIN:g} point (TOST). Confirmed "
    "when every cell loses, refuted when every cell is spared, conditional when some are each, else undecided.",
)
def costs_accuracy(results: Results) -> ClaimResult:
    """B4: tests what accumulation adds to the held-out error at b = 2 and b = 16, each at several N."""
    cells = against_full(trained(results, norm="batch"), MARGIN)
    n = int(cells["n"].sum())
    if cells["n"].min() < FEWEST_SEEDS or cells["b"].nunique() < 2:
        return undecided(f"It takes two b and {FEWEST_SEEDS} seeds.", n)
    harmed = cells["costs"]
    spared = ~harmed & (cells["tost_p"] < LEVEL)
    left = (~harmed & ~spared).sum()
    mixed = CONDITIONAL if harmed.any() and spared.any() else UNDECIDED
    rest = f" {left} of {len(cells)} cells are settled neither way." if left else ""
    return ClaimResult(
        verdict=CONFIRMED if harmed.all() else REFUTED if spared.all() else mixed,
        condition=_fates(cells, harmed, spared),
        measured=cells["mean"].max(),
        threshold=f"points of held-out error above 0 (Holm) in every cell: confirmed; within {MARGIN:g} (TOST) in every: refuted",
        n=n,
        explanation=f"Points of held-out error above the full batch's at fixed B, mean over seeds: {_by_b(cells)}.{rest} "
        f"{in_words(factors(results)) if results.has(REMEDIED) else ''} Small nets, 297 images, rates not tuned per cell; every "
        "cell is on the page of BatchNorm.",
    )


def _cells(cells: DataFrame) -> str:
    """Models with their micro-batches, in words."""
    return " and ".join(f"{model} at b = {names(own)}" for model, own in cells.groupby("model")["b"])


def _fates(cells: DataFrame, harmed: Series[bool], spared: Series[bool]) -> str:
    """The condition: b that cost accuracy at some N, b that cost none at any N, and b of which some N is settled neither way."""
    by = [cells["model"], cells["b"]]
    costs, free = harmed.groupby(by).transform("any"), spared.groupby(by).transform("all")
    told = {"for": cells[costs], "not for": cells[free], "undecided for": cells[~costs & ~free]}
    return "; ".join(f"{word} {_cells(own)}" for word, own in told.items() if len(own))


def _by_b(cells: DataFrame) -> str:
    """The costs of each model at each b, over its N, to hundredths: an image is 0.3 points, and sums of zeros are not quite 0."""
    costs = cells.assign(mean=cells["mean"].round(2) + 0.0)
    return "; ".join(f"{model} b = {b}: {spread(own['mean'])}" for (model, b), own in costs.groupby(["model", "b"]))


def and_with_batch_norm(results: Results) -> Advice | None:
    """Say what the experiments on BatchNorm found: the accuracy lost over b.

    Args:
        results: What a store holds.

    Returns:
        The row of the first screen, or None.
    """
    lost = batch_norm_losses(results)
    costly = lost[lost["costs"]]["b"]
    certain = [
        f"{row['mean']:.1f} points at b = {row['b']} ({row['low']:.1f} to {row['high']:.1f})"
        for row in lost[lost["costs"]].to_dict("records")
    ]
    others = ", ".join(str(b) for b in lost[~lost["costs"]]["b"])
    cells = [*certain, *([f"none for certain at b = {others}"] if others else [])]
    return Advice(
        "And with BatchNorm, at my b?",
        "It is a different computation, however small the loss of accuracy",
        "Held-out error above the large batch's, of the model and B that lose most (95% intervals): " + "; ".join(cells),
        f"Up to b = {costly.max()} it costs accuracy (t tests, corrected for all models and B): compare norm=as_is,group "
        "there on your model. In a trained model the statistics can be frozen."
        if len(costly)
        else "No loss was shown at these b; GroupNorm avoids the question.",
        "batchnorm" if "batchnorm" in results.experiments else "groupnorm",
    )


def batch_norm_losses(results: Results) -> DataFrame:
    """Find for each b the model and B that lose most against their large batch.

    Args:
        results: Those of the questions `batchnorm` and `groupnorm`.

    Returns:
        `mean`, `low`, `high` in points, over n seeds; `costs`: whether some model and B loses at that b for certain,
        Holm-corrected over all.

    Raises:
        Unmeasured: Nothing was trained.
    """
    parts = [trained(part, norm="batch") for name in ("batchnorm", "groupnorm") if (part := results.of(name)).has(TRAINED)]
    if not parts:
        raise Unmeasured(TRAINED)
    cells = against_full(pd.concat(parts), MARGIN)
    most = cells.loc[cells.groupby("b")["mean"].idxmax(), ["b", "model", "effective_batch", "mean", "low", "high", "n"]]
    return most.assign(costs=most["b"].isin(cells[cells["costs"]]["b"]))


EXPERIMENT = Experiment(
    title="What does BatchNorm do to an accumulated step, and what fixes it?",
    question="A BatchNorm layer sees the micro-batch and not the batch. How far off is the accumulated gradient, what do "
    "the running statistics add, what does it cost in accuracy, and what does each remedy fix?",
    prediction="The gradient error grows as b falls, and is exactly Ghost BatchNorm's. The running statistics have no part in "
    "it: they move with an effective momentum of 1 - (1 - m)^N and matter to evaluation. Accuracy depends on b, not on N. "
    "Only statistics in two passes restore the full batch's gradient.",
    rule="Exact measurements in float64 decide on gradients and buffers. Accuracy is paired by seed with the full batch of the "
    f"same B, with an equivalence margin of {MARGIN:g} percentage point that was fixed beforehand (three of the 297 held-out "
    "images) and Holm's correction over cells.",
    claims=(sees_micro_batches, cannot_be_accumulated, costs_accuracy, effective_momentum),
    advice=and_with_batch_norm,
    sections=(
        which_remedy,
        from_a_trained_model,
        shown.gradient_over_b,
        shown.running_statistics,
        shown.accuracy_over_b,
        b_and_n,
        shown.remedies,
    ),
)
