"""Which hyperparameters have to be rescaled when the batch grows by k?

The rules below were fixed before the first run. A row is a rescaling and a measure; its values are paired differences to the
large batch with everything copied, over seeds, in natural logarithms of a loss: of the distance of the training's curve to the
small batch's, and of the validation loss at equal samples. The averaged weights are what the row `ema` looks at.
The validation set is set aside by the seed and chooses nothing: in some tasks the test set is the same for all seeds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.answering import (
    BAND,
    BLUE,
    INK,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    interval,
    panels,
    section,
    statistics,
    table,
)
from accumulation_harness.experiments.shared.tuning import DETECTABLE, FEWEST_SETTINGS, LEVEL

MARGIN = 0.02  # in logarithms of a loss: 2 % of it
FEWEST_SEEDS = 8  # fewer have no exact sign-flip p value below 0.05 after Holm over six rescalings
CURVE, FINAL = "curve", "final"
MEASURES = {CURVE: "distance to the small batch's curve", FINAL: "validation loss at the end"}
SETTING = ["workload", "norm", "effective_batch", "accumulation_steps", "steps", "lr"]
COPIED = "copied"
WORDS = {  # by the arm's name
    "rate": "learning rate times sqrt(k)",
    "beta2": "beta2 to the power k",
    "weight_decay": "weight decay per sample",
    "warmup": "warm-up in samples",
    "ema": "decay of the average to the power k",
    "all": "all of them",
}


@dataclass(frozen=True)
class Effect:
    """A rescaling's paired differences to the copied setting: below 0 it is better."""

    setting: tuple[Hashable, ...]
    what: str
    measure: str
    differences: tuple[float, ...]
    adjusted_p: float = float("nan")  # by Holm, over the rescalings of a setting and measure

    @property
    def p(self) -> float:
        """Unadjusted."""
        return statistics.sign_flip_p(self.differences)

    @property
    def verdict(self) -> str:
        """`no difference (TOST)`, however significant a difference within the margin is; `helps`, `hurts` or `undecided`."""
        if len(self.differences) < FEWEST_SEEDS or not np.isfinite(self.differences).all():
            return "undecided"
        if statistics.equivalence_p(self.differences, MARGIN) < LEVEL:
            return "no difference (TOST)"
        found = statistics.mean_interval(self.differences)
        if self.adjusted_p < LEVEL and (found.high < 0 or found.low > 0):
            return "helps" if found.high < 0 else "hurts"
        return "undecided"


def effects(results: Results) -> list[Effect]:
    """One per setting, measure and rescaling, with Holm's p values."""
    rows, found = results.study("rescaling"), []
    for key, own in rows.groupby(SETTING):
        for measure in MEASURES:
            raw = [Effect(key, what, measure, differences(own, what, measure)) for what in WORDS]
            for one, p in zip(raw, statistics.holm([one.p for one in raw]), strict=True):
                found.append(replace(one, adjusted_p=p))
    return found


def differences(rows: pd.DataFrame, what: str, measure: str) -> tuple[float, ...]:
    """By seed: the rescaled run less the copied one, of one setting."""
    prefix = "ema_" if what == "ema" else ""
    column = f"{prefix}curve_distance" if measure == CURVE else f"{prefix}validation_loss"
    table = rows.pivot_table(index="seed", columns="arm", values=column, aggfunc="first", dropna=False)
    if not {what, COPIED} <= {*table}:
        return ()
    values = table if measure == CURVE else np.log(table)
    return (*(values[what] - values[COPIED]),)


def rescaled_alone(material: Material) -> Section:
    """Every rescaling's effect, the figure and the advice."""
    found = effects(material.results)
    head = "setting | rescaled | measure | difference to copied (95 %) | n | permutation p | Holm | detectable | verdict"
    cells = tuple(
        (named(one.setting), WORDS[one.what], MEASURES[one.measure], interval(one.differences),
         len(one.differences), one.p, one.adjusted_p, statistics.detectable(one.differences),
         one.verdict)
        for one in found
    )  # fmt: skip
    text = (
        f"{advice(found)} {floors(material.results)} Each is rescaled alone beside copied settings: what it adds to the others "
        "is not measured. In short trainings a large batch lacks steps, and all that speeds it up helps. The base settings were "
        "not tuned; beta1 and eps are copied in every run, and another task, k or base rate may answer otherwise."
    )
    picture = Picture(
        "rescaling",
        figure_rescaling(found),
        "Paired differences to the copied setting, by rescaling and measure.",
        "Difference to the large batch with everything copied, in logarithms of a loss, with its 95 % interval; dots are seeds; "
        f"left of 0 is better. The band is ±{MARGIN:g}.",
    )
    return section(
        "One thing rescaled at a time", text, picture, table(head, cells, f"Differences in logarithms of a loss. {DETECTABLE}")
    )


def figure_rescaling(found: Sequence[Effect]) -> Figure:
    """A row of panels per setting, a panel per measure: the differences by seed, their mean and its interval."""

    def draw(axes: Axes, own: Sequence[Effect]) -> None:
        axes.axvspan(-MARGIN, MARGIN, color=BAND, alpha=0.6, linewidth=0)
        axes.axvline(0, color=INK, linewidth=0.8)
        for place, one in enumerate(own):
            mean = statistics.mean_interval(one.differences)
            axes.plot(one.differences, [place + 0.18] * len(one.differences), "o", color=BLUE, markersize=2.5, alpha=0.5)
            axes.plot([mean.low, mean.high], [place] * 2, "-", color=BLUE)
            axes.plot([mean.estimate], [place], "o", color=BLUE, markersize=5)
        axes.set_yticks(range(len(own)), [WORDS[one.what] for one in own])
        axes.set_ylim(len(own) - 0.4, -0.6)

    shown: dict[str, list[Effect]] = {}
    for one in found:
        shown.setdefault(f"{fill(named(one.setting), 40)}\n{MEASURES[one.measure]}", []).append(one)
    return panels(shown, draw, 2.9, columns=2)


def named(setting: tuple[Hashable, ...]) -> str:
    """A setting in words."""
    workload, norm, batch, k, steps, lr = setting
    return f"{workload} ({norm}), B = {batch}, k = {k}, {steps} windows, rate {lr}"


def floors(results: Results) -> str:
    """How far curves are from the small batch's: copied, and by chance alone."""
    rows = results.study("rescaling")
    return " ".join(
        f"{named(key)}: the copied setting's curve is {means.get('copied', float('nan')):.3f} from the small batch's, all "
        f"rescaled {means.get('all', float('nan')):.3f}, and the small batch with its steps in another order "
        f"{means.get('small_reordered', float('nan')):.3f}."
        for key, own in rows.groupby(SETTING)
        for means in [own.groupby("arm")["curve_distance"].mean()]
    )


def advice(found: Sequence[Effect]) -> str:
    """What every setting decides alike; nothing else is advised, and nothing by a setting that stands alone."""
    if len({one.setting for one in found}) < FEWEST_SETTINGS:
        return "Advice: none follows from one setting; the full grid has more."
    sentences = []
    for measure, aim in ((CURVE, "To train as the small batch did"), (FINAL, "For the lowest validation loss at equal samples")):
        verdicts = {what: {one.verdict for one in found if one.what == what and one.measure == measure} for what in WORDS}
        parts = [
            f"{verb} {', '.join(WORDS[what] for what, own in verdicts.items() if own == {verdict})}"
            for verdict, verb in (("helps", "rescale:"), ("hurts", "leave:"), ("no difference (TOST)", "it makes no difference:"))
            if {verdict} in verdicts.values()
        ]
        sentences.append(f"{aim}, {'; '.join(parts)}." if parts else f"{aim}, nothing is decided.")
    return " ".join(sentences)


EXPERIMENT = Experiment(
    title="What has to be rescaled when the batch grows?",
    question="AdamW's settings are those of a batch of B / k. Which of them have to be rescaled for a batch of B, accumulated, "
    "to train as the small batch did over the same samples?",
    prediction="The learning rate matters most, then the warm-up; the average's decay is algebra; beta2 and the weight decay "
    "hardly show in trainings so short.",
    rule=f"Over at least {FEWEST_SEEDS} seeds, which draw weights, order and split together: no difference when TOST puts the "
    f"mean within ±{MARGIN:g} at {LEVEL:g}; else helps or hurts when the paired 95% interval lies on one side of 0 and the "
    f"exact sign-flip p value is below {LEVEL:g} after Holm over the rescalings of a setting and measure; else undecided. "
    "Curves are compared by the mean absolute difference of log probe loss at equal samples, ends by the log of the validation "
    "loss; the average's decay by the losses of the averaged weights.",
    sections=(rescaled_alone,),
)
