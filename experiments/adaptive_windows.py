"""May the number of micro-batches change from window to window, and does accumulation change the balance between tensors?"""

from __future__ import annotations

import pandas as pd

from analysis.content import Picture, Section, Table, Text, number, share
from analysis.figures import order as order_figures
from analysis.load import Results
from analysis.question import Claim, ClaimResult, Experiment, Material, Ruling, undecided
from harness.judge.gates import ALGEBRA_GATE, TRAJECTORY_GATE

ANOTHER = 1e-3  # relative difference of weights that makes another training: seven decades above rounding in float64
ZERO = 1e-9  # of the largest gradient norm. Below, the true gradient is zero, as of a bias before BatchNorm, and has no ratio
ARMS = {
    "constant_batch": "N varies, N·b = B, divided by the window",
    "constant_divisor": "N varies, N·b = B, mean losses divided by a constant N",
    "varying_batch": "N varies at constant b, so B varies",
    "varying_batch_scaled_rate": "the same, learning rate in proportion to B",
}


def adapted(results: Results) -> ClaimResult:
    """A18: tests whether a changing N is equivalent at constant B, and another training where B changes."""
    rows = results.study("adaptive_windows")
    if rows.empty or rows["distinct_n"].min() < 2:
        return undecided("It takes windows of several N.", len(rows))
    same = rows[rows["arm"] == "constant_batch"]
    other = rows[rows["arm"].str.startswith("varying_batch")]
    exact = (same["gradient_error"] <= ALGEBRA_GATE) & (same["distance"] <= TRAJECTORY_GATE)
    parted = other["distance"] > ANOTHER
    return ClaimResult(
        verdict=Ruling.refuted if not exact.all() else Ruling.conditional if parted.all() else Ruling.confirmed,
        measured=float(same["distance"].max()),
        threshold=f"≤ {TRAJECTORY_GATE:.0e} at constant B, > {ANOTHER:g} at varying B",
        n=len(same) + len(other),
        explanation=f"At constant B the trainings with changing N end where the full batch's does "
        f"({share(int(exact.sum()), len(same))}, "
        f"within {number(float(same['distance'].max()))}); where B changes they end elsewhere "
        f"({share(int(parted.sum()), len(other))}, "
        f"off by {number(float(other['distance'].min()))} to {number(float(other['distance'].max()))} of the way), also with a "
        "learning rate in proportion to B.",
    )


def balance(rows: pd.DataFrame) -> pd.DataFrame:
    """Per trial, N and step: the largest deviation of a tensor's norm from the full batch's, and the imbalance of both.

    `imbalance` is the largest norm over the smallest, of the tensors whose gradient is not zero.
    """
    keys = ["trial", "norm", "accumulation_steps", "step"]
    largest = rows.groupby(keys)["full_norm"].transform("max")
    alive = rows[rows["full_norm"] > ZERO * largest]
    alive = alive.assign(off=(alive["accumulated_norm"] / alive["full_norm"] - 1).abs())
    groups = alive.groupby(keys)
    spread = groups[["full_norm", "accumulated_norm"]].max() / groups[["full_norm", "accumulated_norm"]].min()
    table = pd.DataFrame({"off": groups["off"].max(), "aggravation": spread["accumulated_norm"] / spread["full_norm"] - 1})
    return table.reset_index()


def imbalance(results: Results) -> ClaimResult:
    """A17: tests whether every tensor's gradient norm, and so their imbalance, is the full batch's over N and training."""
    rows = results.study("tensor_norms")
    table = balance(rows) if len(rows) else pd.DataFrame({"norm": []})
    free, bound = table[table["norm"] != "batch"], table[table["norm"] == "batch"]
    if free.empty or bound.empty:
        return undecided("It takes gradients with and without BatchNorm.", len(table))
    able = bound["off"] > ANOTHER
    if not able.all():
        return undecided("BatchNorm's tensors have to differ, or the comparison could not have failed.", len(table))
    same = free["off"] <= ALGEBRA_GATE
    worse = int((bound["aggravation"] > 0).sum())
    return ClaimResult(
        verdict=Ruling.refuted
        if same.all()
        else Ruling.confirmed
        if (free["aggravation"] > ANOTHER).all()
        else Ruling.conditional,
        measured=float(free["off"].max()),
        threshold=f"≤ {ALGEBRA_GATE:.0e}",
        n=len(free),
        explanation=f"Every tensor has the full batch's norm in {share(int(same.sum()), len(free))} windows, over N and along "
        "training. "
        f"Under BatchNorm, whose statistics change with the split, norms differ by up to {number(float(bound['off'].max()))}; "
        "the "
        f"imbalance is larger there in {share(worse, len(bound))} windows (median change "
        f"{number(float(bound['aggravation'].median()))}).",
    )


CLAIMS = (
    Claim(
        id="A17",
        expects=Ruling.refuted,
        rule="Refuted when, without BatchNorm, the norm of every tensor's gradient is the full batch's at every N and every "
        "step that was measured.",
        decide=imbalance,
    ),
    Claim(
        id="A18",
        expects=Ruling.conditional,
        rule="Conditional when changing N is equivalent at constant B, and ends elsewhere where B changes.",
        decide=adapted,
    ),
)


def ways_to_adapt(material: Material) -> Section | None:
    """Gradient errors and final distances of each way to change N."""
    rows = material.results.study("adaptive_windows")
    if rows.empty:
        return None
    cells = []
    for (arm, optimizer), own in rows.groupby(["arm", "optimizer"]):
        spread = [f"{number(own[column].min())} to {number(own[column].max())}" for column in ("gradient_error", "distance")]
        cells.append((ARMS[str(arm)], str(optimizer), str(len(own)), *spread))
    head = ("windows", "optimizer", "n", "worst gradient error", "distance of the weights at the end")
    caption = (
        f"Float64, {rows['samples'].max()} samples in the same order, N drawn at every window. Gradient error: distance to the "
        "mean over the arm's own window. Distance: to the weights trained at constant B, relative to how far these moved. With a "
        "varying B the gradients are right, but those of other windows, which is another training."
    )
    return Section("N that changes from window to window", (Table(head, tuple(cells), caption),))


def tensor_balance(material: Material) -> Section | None:
    """Deviations of the tensors' gradient norms over N."""
    rows = material.results.study("tensor_norms")
    if rows.empty:
        return None
    table = balance(rows)
    picture = Picture(
        "tensor-norms",
        order_figures.figure_tensor_norms(table),
        "Largest deviation of a tensor's gradient norm from the full batch's over N, with BatchNorm and without.",
        f"Each dot is a window: the largest relative deviation of a tensor's norm at the same weights, in float64; "
        f"{rows['trial'].nunique()} trials, {rows['step'].nunique()} points along training. Dashed: the gate.",
    )
    text = (
        "A sum of micro-batch gradients has the full batch's norm in every tensor, so accumulation cannot cause an imbalance "
        "between layers. The effect of BatchNorm is due to its statistics. Losses over pairs within the batch are not tested "
        "here."
    )
    return Section("The balance between tensors", (Text(text), picture))


EXPERIMENT = Experiment(
    name="adaptive_windows",
    title="May N change during training?",
    question="Is training the same when the number of micro-batches changes from window to window? And does accumulation make "
    "the gradient norms of the layers more unequal?",
    prediction="At constant N·b = B a changing N is equivalent; a changing B is another training, whether the learning rate is "
    "scaled or not. The norm of every tensor's gradient is the full batch's, unless BatchNorm changes the function.",
    rule=f"In float64, gradients have to agree within {ALGEBRA_GATE:.0e}, and the weights at the end within "
    f"{TRAJECTORY_GATE:.0e} of how far they moved. What has to differ has to differ by more than {ANOTHER:g}.",
    claims=CLAIMS,
    sections=(ways_to_adapt, tensor_balance),
)
