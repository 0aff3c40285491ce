"""Figure of what a rescaling changes beside copied hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BAND, BLUE, INK, new_figure, style
from accumulation_harness.judge import statistics


def figure_rescaling(effects: Sequence[tuple[str, str, str, Sequence[float]]], margin: float) -> Figure:
    """`effects`: (setting, rescaling, measure, differences by seed); a row of panels per setting, a panel per measure."""
    settings, measures = (list(dict.fromkeys(one[i] for one in effects)) for i in (0, 2))
    with style():
        figure = new_figure(WIDTH, 2.9 * len(settings))
        panels = figure.subplots(len(settings), len(measures), squeeze=False, sharey=True)
        for i, setting in enumerate(settings):
            for j, measure in enumerate(measures):
                axes, own = panels[i, j], [one for one in effects if (one[0], one[2]) == (setting, measure)]
                axes.axvspan(-margin, margin, color=BAND, alpha=0.6, linewidth=0)
                axes.axvline(0, color=INK, linewidth=0.8)
                for place, (_, _, _, values) in enumerate(own):
                    found = statistics.mean_interval(values)
                    axes.plot(values, [place + 0.18] * len(values), "o", color=BLUE, markersize=2.5, alpha=0.5)
                    axes.plot([found.low, found.high], [place] * 2, "-", color=BLUE)
                    axes.plot([found.estimate], [place], "o", color=BLUE, markersize=5)
                axes.set_yticks(range(len(own)), [one[1] for one in own])
                axes.set(title=measure, ylim=(len(own) - 0.4, -0.6))
                if j == 0:
                    axes.set_xlabel(setting, loc="left")
    return figure
