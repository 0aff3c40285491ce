"""L0, the algebra in float64: the same gradients, the same optimizer state, the same trajectory; and what is wrong if not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from harness.config import Precision
from harness.judge.cause import Cause
from harness.judge.counters import Differences
from harness.judge.signature import Signature, worst
from harness.judge.verdict import Algebra
from harness.measure.lock_step import REFERENCE, LockStep, Setting, arm_state
from harness.measure.probe import Probe
from harness.measure.update import entry_errors
from harness.recipes.recipe import Recipe
from harness.referee.oracle import no_clipping, snapshot

ACTIVE = 0.5  # the clipping test's threshold, as a fraction of the first gradient's norm: active by construction


@dataclass(frozen=True)
class AlgebraResult:
    """L0 and L2 of one arm, and what its probes saw."""

    algebra: Algebra
    signature: Signature
    counters: Differences


@dataclass
class Run:
    """One arm over all windows: what its probes saw, and what only the whole run shows."""

    signature: Signature = field(default_factory=Signature)
    state_error: float = 0.0  # after the first step, beside the reference's state
    trajectory_error: float = 0.0  # largest distance of the parameters, relative to the reference's movement
    clipped_share: float = 0.0  # of the windows


def measure(
    setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor], floor_arm: str
) -> dict[str, AlgebraResult]:
    """L0 of every arm but the reference. `windows`: sample ids per step; `floor_arm`: the permuted full batch.

    The whole trajectory runs as configured. A few more windows (the first two, a short one and the one after it) have clipping
    the other way round, certainly active unless it has been active already, then off; and dropout off where there is dropout.
    """
    config = setting.config
    lock, runs = _run(setting, recipes, windows, clip_norm=config.clip_norm)
    has_clipped = any(bool(flag) for flag in lock.arms[REFERENCE].clipped)
    # A loop written by hand need not know of a clipping that its trial does not ask for.
    unasked = config.clip_norm is None and any(recipe.loop is not None for recipe in recipes.values())
    off = has_clipped or unasked
    other_clip = no_clipping(config.clip_norm) if off else ACTIVE * _first_norm(setting, windows[0])
    _, plain = _run(setting, recipes, _few(windows), clip_norm=other_clip, dropout=False)
    return {
        label: _result(setting, run, plain[label], plain[floor_arm], lock.differing_counters(label), windows)
        for label, run in runs.items()
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
    setting: Setting, run: Run, plain: Run, floor: Run, counters: Differences, windows: Sequence[Tensor]
) -> AlgebraResult:
    """The configured run and the plain one of an arm, taken together; `floor`: the permuted full batch's plain run."""
    stochastic = setting.config.workload.dropout > 0
    runs = [run] if stochastic else [run, plain]
    signature = reduce(Signature.merged, (one.signature for one in runs))
    if stochastic:
        gap = worst(plain.signature.gradient_error, plain.state_error)
        signature = dataclasses.replace(signature, gap_without_factor={Cause.stochastic_layers: gap})
    algebra = Algebra(
        gradient_error=signature.gradient_error,
        state_error=worst(*(one.state_error for one in runs)),
        trajectory_error=run.trajectory_error,
        steps=len(windows),
        loss_error=signature.loss_error,
        floor=floor.signature.gradient_error,
        clipping_active=run.clipped_share > 0 or plain.clipped_share > 0,
        clipped_share=run.clipped_share,
        short_windows=sum(len(ids) < setting.config.effective_batch for ids in windows),
        unequal_terms=run.signature.unequal_terms,
    )
    return AlgebraResult(algebra, signature, counters)


def _run(
    setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor], *, clip_norm: float | None, dropout: bool = True
) -> tuple[LockStep, dict[str, Run]]:
    """Train all arms over `windows` in float64 and collect what they show."""
    config = setting.config
    runs = {label: Run() for label in recipes}
    arms = setting.arms(recipes, dropout=dropout, precision=Precision.float64, steps=len(windows), clip_norm=clip_norm)
    lock = LockStep(arms, config.seed)
    probe = Probe(setting, lock, setting.referee(dropout=dropout))
    for t, ids in enumerate(windows):
        watched = is_probe(t, ids, config.probe_every, config.effective_batch)
        probe.remember()
        if watched:
            probe.before()
        records = lock.step(ids)
        for label, run in runs.items():
            run.trajectory_error = worst(run.trajectory_error, records[label].parameter_distance)
            if watched:
                run.signature = run.signature.merged(probe.after(label, ids, t, records[label].loss))
        if t == 0:
            reference = arm_state(lock.arms[REFERENCE])
            for label, run in runs.items():
                run.state_error = worst(0.0, *entry_errors(arm_state(lock.arms[label]), reference).values())
    for label, run in runs.items():
        flags = [bool(flag) for flag in lock.arms[label].clipped]
        run.clipped_share = sum(flags) / max(1, len(flags))
    return lock, runs
