"""L0, the algebra in float64: the same gradients, the same optimizer state, the same trajectory; and what is wrong if not.

A training may amplify rounding (Adam where the second moment is nearly zero, a large learning rate, a ReLU that flips), so that
right arms part as well, shuffled full batches among them. Where an arm parts that is right in every probe, the run is repeated
with a probe of every window from that step on: each is then compared at the arm's own weights, and the step it takes with that
of a twin optimizer. An arm that is right in each of them has the full batch's computation, wherever rounding has led it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce

import torch
from torch import Tensor

from accumulation_harness.config import LastWindow, Precision
from accumulation_harness.judge.cause import INHERENT, Cause, Causes
from accumulation_harness.judge.counters import Differences
from accumulation_harness.judge.gates import ALGEBRA_GATE, TRAJECTORY_GATE, coarse_gate
from accumulation_harness.judge.signature import Signature, worst
from accumulation_harness.judge.verdict import Algebra
from accumulation_harness.measure.lock_step import REFERENCE, ArmChanges, LockStep, Setting, arm_state
from accumulation_harness.measure.probe import Probe
from accumulation_harness.measure.update import entry_errors
from accumulation_harness.recipes.recipe import Recipe
from accumulation_harness.referee.oracle import no_clipping, snapshot
from accumulation_harness.results.measurements import Measurement

RAN_AWAY = 1e38  # ||theta_full - theta_0|| beyond which nothing is compared: float32 ends there, float64's squares at 1e154
ACTIVE = 0.5  # the clipping test's threshold, as a fraction of the first gradient's norm: active by construction
FIRST = 10  # windows: the first steps, and every optimizer with its state at work
DEPENDS_ON = (
    "workload", "data", "norm", "optimizer", "schedule", "clip_norm", "ema_decay", "device", "effective_batch",
    "accumulation_steps", "split", "algebra_steps", "probe_every", "seed",
)  # fmt: skip
# Arms that are not ours may look at them.
OTHERS_DEPEND_ON = ("faults", "methods", "precision", "loss_scale", "execution")
MOST_WARMUP = 50  # steps of a warm-up that are taken, with two beyond it


@dataclass(frozen=True)
class AlgebraResult:
    """L0 and L2 of one arm, and what its probes saw."""

    algebra: Algebra
    signature: Signature
    counters: Differences


@dataclass
class Run:
    """One arm over all windows: what its probes saw, and what only the whole run shows."""

    seen: list[Signature] = field(default_factory=list)  # by probed window
    state_error: float = 0.0  # after the first step, beside the reference's state
    distances: list[float] = field(default_factory=list)  # of the parameters by window, relative to the reference's movement
    parted_at: int | None = None  # first window whose distance is amplified rounding: each one from it on was probed, and right
    clipped_share: float = 0.0  # of the windows

    @property
    def signature(self) -> Signature:
        """What all probes saw."""
        return reduce(Signature.merged, self.seen, Signature())

    @property
    def is_right(self) -> bool:
        """Whether everything is as it should be, as far as it was looked at, but for the distance of the parameters."""
        return self.state_error <= ALGEBRA_GATE and self.signature.is_exact

    @property
    def trajectory_error(self) -> float:
        """The largest distance of the parameters while it can tell anything."""
        return worst(0.0, *self.distances[: self.parted_at])


def windows_of(setting: Setting) -> list[Tensor]:
    """The windows ([n] int64 each) of L0: the first `algebra_steps` of the trial where that is set.

    Else those that hold what L0 tests: the first FIRST, more where a warm-up ends later, then an epoch's short last window, at
    which loops go wrong, and the window after it. A schedule runs over their number.
    """
    config = setting.config
    if config.algebra_steps is not None:
        return list(setting.windows(config.algebra_steps))
    num = max(FIRST, min(config.schedule.warmup_steps, MOST_WARMUP) + 2)
    full, remainder = divmod(setting.exact.num_samples, config.effective_batch)
    end = {full, full + 1} if remainder and config.data.last_window == LastWindow.keep else set()
    chosen = {*range(num), *end}
    return [ids for t, ids in enumerate(setting.windows(max(chosen) + 1)) if t in chosen]


def measurement(
    setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor], floor_arm: str, *, ours: bool
) -> Measurement[dict[str, AlgebraResult]]:
    """`measure`, as trials share it.

    `ours`: all arms are our right ones, which do the same in float64 whatever the precision under test. Any other arm may look
    for that precision's loss scaler, which they then all have.
    """
    settings = DEPENDS_ON + (() if ours else OTHERS_DEPEND_ON)
    if setting.config.precision == Precision.float64:
        settings += ("execution",)  # here alone L0 is run as the precision under test
    make = partial(measure, setting, recipes, windows, floor_arm, scaler=not ours)
    return Measurement("algebra", dict[str, AlgebraResult], partial(setting.identity, settings, windows), make)


def measure(
    setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor], floor_arm: str, *, scaler: bool = True
) -> dict[str, AlgebraResult]:
    """L0 of every arm but the reference. `windows`: sample ids per step; `floor_arm`: the permuted full batch.

    The whole trajectory runs as configured. A few more windows (the first two, a short one and the one after it) have clipping
    the other way round, certainly active unless it has been active already, then off; and dropout off where there is dropout.
    """
    config = setting.config
    if setting.not_float64:
        return _in_float32(setting, recipes, _few(windows, first=4), floor_arm)
    take = partial(_run, setting, scaler=scaler)
    lock, runs = take(recipes, windows, clip_norm=config.clip_norm)
    _follow(take, config.clip_norm, recipes, windows, lock, runs)
    has_clipped = lock.clipped_share(REFERENCE) > 0
    # A loop written by hand need not know of a clipping that its trial does not ask for.
    unasked = config.clip_norm is None and any(recipe.loop is not None for recipe in recipes.values())
    off = has_clipped or unasked
    other_clip = no_clipping(config.clip_norm) if off else ACTIVE * _first_norm(setting, windows[0])
    _, plain = take(recipes, _few(windows), clip_norm=other_clip, dropout=False)
    return {
        label: _result(setting, run, plain[label], plain[floor_arm], lock.differing_counters(label), windows[: lock.steps])
        for label, run in runs.items()
        if label != REFERENCE
    }


def _in_float32(
    setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor], floor_arm: str
) -> dict[str, AlgebraResult]:
    """L0 of a task that does not compute in float64: beside the shuffled full batch, for what differs clearly.

    All `windows` are probed, without dropout. Right code and the referee part by rounding here, and a ReLU may flip. So an error
    below the gate (`judge.gates.coarse_gate`) counts as none, one above it as a difference only where a cause reproduces it, or
    in every window. What is left unseen is not judged: no arm is equivalent.
    """
    clip_norm = setting.config.clip_norm
    _, runs = _run(setting, recipes, windows, clip_norm=clip_norm, dropout=False, every_from=0, scaler=True)
    floor = worst(*(one.gradient_error for one in runs[floor_arm].seen))
    found = {}
    for label, run in runs.items():
        signature = reduce(Signature.merged, (one.above(coarse_gate(floor)) for one in run.seen), Signature())
        algebra = Algebra(
            gradient_error=run.signature.gradient_error,
            state_error=math.nan,
            trajectory_error=math.nan,
            loss_error=run.signature.loss_error,
            steps=len(run.seen),
            floor=floor,
            clipping_active=run.clipped_share > 0,
            clipped_share=run.clipped_share,
            short_windows=0,
            unequal_terms=signature.unequal_terms,
            not_float64=setting.not_float64,
        )
        found[label] = AlgebraResult(algebra, signature, {})
    del found[REFERENCE]
    return found


def is_probe(step: int, ids: Tensor, probe_every: int, effective_batch: int) -> bool:
    """The first two steps, every `probe_every` steps, and every short window: a divisible data set would hide its faults."""
    return step == 1 or step % probe_every == 0 or len(ids) < effective_batch


def _few(windows: Sequence[Tensor], first: int = 2) -> list[Tensor]:
    """The `first` windows, and where there is one the first short window and its successor."""
    short = next((t for t, ids in enumerate(windows) if len(ids) < len(windows[0])), len(windows))
    return [windows[t] for t in sorted({*range(first), short, short + 1}) if t < len(windows)]


def _first_norm(setting: Setting, ids: Tensor) -> float:
    referee = setting.referee(dropout=False)
    return float(torch.linalg.vector_norm(referee.gradient(snapshot(referee.model), setting.exact.batch(ids))))


def _result(
    setting: Setting, run: Run, plain: Run, floor: Run, counters: Differences, windows: Sequence[Tensor]
) -> AlgebraResult:
    """The configured run and the plain one of an arm, taken together; `floor`: the permuted full batch's plain run."""
    stochastic = setting.draws
    runs = [run] if stochastic else [run, plain]
    signature = reduce(Signature.merged, (one.signature for one in runs))
    if stochastic:
        # Other masks are another loss, also where a penalty or clipping leaves no trace of them in the gradient.
        signature = dataclasses.replace(signature, gap_without_factor=_gaps(plain), loss_error=plain.signature.loss_error)
    algebra = Algebra(
        gradient_error=signature.gradient_error,
        state_error=worst(*(one.state_error for one in runs)),
        trajectory_error=run.trajectory_error,
        parted_at=run.parted_at,
        steps=len(run.distances),
        loss_error=signature.loss_error,
        floor=worst(floor.signature.gradient_error, floor.signature.resolution),
        clipping_active=run.clipped_share > 0 or plain.clipped_share > 0,
        clipped_share=run.clipped_share,
        short_windows=sum(len(ids) < setting.config.effective_batch for ids in windows),
        unequal_terms=run.signature.unequal_terms,
        draws=stochastic,
        widened=setting.exact.widens,
    )
    return AlgebraResult(algebra, signature, counters)


def _gaps(plain: Run) -> dict[Causes, float]:
    """What is left of the error without dropout, beside what the model computes within micro-batches where that is wrong too."""
    gaps: dict[Causes, float] = {(): worst(plain.signature.gradient_error, plain.state_error)}
    if plain.signature.wrong:
        gaps = {causes: error for causes, error in plain.signature.explanations.items() if INHERENT.issuperset(causes)}
    return {(*causes, Cause.stochastic_layers): gap for causes, gap in gaps.items()}


def _follow(
    take: Callable[..., tuple[LockStep, dict[str, Run]]],
    clip_norm: float | None,
    recipes: Mapping[str, Recipe],
    windows: Sequence[Tensor],
    lock: LockStep,
    runs: dict[str, Run],
) -> None:
    """Repeat the run of the arms that parted although every probe was right, with a probe of each window since, in place."""
    parted = {
        label: next(t for t, distance in enumerate(run.distances) if not distance <= TRAJECTORY_GATE)
        for label, run in runs.items()
        if not run.trajectory_error <= TRAJECTORY_GATE and run.is_right and not lock.differing_counters(label)
    }
    if not parted:
        return
    again = {label: recipe for label, recipe in recipes.items() if label in parted or label == REFERENCE}
    first = min(parted.values())
    _, followed = take(again, windows, clip_norm=clip_norm, every_from=first)
    for label, parted_at in parted.items():
        runs[label].seen = followed[label].seen
        if followed[label].is_right and all(map(math.isfinite, followed[label].distances)):
            runs[label].parted_at = parted_at


def _state_error(lock: LockStep, probe: Probe, label: str, signature: Signature) -> float:
    """The largest relative distance of an arm's state to the reference's after the first window, over its entries.

    Rounding may turn whole eigenvectors (SOAP). Where both began alike, and all that the probe saw of this window is right, the
    state is the optimizer's own result of the right gradient: the distance is then that to the twin's.
    """
    errors = entry_errors(arm_state(lock.arms[label]), arm_state(lock.arms[REFERENCE]))
    if not worst(0.0, *errors.values()) <= ALGEBRA_GATE and signature.probes and signature.is_exact:
        own, reference = (probe.carried[one].state() for one in (label, REFERENCE))
        if not any(entry_errors(own, reference).values()):
            errors = dict(signature.state_errors)
    return worst(0.0, *errors.values())


def _run(
    setting: Setting,
    recipes: Mapping[str, Recipe],
    windows: Sequence[Tensor],
    *,
    clip_norm: float | None,
    dropout: bool = True,
    every_from: int | None = None,
    scaler: bool,
) -> tuple[LockStep, dict[str, Run]]:
    """Train all arms over `windows` in the exact format and collect what they show; each one from `every_from` on is probed.

    The run ends before the window in which the full batch leaves the range of float32.
    """
    config = setting.config
    runs = {label: Run() for label in recipes}
    exact = Precision.float32 if setting.not_float64 else Precision.float64
    changes: ArmChanges = {"precision": exact, "steps": len(windows), "clip_norm": clip_norm}
    arms = setting.arms(recipes, dropout=dropout, scaler=scaler, **changes)
    lock = LockStep(arms, config.seed, shelf=setting.shelf)
    probe = Probe(setting, lock, setting.referee(dropout=dropout))
    for t, ids in enumerate(windows):
        watched = is_probe(t, ids, config.probe_every, config.effective_batch) or (every_from is not None and t >= every_from)
        probe.remember()
        if watched:
            probe.before()
        records = lock.step(ids)
        if not (lock.movement <= RAN_AWAY and math.isfinite(records[REFERENCE].loss)):
            break
        for label, run in runs.items():
            distance = records[label].parameter_distance
            is_gone = lock.movement > 0 and not math.isfinite(distance)  # out of range, where the full batch is not
            run.distances.append(math.nan if is_gone else distance)
            if watched and not is_gone:
                run.seen.append(probe.after(label, ids, t, records[label].loss))
        if t == 0:
            for label, run in runs.items():
                run.state_error = _state_error(lock, probe, label, run.signature)
                setting.shelf.release()
    for label, run in runs.items():
        run.clipped_share = lock.clipped_share(label)
    return lock, runs
