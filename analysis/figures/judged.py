"""The figures of judged arms, from tables to a matplotlib Figure: no global plotting state."""

from __future__ import annotations

from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis.figures.forms import EXACT, WIDTH, Curve, curves, mean_curve, median_curve, panels, to_the_ends
from accumulation_harness.analysis.figures.style import (
    BLUE,
    DASHED,
    GREEN,
    GREY,
    INK,
    SERIES,
    VERMILLION,
    by_steps,
    log_axis,
    power_of_ten,
    steps_axis,
)
from accumulation_harness.analysis.tables import NORMS, PRECISIONS, facets
from accumulation_harness.judge.gates import ALGEBRA_GATE

MAX_MARKS = 150  # of one strip: more cannot be told apart, and would make the page heavy
NULLS = ("null", "ulp")


def figure_algebra(arms: DataFrame) -> Figure:
    """Float64 difference of every arm, one strip per normalisation, with the gate and the oracle of BatchNorm."""
    norms = [norm for norm in NORMS if norm in set(arms["norm"])]

    def draw(axes: Axes, arms: DataFrame) -> None:
        log_axis(axes, "x", most=10)
        axes.axvspan(EXACT / 3, ALGEBRA_GATE, color=BLUE, alpha=0.06, linewidth=0)
        axes.axvline(ALGEBRA_GATE, color=INK, linewidth=1, linestyle=DASHED)
        axes.text(ALGEBRA_GATE * 1.6, -0.62, f"gate {power_of_ten(ALGEBRA_GATE)}", va="center", color=INK)
        labels: list[str] = []
        for place, norm in enumerate(norms):
            own, null = (arms[arms["norm"].eq(norm) & arms["arm"].eq(name)] for name in ("accumulated", "permuted"))
            errors, labels = own["algebra_error"], [*labels, f"{norm} (n = {len(own)})"]
            passes = errors <= ALGEBRA_GATE
            _strip(axes, errors[passes], place - 0.06, BLUE, "o", "accumulated, passes")
            _strip(axes, errors[~passes], place - 0.06, VERMILLION, "X", "accumulated, fails")
            _strip(axes, null["algebra_error"], place + 0.3, GREY, "|", "permuted full batch")
            if norm == "batch":
                _strip(axes, own["oracle_error"], place - 0.06, GREEN, "D", "BatchNorm against its oracle")
        axes.set_yticks(range(len(norms)), labels)
        axes.set_ylim(len(norms) - 0.4, -0.85)
        axes.set_xlim(EXACT / 3, 10)
        axes.grid(axis="y", visible=False)

    x = "relative difference to the full batch in float64 (gradients and optimizer state)"
    return panels({"": arms}, draw, 1.2 + 0.55 * len(norms), x=x, ncols=4)


def _strip(axes: Axes, errors: Series[float], place: float, colour: str, mark: str, label: str) -> None:
    """Marks along one line, slightly scattered; of many, evenly spaced ranks with both ends."""
    values = np.sort(errors.dropna().to_numpy())
    if len(values) > MAX_MARKS:
        values = values[np.linspace(0, len(values) - 1, MAX_MARKS).round().astype(int)]
    scatter = np.zeros(len(values)) if mark == "|" else 0.13 * np.sin(np.arange(len(values)) * 2.4)
    size, edge = (6, 1.2) if mark == "|" else (4, 0)
    at = np.clip(values, EXACT, None)
    axes.plot(at, place + scatter, mark, color=colour, markersize=size, markeredgewidth=edge, alpha=0.75, label=label)


def figure_gradient_error(arms: DataFrame) -> Figure:
    """Error of the gradient in the target precision over N: rows are precisions, columns models; the floor is drawn as a band."""
    arms = arms[np.isfinite(arms["arm_error"])]
    models, shown = facets(arms), dict[str, list[Curve]]()
    for precision, model in product(_precisions(arms), models):
        own = arms.query("precision == @precision and model == @model")
        drawn = shown.setdefault(f"{model}\n{precision} (n = {own['trial'].nunique()})", [])
        if own.empty:
            continue
        accumulated, null = (own.query("arm == @name") for name in ("accumulated", "permuted"))
        ends, full = own["accumulation_steps"].agg(["min", "max"]), own["full_error"]
        look = {"color": GREY, "label": "full batch: median, range"}
        drawn.append(Curve(ends, [full.median()] * 2, look, band=([full.min()] * 2, [full.max()] * 2)))
        for value in null["arm_error"].agg(["min", "max"]):
            drawn.append(Curve(ends, [value] * 2, {"color": INK, "linestyle": ":", "label": "permuted full batch: range"}))
        is_different = accumulated["verdict"] == "different"
        for chosen, colour, mark, label in (
            (accumulated[~is_different], BLUE, "o", "accumulated: median, range over trials"),
            (accumulated[is_different], VERMILLION, "X", "the same, verdict different"),
        ):
            if len(chosen):
                drawn.append(median_curve(chosen, "accumulation_steps", "arm_error", color=colour, marker=mark, label=label))
    return curves(shown, "N", "‖g - g₆₄‖ / ‖g₆₄‖", columns=len(models), sharey="row", size=(WIDTH, 2.8))


def figure_losses(steps: DataFrame) -> Figure:
    """Loss of every arm, and below it the distance to the full batch's, against the band of the null runs; columns are models."""
    models, above, below = facets(steps), dict[str, list[Curve]](), dict[str, list[Curve]]()
    colours = by_steps(steps.query("arm == 'accumulated'")["accumulation_steps"].tolist())
    for model in models:
        own = steps.query("model == @model")
        table = own.pivot_table(index="step", columns=["arm", "accumulation_steps", "replicate"], values="loss")
        full = table["full", 1, 0]
        drawn = above.setdefault(f"{model}\n{own['optimizer'].iloc[0]}, seed {own['seed'].iloc[0]}", [])
        for n, curve in _accumulated(table):
            drawn.append(Curve(curve.index, curve, {"color": colours[n], "linewidth": 1, "label": f"N = {n}"}))
        drawn.append(Curve(full.index, full, {"color": INK, "linestyle": DASHED, "label": "full batch"}))
        below[f"{model}: |loss - full batch's|"] = _beside_null(table.sub(full, axis=0).abs(), colours)
    figure = curves({**above, **below}, "optimizer step", "loss", axes=("linear", "linear"), columns=len(models), sharey="row")
    for axes in figure.axes[len(models) :]:
        log_axis(axes, "y")
    return figure


def figure_distances(steps: DataFrame) -> Figure:
    """Distance of the parameters to the full batch's, against the band of the null runs: rows are precisions, columns models."""
    models, shown = facets(steps), dict[str, list[Curve]]()
    colours = by_steps(steps.query("arm == 'accumulated'")["accumulation_steps"].tolist())
    for precision, model in product(_precisions(steps), models):
        own = steps.query("model == @model and precision == @precision")
        table = own.pivot_table(index="step", columns=["arm", "accumulation_steps", "replicate"], values="parameter_distance")
        shown[f"{model}\n{precision}"] = _beside_null(table, colours) if len(own) else []
    size = (WIDTH, 2.8)
    return curves(shown, "optimizer step", "distance d", axes=("linear", "log"), size=size, columns=len(models), sharey="row")


def _precisions(rows: DataFrame) -> list[str]:
    return [name for name in PRECISIONS if name in set(rows["precision"])]


def _beside_null(table: DataFrame, colours: dict[int, str]) -> list[Curve]:
    """Curves by N over the shaded band of the null runs; what is exactly zero is a gap."""
    table = table.where(table > 0)
    accumulated = _accumulated(table)
    null = table.loc[:, table.columns.get_level_values("arm").isin(NULLS)].max(axis=1)
    lowest = np.nanmin([null.min(), *(curve.min() for _, curve in accumulated)]) / 2
    look = {"color": GREY, "linewidth": 0.6, "label": "band of the null runs"}
    return [Curve(null.index, null, look, band=(lowest, null))] + [
        Curve(curve.index, curve, {"color": colours[n], "linewidth": 0.9, "label": f"N = {n}"}) for n, curve in accumulated
    ]


def _accumulated(table: DataFrame) -> list[tuple[int, Series[float]]]:
    """N and the column of each accumulated arm."""
    return [(int(key[1]), table[key]) for key in table.columns.to_flat_index() if key[0] == "accumulated"]


def figure_batch_norm(arms: DataFrame, l4: DataFrame) -> Figure:
    """BatchNorm over N: the difference and what is left of it against the Ghost-BatchNorm oracle; held-out loss beside it."""
    accumulated, l4 = arms.query("arm == 'accumulated'"), l4.query("measure == 'held_out_loss'")
    gate = {"color": INK, "linestyle": DASHED, "label": f"gate {power_of_ten(ALGEBRA_GATE)}"}
    steps = sorted(set(accumulated["accumulation_steps"]))
    at = "accumulation_steps"
    left = [
        median_curve(accumulated, at, "gradient_error", color=VERMILLION, marker="X", label="to the full batch"),
        median_curve(accumulated, at, "oracle_error", color=GREEN, marker="D", label="to Ghost BatchNorm, chunks of b = B/N"),
        Curve(steps, [ALGEBRA_GATE] * len(steps), gate),
    ]
    right = []
    for place, (names, own) in enumerate(l4.groupby(["workload", "optimizer", "precision"], sort=False)):
        cells = own.assign(at=own[at].where(own["arm"] == "accumulated", 1) * 1.04**place)
        label = f"{' '.join(map(str, names))} (n = {own['n'].max()})"
        look = {"color": SERIES[place % len(SERIES)], "marker": "oDsv^P"[place % 6], "linestyle": "", "label": label}
        right.append(mean_curve(cells, "at", **look))
    shown = {"float64 gradient: relative difference": left,
             "held-out loss less the full batch's, nats, 95%; 1: permuted": right}  # fmt: skip
    figure = curves(shown, "N", "", axes=("steps", "linear"), sharey=False, size=(WIDTH, 3.8), ncols=3)
    log_axis(figure.axes[0], "y", most=10)
    steps_axis(figure.axes[1], [1, *steps])
    return figure


def figure_convergence(l4: DataFrame, margin: float) -> Figure:
    """L4 of the held-out loss, one row per configuration: mean difference and interval of every arm, with the margin."""
    l4 = l4.query("measure == 'held_out_loss'")
    l4 = l4.assign(row=l4[["workload", "norm", "optimizer"]].agg(" ".join, axis=1))
    rows = list(dict.fromkeys(l4["row"]))
    colours = {0: GREY, **by_steps(l4.query("arm == 'accumulated'")["accumulation_steps"].tolist())}
    l4 = l4.assign(num=l4["accumulation_steps"].where(l4["arm"] == "accumulated", 0))  # 0: the permuted full batch

    def draw(axes: Axes, own: DataFrame) -> None:
        axes.axvspan(-margin, margin, color=BLUE, alpha=0.07, linewidth=0, label="margin")
        axes.axvline(0, color=INK, linewidth=0.8)
        for place, (n, colour) in enumerate(colours.items()):
            arm = own.query("num == @n")
            at = arm["row"].map(rows.index) + 0.8 * ((place + 0.5) / len(colours) - 0.5)
            mark, label = ("o", f"N = {n}") if n else ("d", "permuted full batch")
            axes.errorbar(
                arm["mean"], at, xerr=to_the_ends(arm), fmt=mark, markersize=3, linewidth=0.9, color=colour, label=label
            )
        axes.set_xscale("symlog", linthresh=margin / 20, linscale=0.6)
        ticks = [-margin * 10, -margin, 0, margin, margin * 10]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(axis="y", visible=False)
        for below in range(1, len(rows)):
            axes.axhline(below - 0.5, color="#e7eaee", linewidth=0.7)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.4, -0.6)

    shown = {precision: l4.query("precision == @precision") for precision in _precisions(l4)}
    return panels(shown, draw, 1.3 + 0.36 * len(rows), x="held-out loss - full batch's (nats)", ncols=len(colours) + 1)
