"""Figure of the critical batch size along a training."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import WIDTH
from accumulation_harness.analysis.figures.style import BLUE, new_figure, style


def figure_critical(table: pd.DataFrame) -> Figure:
    """Critical batch over samples, a panel per setting: a line per seed, triangles where it is a lower bound."""
    groups = list(table.groupby(["workload", "norm", "optimizer"]))
    with style():
        figure = new_figure(WIDTH, 2.6 * ((len(groups) + 1) // 2))
        panels = figure.subplots((len(groups) + 1) // 2, min(2, len(groups)), squeeze=False).flat
        for axes, ((workload, norm, optimizer), own) in zip(panels, groups, strict=False):
            for _, one in own.sort_values("point").groupby("seed"):
                axes.plot(one["samples"], one["critical"], "-", color=BLUE, alpha=0.5)
                for bounded, marker in ((False, "o"), (True, "^")):
                    part = one[one["censored"] == bounded]
                    axes.plot(part["samples"], part["critical"], marker, color=BLUE, markersize=4, alpha=0.6)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set(title=f"{workload} ({norm}), {optimizer}", xlabel="samples before the branch", ylabel="critical batch")
    return figure
