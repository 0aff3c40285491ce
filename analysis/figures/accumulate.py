"""Samples, seconds and memory to a target over b, a line for each N."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from accumulation_harness.analysis.figures.forms import WIDTH, curves, lines
from accumulation_harness.analysis.figures.style import to_svg

SHOWN = {"samples": "samples to the target", "seconds": "seconds to the target", "megabytes": "memory of a step, MB"}


def drawn(stored: Path) -> bytes:
    """Draw the figure of docs/should_i_accumulate.md as SVG.

    Args:
        stored: The CSV that `benchmarks/accumulate.py` writes.

    Returns:
        The file.
    """
    rows = pd.read_csv(stored).sort_values(["N", "b"])
    rows["megabytes"] = rows["bytes"] / 1e6
    shown = {
        f"{task}\n{label}": lines(own, "N", "b", column, "N = {}".format)
        for task, own in rows.groupby("task", sort=False)
        for column, label in SHOWN.items()
    }
    return to_svg(curves(shown, "micro-batch b", "", axes=("steps", "log"), size=(WIDTH, 2.5), columns=len(SHOWN), sharey=False))
