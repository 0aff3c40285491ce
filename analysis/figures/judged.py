"""The figures of judged arms, from tables to a matplotlib Figure: no global plotting state."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis.figures.forms import Curve, curves, lines, mean_curve, median_curve
from accumulation_harness.analysis.figures.style import GREY, INK, log_axis, power_of_ten
from accumulation_harness.analysis.tables import NORM_NAMES, PRECISIONS, facets
from accumulation_harness.judge.gates import ALGEBRA_GATE

NULLS = ("null", "ulp")
AT = "accumulation_steps"
NAMES = {**NORM_NAMES, "as_is": "the model as it is", "permuted": "large batch, shuffled"}
GATE = (ALGEBRA_GATE, f"rounding limit {power_of_ten(ALGEBRA_GATE)}")


def figure_algebra(arms: DataFrame) -> Figure:
    """Float64 difference of every arm over N, a line per normalisation, with the gate and the oracle of BatchNorm.

    Args:
        arms: Judged arms, a row each.

    Returns:
        The figure.
    """
    own = arms[arms["arm"].isin(["accumulated", "permuted"]) & arms["algebra_error"].notna()]
    kinds = own.assign(kind=own["norm"].where(own["arm"] == "accumulated", "permuted")).sort_values("norm")
    drawn = lines(kinds, "kind", AT, "algebra_error", NAMES.get)
    if len(explained := own.query("norm == 'batch' and oracle_error.notna()")):
        drawn.append(median_curve(explained, AT, "oracle_error", color=INK, marker="D", label="BatchNorm, simulated"))
    return curves({"": drawn}, "N", "difference to the large batch", level=GATE)


def figure_gradient_error(arms: DataFrame) -> Figure:
    """Error of the gradient in the target precision over N, and the full batch's own: rows are precisions, columns models.

    Args:
        arms: Judged arms, a row each.

    Returns:
        The figure.
    """
    parted = arms["arm"].where(arms["verdict"] != "different", arms["arm"] + ", different")
    full = arms[arms["arm"] == "accumulated"].assign(arm="full", arm_error=lambda own: own["full_error"])
    rows = pd.concat([full, arms.assign(arm=parted)])
    shown = {
        f"{model}\n{precision} (n = {own['trial'].nunique()})": lines(
            own, "arm", AT, "arm_error", lambda arm: {"full": "full batch"}.get(arm, arm)
        )
        for precision, model, own in _cells(rows)
    }
    return curves(shown, "N", "‖g - g₆₄‖ / ‖g₆₄‖", columns=len(facets(arms)), sharey="row")


def figure_losses(steps: DataFrame) -> Figure:
    """Loss of every arm, and below it the distance to the full batch's, against the band of the null runs; columns are models.

    Args:
        steps: Step rows of the drawn trials.

    Returns:
        The figure.
    """
    full = steps[steps["arm"] == "full"][["model", "step", "loss"]].rename(columns={"loss": "full"})
    steps = steps.merge(full, on=["model", "step"]).assign(off=lambda own: (own["loss"] - own["full"]).abs())
    above, below = dict[str, list[Curve]](), dict[str, list[Curve]]()
    for _, model, own in _cells(steps):
        seen = own[own["arm"].isin(["full", "accumulated"])]
        title = f"{model}\n{own['optimizer'].iloc[0]}, seed {own['seed'].iloc[0]}"
        above[title] = lines(seen, AT, "step", "loss", lambda n: f"N = {n}" if n > 1 else "full batch", marker="")
        below[f"{model}: |loss - full batch's|"] = _beside_null(own, "off")
    figure = curves({**above, **below}, "optimizer step", "loss", axes=("linear", "linear"), columns=len(above), sharey="row")
    for axes in figure.axes[len(above) :]:
        log_axis(axes, "y")
    return figure


def figure_distances(steps: DataFrame) -> Figure:
    """Distance of the parameters to the full batch's, against the band of the null runs: rows are precisions, columns models.

    Args:
        steps: Step rows of the drawn trials.

    Returns:
        The figure.
    """
    shown = {f"{model}\n{precision}": _beside_null(own, "parameter_distance") for precision, model, own in _cells(steps)}
    columns = len(facets(steps))
    return curves(shown, "optimizer step", "distance d", axes=("linear", "log"), columns=columns, sharey="row")


def _cells(rows: DataFrame) -> Iterator[tuple[str, str, DataFrame]]:
    """The rows of each precision and model, in the order of the panels; of what was not run there are none."""
    for precision in (name for name in PRECISIONS if name in set(rows["precision"])):
        for model in facets(rows):
            yield precision, model, rows.query("precision == @precision and model == @model")


def _beside_null(rows: DataFrame, value: str) -> list[Curve]:
    """Curves by N over the shaded band of the null runs; what is exactly zero is a gap."""
    rows = rows[rows[value] > 0]
    null = rows[rows["arm"].isin(NULLS)].groupby("step")[value].max()
    look = {"color": GREY, "linewidth": 0.6, "label": "band of the control runs"}
    band = Curve(null.index, null, look, band=(rows[value].min() / 2, null))
    return [band, *lines(rows.query("arm == 'accumulated'"), AT, "step", value, "N = {}".format, marker="")]


def figure_convergence(l4: DataFrame, margin: float) -> Figure:
    """L4 of the held-out loss over N, a line per configuration: mean difference, interval; at N = 1 the permuted full batch.

    Args:
        l4: What `tables.convergence` gives.
        margin: Margin of the equivalence test, in nats.

    Returns:
        The figure.
    """
    l4 = l4.query("measure == 'held_out_loss'")
    l4 = l4.assign(row=l4[["workload", "norm", "optimizer"]].agg(" ".join, axis=1))
    shown = {precision: lines(own, "row", AT, of=mean_curve) for precision, own in l4.groupby("precision", sort=False)}
    y = "held-out loss - full batch's (nats)"
    figure = curves({str(name): drawn for name, drawn in shown.items()}, "N", y, axes=("steps", "linear"))
    for axes in figure.axes:
        axes.axhspan(-margin, margin, color=GREY, alpha=0.15, linewidth=0)
        axes.set_yscale("symlog", linthresh=margin)
        axes.yaxis.set_major_formatter("{x:g}")
    return figure
