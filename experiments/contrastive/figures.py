"""Figures of methods for in-batch negatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis.figures.common import EXACT
from accumulation_harness.analysis.figures.forms import Curve, curves
from accumulation_harness.analysis.figures.style import BLUE, DASHED, GREEN, GREY, INK, ORANGE, SERIES, VERMILLION, log_axis
from accumulation_harness.judge import statistics
from accumulation_harness.judge.gates import ALGEBRA_GATE

COLOURS = {"full": INK, "permuted": GREY, "accumulated": VERMILLION, "small": ORANGE, "grad_cache": BLUE, "dual_bank": GREEN,
           "passage_bank": SERIES[4], "momentum_bank": SERIES[5], "temperature_repeated": GREY}  # fmt: skip
MARKS = "osD^vP"
MB, POINTS = 1e6, 100.0


def looks(rows: pd.DataFrame, words: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """Each method's colour, whatever the size of its bank, and its sign: neighbours of one colour have different ones."""
    return {
        arm: {"color": COLOURS.get(arm.partition("@")[0], GREY), "marker": MARKS[place % len(MARKS)], "label": words(arm)}
        for place, arm in enumerate(sorted(set(rows["arm"])))
    }


def figure_gradients(rows: pd.DataFrame, words: Callable[[str], str]) -> Figure:
    """Distance of the gradient to the full batch's over N, and the reported loss; a line per method."""
    off, loss = [], []
    for arm, look in looks(rows, words).items():
        own = rows[rows["arm"] == arm].groupby("accumulation_steps")[["gradient_error", "loss", "full_loss"]].median()
        off.append(Curve(own.index, own["gradient_error"].clip(lower=EXACT), look))
        loss.append(Curve(own.index, own["loss"], look))
    loss.append(
        Curve(own.index, own["full_loss"], {"color": INK, "linestyle": DASHED, "label": "the full batch's, and the gate"})
    )
    panels = {"gradient off the full batch's": off, "reported loss, nats": loss}
    figure = curves(panels, "accumulation steps N", "", axes=("steps", "linear"), size=(9.4, 4), sharey=False, ncols=2)
    log_axis(figure.axes[0], "y")
    figure.axes[0].axhline(ALGEBRA_GATE, color=INK, linewidth=1, linestyle=DASHED)
    return figure


def figure_bytes(rows: pd.DataFrame, words: Callable[[str], str]) -> Figure:
    """Mean reciprocal rank with its interval against bytes of a step and against the time of a window; a row per N."""
    rows = rows.query("arm != 'permuted'")
    panels: dict[str, list[Curve]] = {}
    for num in sorted(set(rows.query("arm != 'full'")["accumulation_steps"])) or [1]:
        at = rows.query("arm == 'full' or accumulation_steps == @num")
        for column, unit, title in (("total_bytes", MB, "memory of a step, MB"),
                                    ("slowness", 1, "time of a window over the full batch's")):  # fmt: skip
            drawn = panels.setdefault(f"N = {num}: over the {title}", [])
            for arm, look in looks(rows, words).items():
                if len(own := at[at["arm"] == arm]):
                    rank = statistics.mean_interval((POINTS * own.groupby("seed")["reciprocal_rank"].mean()).tolist())
                    half = rank.high - rank.estimate
                    bars = [half] if half == half else None
                    drawn.append(Curve([own[column].median() / unit], [rank.estimate], {**look, "linestyle": ""}, bars))
    size = (9.4, 3.2)
    return curves(panels, "", "mean reciprocal rank, %", axes=("linear", "linear"), size=size, columns=2, ncols=2, xlim=(0, None))


def figure_peaks(rows: pd.DataFrame, words: Callable[[str], str]) -> Figure:
    """The bytes that live in a step over the window's size B at one b; a line per method."""
    drawn = []
    for arm, look in looks(rows, words).items():
        peaks = rows[rows["arm"] == arm].groupby("window")["peak_bytes"].median() / MB
        drawn.append(Curve(peaks.index, peaks, look))
    return curves({"": drawn}, "window B", "bytes at the peak of a step, MB", size=(9.4, 3.8), ncols=2)
