"""One function per figure, from tables to a matplotlib Figure; no global plotting state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from accumulation_harness.analysis.figures.style import (
    BAND,
    BLUE,
    GREEN,
    GREY,
    INK,
    SERIES,
    VERMILLION,
    by_steps,
    log_axis,
    new_figure,
    power_of_ten,
    steps_axis,
    style,
)
from accumulation_harness.analysis.tables import NORMS, PRECISIONS, facets
from accumulation_harness.judge.gates import ALGEBRA_GATE

WIDTH = 9.4  # inches, of every figure: then letters have one size on the page
MAX_MARKS = 150  # of one strip: more cannot be told apart, and would make the page heavy
EXACT = 1e-17  # where a difference of exactly zero is drawn
BOTTOMLESS = 1e-300  # lower end of a band on a logarithmic axis
NULLS = ("null", "ulp")


def figure_algebra(arms: pd.DataFrame) -> Figure:
    """Float64 difference of every arm, one strip per normalisation, with the gate and the oracle of BatchNorm."""
    norms = [norm for norm in NORMS if norm in set(arms["norm"])]
    with style():
        figure = new_figure(WIDTH, 1.2 + 0.55 * len(norms))
        axes = figure.subplots()
        log_axis(axes, "x", most=10)
        axes.axvspan(EXACT / 3, ALGEBRA_GATE, color=BLUE, alpha=0.06, linewidth=0)
        axes.axvline(ALGEBRA_GATE, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.text(ALGEBRA_GATE * 1.6, -0.62, f"gate {power_of_ten(ALGEBRA_GATE)}", va="center", color=INK)
        for place, norm in enumerate(norms):
            own = arms[arms["norm"] == norm]
            accumulated, null = (own[own["arm"] == name] for name in ("accumulated", "permuted"))
            good = accumulated["algebra_error"] <= ALGEBRA_GATE
            _strip(axes, accumulated.loc[good, "algebra_error"], place - 0.06, BLUE, "o")
            _strip(axes, accumulated.loc[~good, "algebra_error"], place - 0.06, VERMILLION, "X")
            _strip(axes, null["algebra_error"], place + 0.3, GREY, "|")
            if norm == "batch":
                _strip(axes, accumulated["oracle_error"].dropna(), place - 0.06, GREEN, "D")
        names = [f"{norm} (n = {int(((arms['norm'] == norm) & (arms['arm'] == 'accumulated')).sum())})" for norm in norms]
        axes.set_yticks(range(len(norms)), names)
        axes.set_ylim(len(norms) - 0.4, -0.85)
        axes.set_xlim(EXACT / 3, 10)
        axes.set_xlabel("relative difference to the full batch in float64 (gradients and optimizer state)")
        axes.grid(axis="y", visible=False)
        marks = [("o", BLUE, "accumulated, passes"), ("X", VERMILLION, "accumulated, fails"), ("|", GREY, "permuted full batch"),
                 ("D", GREEN, "BatchNorm against its oracle")]  # fmt: skip
        handles = [Line2D([], [], marker=mark, color=colour, linestyle="", label=label) for mark, colour, label in marks]
        figure.legend(handles=handles, loc="outside upper left", ncols=4, handletextpad=0.2, columnspacing=1.4)
    return figure


def figure_gradient_error(arms: pd.DataFrame) -> Figure:
    """Error of the gradient in the target precision over N: rows are precisions, columns models; the floor is drawn as a band."""
    arms = arms[np.isfinite(arms["arm_error"])]
    precisions = [name for name in PRECISIONS if name in set(arms["precision"])]
    models = facets(arms)
    steps = sorted(set(arms.loc[arms["arm"] == "accumulated", "accumulation_steps"]))
    with style():
        figure = new_figure(WIDTH, 0.9 + 1.9 * len(precisions))
        grid = figure.subplots(len(precisions), len(models), sharex=True, sharey="row", squeeze=False)
        for row, precision in enumerate(precisions):
            for column, model in enumerate(models):
                own = arms[(arms["precision"] == precision) & (arms["model"] == model)]
                _error_facet(grid[row, column], own, steps)
                if row == 0:
                    grid[row, column].set_title(model)
                if row == len(precisions) - 1:
                    grid[row, column].set_xlabel("N")
            grid[row, 0].set_ylabel(f"{precision}\n‖g - g₆₄‖ / ‖g₆₄‖")
        handles = [
            Line2D([], [], marker="o", color=BLUE, label="accumulated: median, range over trials"),
            Line2D([], [], marker="X", color=VERMILLION, label="the same, verdict different"),
            Patch(facecolor=BAND, edgecolor=GREY, label="full batch: median, range"),
            Line2D([], [], color=INK, linestyle=(0, (1, 1.5)), label="permuted full batch: range"),
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=4, columnspacing=1.2, fontsize=8.5)
    return figure


def _error_facet(axes: Axes, arms: pd.DataFrame, steps: Sequence[int]) -> None:
    log_axis(axes, "y", most=5)
    steps_axis(axes, steps)
    if arms.empty:
        axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color=GREY)
        return
    accumulated, null = (arms[arms["arm"] == name] for name in ("accumulated", "permuted"))
    full = arms["full_error"]
    axes.axhspan(full.min(), full.max(), color=BAND, alpha=0.8, linewidth=0)
    for value in (null["arm_error"].min(), null["arm_error"].max()):
        axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (1, 1.5)))
    axes.axhline(full.median(), color=GREY, linewidth=0.9)
    for is_different, colour, mark in ((False, BLUE, "o"), (True, VERMILLION, "X")):
        chosen = accumulated[(accumulated["verdict"] == "different") == is_different]
        if chosen.empty:
            continue
        _range_line(axes, chosen.groupby("accumulation_steps")["arm_error"].agg(["median", "min", "max"]), colour, mark)
    axes.text(
        0.97, 0.5, f"n = {arms['trial'].nunique()}", transform=axes.transAxes, ha="right", va="center", color=GREY, fontsize=8
    )


def figure_losses(steps: pd.DataFrame) -> Figure:
    """Loss of every arm, and below it the distance to the full batch's, against the band of the null runs; columns are models."""
    models = facets(steps)
    colours = by_steps(steps.loc[steps["arm"] == "accumulated", "accumulation_steps"].tolist())
    with style():
        figure = new_figure(WIDTH, 4.3)
        grid = figure.subplots(2, len(models), sharex="col", sharey="row", squeeze=False, height_ratios=[1, 1.25])
        for column, model in enumerate(models):
            own = steps[steps["model"] == model]
            curves = _curves(own, "loss")
            above, below = grid[0, column], grid[1, column]
            for label, curve in curves.items():
                if label[0] == "accumulated":
                    above.plot(curve.index, curve, color=colours[label[1]], linewidth=1.0)
            above.plot(curves[_FULL].index, curves[_FULL], color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
            above.set_title(f"{model}\n{own['optimizer'].iloc[0]}, seed {own['seed'].iloc[0]}")
            distances = {label: (curve - curves[_FULL]).abs() for label, curve in curves.items() if label != _FULL}
            _against_null(below, distances, colours)
            below.set_xlabel("optimizer step")
        _fit_height(list(grid[1]))
        grid[0, 0].set_ylabel("loss")
        grid[1, 0].set_ylabel("|loss - loss of full batch|")
        _legend_of_steps(figure, colours, full=True)
    return figure


def figure_distances(steps: pd.DataFrame) -> Figure:
    """Distance of the parameters to the full batch's, against the band of the null runs: rows are precisions, columns models."""
    models, precisions = facets(steps), [name for name in PRECISIONS if name in set(steps["precision"])]
    colours = by_steps(steps.loc[steps["arm"] == "accumulated", "accumulation_steps"].tolist())
    with style():
        figure = new_figure(WIDTH, 0.9 + 1.9 * len(precisions))
        grid = figure.subplots(len(precisions), len(models), sharex=True, sharey="row", squeeze=False)
        for row, precision in enumerate(precisions):
            for column, model in enumerate(models):
                axes, own = grid[row, column], steps[(steps["model"] == model) & (steps["precision"] == precision)]
                if own.empty:
                    axes.text(0.5, 0.5, "not run", transform=axes.transAxes, ha="center", color=GREY)
                else:
                    curves = _curves(own, "parameter_distance")
                    _against_null(axes, {label: curve for label, curve in curves.items() if label != _FULL}, colours)
                if row == 0:
                    axes.set_title(model)
                if row == len(precisions) - 1:
                    axes.set_xlabel("optimizer step")
            grid[row, 0].set_ylabel(f"{precision}\ndistance d")
            _fit_height(list(grid[row]))
        _legend_of_steps(figure, colours, full=False)
    return figure


def figure_batch_norm(arms: pd.DataFrame, l4: pd.DataFrame) -> Figure:
    """BatchNorm over N: the difference and what is left of it against the Ghost-BatchNorm oracle; held-out loss beside it."""
    accumulated = arms[arms["arm"] == "accumulated"]
    steps = sorted(set(accumulated["accumulation_steps"]))
    with style():
        figure = new_figure(WIDTH, 3.5)
        left, right = figure.subplots(1, 2)
        log_axis(left, "y", most=10)
        steps_axis(left, steps)
        for column, colour, mark in (("gradient_error", VERMILLION, "X"), ("oracle_error", GREEN, "D")):
            spread = accumulated.groupby("accumulation_steps")[column].agg(["median", "min", "max"]).clip(lower=EXACT)
            _range_line(left, spread, colour, mark)
        left.axhline(ALGEBRA_GATE, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        left.set(title="float64 gradient: difference to …", xlabel="N", ylabel="relative difference")
        middle = math.sqrt(steps[0] * steps[-1])
        for y, text in ((3e-3, "the full batch"), (ALGEBRA_GATE * 4, f"gate {power_of_ten(ALGEBRA_GATE)}"),
                        (8e-14, "Ghost BatchNorm, chunks of b = B/N")):  # fmt: skip
            left.text(middle, y, text, ha="center", fontsize=8.5)
        left.set_ylim(1e-17, 10)
        _loss_differences(right, l4[l4["measure"] == "held_out_loss"], steps)
    return figure


def _loss_differences(axes: Axes, l4: pd.DataFrame, steps: Sequence[int]) -> None:
    """Mean and interval of the held-out loss difference by workload, optimizer and precision, with the null at the left."""
    places = {1: 0, **{n: place for place, n in enumerate(steps, start=1)}}
    series = list(l4.groupby(["workload", "optimizer", "precision"], sort=False))
    for number, (names, rows) in enumerate(series):
        offset = (number - (len(series) - 1) / 2) * min(0.12, 0.7 / len(series))
        at = rows["accumulation_steps"].where(rows["arm"] == "accumulated", 1).map(places) + offset
        reach = to_the_ends(rows)
        label = f"{' '.join(map(str, names))} (n = {rows['n'].max()})"
        mark, colour = "oDsv^P"[number % len(SERIES)], SERIES[number % len(SERIES)]
        axes.errorbar(at, rows["mean"], yerr=reach, fmt=mark, markersize=4, linewidth=0.9, color=colour, label=label)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xticks(list(places.values()), ["permuted", *map(str, steps)])
    axes.grid(axis="x", visible=False)
    axes.set(title="held-out loss: difference to the full batch", xlabel="N", ylabel="nats, mean and 95% interval")
    axes.figure.legend(fontsize=7.5, loc="outside lower right", ncols=3)


def figure_convergence(l4: pd.DataFrame, margin: float) -> Figure:
    """L4 of the held-out loss, one row per configuration: mean difference and interval of every arm, with the margin."""
    l4 = l4[l4["measure"] == "held_out_loss"]
    precisions = [name for name in PRECISIONS if name in set(l4["precision"])]
    rows = list(dict.fromkeys(zip(l4["workload"], l4["norm"], l4["optimizer"], strict=True)))
    colours = by_steps(l4.loc[l4["arm"] == "accumulated", "accumulation_steps"].tolist())
    with style():
        figure = new_figure(WIDTH, 1.3 + 0.36 * len(rows))
        grid = figure.subplots(1, len(precisions), sharey=True, squeeze=False)
        for axes, precision in zip(grid[0], precisions, strict=True):
            own = l4[l4["precision"] == precision]
            axes.axvspan(-margin, margin, color=BLUE, alpha=0.07, linewidth=0)
            axes.axvline(0, color=INK, linewidth=0.8)
            arms = [(GREY, own[own["arm"] == "permuted"])]
            arms += [
                (colour, own[(own["arm"] == "accumulated") & (own["accumulation_steps"] == n)]) for n, colour in colours.items()
            ]
            for place, (colour, arm) in enumerate(arms):
                _forest(axes, arm, rows, (place + 0.5) / len(arms) - 0.5, colour)
            axes.set_xscale("symlog", linthresh=margin / 20, linscale=0.6)
            ticks = [-margin * 10, -margin, 0, margin, margin * 10]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.set(title=precision, xlabel="held-out loss - full batch's (nats)")
            axes.grid(axis="y", visible=False)
            for above, below in pairwise(range(len(rows))):
                axes.axhline((above + below) / 2, color="#e7eaee", linewidth=0.7)
        grid[0, 0].set_yticks(range(len(rows)), [" ".join(row) for row in rows])
        grid[0, 0].set_ylim(len(rows) - 0.4, -0.6)
        _legend_of_steps(figure, colours, full=False, band="margin")
    return figure


def _forest(axes: Axes, arm: pd.DataFrame, rows: list[tuple[str, str, str]], offset: float, colour: str) -> None:
    keys = zip(arm["workload"], arm["norm"], arm["optimizer"], strict=True)
    at = [rows.index(key) + 0.8 * offset for key in keys]
    reach = to_the_ends(arm)
    mark = "d" if colour == GREY else "o"
    axes.errorbar(arm["mean"], at, xerr=reach, fmt=mark, markersize=3, linewidth=0.9, color=colour)


_FULL = ("full", 1, 0)
_Label = tuple[str, int, int]


def _curves(steps: pd.DataFrame, column: str) -> dict[_Label, pd.Series[float]]:
    """One trial's curves by arm, accumulation steps and replicate."""
    curves: dict[_Label, pd.Series[float]] = {}
    for key, curve in steps.set_index("step").groupby(["arm", "accumulation_steps", "replicate"])[column]:
        arm, n, replicate = cast(_Label, key)
        curves[arm, int(n), int(replicate)] = curve.astype(float)
    return curves


def _against_null(axes: Axes, curves: dict[_Label, pd.Series[float]], colours: dict[int, str]) -> None:
    """Curves by N over the shaded band of the null runs; what is exactly zero is a gap."""
    log_axis(axes, "y", most=6)
    band = pd.DataFrame({label: curve for label, curve in curves.items() if label[0] in NULLS}).max(axis=1)
    if band.gt(0).any():
        axes.fill_between(band.index, BOTTOMLESS, band.where(band > 0), color=BAND, alpha=0.8, linewidth=0)
        axes.plot(band.index, band.where(band > 0), color=GREY, linewidth=0.6)
    for label, curve in curves.items():
        if label[0] == "accumulated":
            axes.plot(curve.index, curve.where(curve > 0), color=colours[label[1]], linewidth=0.9)


def _fit_height(row: Sequence[Axes]) -> None:
    """Limits of axes that share their height, from the lines alone: the band goes down without end."""
    drawn = [np.asarray(line.get_ydata(), dtype=float) for axes in row for line in axes.get_lines()]
    values = np.concatenate([np.empty(0), *drawn])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values):
        row[0].set_ylim(values.min() / 2, values.max() * 2)


def _range_line(axes: Axes, spread: pd.DataFrame, colour: str, mark: str) -> None:
    """Medians joined by a line, and the range as bars."""
    reach = [spread["median"] - spread["min"], spread["max"] - spread["median"]]
    axes.errorbar(spread.index, spread["median"], yerr=reach, color=colour, marker=mark, markersize=4, linewidth=1.1, capsize=2)


def _strip(axes: Axes, errors: pd.Series[float], place: float, colour: str, mark: str) -> None:
    """Marks along one line, slightly scattered; of many, evenly spaced ranks with both ends."""
    values = np.sort(errors.dropna().to_numpy())
    if len(values) > MAX_MARKS:
        values = values[np.linspace(0, len(values) - 1, MAX_MARKS).round().astype(int)]
    scatter = np.zeros(len(values)) if mark == "|" else 0.13 * np.sin(np.arange(len(values)) * 2.4)
    size, edge = (6, 1.2) if mark == "|" else (4, 0)
    at = np.clip(values, EXACT, None)
    axes.plot(at, place + scatter, mark, color=colour, markersize=size, markeredgewidth=edge, alpha=0.75)


def _legend_of_steps(figure: Figure, colours: dict[int, str], *, full: bool, band: str = "null runs") -> None:
    handles: list[Line2D | Patch] = [Line2D([], [], color=colour, label=f"N = {n}", linewidth=2) for n, colour in colours.items()]
    if full:
        handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 2)), label="full batch"))
    handles.append(
        Patch(color=BLUE, alpha=0.12, label="margin") if band == "margin" else Patch(color=BAND, label="band of the null runs")
    )
    if band == "margin":
        handles.append(Line2D([], [], color=GREY, marker="d", linestyle="", label="permuted full batch"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), columnspacing=1.4, handlelength=1.4)


def to_the_ends(cells: pd.DataFrame) -> list[pd.Series[float]]:
    """From the mean of each cell to both ends of its interval; 0 where a single seed has none."""
    return [(cells["mean"] - cells["low"]).fillna(0), (cells["high"] - cells["mean"]).fillna(0)]
