"""Figure of what a rescaling changes beside copied hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.panels import panels
from accumulation_harness.analysis.figures.style import BAND, BLUE, INK
from accumulation_harness.judge import statistics

Effects = Sequence[tuple[str, str, str, Sequence[float]]]


def figure_rescaling(effects: Effects, margin: float) -> Figure:
    """`effects`: (setting, rescaling, measure, differences by seed); a row of panels per setting, a panel per measure."""

    def draw(axes: Axes, own: Effects) -> None:
        axes.axvspan(-margin, margin, color=BAND, alpha=0.6, linewidth=0)
        axes.axvline(0, color=INK, linewidth=0.8)
        for place, (_, _, _, values) in enumerate(own):
            found = statistics.mean_interval(values)
            axes.plot(values, [place + 0.18] * len(values), "o", color=BLUE, markersize=2.5, alpha=0.5)
            axes.plot([found.low, found.high], [place] * 2, "-", color=BLUE)
            axes.plot([found.estimate], [place], "o", color=BLUE, markersize=5)
        axes.set_yticks(range(len(own)), [one[1] for one in own])
        axes.set_ylim(len(own) - 0.4, -0.6)

    titles = {
        f"{fill(one[0], 40)}\n{one[2]}": [two for two in effects if (two[0], two[2]) == (one[0], one[2])] for one in effects
    }
    return panels(titles, draw, 2.9, columns=2)
