"""A short record of a sweep that can be committed: what ran where, and how it ended. Used by `make gpu`."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from accumulation_harness.analysis import load
from accumulation_harness.results.record import keep_others_out, write_atomically

KEYS = ["workload", "norm", "optimizer", "precision", "arm"]


def summarise(results: load.Results) -> dict[str, Any]:
    """Environment, date, and per kind of arm the verdicts, causes and largest errors; plain JSON types."""
    arms, first = results.arms, results.trials.iloc[0]
    rows = []
    for key, group in arms.groupby(KEYS, sort=True):
        rows.append(
            {
                **dict(zip(KEYS, map(str, key), strict=True)),
                "n": len(group),
                "verdicts": {str(k): int(v) for k, v in group["verdict"].value_counts().items()},
                "causes": sorted({str(cause) for cause in group["cause"] if cause}),
                "largest_algebra_error": float(group["algebra_error"].max()),
                "largest_rounding_ratio": None if group["rounding_ratio"].isna().all() else float(group["rounding_ratio"].max()),
            }
        )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": str(first["device"]),
        "environment": str(first["environment"]),
        "trials": len(results.trials),
        "without_result": [missing.trial for missing in results.missing],
        "arms": rows,
    }


def main() -> int:
    """Write `summary.json`; exit code 1 when there is no finished trial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    arguments = parser.parse_args()
    keep_others_out()
    results = load.read(arguments.results)
    if results.trials.empty:
        print(f"{arguments.results}: no finished trial to summarise", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summarise(results), indent=1, default=str) + "\n"
    write_atomically(arguments.out / "summary.json", text.encode())
    verdicts = pd.Series(results.arms["verdict"]).value_counts()
    print(f"{arguments.out / 'summary.json'}: {len(results.trials)} trials, {dict(verdicts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
