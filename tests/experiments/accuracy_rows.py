"""Hand-built trainings with BatchNorm and GroupNorm, with the held-out errors that theory expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from accumulation_harness.analysis.load import Results

SEEDS = range(6)
JITTER = 0.1  # points, of the errors made here
BATCH = {32: 3.0, 16: 3.0, 8: 3.5, 4: 5.0, 2: 30.0}  # b: held-out error, %, as the theory has it
VALUES = {"mlp": 1, "conv": 16}  # H W of the layer with the fewest
GROUP = dict.fromkeys(BATCH, 4.0)
LARGE = {128: 3.0} | {b: error for b, error in BATCH.items() if b < 32}


def run_of(
    norm: str, errors: Mapping[int, float], size: int, seed: int, model: str = "mlp", jitter: float = JITTER
) -> list[dict[str, Any]]:
    """One trial: the full batch is the largest b."""
    rng = np.random.default_rng([seed, size, *norm.encode()])
    rows = []
    for b, error in errors.items():
        arm = "full" if b == max(errors) else "accumulated"
        own = error + jitter * float(rng.standard_normal())
        rows.append({"arm": arm, "accumulation_steps": size // b if arm == "accumulated" else 1,
                     "micro_batch": size if arm == "full" else b, "values_per_channel": VALUES[model] * b,
                     "held_out_accuracy": 1 - own / 100,
                     "held_out_loss": own / 30 + 1e-3 * float(rng.standard_normal())})  # fmt: skip
    rows.append(rows[0] | {"arm": "permuted", "held_out_loss": rows[0]["held_out_loss"] + 1e-6 * float(rng.standard_normal())})
    shared = {"experiment": "groupnorm", "trial": f"{model}-{norm}-{size}-{seed}", "study": "convergence", "model": model,
              "norm": norm, "effective_batch": size, "seed": seed}  # fmt: skip
    return [shared | row for row in rows]


def exact(error: float) -> dict[str, Any]:
    return {"experiment": "groupnorm", "trial": "e", "study": "batch_statistics", "norm": "group", "model": "mlp",
            "arm": "accumulated", "gradient_error": error, "accumulation_steps": 8, "momentum": 0.1}  # fmt: skip


def results(
    batch: Mapping[int, float] = BATCH, group: Mapping[int, float] = GROUP, error: float = 1e-15, jitter: float = JITTER
) -> Results:
    rows = [
        row
        for seed in SEEDS
        for norm, errors in (("batch", batch), ("group", group))
        for row in run_of(norm, errors, 32, seed, jitter=jitter)
    ]
    return Results(pd.DataFrame(), pd.DataFrame([*rows, exact(error)]), pd.DataFrame(), ())


def two_batches(small: Mapping[int, float], large: Mapping[int, float]) -> Results:
    rows = [row for seed in SEEDS for size, errors in ((32, small), (128, large)) for row in run_of("batch", errors, size, seed)]
    return Results(pd.DataFrame(), pd.DataFrame(rows), pd.DataFrame(), ())
