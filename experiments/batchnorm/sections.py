"""The sections of the page on BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    Interval,
    Material,
    Picture,
    Section,
    columns_over,
    curves,
    ends,
    estimated,
    formula,
    lines,
    mean_curve,
    needed,
    number,
    points,
    section,
    span,
    statistics,
    table,
    table_by,
)
from accumulation_harness.analysis.caveats import DEFAULT_MOMENTUM
from accumulation_harness.experiments.batchnorm.tables import (
    EXACT,
    LEVEL,
    MARGIN,
    WU_HE,
    against_full,
    between_norms,
    error_cells,
    exact_rows,
    expected_momentum,
    fixed_batch,
    trained,
)

WORDS = {
    "accumulated": "none",
    "corrected_momentum": "momentum 1 - (1 - m)^(1/N)",
    "window_statistics": "running statistics pooled over the window",
    "frozen_statistics": "frozen statistics",
    "detached_statistics": "window statistics as constants",
    "two_pass_statistics": "two-pass statistics",
    "ghost_full_batch": "Ghost BatchNorm in the full batch",
}
VERDICTS = {
    "accumulated": "",
    "corrected_momentum": "fixes the rate of the running statistics; not the gradient",
    "window_statistics": "fixes rate and pooling of the running statistics (the first layer's exactly); not the gradient",
    "frozen_statistics": "fixes the dependence on the split; it is no longer BatchNorm, and needs statistics from elsewhere",
    "detached_statistics": "fixes the running statistics and the dependence on N; the gradient is wrong at every N, even at 1",
    "two_pass_statistics": "fixes gradient and running statistics, exactly; 2L + 1 forwards and L + 1 backwards for L layers",
    "ghost_full_batch": "fixes nothing: the full batch becomes the same other computation as accumulation, exactly",
}

NAMES = {"mlp": "perceptron", "conv": "convolutions"}  # models as the page calls them
CURVES = {
    "gradient_error": "accumulated",
    "oracle_error": "accumulated, against Ghost BatchNorm",
    "two_pass": "two-pass statistics",
}


def _figure_gradient_over_b(rows: DataFrame) -> Figure:
    """Relative gradient error over b, a panel for each model and moment; medians and ranges over trials."""
    two_pass = rows["gradient_error"].where(rows["arm"] == "two_pass_statistics")
    accumulated = rows[["gradient_error", "oracle_error"]].where(rows["arm"] == "accumulated")
    panels = {
        f"{named(model)}\n{f'after {after:.0f} steps' if after else 'initial weights'} (n = {own['trial'].nunique()})":
            columns_over(own, "micro_batch", CURVES)
        for (model, after), own in rows.assign(**accumulated, two_pass=two_pass).groupby(["model", "after_steps"], sort=False)
    }  # fmt: skip
    return curves(panels, "micro-batch b", "‖a - g‖ / ‖g‖, float64", level=(ALGEBRA_GATE, "rounding limit"))


def _figure_effective_momentum(plain: DataFrame, corrected: DataFrame) -> Figure:
    """Effective momentum of the running statistics over N: measured points on the formula's curves; corrected beside it."""
    panels = {
        title: [
            *lines(rows, "momentum", "accumulation_steps", "effective_momentum", "m = {:g} (line: formula)".format, points),
            *formula(rows.assign(formula=expected), "momentum", "accumulation_steps", "formula"),
        ]
        for title, rows, expected in (("as it is", plain, expected_momentum(plain)),
                                      ("momentum 1 - (1 - m)^(1/N)", corrected, corrected["momentum"]))
    }  # fmt: skip
    return curves(panels, "accumulation steps N", "forgotten in one window", axes=("steps", "linear"))


def _figure_accuracy(panels: Mapping[str, DataFrame]) -> Figure:
    """Held-out error in percent over b, mean over seeds with its interval, a line per normalisation; panels: cells by title."""
    drawn = {title: lines(cells, "norm", "b", of=mean_curve, names="{} norm".format) for title, cells in panels.items()}
    return curves(drawn, "micro-batch b", "held-out error, %", axes=("steps", "linear"), sharey=False, ylim=(0, None))


def gradient_over_b(material: Material) -> Section:
    """How far the gradient is off over the micro-batch size.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = material.study(EXACT).query(f"norm == 'batch' and momentum == {DEFAULT_MOMENTUM}")
    plain = exact_rows(material.results, "accumulated")
    influence = plain["influence"].max()
    lines = [_gradient_words(model, own) for model, own in plain.query("after_steps == 0").groupby("model")]
    text = (
        "The batch statistics cause all of it. The running statistics have no part in it: other buffers change the gradient by "
        f"{number(influence)} (relative, largest of {len(plain)}), because a training forward does not read them."
    )
    picture = Picture(
        "gradient-over-b",
        _figure_gradient_over_b(rows),
        "Relative gradient error over the micro-batch size at fixed effective batch, with the error against Ghost "
        "BatchNorm and that of two-pass statistics.",
        f"Same weights, same window of B = {int(rows['effective_batch'].max())}, float64; medians and ranges over trials. "
        "Against Ghost BatchNorm: the distance to a full batch that normalises in chunks of b, which accounts for the whole "
        "difference. Late in training the full gradient is small, so the same disturbance is relatively larger. This does not "
        "show the effect on accuracy.",
    )
    return section("The gradient: batch statistics", *lines, text, picture)


def _gradient_words(model: object, rows: DataFrame) -> str:
    """Error of a model at the largest and the smallest b."""
    middle = rows.groupby("micro_batch")["gradient_error"].median()
    ends = " and ".join(f"{number(error)} at b = {b}" for b, error in middle.iloc[[-1, 0]].items())
    return (
        f"{named(model).capitalize()}, initial weights, B = {int(rows['effective_batch'].max())}: the accumulated gradient is "
        f"{ends} off the full batch's (relative, medians of {rows['trial'].nunique()} trials)."
    )


def running_statistics(material: Material) -> Section:
    """The effective momentum of the running statistics over N, beside its formula.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    plain = exact_rows(material.results, "accumulated", all_momenta=True)
    corrected = exact_rows(material.results, "corrected_momentum", all_momenta=True)
    needed(plain, corrected)
    usual = exact_rows(material.results, "accumulated")
    after = usual.query("after_steps == 0").groupby("accumulation_steps")["statistics_error"].median()
    mended = exact_rows(material.results, "corrected_momentum")
    left = mended.query("after_steps == 0").groupby("accumulation_steps")["statistics_error"].median()
    most = after.index.max()
    text = (
        "Every micro-batch updates the running statistics, N times in a window. The update is affine in their old values, so "
        "two different starting values measure exactly how much of the old values is left. After the first window, the distance "
        f"of the running statistics at N = {most} from the full batch's is {number(after[most])} times how far the full batch's "
        f"moved; with the corrected momentum it is {number(left[most])}. No momentum can fix the rest: layers after the first "
        "normalisation see other inputs, and the last micro-batches still weigh more."
    )
    picture = Picture(
        "effective-momentum",
        _figure_effective_momentum(plain, corrected),
        "Effective momentum of the running statistics over N for three momenta, measured points on the curves of the formula.",
        "Points: measured on the buffers of the loop under test, in float64. Lines: 1 - (1 - m)^N on the left, m on the right.",
    )
    return section("The running statistics: an effective momentum", text, picture)


def remedies(material: Material) -> Section:
    """What each remedy does to gradient and running statistics in one window.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = material.study(EXACT).query(f"norm == 'batch' and momentum == {DEFAULT_MOMENTUM} and after_steps == 0")
    smallest = rows["micro_batch"].min()
    own = rows.query("micro_batch == @smallest")
    columns = ["gradient_error", "split_error", "statistics_error", "effective_momentum", "forwards"]
    middle = own.groupby("arm")[columns].median()
    middle.loc["frozen_statistics", ["statistics_error", "effective_momentum"]] = np.nan  # they do not move
    cells = [(words, *middle.loc[arm], VERDICTS[arm]) for arm, words in WORDS.items()]
    head = "remedy | gradient off | depends on N | running statistics off | effective momentum | forwards | what it does"
    caption = (
        f"One window at the initial weights, b = {smallest}, medians over {own['trial'].nunique()} trials. Gradient off: "
        "relative distance to the full batch's BatchNorm gradient. Depends on N: distance to the same arm at N = 1. Running "
        "statistics off: distance to the full batch's after the window, relative to how far those moved. Forwards: samples that "
        "went through the model, over the window's. GroupNorm and LayerNorm have no batch statistics and are exact at every N "
        "(see their experiment); they are other models, with an accuracy of their own."
    )
    return section("Remedies side by side", table(head, cells, caption))


def named(model: Any) -> str:
    """A model as the page calls it.

    Args:
        model: Name of a model.

    Returns:
        A phrase.
    """
    return NAMES.get(str(model), str(model))


def accuracy_over_b(material: Material) -> Section:
    """Held-out error over the micro-batch size at fixed B, and what accumulation costs of it.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = trained(material.results, norm="batch")
    errors, costs = error_cells(rows), against_full(rows, MARGIN)
    panels = {
        f"{named(model)}, B = {batch} (n = {int(own['n'].max())})": own
        for (model, batch), own in errors.groupby(["model", "effective_batch"], sort=False)
    }
    picture = Picture(
        "accuracy-over-b",
        _figure_accuracy(panels),
        "Held-out error of BatchNorm over the micro-batch at fixed effective batch, per model and batch, with intervals.",
        "Held-out error at the end over b; the largest b of each panel is the full batch. Means over seeds and 95% t "
        "intervals, which are wider than those of the paired differences below. Same weights, windows and learning-rate "
        "schedule within a seed.",
    )
    inside, beyond = (costs["tost_p"] < LEVEL).sum(), ((costs["p_holm"] < LEVEL) & (costs["mean"] > MARGIN)).sum()
    text = (
        f"Of {len(costs)} cells {inside} are within {MARGIN:g} point of their full batch (TOST, 5%) and {beyond} lose more "
        "than that (paired t test, Holm, 5%)."
    )
    if (costs["apart_p"] < LEVEL).all():
        text += (
            " The smallest difference that these seeds would have found with a power of 80% is "
            f"{span(costs['detectable'])} points, cell by cell in the table. The "
            "held-out loss lies farther from the full batch's than the permuted one's in every cell, including those whose mean "
            "is unharmed: it is another training, whatever its mean says."
        )
    reach = (
        "What this does not show: other data, deeper nets, longer training. The nets are small, the test set has 297 images, "
        "and the learning rate was not tuned for each b. Wu & He (2018, read, not measured here) let ResNet-50 lose 0.1, 1.2, "
        "3.7 and 11.1 points on ImageNet at b = 16, 8, 4 and 2 to b = 32, with B growing with b: smaller losses here say nothing "
        "of such nets."
    )
    head = (
        "model | B | N | b | b H W | n | points lost | 95% interval | in the weights alone | TOST p | t test, Holm | "
        "would have been seen | loss apart, times the control"
    )
    columns = (
        ("model", named), "effective_batch", "accumulation_steps", "b", "values", "n", "mean", ends,
        ("weights", lambda each: statistics.mean_interval(each) if each else "-"), "tost_p", "p_holm", "detectable", "apart",
    )  # fmt: skip
    caption = (
        "Held-out error above the full batch's. b H W: "
        "values of a channel in a micro-batch, in the BatchNorm layer that has the fewest. In the weights alone: with statistics "
        "of the whole training set in both (precise BatchNorm)."
    )
    cells = table_by(costs, "", head, columns, caption)
    return section("Accuracy over b", text, picture, _over_values(costs.query("values.notna()")), cells, reach)


def _over_values(costs: DataFrame) -> Picture | None:
    """The costs of all models over one axis: what a channel's statistics are taken over."""
    if costs.empty:
        return None
    kinds = costs.assign(kind=costs["model"].map(named) + ", B = " + costs["effective_batch"].astype(str))
    return Picture(
        "cost-over-values",
        curves({"": lines(kinds, "kind", "values", of=mean_curve)}, "values per channel in a micro-batch, b H W", "points lost",
               axes=("steps", "linear"), level=(0, "the full batch's")),
        "Points of held-out error above the full batch's over the number of values per channel, b H W, for every model.",
        "Paired by seed; means and 95% t intervals. The axis counts the values of a channel in a micro-batch, in the layer "
        "that has the fewest. Models that lay on one curve would be parted by b H W alone; depth and data part them as well.",
    )  # fmt: skip


def in_points(one: Interval) -> str:
    """An estimate with its interval, in points to a hundredth: no 4e-15.

    Args:
        one: An estimate in points.

    Returns:
        `MEAN (LOW to HIGH)`.
    """
    return estimated(Interval(*(round(value, 2) + 0.0 for value in (one.estimate, one.low, one.high))))


def wu_and_he(material: Material) -> Section:
    """BatchNorm and GroupNorm over b at fixed B, beside the figures of Wu & He (2018).

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = fixed_batch(trained(material.results))
    gains, cells = between_norms(rows), error_cells(rows)
    needed(gains)
    gains = gains.sort_values(["model", "b"], ascending=[True, False]).round({"gain": 9, "low": 9, "high": 9})  # points: no 4e-15
    panels = {f"{named(model)} (n = {int(own['n'].max())})": own for model, own in cells.groupby("model", sort=False)}
    picture = Picture(
        "fixed-batch",
        _figure_accuracy(panels),
        "Held-out error of BatchNorm and GroupNorm over the micro-batch, with intervals.",
        "Held-out error over b, means over seeds and 95% t intervals. One B; its largest b is the full batch.",
    )
    head = (
        "model | b | B | n | BatchNorm, % | GroupNorm, % | GroupNorm gains | 95% interval | would have been seen | "
        "Wu & He: BatchNorm | GroupNorm | gain"
    )
    theirs = [(lambda row, of=of: of(*both) if (both := WU_HE.get(row["b"].iloc[0])) else "-") for of in (
        lambda batch, _: str(batch), lambda _, group: str(group), lambda batch, group: f"{batch - group:.1f}")]  # fmt: skip
    columns = (("model", named), "b", "effective_batch", "n", "batch", "group", "gain", ends, "detectable", *theirs)
    caption = (
        "Gain: BatchNorm's error minus GroupNorm's, in percentage points, paired by seed. Wu & He 2018: ResNet-50 on ImageNet, "
        "validation error; b is images per GPU on 8 GPUs. Only the shapes of the two curves can be compared."
    )
    return section("At fixed B: only the normaliser changes", picture, table_by(gains, "", head, columns, caption))
