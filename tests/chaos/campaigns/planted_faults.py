"""A fault of the catalogue under settings drawn at random: detected wherever it changes the computation.

Whether it does is measured without the judge: right and faulty arm are trained alone, and what they leave is compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch

from accumulation_harness.config import Data, Norm, Precision, TrialConfig, to_dict
from accumulation_harness.draws import DRAWS, drawn
from accumulation_harness.measure.algebra import windows_of
from accumulation_harness.measure.lock_step import Setting, arm_state
from accumulation_harness.recipes.catalogue import FAULTS, Fault
from accumulation_harness.recipes.determinism import deterministic, start_randomness
from accumulation_harness.recipes.micro_batch import hash_seed
from accumulation_harness.recipes.recipe import Recipe, take_step
from accumulation_harness.referee.gradients import flatten, gradients, relative_distance
from accumulation_harness.referee.oracle import snapshot
from accumulation_harness.trial import Candidate, accumulated, permuted, run_trial, standard_candidates
from tests.chaos.campaign import Broken

CHANGED = 1e-9  # relative: a thousand times L0's gate for a gradient
BEYOND_ROUNDING = 100.0  # times what a shuffled full batch changes
ROUGHER = 4.0  # times the right arm's error, twice L1's gate
CPU = torch.device("cpu")


def attack(rng: Random, folder: Path) -> str:
    """One trial with one fault beside the right arms."""
    torch.set_num_threads(1)
    fault = rng.choice(FAULTS)
    draws = {**DRAWS, "accumulation_steps": lambda rng: (rng.randint(2, 24),), "workload.dropout": lambda rng: 0.0}
    config = drawn(rng, draws)
    while config.norm == Norm.batch or config.workload.data == Data.pairs:
        config = drawn(rng, draws)
    right = accumulated(config, config.accumulation_steps[0])
    wrong = Candidate(fault.cause, fault.apply(right))
    arms = run_trial(config, lambda step, rows: None, [wrong, *standard_candidates(config)]).arms
    own, beside = arms[0], next(arm for arm in arms if arm["arm"] == "accumulated")
    verdict = own["verdict"]
    if verdict in ("different", "degraded"):
        return "detected and named" if fault.cause in own["cause"].split("+") else f"detected as {own['cause'] or 'rounding'}"
    if verdict == "inconclusive" and beside["verdict"] == "inconclusive":
        return "not judged, nor was the right arm"
    if changes(config, right, fault):
        raise Broken(f"{fault.cause} is {verdict}: {own['reasons']}\n{json.dumps(to_dict(config))}")
    return "at rest"


def changes(config: TrialConfig, right: Recipe, fault: Fault) -> bool:
    """Whether the fault changes what is computed: in float64 over the run, or the first gradient in the format under test."""
    with deterministic(config.precision):
        setting = Setting(config, CPU)
        reference, faulty = trained(setting, right), trained(setting, fault.apply(right))
        control = trained(setting, permuted(config, 0))
        if reference["counted"] != faulty["counted"]:
            return True
        for name in ("weights", "state", "losses"):
            gap = relative_distance(faulty[name], reference[name])
            if gap > CHANGED and gap > BEYOND_ROUNDING * relative_distance(control[name], reference[name]):
                return True
        return config.precision != Precision.float64 and error(setting, fault.apply(right)) > ROUGHER * error(setting, right)


def trained(setting: Setting, recipe: Recipe) -> dict[str, Any]:
    """Movement of the weights, state, losses and counters after the run in float64."""
    config, windows = setting.config, windows_of(setting)
    arm = setting.arm(recipe, precision=Precision.float64, steps=len(windows))
    start, losses = flatten(arm.model.parameters()), []
    for t, ids in enumerate(windows):
        start_randomness(hash_seed(config.seed, t), CPU)
        losses.append(take_step(arm, setting.exact.batch(ids)).double())
    state = arm_state(arm)
    return {
        "weights": flatten(arm.model.parameters()) - start,
        "state": flatten(state.values()) if state else torch.zeros(0, dtype=torch.float64),
        "losses": torch.stack(losses),
        "counted": (arm.samples, arm.windows, arm.schedule.last_epoch, arm.scaler.get_scale()),
    }


def error(setting: Setting, recipe: Recipe) -> float:
    """||g - g_64|| / ||g_64|| of what the first step consumes, in the format under test, without clipping."""
    arm = setting.arm(recipe, clip_norm=None)
    consumed: list[torch.Tensor] = []
    arm.optimizer.register_step_pre_hook(lambda *_: consumed.append(flatten(gradients(arm.model.parameters()))))
    ids = next(setting.windows(1))
    referee = setting.referee()
    exact = referee.gradient(snapshot(arm.model), setting.exact.batch(ids))
    take_step(arm, arm.workload.batch(ids))
    return relative_distance(consumed[-1], exact) if consumed else 0.0
