"""May the number of micro-batches change from window to window, and does accumulation change the balance between tensors?"""

from __future__ import annotations

import math

from pandas import DataFrame, Series

from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    TRAJECTORY_GATE,
    UNDECIDED,
    ClaimResult,
    Experiment,
    Material,
    Results,
    Section,
    claim,
    counted,
    number,
    section,
    span,
    table_by,
    undecided,
)
from accumulation_harness.judge.statistics import equivalence_p, mean_interval

ANOTHER = 1e-3  # relative difference of weights that makes another training: seven decades above rounding in float64
EQUAL = 0.02  # of the logarithm of a ratio of norms
LEAST_SEEDS = 5
ZERO = 1e-9  # of the largest gradient norm. Below, the true gradient is zero, as of a bias before BatchNorm, and has no ratio
ARMS = {
    "constant_batch": "N varies, N·b = B, divided by the window",
    "constant_divisor": "N varies, N·b = B, mean losses divided by a constant N",
    "varying_batch": "N varies at constant b, so B varies",
    "varying_batch_scaled_rate": "the same, learning rate in proportion to B",
}


@claim(
    "A18",
    CONDITIONAL,
    "Conditional when changing N is equivalent at constant B, and ends elsewhere where B changes.",
)
def adapted(results: Results) -> ClaimResult:
    """A18: tests whether a changing N is equivalent at constant B, and another training where B changes."""
    rows = results.study("adaptive_windows")
    if rows["distinct_n"].min() < 2:
        return undecided("It takes windows of several N.", len(rows))
    same = rows.query("arm == 'constant_batch'")
    other = rows.query("arm.str.startswith('varying_batch')")
    exact = (same["gradient_error"] <= ALGEBRA_GATE) & (same["distance"] <= TRAJECTORY_GATE)
    parted = other["distance"] > ANOTHER
    return ClaimResult(
        verdict=REFUTED if not exact.all() else CONDITIONAL if parted.all() else CONFIRMED,
        condition="at constant N·b",
        measured=same["distance"].max(),
        threshold=f"≤ {TRAJECTORY_GATE:.0e} at constant B, > {ANOTHER:g} at varying B",
        n=len(same) + len(other),
        explanation="At constant B the trainings with changing N end where the full batch's does "
        f"({counted(exact)}, "
        f"within {number(same['distance'].max())}); where B changes they end elsewhere "
        f"({counted(parted)}, "
        f"off by {span(other['distance'])} of the way), also with a "
        "learning rate in proportion to B.",
    )


def balance(rows: DataFrame) -> DataFrame:
    """Compare the norms of tensors' gradients with the full batch's.

    Args:
        rows: Those of the study `tensor_norms`.

    Returns:
        Per trial, N and step: the largest deviation of a tensor's norm, and by how much the imbalance (largest norm over the
        smallest, of the tensors whose gradient is not zero) is worse.
    """
    keys = ["trial", "norm", "accumulation_steps", "step"]
    largest = rows.groupby(keys)["full_norm"].transform("max")
    alive = rows[rows["full_norm"] > ZERO * largest]
    alive = alive.assign(off=(alive["accumulated_norm"] / alive["full_norm"] - 1).abs())
    groups = alive.groupby(keys)[["off", "full_norm", "accumulated_norm"]]
    spread = groups.max() / groups.min()
    table = groups.max().assign(aggravation=spread["accumulated_norm"] / spread["full_norm"] - 1)
    return table.reset_index()


def _between_towers(rows: DataFrame) -> Series[float]:
    """How much more unequal the two towers' gradient norms are under accumulation: mean change of |log ratio|, by trial."""
    towers = rows.assign(tower=rows["tensor"].str.partition(".")[0])
    names = ["full_norm", "accumulated_norm"]
    squares = towers.assign(**towers[names] ** 2).groupby(["trial", "accumulation_steps", "step", "tower"])[names].sum()
    ratios = squares.xs("left", level="tower") / squares.xs("right", level="tower")
    logs = ratios.map(math.log).abs() / 2
    change: Series[float] = (logs["accumulated_norm"] - logs["full_norm"]).groupby("trial").mean()
    return change


@claim(
    "A17",
    REFUTED,
    "Of two towers under a contrastive loss, by trial: conditional on such a loss when the ratio of their gradient "
    f"norms is farther from 1 under accumulation (95% interval), refuted when it is nearer or within {EQUAL:g} (TOST), "
    "else undecided; where losses of single samples have every tensor's norm of the full batch, which the claim would need "
    "to fail.",
)
def imbalance(results: Results) -> ClaimResult:
    """A17: compares the gradient norms of two towers under a contrastive loss, and of tensors under losses of single samples."""
    rows = results.study("tensor_norms")
    pairs = rows.query("workload == 'pairs'")
    table = balance(rows.query("workload != 'pairs'"))
    free, bound = table.query("norm != 'batch'"), table.query("norm == 'batch'")
    if free.empty or bound.empty or pairs["trial"].nunique() < LEAST_SEEDS:
        return undecided(f"It takes gradients with and without BatchNorm, and {LEAST_SEEDS} trials with two towers.", len(table))
    if not (bound["off"] > ANOTHER).all():
        return undecided("BatchNorm's tensors have to differ, or the comparison could not have failed.", len(table))
    same = free["off"] <= ALGEBRA_GATE
    towers = _between_towers(pairs).tolist()
    change = mean_interval(towers)
    worse = change.low > 0
    kept = change.high <= 0 or equivalence_p(towers, EQUAL) < 0.05
    if not same.all():
        verdict = CONFIRMED if (free["aggravation"] > ANOTHER).all() and worse else UNDECIDED
    else:
        verdict = CONDITIONAL if worse else REFUTED if kept else UNDECIDED
    return ClaimResult(
        verdict=verdict,
        condition="under a contrastive loss, whose negatives accumulation takes away",
        measured=change.estimate,
        threshold=f"change of |log(left / right)| of the towers' norms: above 0 (95%); 0 or within ±{EQUAL:g} refutes",
        n=len(towers),
        explanation="S4 speaks of query and passage encoders. Two towers under InfoNCE: the log ratio of their gradient norms "
        f"is {number(change.estimate)} larger under accumulation ({number(change.low)} to {number(change.high)}, means of "
        f"{len(towers)} trials). Losses of single samples: every tensor has the full batch's norm in "
        f"{counted(same)} windows, which follows from A1. Without a memory bank (F5c).",
    )


def _ways_to_adapt(material: Material) -> Section:
    """Gradient errors and final distances of each way to change N."""
    rows = material.study("adaptive_windows")
    head = "windows | optimizer | n | worst gradient error | distance of the weights at the end"
    caption = (
        f"Float64, {rows['samples'].max()} samples in the same order, N drawn at every window. Gradient error: distance to the "
        "mean over the arm's own window. Distance: to the weights trained at constant B, relative to how far these moved. With a "
        "varying B the gradients are right, but those of other windows, which is another training."
    )
    columns = (("arm", ARMS.get), "optimizer", "trial n", "gradient_error span", "distance span")
    return section("N that changes from window to window", table_by(rows, "arm optimizer", head, columns, caption))


EXPERIMENT = Experiment(
    title="May N change during training?",
    question="Is training the same when the number of micro-batches changes from window to window? And does accumulation make "
    "the gradient norms of the layers more unequal?",
    prediction="At constant N·b = B a changing N is equivalent; a changing B is another training, whether the learning rate is "
    "scaled or not. The norm of every tensor's gradient is the full batch's, unless BatchNorm changes the function.",
    rule=f"In float64, gradients have to agree within {ALGEBRA_GATE:.0e}, and the weights at the end within "
    f"{TRAJECTORY_GATE:.0e} of how far they moved. What has to differ has to differ by more than {ANOTHER:g}.",
    claims=(imbalance, adapted),
    sections=(_ways_to_adapt,),
)
