"""A batch k times as large, with every hyperparameter of the small one copied, each rescaled alone, and all of them.

The setting's hyperparameters are those of the small batch, B / k; k is the trial's only N. The large batch is accumulated. All
see the same windows in the same order, so that curves are compared at equal samples; the trial's seed draws weights, order
and split.
"""

from __future__ import annotations

import dataclasses
import math

from accumulation_harness.config import TrialConfig
from accumulation_harness.experiments.convergence.learning_curves import Samples, evaluation
from accumulation_harness.experiments.momentum.optimizer_states import InOrder, small_batch
from accumulation_harness.experiments.shared.measuring import (
    BOUNDARY,
    Arm,
    ArmName,
    OnStep,
    Recipe,
    Row,
    Setting,
    accumulated,
    take_step,
)
from accumulation_harness.recipes.rescaling import Rescaling, rescaled

POINTS = 16  # equal-sample points of a curve
SMALL = "small"  # the batch that is to be reproduced
REORDERED = "small_reordered"  # the same with each window's steps in another order: how far chance alone parts two curves


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per arm: where it ended, and how far its curve was from the small batch's.

    `validation_loss` (on samples that the seed sets aside) and `probe_loss` are nats per loss term at the end;
    `curve_distance` is the mean over the points of |log probe loss - log probe loss of the small batch|.
    `ema_*` are the same of the averaged weights.
    """
    config, chosen = setting.config, Samples.drawn(setting)
    (k,) = config.accumulation_steps
    arms, num_samples = _arms(setting, k), 0
    seen = {(prefix, name): one for name, arm in arms.items() for prefix, one in (("", arm), ("ema_", averaged(arm)))}
    probe, validation = (arms[SMALL].workload.batch(ids) for ids in (chosen.probe, chosen.validation))
    points = {round(config.steps * (i + 1) / POINTS) - 1 for i in range(POINTS)}
    curves: dict[tuple[str, str], list[float]] = {key: [] for key in seen}
    for t, ids in enumerate(chosen.windows(setting)):
        window, rows = arms[SMALL].workload.batch(ids), []
        num_samples += len(ids)
        for name, arm in arms.items():
            with setting.randomness(t):
                loss = take_step(arm, window)
            rows.append({**ArmName(name, k).columns, "step": t, "samples": num_samples, "loss": loss})
        if t in points:
            for key, one in seen.items():
                curves[key].append(evaluation(one, probe))
        on_step(t, rows)
    found: dict[str, Row] = {name: {"arm": name, "accumulation_steps": k} for name in arms}
    for (prefix, name), curve in curves.items():
        found[name] |= {
            f"{prefix}validation_loss": evaluation(seen[prefix, name], validation),
            f"{prefix}probe_loss": curve[-1],
            f"{prefix}curve_distance": curve_distance(curve, curves[prefix, SMALL]),
            f"{prefix}curve_probe_loss": curve,
        }
    return [*found.values()]


def curve_distance(losses: list[float], others: list[float]) -> float:
    """Mean absolute difference of the logarithms of two losses at the same points."""
    return sum(abs(math.log(a) - math.log(b)) for a, b in zip(losses, others, strict=True)) / len(losses)


def averaged(arm: Arm) -> Arm:
    """The arm with its averaged weights, to be evaluated only."""
    assert arm.ema is not None
    return dataclasses.replace(arm, model=arm.ema.module)


def every_step(right: Recipe) -> Recipe:
    """Training at the micro-batch's size: optimizer, average and schedule move after each of them."""
    return dataclasses.replace(small_batch(right), after_backward=BOUNDARY, at_boundary=())


def _arms(setting: Setting, k: int) -> dict[str, Arm]:
    config = setting.config
    right = accumulated(config, k)
    order = InOrder(right.split, config.seed)
    small = dataclasses.replace(config, steps=config.steps * k)
    arms = {
        SMALL: _arm(setting, every_step(right), small),
        REORDERED: _arm(setting, every_step(dataclasses.replace(right, split=order, arrange=order.arrange)), small),
    }
    return arms | {what: _arm(setting, right, rescaled(config, what, k)) for what in Rescaling}


def _arm(setting: Setting, recipe: Recipe, own: TrialConfig) -> Arm:
    return setting.arm(recipe, optimizer=own.optimizer, schedule=own.schedule, ema_decay=own.ema_decay, steps=own.steps)
