"""Hand-built measurements of optimizers, as the studies give them, with the errors that theory expects."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from accumulation_harness.analysis import load
from accumulation_harness.analysis.load import Results

ERRORS = ("gradient_error", "state_error", "parameter_error", "buffer_error")
LIKE = {"accumulated": 1e-15, "reordered": 2e-15, "permuted": 1e-15}  # arms that are equal, and how nearly
DISTANCE = {"small_steps": 5.0, "small_steps_rate": 0.4, "small_steps_memory": 0.1}

RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
BEST = {8: 0.1, 32: 0.2, 128: 0.4}  # square-root scaling is right

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


def memory_rows(*, stale: float = 1.0, beta: float = 0.9) -> list[dict[str, Any]]:
    """Three windows of 4 micro-batches of 16; `stale`: factor from each micro-batch of a window to the next older one."""
    powers = {
        "accumulated": lambda k: beta ** (2 - k // 4) * stale ** (3 - k % 4),
        "small_steps": lambda k: beta ** (11 - k),
        "small_steps_memory": lambda k: beta ** ((11 - k) / 4),
    }
    return [
        {"trial": "memory", "study": "optimizer_memory", "optimizer": "momentum", "effective_batch": 64, "momentum": 0.9,
         "arm": arm, "accumulation_steps": 4, "entry": "momentum_buffer", "window": k // 4, "position": k % 4,
         "age": 16 * (11 - k),
         "weight": weight(k), "residual": 1e-15, "condition": 3.0}
        for arm, weight in powers.items() for k in range(12)
    ]  # fmt: skip


def loss_at(lr: float, best: float, octave: float = 0.08) -> float:
    """0.2 at the best rate, `octave` more an octave away, no number from eight times on."""
    octaves = abs(math.log2(lr / best))
    return 0.2 + octave * octaves if lr < 7.9 * best else math.nan


def trained(
    *, seeds: int = 5, best: dict[int, float] = BEST, scatter: float = 1e-3, octave: float = 0.08,
) -> Rows:  # fmt: skip
    """SGD and Adam at three batches, with a best rate each."""
    rows = []
    for optimizer in ("sgd", "adam"):
        for lr in RATES:
            for seed in range(seeds):
                for batch, rate in best.items():
                    large = batch == max(best)
                    loss = loss_at(lr, rate, octave)
                    held_out = loss + large * scatter * (seed - 2)
                    rows.append({"trial": f"{optimizer}-{lr}-{seed}", "study": "batch_sizes", "optimizer": optimizer, "lr": lr,
                                 "seed": seed, "batch": batch, "tail_loss": loss, "held_out_loss": held_out,
                                 "tuning_loss": held_out, "judged_loss": held_out,
                                 "early_held_out_loss": loss + (not large)})  # fmt: skip
    return rows
