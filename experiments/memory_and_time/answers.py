"""What does accumulating save in memory, and what does it cost in time?"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis.answering import (
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    Advice,
    ClaimResult,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    claim,
    counted,
    curves,
    lines,
    section,
    share,
    spread,
    table_by,
    takes,
    undecided,
)

CLOSE = 0.02  # relative tolerance around the factor that a text gives
NEGLIGIBLE = 0.05  # relative increase of time that counts as no cost
SLIGHTLY = 1.25  # times as long, that still counts as slightly slower
N_TIMES = 0.1  # relative tolerance around a factor of N in time
LARGER = 4.0  # times: S0 says 4 to 8
KB, MB = 1e3, 1e6
TOTAL = ["parameter_bytes", "gradient_bytes", "state_bytes", "activation_bytes"]


def _against_full(rows: DataFrame, column: str, num: int) -> Series:
    """The value of a column at the full batch over that at N = `num`, per trial that has both."""
    wide = rows.pivot_table(index="trial", columns="accumulation_steps", values=column)
    return (wide[1] / wide[num]).dropna() if {1, num} <= set(wide) else Series(dtype=float)


@claim(
    "D1",
    CONDITIONAL,
    "Of what is alive at its most: confirmed when it falls 4 times (within 2%) at N = 4 in every trial; conditional "
    "when the activations do in every trial, or all of it in some; refuted otherwise.",
)
def falls_four_times(results: Results) -> ClaimResult:
    """D1: tests whether memory at N = 4 is a fourth of the full batch's, and whether the activations alone are."""
    rows = results.study("memory_and_time")
    factors, activations = (_against_full(rows, name, 4) for name in ("alive_bytes", "activation_bytes"))
    takes("It takes trials with N = 4.", factors, n=0)
    whole, part = factors >= 4 * (1 - CLOSE), activations >= 4 * (1 - CLOSE)
    verdict = CONFIRMED if whole.all() else CONDITIONAL if part.all() or whole.any() else REFUTED
    where = (
        f"in {counted(whole)} trials"
        if whole.any()
        else "of activations alone, as S0's bracket says; memory as a whole falls less"
    )
    return ClaimResult(
        verdict=verdict,
        condition=where,
        measured=factors.median(),
        threshold="4 within 2%",
        n=len(factors),
        explanation=f"What is alive at its most falls {factors.min():.2f} to {factors.max():.2f} times: parameters, optimizer "
        "state and, from the second micro-batch on, the gradients stay whole. The activations alone fall "
        f"{activations.min():.2f} to {activations.max():.2f} times.",
    )


def _largest_models(rows: DataFrame) -> DataFrame:
    """Find for each family (workload, model, optimizer, B) and N the largest model that fits where the smallest fits at N = 1.

    Args:
        rows: Those of the study `memory_and_time`.

    Returns:
        `larger`: its model state (parameters, gradients, optimizer state) over the smallest model's; sizes differ in depth or
        width.
    """
    rows = rows.assign(model_state=rows[TOTAL[:3]].sum(axis=1))
    found = []
    for family, own in rows.groupby(["workload", "model", "optimizer", "effective_batch"]):
        if own["model_state"].nunique() < 2:
            continue
        smallest = own[(own["model_state"] == own["model_state"].min())]
        budget = smallest.query("accumulation_steps == 1")["alive_bytes"].max()
        for num, split in own.query("accumulation_steps > 1").groupby("accumulation_steps"):
            fits = split.loc[split["alive_bytes"] <= budget, "model_state"]
            larger = (fits.max() / smallest["model_state"].iloc[0]) if len(fits) else 0.0
            found.append((" ".join(map(str, family[:3])), num, larger))
    return DataFrame(found, columns=["family", "accumulation_steps", "larger"])


@claim(
    "D4",
    CONDITIONAL,
    "The budget is what the smallest model of a kind takes at N = 1. Confirmed when for every kind some N makes room "
    f"for a model whose state is {LARGER:g} times as large, conditional when for some kinds, refuted when for none.",
)
def models_become_larger(results: Results) -> ClaimResult:
    """D4: tests how much larger a model may be in the memory of the full batch, when its batch is accumulated."""
    rows = results.study("memory_and_time")
    found = _largest_models(rows)
    if found["family"].nunique() < 2:
        return undecided("It takes two kinds of model, each in several sizes.", len(found))
    best = found.groupby("family")["larger"].max()
    first = found.query("larger >= @LARGER").groupby("family")["accumulation_steps"].min()
    never = best.index.difference(first.index)
    verdict = CONFIRMED if never.empty else REFUTED if first.empty else CONDITIONAL
    where = ", ".join(f"{family} from N = {num:g}" for family, num in first.items())
    found["told"] = [f"{times:.1f}" if times else "none" for times in found["larger"]]
    words = "; ".join(
        f"{family}: {', '.join(f'{row.told} at N = {row.accumulation_steps:g}' for row in own.itertuples())}"
        for family, own in found.groupby("family")
    )
    return ClaimResult(
        verdict=verdict,
        condition=f"for {where}; not for {', '.join(never)}",
        measured=best.max(),
        threshold=f"largest model state within the full batch's memory, over the smallest model's: {LARGER:g} or more",
        n=len(rows),
        explanation="Within the memory that the smallest model takes at N = 1, the largest measured model that fits has so many "
        f"times its model state: {words}. The model state itself is the same at every N: what pays for it are activations.",
    )


@claim(
    "G4",
    CONDITIONAL,
    "A smaller b removes an error of memory between what is alive at b = B and at the smallest b. Conditional when that "
    "range is not empty, refuted when it is; it cannot be confirmed, as something is alive at every b.",
)
def automatic_micro_batches(results: Results) -> ClaimResult:
    """G4: tests under which memory limits some micro-batch fits: what is alive at b = B down to the smallest b measured."""
    rows = results.study("memory_and_time")
    if rows["accumulation_steps"].nunique() < 3:
        return undecided("It takes what is alive at once, at three N or more.", len(rows))
    ends = rows.groupby("trial")["alive_bytes"].agg(["min", "max"])
    helped, floor = (ends["min"] < ends["max"]), ends["min"] / ends["max"]
    return ClaimResult(
        verdict=REFUTED if not helped.any() else CONDITIONAL,
        condition="while the static part and the smallest micro-batch's activations fit",
        measured=floor.median(),
        threshold="memory at the smallest b over that at b = B: below 1 (helps); 0 would remove every such error",
        n=len(ends),
        explanation=f"Choosing b to fit keeps a run alive down to {floor.min():.2f} to {floor.max():.2f} of the full batch's "
        f"memory (median {floor.median():.2f}), in {counted(helped)} trials; below that no b fits, because "
        "parameters, gradients and state do not shrink. Incident rates of a service, and what its own search does, are not "
        "tested.",
    )


@claim(
    "D2",
    CONFIRMED,
    "Confirmed when the activations times N are the full batch's, within 2%, at every N.",
)
def activations_fall(results: Results) -> ClaimResult:
    """D2: tests whether the activations at N are the full batch's over N, by the N that is farthest off."""
    rows = results.study("memory_and_time")
    nums = {*rows["accumulation_steps"]} - {1}
    worst = max((_against_full(rows, "activation_bytes", num) / num - 1).abs().max() for num in nums)
    return ClaimResult(
        verdict=CONFIRMED if worst <= CLOSE else REFUTED,
        measured=worst,
        threshold="activations at N = 1 over N times those at N, less 1: 0 within 2%",
        n=len(rows),
        explanation="What autograd keeps for backward is proportional to the micro-batch.",
    )


TEXTS = {"negligible (S0)": (0.0, 1 + NEGLIGIBLE), "slightly slower (S4)": (1 + NEGLIGIBLE, SLIGHTLY)}


@claim(
    "D6",
    CONDITIONAL,
    f"A window costs nothing up to {1 + NEGLIGIBLE:g} times the full batch's seconds (S0), little up to {SLIGHTLY:g} "
    f"(S4), and N times within {N_TIMES:.0%} (S3). Confirmed when one text is right at every N, conditional when some are "
    "at some, refuted when none is anywhere.",
)
def cost_in_time(results: Results) -> ClaimResult:
    """D6: compares the seconds of a window at N with the full batch's, and with what each of the three articles says of them."""
    rows = results.study("memory_and_time")
    nums = sorted(set(rows["accumulation_steps"]) - {1})
    cost = {num: 1 / _against_full(rows, "seconds", num) for num in nums}
    every = pd.concat([one.rename(num).to_frame("cost").assign(num=num) for num, one in cost.items()])
    size = int((rows["micro_batch"] * rows["accumulation_steps"]).median())
    says = {text: every.query("cost > @low and cost <= @high") for text, (low, high) in TEXTS.items()}
    says["N times (S3)"] = every[(every["cost"] / every["num"] - 1).abs() <= N_TIMES]
    right = {text: len(cells) for text, cells in says.items()}
    alone = [text for text, count in right.items() if count == len(every)]
    verdict = CONFIRMED if alone else CONDITIONAL if any(right.values()) else REFUTED
    places = {text: _at(cells, size) for text, cells in says.items()}
    ranges = "; ".join(f"{text} in {share(right[text], len(every))} (at {place})" for text, place in places.items())
    where = "; ".join(f"{text} at {place}" for text, place in places.items())
    largest = cost[nums[-1]]
    return ClaimResult(
        verdict=verdict,
        condition=f"on b and the device: {where}",
        measured=largest.median(),
        threshold=f"≤ {1 + NEGLIGIBLE:g} (S0), ≤ {SLIGHTLY:g} (S4), N within {N_TIMES:.0%} (S3); outside all of them: refuted",
        n=len(every),
        explanation=f"At N = {nums[-1]:.0f} a window takes {largest.min():.2g} to {largest.max():.2g} times as long, at "
        f"N = {nums[0]:.0f} {cost[nums[0]].median():.2g} times (median). Right are: {ranges}. The arithmetic is the same: the "
        "cost is that of micro-batches too small for the device. Measured on models of 4 to 50 kB on a CPU, which b = B does "
        "not fill.",
    )


def _at(cells: DataFrame, size: int) -> str:
    """The micro-batches at which a text is right."""
    found = sorted({round(size / num) for num in cells["num"]})
    return f"b = {', '.join(map(str, found))}" if found else "no b"


def _fitted(rows: DataFrame) -> tuple[float, float]:
    """M_s and a of M = M_s + a b, in bytes, by least squares over b."""
    slope, static = np.polyfit(rows["micro_batch"].astype(float), rows["total_bytes"].astype(float), 1)
    return static, slope


def _time_against_memory(rows: DataFrame) -> DataFrame:
    """`total_bytes` and `slowdown` (seconds over those at N = 1), by model, optimizer and b."""
    full = rows.query("accumulation_steps == 1").groupby("trial")["seconds"].first()
    taken = rows.assign(slowdown=rows["seconds"] / rows["trial"].map(full))
    return taken.groupby(["workload", "model", "optimizer", "micro_batch"], as_index=False).median(numeric_only=True)


def _figure_cost_of_memory(rows: DataFrame) -> Figure:
    """Draw the time of a window over the full batch's against its memory.

    A budget is a place on the x axis: the first point to its left is the largest b measured that fits, and its height is what
    that costs.

    Args:
        rows: What `_time_against_memory` gives.

    Returns:
        A point per b, a line per optimizer, a panel per model.
    """
    rows = rows.assign(mb=rows["total_bytes"] / MB, b=rows["micro_batch"].astype(int))
    groups = {f"{workload} {model}": own for (workload, model), own in rows.groupby(["workload", "model"])}
    drawn = {title: lines(own, "optimizer", "mb", "slowdown") for title, own in groups.items()}
    y = "time of a window over the full batch's"
    figure = curves(drawn, "memory of a step, MB", y, axes=("linear", "linear"), sharey=False, level=(1, "the full batch's"))
    for axes, own in zip(figure.axes, groups.values(), strict=True):
        for b, x, height in own[["b", "mb", "slowdown"]].to_numpy():
            axes.annotate(f"{b:.0f}", (x, height), xytext=(4, 4), textcoords="offset points", fontsize=7)
    return figure


def _budget_figure(material: Material) -> Section:
    """The largest b for a budget of memory, and what it costs in time."""
    rows = material.study("memory_and_time")
    picture = Picture(
        "memory_and_time",
        _figure_cost_of_memory(_time_against_memory(rows)),
        "Time of a window over the full batch's against the memory of a step, a point per micro-batch size",
        "Each point is a size of micro-batch, labelled with b, at the same window B. A budget is a position on the "
        "horizontal axis: the first point to its left is the largest measured b that fits, and its height is what "
        "accumulating costs. `accumulation-harness plan memory=... effective_batch=...` answers for a model of yours.",
    )
    return section("What a budget of memory costs in time", picture)


def _memory_table(material: Material) -> Section:
    """The parts of the memory over b, and the fit of M = M_s + a b, per model and optimizer."""
    rows = material.study("memory_and_time")
    head = "model | optimizer | N | b | parameters | gradients | state | activations | kB in all | samples/s"
    middle = rows.assign(model=rows["workload"] + " " + rows["model"].astype(str), **rows[[*TOTAL, "total_bytes"]] / KB)
    columns = (
        "model", "optimizer", "accumulation_steps", "micro_batch median", *(f"{name} median" for name in (*TOTAL, "total_bytes")),
        "samples_per_second median",
    )  # fmt: skip
    fits = (
        lambda own: " ".join(map(str, own[["workload", "model", "optimizer"]].iloc[0])),
        *(lambda own, place=place: _fitted(own)[place] / KB for place in (0, 1)),
    )
    parts = "kB of each part (exact on a CPU), and samples per second; medians over trials."
    static = "model | static part, kB | kB per sample"
    return section(
        "Memory and time over the micro-batch",
        table_by(rows, "workload model optimizer", static, fits, "M = M_s + a·b, by least squares over b."),
        table_by(middle, "model optimizer accumulation_steps", head, columns, parts, folded=True),
    )


def _what_does_it_cost(results: Results) -> Advice:
    """Of the experiment on memory and time: over N at fixed B."""
    rows = results.of("memory_and_time").study("memory_and_time")
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


EXPERIMENT = Experiment(
    title="What does accumulating save in memory, and what does it cost in time?",
    question="How does the memory of a step fall with the micro-batch, and how much longer does a window take?",
    prediction="M = M_s + a·b: only the activations shrink, exactly as 1/N, so memory falls less than N times. Where they are "
    "most of it, a model of 4 times the state fits into the full batch's memory, and not elsewhere. A window takes longer as a "
    "smaller b leaves the device less to do at once.",
    rule="The bytes of parameters, gradients, state and of what is saved for backward are counted (on CUDA: the allocator's "
    "peak). Seconds are medians over windows, with the N taken in turn.",
    claims=(falls_four_times, activations_fall, models_become_larger, cost_in_time, automatic_micro_batches),
    advice=_what_does_it_cost,
    sections=(_budget_figure, _memory_table),
)
