"""Tables that are kept with the project: what was counted once, or read from another's library."""

from __future__ import annotations

from importlib.resources import files

import pandas as pd


def recorded(name: str) -> pd.DataFrame:
    """Read `experiments/recorded/NAME.csv`.

    Args:
        name: Name of the file.

    Returns:
        Its rows.
    """
    return pd.read_csv(str(files("accumulation_harness.experiments") / "recorded" / f"{name}.csv"), keep_default_na=False)
