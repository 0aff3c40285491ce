"""Does the critical batch size grow along a training?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    BLUE,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    interval,
    needed,
    number,
    panels,
    section,
    statistics,
    table_by,
)
from accumulation_harness.experiments.shared.tuning import (
    DETECTABLE,
    FEWEST_SEEDS,
    FEWEST_SETTINGS,
    LEVEL,
    LONGEST,
    at_tuned_rate,
    longest,
)

TOLERANCE = 0.02  # of the smallest batch's loss after the branch
SAME = 0.5  # octaves within which a change is none
SETTING = ["workload", "norm", "optimizer", "effective_batch"]


def figure_critical(table: DataFrame) -> Figure:
    """Critical batch over samples, a panel per setting: a line per seed, triangles where it is a lower bound."""

    def draw(axes: Axes, own: DataFrame) -> None:
        for _, one in own.sort_values("point").groupby("seed"):
            axes.plot(one["samples"], one["critical"], "-", color=BLUE, alpha=0.5)
        for bounded, part in own.groupby("censored"):
            axes.plot(part["samples"], part["critical"], "^" if bounded else "o", color=BLUE, markersize=4, alpha=0.6)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")

    groups = {f"{workload} ({norm}), {optimizer}": own
              for (workload, norm, optimizer), own in table.groupby(["workload", "norm", "optimizer"])}  # fmt: skip
    return panels(groups, draw, 2.6, x="samples before the branch", y="critical batch", columns=2, share=False)


def critical_batch(losses: Sequence[Sequence[float]], tolerance: float = TOLERANCE) -> float:
    """The batch up to which every branch ends within `tolerance` of the smallest batch's loss, relative.

    `losses`: (batch, loss) by batch. Between the last branch within and the first outside, interpolated over log2 of the batch;
    the largest batch where all are within, which is then a lower bound.
    """
    _, base = losses[0]
    for (batch, loss), (above, worse) in itertools.pairwise(losses):
        if not worse / base - 1 <= tolerance:  # also where it diverged to NaN
            inside, outside = loss / base - 1, worse / base - 1
            share = (tolerance - inside) / (outside - inside) if math.isfinite(outside) else 0.0
            return float(batch * (above / batch) ** share)
    return losses[-1][0]


def critical_batches(results: Results) -> DataFrame:
    """One row per setting, seed and point: `critical`, and whether it is the largest batch tried (`censored`).

    Each setting at the rate whose trunk ends lowest on the tuning seeds; `interior`: whether it lies inside the grid.
    """
    rows = at_tuned_rate(longest(results.study("critical_batch"), SETTING), SETTING, "trunk_end")

    def critical(own: DataFrame) -> dict[str, object]:
        losses = own.sort_values("batch")[["batch", "validation_loss"]].to_numpy(dtype=float).tolist()
        found = critical_batch(losses)
        return {**own[["samples", "start_loss"]].iloc[0], "critical": found, "censored": found >= losses[-1][0]}

    return tables.cells(rows, [*SETTING, "lr", "interior", "seed", "point"], critical)


@dataclass(frozen=True)
class Growth:
    """Octaves by which the critical batch size of one setting grows from the first point to the last, by seed."""

    setting: tuple[Hashable, ...]
    octaves: list[float]
    interior: bool
    bounded: bool  # whether some seed has a bound where a value was wanted, of either end

    @property
    def verdict(self) -> str:
        """`grows`, `shrinks`, `does not grow`, or `undecided`.

        A last value that is only a lower bound leaves a growth that is found standing, and excludes a verdict of none.
        """
        if len(self.octaves) < FEWEST_SEEDS or not self.interior:
            return "undecided"
        found = statistics.mean_interval(self.octaves)
        if found.low > 0:
            return "grows"
        if self.bounded:
            return "undecided"
        if found.high < 0:
            return "shrinks"
        return "does not grow" if statistics.equivalence_p(self.octaves, SAME) < LEVEL else "undecided"

    @property
    def name(self) -> str:
        """The setting in words."""
        workload, norm, optimizer, _ = self.setting
        return f"{workload} ({norm}), {optimizer}"


def growths(table: DataFrame) -> list[Growth]:
    """One per setting. A seed whose first value is a lower bound is left out: its growth has no sign that could be known."""
    found = []
    for key, own in table.groupby(SETTING):
        wide, censored = (
            own.pivot_table(index="seed", columns="point", values=name, aggfunc="first") for name in ("critical", "censored")
        )
        first, last = own["point"].min(), own["point"].max()
        known = ~censored[first].astype(bool)
        pairs = zip(wide[first][known], wide[last][known], strict=True)
        octaves = [math.log2(b / a) for a, b in pairs]
        bounded = bool((~known).any() or censored[last].any())
        found.append(Growth(key, octaves if first != last else [], bool(own["interior"].all()), bounded))
    return found


def along(material: Material) -> Section:
    """The critical batch size at every point, and the advice."""
    rows = critical_batches(material.results)
    needed(rows)
    found = growths(rows)
    words = " ".join(
        f"{one.name}: {one.verdict} ({interval(one.octaves)} octaves, n = {len(one.octaves)}; "
        f"detectable {number(statistics.detectable(one.octaves))})."
        for one in found
    )
    head = (
        "setting | samples before | loss there | n | critical batch (median) | at the largest batch tried | "
        "rate | inside the grid"
    )
    columns = (
        lambda own: Growth(tuple(own[SETTING].iloc[0]), [], True, False).name, "samples", "start_loss mean", "seed n",
        "critical median", "censored counted", "lr", "interior ended",
    )  # fmt: skip
    text = (
        f"{words} {advice(found)} The rate of a branch is that of the largest batch over N, under Adam over sqrt(N): another "
        "rule gives another critical batch. These tasks are small; arXiv 2505.23971 measures language models."
    )
    picture = Picture(
        "critical",
        figure_critical(rows),
        "Critical batch size over the samples trained on before, by seed.",
        f"Largest batch whose branch ends within {TOLERANCE:.0%} of the smallest batch's loss; a line is a judging seed; a "
        "triangle is a lower bound.",
    )
    caption = f"Over the judging seeds; nats per loss term. {DETECTABLE} {LONGEST}"
    return section("Along a training", text, picture, table_by(rows, " ".join([*SETTING, "point"]), head, columns, caption))


def advice(found: Sequence[Growth]) -> str:
    """What every setting says alike, and nothing of a setting that stands alone."""
    verdicts = {one.verdict for one in found} if len(found) >= FEWEST_SETTINGS else set()
    if verdicts == {"grows"}:
        return "Advice: begin with a small batch and accumulate more micro-batches later."
    if verdicts == {"does not grow"}:
        return "Advice: one batch size serves the whole training."
    return "Advice: none follows from these trainings."


EXPERIMENT = Experiment(
    title="Does the critical batch size grow along a training?",
    question="From the same weights and over the same samples, up to which batch does nothing get lost, and is it larger late "
    "in a training than early (arXiv 2505.23971)?",
    prediction="It grows: early the gradient is large beside its noise, and steps are what is short.",
    rule=f"A branch loses nothing when its validation loss is within {TOLERANCE:.0%} of the smallest batch's. It grows when the "
    "paired 95% interval of log2 of last over first lies above 0; it does not when TOST puts the change within "
    f"±{SAME:g} octaves at {LEVEL:g} and no value is a bound; else undecided, as below {FEWEST_SEEDS} judging seeds or at a rate "
    "at an end of the grid. The rate is the one at which the training itself ends lowest on the tuning seeds.",
    sections=(along,),
)
