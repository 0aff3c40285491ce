"""What figures share: their width, and where a zero is drawn."""

from __future__ import annotations

import pandas as pd

WIDTH = 9.4  # inches, of every figure: then letters have one size on the page
EXACT = 1e-17  # where a difference of exactly zero is drawn


def to_the_ends(cells: pd.DataFrame) -> list[pd.Series[float]]:
    """From the mean of each cell to both ends of its interval; 0 where a single seed has none."""
    return [(cells["mean"] - cells["low"]).fillna(0), (cells["high"] - cells["mean"]).fillna(0)]
