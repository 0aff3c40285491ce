"""What does accumulating save in memory, and what does it cost in time?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.content import Picture, Section, Table, number
from analysis.figures.memory import figure_cost_of_memory
from analysis.load import Results
from analysis.question import Claim, ClaimResult, Experiment, Material, Ruling, undecided

CLOSE = 0.02  # relative tolerance around the factor that a text gives
NEGLIGIBLE = 0.05  # relative increase of time that counts as no cost
TOTAL = ["parameter_bytes", "gradient_bytes", "state_bytes", "activation_bytes"]


def against_full(rows: pd.DataFrame, column: str, num: int) -> pd.Series:
    """The value of a column at the full batch over that at N = `num`, per trial that has both."""
    wide = rows.pivot_table(index="trial", columns="accumulation_steps", values=column)
    return (wide[1] / wide[num]).dropna() if {1, num} <= set(wide) else pd.Series(dtype=float)


def falls_four_times(results: Results) -> ClaimResult:
    """D1: tests whether memory at N = 4 is a fourth of the full batch's."""
    factors = against_full(results.measurements, "total_bytes", 4)
    if factors.empty:
        return undecided("It takes trials with N = 4.", 0)
    reached = factors >= 4 * (1 - CLOSE)
    return ClaimResult(
        verdict=Ruling.confirmed if reached.all() else Ruling.conditional if reached.any() else Ruling.refuted,
        measured=float(factors.median()),
        threshold="4 within 2%",
        n=len(factors),
        explanation=f"Memory falls {factors.min():.2f} to {factors.max():.2f} times: parameters, gradients and optimizer state "
        "stay whole, only the activations shrink.",
    )


def activations_fall(results: Results) -> ClaimResult:
    """D2: tests whether the activations at N are the full batch's over N, by the N that is farthest off."""
    rows = results.measurements
    worst = 0.0
    for num in sorted(set(rows["accumulation_steps"]) - {1}):
        factors = against_full(rows, "activation_bytes", num) / num
        worst = max(worst, float((factors - 1).abs().max()))
    return ClaimResult(
        verdict=Ruling.confirmed if worst <= CLOSE else Ruling.refuted,
        measured=worst,
        threshold="activations at N = 1 over N times those at N, less 1: 0 within 2%",
        n=len(rows),
        explanation="What autograd keeps for backward is proportional to the micro-batch.",
    )


def cost_in_time(results: Results) -> ClaimResult:
    """D6: compares the seconds of a window at N with the full batch's."""
    rows = results.measurements
    cost = pd.concat([1 / against_full(rows, "seconds", num) for num in sorted(set(rows["accumulation_steps"]) - {1})])
    nums = sorted(set(rows["accumulation_steps"]) - {1})
    smallest = 1 / against_full(rows, "seconds", nums[0])
    largest = 1 / against_full(rows, "seconds", nums[-1])
    return ClaimResult(
        verdict=Ruling.confirmed if (cost <= 1 + NEGLIGIBLE).all() else Ruling.conditional,
        measured=float(largest.median()),
        threshold=f"confirmed at 1 within {NEGLIGIBLE:.0%} at every N (S0); N (S3) or a little over 1 (S4) are conditions",
        n=len(cost),
        explanation=f"At N = {nums[-1]:.0f} a window takes {largest.min():.2g} to {largest.max():.2g} times as long, at "
        f"N = {nums[0]:.0f} {smallest.median():.2g} times. The arithmetic is the same: the cost is that of micro-batches too "
        "small for the device.",
    )


CLAIMS = (
    Claim(
        id="D1",
        expects=Ruling.refuted,
        rule="Confirmed when memory falls 4 times (within 2%) at N = 4 in every trial, conditional when it does in some, "
        "refuted when in none.",
        decide=falls_four_times,
    ),
    Claim(
        id="D2",
        expects=Ruling.confirmed,
        rule="Confirmed when the activations times N are the full batch's, within 2%, at every N.",
        decide=activations_fall,
    ),
    Claim(
        id="D6",
        expects=Ruling.conditional,
        rule="Confirmed when a window takes at most 5% longer at every N; otherwise conditional on b.",
        decide=cost_in_time,
    ),
)


def fitted(rows: pd.DataFrame) -> tuple[float, float]:
    """M_s and a of M = M_s + a b, in bytes, by least squares over b."""
    slope, static = np.polyfit(rows["micro_batch"].astype(float), rows["total_bytes"].astype(float), 1)
    return float(static), float(slope)


def time_against_memory(rows: pd.DataFrame) -> pd.DataFrame:
    """`total_bytes`, `static_bytes` (M_s of the fit) and `slowdown` (seconds over those at N = 1), by model, optimizer and b."""
    groups = []
    for _, own in rows.groupby(["workload", "model", "optimizer"]):
        full = own[own["accumulation_steps"] == 1].groupby("trial")["seconds"].first()
        slowdown = own["seconds"] / own["trial"].map(full)
        taken = own.assign(slowdown=slowdown, static_bytes=fitted(own)[0])
        groups.append(taken.groupby(["workload", "model", "optimizer", "micro_batch"], as_index=False).median(numeric_only=True))
    return pd.concat(groups, ignore_index=True)


def budget_figure(material: Material) -> Section | None:
    """The largest b for a budget of memory, and what it costs in time."""
    rows = material.measurements
    if rows.empty:
        return None
    cost = time_against_memory(rows)
    panels = {f"{workload} {model}": own for (workload, model), own in cost.groupby(["workload", "model"])}
    return Section(
        "What a budget of memory costs in time",
        (
            Picture(
                "memory_and_time",
                figure_cost_of_memory(panels),
                "Time of a window over the full batch's against the memory of a step, a point per micro-batch size",
                "Each point is a size of micro-batch, labelled with b, at the same window B. A budget is a position on the "
                "horizontal axis: the first point to its left is the largest measured b that fits, and its height is what "
                "accumulating costs. `python -m harness.plan memory=... effective_batch=...` answers for a model of yours.",
            ),
        ),
    )


def memory_table(material: Material) -> Section | None:
    """The parts of the memory over b, and the fit of M = M_s + a b, per model and optimizer."""
    rows = material.measurements
    if rows.empty:
        return None
    head = ("model", "optimizer", "N", "b", "parameters", "gradients", "state", "activations", "kB in all", "samples/s")
    columns = ["workload", "model", "optimizer", "accumulation_steps"]
    middle = rows.groupby(columns, as_index=False)[[*TOTAL, "micro_batch", "total_bytes", "samples_per_second"]].median()
    cells = tuple(
        (
            f"{row['workload']} {row['model']}", row["optimizer"], str(row["accumulation_steps"]), number(row["micro_batch"]),
            *(number(row[name] / 1e3) for name in TOTAL), number(row["total_bytes"] / 1e3), number(row["samples_per_second"]),
        )
        for row in middle.to_dict("records")
    )  # fmt: skip
    fits = tuple(
        (" ".join(map(str, key)), number(static / 1e3), number(slope / 1e3))
        for key, own in rows.groupby(["workload", "model", "optimizer"])
        for static, slope in [fitted(own)]
    )
    return Section(
        "Memory and time over the micro-batch",
        (
            Table(("model", "static part, kB", "kB per sample"), fits, "M = M_s + a·b, by least squares over b."),
            Table(head, cells, "kB of each part (exact on a CPU), and samples per second; medians over trials.", folded=True),
        ),
    )


EXPERIMENT = Experiment(
    name="memory_and_time",
    title="What does accumulating save in memory, and what does it cost in time?",
    question="How does the memory of a step fall with the micro-batch, and how much longer does a window take?",
    prediction="M = M_s + a·b: only the activations shrink, exactly as 1/N, so memory falls less than N times. A window takes "
    "longer as a smaller b leaves the device less to do at once.",
    rule="The bytes of parameters, gradients, state and of what is saved for backward are counted (on CUDA: the allocator's "
    "peak). Seconds are medians over windows, with the N taken in turn.",
    claims=CLAIMS,
    sections=(budget_figure, memory_table),
)
