"""What accumulation does to Muon's step: the matrices' update of a window against the full batch's, and training with it.

Muon orthogonalises in bfloat16 whatever the trial's format: a gradient that differs by its last bits gives the same update to
the bit, or one that differs by roundings of bfloat16. So the permuted full batch, whose gradient differs by rounding alone, is
measured beside every arm.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from accumulation_harness.experiments.shared.convergence import train
from accumulation_harness.experiments.shared.measuring import (
    ACCUMULATED,
    FULL,
    PERMUTED,
    Arm,
    Candidate,
    OnStep,
    Recipe,
    Row,
    Setting,
    accumulated,
    clear,
    compare,
    flatten,
    full_batch,
    outcome,
    permuted,
    relative_distance,
    snapshot,
    take_step,
)
from accumulation_harness.recipes.faults import low_precision_accumulator
from accumulation_harness.recipes.muon import held, matrices, orthogonalised_per_micro_batch

PER_MICRO_BATCH, BFLOAT16_SUM = "per_micro_batch", "bfloat16_sum"
STREAM = 21  # of the trial's seed, for the windows that are looked at
NULL_STREAM = 22  # of the orders of the permuted arm
State = dict[str, Tensor]


@dataclass(eq=False)
class Look:
    """An arm that takes single windows from weights that are put back, with what its steps did."""

    arm: Arm
    update: Tensor = field(default_factory=lambda: torch.zeros(0))  # [P] float64, of the matrices, in the last window
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0))  # [P] float64, of the matrices, summed over the window
    orthogonalisations: int = 0  # of each matrix, in all windows
    apart: list[Row] = field(default_factory=list)  # of each window, beside the full batch's

    @classmethod
    def of(cls, setting: Setting, recipe: Recipe) -> Look:
        """With a unit learning rate, at which the rounding of the weights is small beside the update."""
        look = cls(setting.arm(recipe, optimizer=dataclasses.replace(setting.config.optimizer, lr=1.0)))
        stages = look.arm.recipe.at_boundary
        at = stages.index(clear)
        look.arm.recipe = dataclasses.replace(look.arm.recipe, at_boundary=(*stages[:at], look._keep, *stages[at:]))
        held(look.arm).register_step_pre_hook(look._count)
        return look

    def _count(self, *_: object) -> None:
        self.orthogonalisations += all(p.grad is not None for p in matrices(self.arm))

    def _keep(self, arm: Arm) -> None:
        self.gradient = flatten(p.grad for p in matrices(arm) if p.grad is not None)

    def take(self, state: State, ids: Tensor) -> None:
        """The step of one window from the weights `state`, with an optimizer that has no memory yet."""
        self.arm.model.load_state_dict(state)
        held(self.arm).state.clear()
        before = flatten(matrices(self.arm))
        take_step(self.arm, self.arm.workload.batch(ids))
        self.update = before - flatten(matrices(self.arm))

    def compare(self, full: Look) -> None:
        """Note this window's update and gradient beside the full batch's."""
        beside = compare(self.update, full.update)
        self.apart.append({
            "update_error": relative_distance(self.update, full.update), "cosine": beside.cosine, "length": beside.scale,
            "gradient_error": relative_distance(self.gradient, full.gradient),
        })  # fmt: skip


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Rows `update`, one per arm, N and number of steps trained before (none, and `steps`), and `training`, one per arm and N."""
    recipes, steps = _recipes(setting), setting.config.steps
    rows = _updates(setting, recipes, snapshot(setting.arm(recipes[FULL, 1]).model), 0)
    ends = train(setting, [Candidate(name, recipe) for (name, _), recipe in recipes.items()], on_step)
    rows += _updates(setting, recipes, snapshot(ends[0].arm.model), steps)
    return rows + [
        {"quantity": "training", **end.candidate.name.columns, "after_steps": steps, **vars(outcome(end.arm, end.losses))}
        for end in ends
    ]


def _recipes(setting: Setting) -> dict[tuple[str, int], Recipe]:
    config = setting.config
    recipes = {(FULL, 1): full_batch(config), (PERMUTED, 1): permuted(config, NULL_STREAM)}
    for num in (num for num in config.accumulation_steps if num > 1):
        right = accumulated(config, num)
        recipes |= {
            (ACCUMULATED, num): right,
            (BFLOAT16_SUM, num): low_precision_accumulator(right),
            (PER_MICRO_BATCH, num): orthogonalised_per_micro_batch(right),
        }
    return recipes


def _updates(setting: Setting, recipes: dict[tuple[str, int], Recipe], state: State, after: int) -> list[Row]:
    """Every arm's step over `permutations` windows from the same weights, beside the full batch's over the same windows."""
    config = setting.config
    looks = {key: Look.of(setting, recipe) for key, recipe in recipes.items()}
    generator = setting.generator(STREAM, after)
    for t in range(config.permutations):
        ids = torch.randperm(setting.exact.num_samples, generator=generator)[: config.effective_batch]
        for look in looks.values():
            with setting.randomness(after, t):
                look.take(state, ids)
            look.compare(looks[FULL, 1])
    return [
        {"quantity": "update", "arm": name, "accumulation_steps": num, "after_steps": after, "windows": config.permutations,
         "orthogonalisations": look.orthogonalisations / config.permutations,
         "same": sum(error == 0 for error in of["update_error"]), "update_error": rms(of["update_error"]),
         "gradient_error": rms(of["gradient_error"]), "cosine": fmean(of["cosine"]), "length": fmean(of["length"])}
        for (name, num), look in looks.items()
        for of in [{what: [row[what] for row in look.apart] for what in look.apart[0]}]
    ]  # fmt: skip


def rms(values: list[float]) -> float:
    """sqrt(mean of squares)."""
    return math.sqrt(fmean(value * value for value in values))
