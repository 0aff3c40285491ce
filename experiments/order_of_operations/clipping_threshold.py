"""Which threshold clips an averaged and a summed gradient as the full batch's is clipped."""

from __future__ import annotations

import itertools

import torch

from accumulation_harness.experiments.shared.convergence import consumed
from accumulation_harness.experiments.shared.measuring import (
    OnStep,
    Row,
    Setting,
    accumulated,
    clipped,
    relative_distance,
    snapshot,
)
from accumulation_harness.recipes import faults

THRESHOLDS = {"clipped": 0.5, "not_clipped": 1.5}  # times the norm of the full batch's gradient


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Clip accumulated gradients at several thresholds, on the first window at the initial weights, in float64.

    Args:
        setting: The trial.
        on_step: Not called.

    Returns:
        One row per N, averaged or summed mean losses, threshold (c / N, c or c·N), and a c that clips or does not. `error`:
        relative distance of the consumed gradient to the full batch's, clipped at c; `error_of_nth`: the same of the N-th
        part of the consumed gradient.
    """
    config = setting.config
    ids = next(setting.windows())
    window, referee = setting.exact.batch(ids), setting.referee()
    full = referee.gradient(snapshot(referee.model), window)
    norm = float(torch.linalg.vector_norm(full))
    rows: list[Row] = []
    for num, (kind, share) in itertools.product(config.accumulation_steps, THRESHOLDS.items()):
        averaged, right = accumulated(config, num), clipped(full, share * norm)
        for name, recipe in (("averaged", averaged), ("summed", faults.loss_not_divided(averaged))):
            for factor in (1 / num, 1.0, float(num)):
                found = consumed(setting, recipe, window, clip_norm=factor * share * norm)
                rows.append({
                    "arm": name, "accumulation_steps": num, "threshold": kind, "factor": factor,
                    "error": relative_distance(found, right),
                    "error_of_nth": relative_distance(found / num, right),
                })  # fmt: skip
    return rows
