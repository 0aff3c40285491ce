"""Figure of the critical batch size along a training."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.panels import panels
from accumulation_harness.analysis.figures.style import BLUE


def figure_critical(table: pd.DataFrame) -> Figure:
    """Critical batch over samples, a panel per setting: a line per seed, triangles where it is a lower bound."""

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        for _, one in own.sort_values("point").groupby("seed"):
            axes.plot(one["samples"], one["critical"], "-", color=BLUE, alpha=0.5)
        for bounded, part in own.groupby("censored"):
            axes.plot(part["samples"], part["critical"], "^" if bounded else "o", color=BLUE, markersize=4, alpha=0.6)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")

    groups = {f"{workload} ({norm}), {optimizer}": own
              for (workload, norm, optimizer), own in table.groupby(["workload", "norm", "optimizer"])}  # fmt: skip
    return panels(groups, draw, 2.6, x="samples before the branch", y="critical batch", columns=2, share=False)
