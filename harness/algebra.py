"""L0, the algebra in float64: the same gradients, the same optimizer state, the same trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.config import Norm, Precision
from harness.gradients import relative_distance
from harness.lock_step import REFERENCE, LockStep, Setting, optimizer_state
from harness.oracle import Referee, State, clipped, running_statistics, snapshot
from harness.recipe import Recipe
from harness.verdict import Algebra, worst

ACTIVE = 0.5  # the clipping test's threshold, as a fraction of the first gradient's norm: active by construction


@dataclass
class Findings:
    """What one arm showed, collected over the runs."""

    gradient_error: float = 0.0
    state_error: float = 0.0
    trajectory_error: float = 0.0
    clipping_active: bool = False
    unequal_terms: bool = False
    explanations: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AlgebraResult:
    algebra: Algebra
    explanations: Mapping[str, float]  # cause -> error of its exact oracle, see diagnosis
    counters: Mapping[str, tuple[float, float]]  # those that differ from the reference's, (arm, reference)


def measure(setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor], floor_arm: str) -> dict[str, AlgebraResult]:
    """L0 of every arm but the reference. `windows`: sample ids per step; `floor_arm`: the permuted full batch.

    The whole trajectory runs as configured; one more step has clipping the other way round (off, or certainly active), and one
    has dropout off where the model has dropout.
    """
    config, findings = setting.config, {label: Findings() for label in recipes}
    lock = _run(setting, recipes, windows, findings, clip_norm=config.clip_norm)
    first_norm = _first_norm(setting, windows[0])
    other_clip = ACTIVE * first_norm if config.clip_norm is None else None
    plain = {label: Findings() for label in recipes}
    _run(setting, recipes, windows[:1], plain, clip_norm=other_clip, dropout=False)
    stochastic = config.workload.dropout > 0
    for label, found in findings.items():
        if stochastic:  # the exact test of this cause is its removal: the gap closes when nothing is drawn
            found.explanations["stochastic_layers"] = worst(plain[label].gradient_error, plain[label].state_error)
        else:
            found.gradient_error = worst(found.gradient_error, plain[label].gradient_error)
            found.state_error = worst(found.state_error, plain[label].state_error)
    return {
        label: AlgebraResult(
            Algebra(
                gradient_error=found.gradient_error,
                state_error=found.state_error,
                trajectory_error=found.trajectory_error,
                steps=len(windows),
                floor=plain[floor_arm].gradient_error,
                clipping_active=found.clipping_active or plain[label].clipping_active,
                short_windows=sum(len(ids) < config.effective_batch for ids in windows),
                unequal_terms=found.unequal_terms,
            ),
            found.explanations,
            lock.differing_counters(label),
        )
        for label, found in findings.items()
        if label != REFERENCE
    }


def _first_norm(setting: Setting, ids: Tensor) -> float:
    referee = setting.referee(dropout=False)
    return float(torch.linalg.vector_norm(referee.gradient(snapshot(referee.model), setting.exact.batch(ids))))


def _run(
    setting: Setting,
    recipes: Mapping[str, Recipe],
    windows: Sequence[Tensor],
    findings: dict[str, Findings],
    *,
    clip_norm: float | None,
    dropout: bool = True,
) -> LockStep:
    """Train all arms over `windows` in float64 and collect what they show."""
    config = setting.config
    lock = LockStep(
        {
            label: setting.arm(recipe, Precision.float64, total_steps=len(windows), clip_norm=clip_norm, dropout=dropout)
            for label, recipe in recipes.items()
        },
        config.seed,
    )
    referee = setting.referee(dropout=dropout)
    for t, ids in enumerate(windows):
        probe = is_probe(t, ids, config.probe_every, config.effective_batch)
        before = {label: snapshot(arm.model) for label, arm in lock.arms.items()} if probe else {}
        records = lock.step(ids)
        for label, state in before.items():
            _probe(setting, lock, referee, label, state, ids, t, findings[label])
        for label, found in findings.items():
            found.trajectory_error = worst(found.trajectory_error, records[label].parameter_distance)
        if t == 0:
            reference = optimizer_state(lock.arms[REFERENCE])
            for label, found in findings.items():
                found.state_error = _state_error(optimizer_state(lock.arms[label]), reference)
    for label, found in findings.items():
        found.clipping_active = any(bool(flag) for flag in lock.arms[label].clipped)
    return lock


def is_probe(step: int, ids: Tensor, probe_every: int, effective_batch: int) -> bool:
    """The first step, every `probe_every` steps, and every short window: a divisible data set would hide its faults."""
    return step % probe_every == 0 or len(ids) < effective_batch


def _probe(
    setting: Setting, lock: LockStep, referee: Referee, label: str, before: State, ids: Tensor, step: int, found: Findings
) -> None:
    """Compare what the optimizer consumed with the referee's gradient at the very parameters it was computed at."""
    arm, consumed = lock.arms[label], lock.watches[label].gradient
    window = setting.exact.batch(ids)
    if consumed is None:
        found.gradient_error = float("nan")
        return
    with lock.randomness(step):
        exact = clipped(referee.gradient(before, window), arm.clip_norm)
    found.gradient_error = worst(found.gradient_error, relative_distance(consumed, exact))
    sizes = arm.recipe.split(len(window))
    terms = [int(n.sum()) for n in setting.exact.num_terms(window).split(sizes)]
    found.unequal_terms = found.unequal_terms or len(set(terms)) > 1
    if setting.config.norm == Norm.batch and len(sizes) > 1:
        arranged = window if arm.recipe.arrange is None else arm.recipe.arrange(window, step)
        with lock.randomness(step):
            ghost, after = referee.ghost(before, arranged, sizes)
        error = worst(
            relative_distance(consumed, clipped(ghost, arm.clip_norm)),
            relative_distance(running_statistics(snapshot(arm.model)), running_statistics(after)),
        )
        found.explanations["batch_statistics"] = worst(found.explanations.get("batch_statistics", 0.0), error)


def _state_error(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Largest relative distance over the entries of the optimizer's state; 0 for an optimizer without state."""
    if state.keys() != reference.keys():
        return float("inf")
    return worst(0.0, *(relative_distance(state[name], reference[name]) for name in reference))
