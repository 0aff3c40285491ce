"""Hand-built measurements of optimizers, as the studies give them, with the errors that theory expects."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from analysis import load
from analysis.load import Results

ERRORS = ("gradient_error", "state_error", "parameter_error", "buffer_error")
LIKE = {"accumulated": 1e-15, "reordered": 2e-15, "permuted": 1e-15}  # arms that are equal, and how nearly
DISTANCE = {"small_steps": 5.0, "small_steps_rate": 0.4, "small_steps_memory": 0.1}


Rows = list[dict[str, Any]]


def results(measurements: Rows) -> Results:
    frame = pd.DataFrame(measurements)
    trials = pd.DataFrame({"experiment": "momentum", "trial": sorted(set(frame["trial"]))})
    return Results(pd.DataFrame(columns=list(load.ARM_COLUMNS)), frame.assign(experiment="momentum"), trials, ())


def state_rows(
    optimizer: str = "momentum", *, norm: str = "none", dropout: float = 0.0, change: Any = None
) -> list[dict[str, Any]]:
    """A trial as the study measures it, with the errors that theory expects; `change` maps (arm, error) to another."""
    trial = f"{optimizer}-{norm}-{dropout}"
    about = {"trial": trial, "study": "optimizer_states", "optimizer": optimizer, "norm": norm, "dropout": dropout}
    rows = []
    for after in (1, 50, 200):
        for arm in (*LIKE, *DISTANCE, "optimizer_state_per_micro_batch", "small_steps_reordered"):
            size = LIKE.get(arm, DISTANCE.get(arm, 0.7))
            errors = dict.fromkeys(ERRORS, size)
            if optimizer == "sgd":
                errors["state_error"] = math.nan
            if norm == "batch" and arm == "reordered":
                errors["buffer_error"] = 0.01
            if dropout and arm == "reordered":
                errors |= {"gradient_error": 0.5, "state_error": 0.5, "parameter_error": 0.5}
            errors |= {error: value for (changed, error), value in (change or {}).items() if changed == arm}
            now = {f"{name}_now": value for name, value in errors.items()}
            rows.append({**about, "workload": "digits", "arm": arm, "accumulation_steps": 4, "after_steps": after,
                         **errors, **now, "loss": 0.5, "loss_against": 0.5})  # fmt: skip
    return rows
