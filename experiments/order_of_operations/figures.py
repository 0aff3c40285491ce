"""Figures about the order of operations and about changing windows: tables in, a matplotlib Figure out."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from accumulation_harness.analysis.faults import VISIBLE
from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import (
    INK,
    SERIES,
    VERMILLION,
    key,
    log_axis,
    new_figure,
    power_of_ten,
    steps_axis,
    style,
)
from accumulation_harness.analysis.tables import NORMS, optimizers_of
from accumulation_harness.judge.gates import ALGEBRA_GATE

DASHES = ("-", (0, (4, 1.5)))
EXACT = 1e-17  # where a difference of exactly zero is drawn
BOTTOM = 1e-4  # relative: below, a curve lies on the correct one


def figure_losses(steps: pd.DataFrame) -> Figure:
    """|loss / correct loss - 1| over the optimizer steps: a panel per optimizer, a line per wrong arm."""
    optimizers = optimizers_of(steps)
    wrong = sorted(set(steps["arm"]) - {"accumulated", "full", "permuted"})
    looks = {arm: (SERIES[i % len(SERIES)], DASHES[i // len(SERIES) % len(DASHES)]) for i, arm in enumerate(wrong)}
    with style():
        figure = new_figure(WIDTH, 4.2)
        panels = figure.subplots(1, len(optimizers), sharey=True, squeeze=False)[0]
        for axes, optimizer in zip(panels, optimizers, strict=True):
            curves = steps[steps["optimizer"] == optimizer].pivot_table(index="step", columns="arm", values="loss")
            for arm in wrong:
                if arm in curves:
                    apart = (curves[arm] / curves["accumulated"] - 1).abs()
                    colour, dash = looks[arm]
                    axes.plot(curves.index, np.maximum(apart, BOTTOM), color=colour, linestyle=dash, linewidth=1.1, label=arm)
            axes.axhline(VISIBLE, color=INK, linewidth=1, linestyle=(0, (4, 3)))
            log_axis(axes, "y")
            axes.set(title=optimizer, xlabel="optimizer step")
        panels[0].set_ylim(bottom=BOTTOM)  # after all lines: a limit stops the axes they share from growing
        panels[0].set_ylabel("|loss / correct loss - 1|")
        drawn = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        drawn[f"visible in the loss ({VISIBLE:.0%} of it)"] = key("")
        figure.legend(list(drawn.values()), list(drawn), loc="outside lower center", ncols=3)
    return figure


def figure_tensor_norms(table: pd.DataFrame) -> Figure:
    """Largest deviation of a tensor's norm over N: a dot per window, coloured by normalisation."""
    norms = [norm for norm in NORMS if norm in set(table["norm"])]
    numbers = sorted(set(table["accumulation_steps"].astype(int)))  # among other studies the column has gaps
    with style():
        figure = new_figure(WIDTH, 3.2)
        axes = figure.subplots()
        log_axis(axes, "y", most=9)
        for place, norm in enumerate(norms):
            own = table[table["norm"] == norm]
            shifted = own["accumulation_steps"] * 1.1 ** (place - (len(norms) - 1) / 2)
            colour, mark = (VERMILLION, "X") if norm == "batch" else (SERIES[place], "o")
            axes.plot(shifted, np.maximum(own["off"], EXACT), color=colour, marker=mark, markersize=4, linestyle="", alpha=0.7,
                      label=f"norm {norm}")  # fmt: skip
        axes.axhline(ALGEBRA_GATE, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        steps_axis(axes, numbers)
        axes.set(xlabel="N", ylabel="largest |norm / full batch's - 1|")
        handles: list[Artist] = list(axes.get_legend_handles_labels()[0])
        handles.append(key(f"gate {power_of_ten(ALGEBRA_GATE)}"))
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
    return figure
