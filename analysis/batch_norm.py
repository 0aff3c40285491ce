"""Tables of the experiments on BatchNorm, from their measurements: pure functions."""

from __future__ import annotations

import pandas as pd

from analysis.load import Results

DEFAULT_MOMENTUM = 0.1  # PyTorch's; the other momenta are there for the formula alone
EXACT, TRAINED = "batch_statistics", "convergence"  # studies


def of_study(results: Results, study: str) -> pd.DataFrame:
    """The measurements of one study; its columns are all there, or none."""
    rows = results.measurements
    if "study" not in rows:
        return rows.iloc[:0]
    return rows[rows["study"] == study].dropna(axis=1, how="all").reset_index(drop=True)


def exact_rows(results: Results, arm: str, *, all_momenta: bool = False) -> pd.DataFrame:
    """What `study=batch_statistics` measured of an arm under BatchNorm, at PyTorch's momentum unless all are wanted."""
    rows = of_study(results, EXACT)
    if rows.empty:
        return rows
    chosen = rows[(rows["norm"] == "batch") & (rows["arm"] == arm)]
    return chosen if all_momenta else chosen[chosen["momentum"] == DEFAULT_MOMENTUM]


def expected_momentum(rows: pd.DataFrame) -> pd.Series[float]:
    """1 - (1 - m)^N."""
    return 1 - (1 - rows["momentum"]) ** rows["accumulation_steps"]
