"""L0, the algebra in float64: the same gradients, the same optimizer state, the same trajectory; and what is wrong if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.config import Precision
from harness.judge.diagnosis import Signature, alone, explanations
from harness.judge.verdict import Algebra, worst
from harness.measure.lock_step import REFERENCE, LockStep, Setting, arm_state
from harness.measure.probe import Findings, Probe
from harness.measure.update import entry_errors, size
from harness.recipes.recipe import Recipe
from harness.referee.oracle import no_clipping, snapshot

ACTIVE = 0.5  # the clipping test's threshold, as a fraction of the first gradient's norm: active by construction


@dataclass(frozen=True)
class AlgebraResult:
    algebra: Algebra
    signature: Signature
    counters: Mapping[str, tuple[float, float]]  # those that differ from the reference's, (arm, reference)


def measure(
    setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor], floor_arm: str
) -> dict[str, AlgebraResult]:
    """L0 of every arm but the reference. `windows`: sample ids per step; `floor_arm`: the permuted full batch.

    The whole trajectory runs as configured. A few more windows (the first two, a short one and the one after it) have clipping
    the other way round, certainly active unless it has been active already, then off; and dropout off where there is dropout.
    """
    config, findings = setting.config, {label: Findings() for label in recipes}
    lock = _run(setting, recipes, windows, findings, clip_norm=config.clip_norm)
    has_clipped = any(bool(flag) for flag in lock.arms[REFERENCE].clipped)
    # A loop written by hand need not know of a clipping that its trial does not ask for.
    unasked = config.clip_norm is None and any(recipe.loop is not None for recipe in recipes.values())
    off = has_clipped or unasked
    other_clip = no_clipping(config.clip_norm) if off else ACTIVE * _first_norm(setting, windows[0])
    plain = {label: Findings() for label in recipes}
    _run(setting, recipes, _few(windows), plain, clip_norm=other_clip, dropout=False)
    return {
        label: _result(setting, findings[label], plain[label], plain[floor_arm], lock.differing_counters(label), windows)
        for label in recipes
        if label != REFERENCE
    }


def is_probe(step: int, ids: Tensor, probe_every: int, effective_batch: int) -> bool:
    """The first two steps, every `probe_every` steps, and every short window: a divisible data set would hide its faults."""
    return step == 1 or step % probe_every == 0 or len(ids) < effective_batch


def _few(windows: Sequence[Tensor]) -> list[Tensor]:
    """The first two windows, and where there is one the first short window and its successor."""
    short = next((t for t, ids in enumerate(windows) if len(ids) < len(windows[0])), len(windows))
    return [windows[t] for t in sorted({0, 1, short, short + 1}) if t < len(windows)]


def _first_norm(setting: Setting, ids: Tensor) -> float:
    referee = setting.referee(dropout=False)
    return float(torch.linalg.vector_norm(referee.gradient(snapshot(referee.model), setting.exact.batch(ids))))


def _result(
    setting: Setting,
    found: Findings,
    plain: Findings,
    floor: Findings,
    counters: Mapping[str, tuple[float, float]],
    windows: Sequence[Tensor],
) -> AlgebraResult:
    gap = worst(plain.gradient_error, plain.state_error)
    stochastic = setting.config.workload.dropout > 0
    runs = [found] if stochastic else [found, plain]
    moved, update = max((run.moved for run in runs), key=size), max((run.update for run in runs), key=size)
    algebra = Algebra(
        gradient_error=worst(*(run.gradient_error for run in runs)),
        state_error=worst(*(run.state_error for run in runs)),
        trajectory_error=found.trajectory_error,
        steps=len(windows),
        loss_error=worst(*(run.loss_error for run in runs)),
        floor=floor.gradient_error,
        clipping_active=found.clipped_share > 0 or plain.clipped_share > 0,
        clipped_share=found.clipped_share,
        short_windows=sum(len(ids) < setting.config.effective_batch for ids in windows),
        unequal_terms=found.unequal_terms,
    )
    errors = [window for run in runs for window in run.errors]
    signature = Signature(
        probes=sum(run.probes for run in runs),
        wrong=sum(len(run.errors) for run in runs),
        worst=max((run.worst for run in runs if run.worst), key=lambda window: window.distance, default=None),
        explanations=explanations(errors),
        at_rest=alone(errors),
        beside=explanations([window for run in runs for window in run.beside]),
        resolved={"stochastic_layers": gap} if stochastic else {},
        moved_in_window=moved[0],
        moved_along_weights=moved[1],
        steps_in_window=max(run.steps_in_window for run in runs),
        decays_fit=all(run.decays_fit for run in runs),
        steps_before_last_forward=max(run.steps_before_last_forward for run in runs),
        skipped_windows=max(run.skipped for run in runs),
        advanced_error=worst(*(run.advanced_error for run in runs)),
        average_error=worst(*(run.average_error for run in runs)),
        update_error=update[0],
        update_along_weights=update[1],
        state_errors={name: worst(*(run.own_state_errors.get(name, 0.0) for run in runs)) for name in found.own_state_errors},
        loss_error=algebra.loss_error,
        repeated_samples=max(run.samples[0] for run in runs),
        missing_samples=max(run.samples[1] for run in runs),
        foreign_samples=max(run.samples[2] for run in runs),
        unknown_rows=max(run.samples[3] for run in runs),
    )
    return AlgebraResult(algebra, signature, counters)


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
    probe = Probe(setting, lock, setting.referee(dropout=dropout))
    for t, ids in enumerate(windows):
        watched = is_probe(t, ids, config.probe_every, config.effective_batch)
        probe.remember()
        if watched:
            probe.before()
        records = lock.step(ids)
        for label, found in findings.items():
            found.trajectory_error = worst(found.trajectory_error, records[label].parameter_distance)
            if watched:
                probe.after(label, ids, t, records[label].loss, found)
        if t == 0:
            reference = arm_state(lock.arms[REFERENCE])
            for label, found in findings.items():
                state = arm_state(lock.arms[label])
                found.state_error = worst(0.0, *entry_errors(state, reference).values())
    for label, found in findings.items():
        flags = [bool(flag) for flag in lock.arms[label].clipped]
        found.clipped_share = sum(flags) / max(1, len(flags))
    return lock
