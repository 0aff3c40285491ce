"""L0, the algebra in float64: the same gradients, the same optimizer state, the same trajectory; and what is wrong if not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.causes import WindowFacts, hypotheses
from harness.config import Norm, Precision
from harness.diagnosis import BATCH, GATE, Signature, WrongWindow, explanations, telling
from harness.gradients import by_tensor, compare, decompose, flatten, relative_distance
from harness.lock_step import REFERENCE, LockStep, Setting, arm_state, optimizer_state
from harness.oracle import Parts, Referee, State, clipped, running_statistics, snapshot
from harness.recipe import Arm, Recipe, make_optimizer
from harness.verdict import Algebra, worst
from harness.workloads import Batch

WEIGHT_ROUNDING = 2.0**-50  # a few roundings of float64, relative
ACTIVE = 0.5  # the clipping test's threshold, as a fraction of the first gradient's norm: active by construction


@dataclass
class Findings:
    """What one arm showed, collected over the runs."""

    gradient_error: float = 0.0
    state_error: float = 0.0
    trajectory_error: float = 0.0
    clipped_share: float = 0.0
    unequal_terms: bool = False
    probes: int = 0
    worst: WrongWindow | None = None
    errors: list[dict[str, float]] = field(default_factory=list)  # of every wrong window: cause -> error of its oracle
    loss_error: float = 0.0
    moved: tuple[float, float] = (0.0, 0.0)  # how far inside a window, and its cosine with the weights
    steps_in_window: int = 1
    update: tuple[float, float] = (0.0, 0.0)
    own_state_errors: dict[str, float] = field(default_factory=dict)
    samples: tuple[int, int, int] = (0, 0, 0)  # repeated, missing, foreign


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
    other_clip = None if has_clipped else ACTIVE * _first_norm(setting, windows[0])
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
    moved, update = max((run.moved for run in runs), key=_size), max((run.update for run in runs), key=_size)
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
    signature = Signature(
        probes=sum(run.probes for run in runs),
        wrong=sum(len(run.errors) for run in runs),
        worst=max((run.worst for run in runs if run.worst), key=lambda window: window.distance, default=None),
        explanations=explanations([errors for run in runs for errors in run.errors]),
        resolved={"stochastic_layers": gap} if stochastic else {},
        moved_in_window=moved[0],
        moved_along_weights=moved[1],
        steps_in_window=max(run.steps_in_window for run in runs),
        update_error=update[0],
        update_along_weights=update[1],
        state_errors={name: worst(*(run.own_state_errors.get(name, 0.0) for run in runs)) for name in found.own_state_errors},
        loss_error=algebra.loss_error,
        repeated_samples=max(run.samples[0] for run in runs),
        missing_samples=max(run.samples[1] for run in runs),
        foreign_samples=max(run.samples[2] for run in runs),
    )
    return AlgebraResult(algebra, signature, counters)


def _size(pair: tuple[float, float]) -> float:
    return math.inf if math.isnan(pair[0]) else pair[0]


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
                found.state_error = worst(0.0, *_entry_errors(state, reference).values())
    for label, found in findings.items():
        flags = [bool(flag) for flag in lock.arms[label].clipped]
        found.clipped_share = sum(flags) / max(1, len(flags))
    return lock


class Probe:
    """Compares what each optimizer consumed with the referee's gradient at the very parameters it was computed at."""

    def __init__(self, setting: Setting, lock: LockStep, referee: Referee) -> None:
        self.setting, self.lock, self.referee = setting, lock, referee
        self.states: dict[str, State] = {}
        self.left_over: dict[str, Tensor | None] = {}
        self.consumed_before: dict[str, Tensor | None] = {}
        self.carried: dict[str, Before] = {}

    def before(self) -> None:
        """Remember every arm's parameters, buffers and gradients at the window's start."""
        for label, arm in self.lock.arms.items():
            self.states[label] = snapshot(arm.model)
            gradients = [p.grad for p in arm.model.parameters()]
            self.left_over[label] = None if None in gradients else flatten(g for g in gradients if g is not None)
            self.consumed_before[label] = self.lock.watches[label].gradient
            self.carried[label] = Before.of(arm)
        self.lock.watch_forwards(True)

    def after(self, label: str, ids: Tensor, step: int, loss: float, found: Findings) -> None:
        """Add what the arm did with the window `ids` to its findings."""
        arm, watch, state = self.lock.arms[label], self.lock.watches[label], self.states[label]
        self.lock.watch_forwards(False)
        window = self.setting.exact.batch(ids)
        found.probes += 1
        found.steps_in_window = max(found.steps_in_window, watch.steps_in_window)
        found.samples = _more(found.samples, _sample_counts(torch.cat(arm.seen), ids))
        start = flatten(state[name] for name in self.referee.names)
        if watch.last_forward is not None:
            found.moved = max(
                found.moved, _movement(watch.last_forward - start, start, torch.linalg.vector_norm(start)), key=_size
            )
        if watch.gradient is None:
            found.gradient_error = math.nan
            return
        with self.lock.randomness(step):
            exact_loss, gradient = self.referee.loss_and_gradient(state, window)
        exact = clipped(gradient, arm.clip_norm)
        if watch.steps_in_window == 1:
            _check_update(self.setting, arm, watch.gradient, start, self.carried[label], found)
        error = relative_distance(watch.gradient, exact)
        found.gradient_error = worst(found.gradient_error, error)
        sizes = arm.recipe.split(len(window))
        terms = [int(n.sum()) for n in self.setting.exact.num_terms(window).split(sizes)]
        found.unequal_terms = found.unequal_terms or len(set(terms)) > 1
        if error <= GATE:
            found.loss_error = worst(found.loss_error, abs(loss / exact_loss - 1))
        else:
            arranged = window if arm.recipe.arrange is None else arm.recipe.arrange(window, step)
            if len(arranged) == len(window):
                errors = self._errors(label, arm, arranged, sizes, step, watch.gradient, loss, found)
                found.errors.append(telling(errors, error))
                if found.worst is None or not error <= found.worst.distance:
                    found.worst = self._wrong_window(label, arm, arranged, sizes, step, watch.gradient, exact)

    def _wrong_window(
        self, label: str, arm: Arm, window: Batch, sizes: list[int], step: int, consumed: Tensor, exact: Tensor
    ) -> WrongWindow:
        with self.lock.randomness(step):
            parts = self.referee.parts(self.states[label], window, sizes)
        compared = compare(consumed, exact)
        apart = decompose(consumed, parts.parts)
        rightful = [n * len(sizes) / max(1, sum(parts.terms)) for n in parts.terms]
        weights = [w / right if right else math.nan for w, right in zip(apart.weights, rightful, strict=True)]
        sizes_by_name = {name: parameter.numel() for name, parameter in self.referee.model.named_parameters()}
        tensors = {
            name: (near.distance, near.scale, near.cosine, own.residual)
            for name, (near, own) in by_tensor(sizes_by_name, consumed, exact, parts.parts).items()
        }
        return WrongWindow(
            step=step,
            samples=len(window),
            micro_batches=len(sizes),
            clip_norm=arm.clip_norm,
            distance=compared.distance,
            scale=compared.scale,
            cosine=compared.cosine,
            weights=tuple(weights),
            residual=apart.residual,
            condition=apart.condition,
            tensors=tensors,
        )

    def _errors(
        self, label: str, arm: Arm, window: Batch, sizes: list[int], step: int, consumed: Tensor, loss: float, found: Findings
    ) -> dict[str, float]:
        """Cause -> error of its best variant, with BatchNorm also beside its statistics."""
        smallest: dict[str, float] = {}
        if not bool(torch.isfinite(consumed).all()):
            return smallest

        def consider(prefix: str, of: Parts) -> None:
            facts = WindowFacts(
                parts=of,
                configured_steps=arm.recipe.accumulation_steps,
                configured_terms=sum(of.terms) / len(window) * self.setting.config.effective_batch,
                max_norm=arm.clip_norm,
                loss_scale=arm.scaler.get_scale(),
                left_over=self.left_over[label],
                consumed_before=self.consumed_before[label],
            )
            for name, gradient in hypotheses(facts):
                cause = prefix + name.partition("#")[0]
                smallest[cause] = min(smallest.get(cause, math.inf), relative_distance(consumed, gradient))

        if self.setting.config.norm == Norm.batch and len(sizes) > 1:
            with self.lock.randomness(step):
                ghost_loss, ghost, after = self.referee.ghost(self.states[label], window, sizes)
            smallest[BATCH] = worst(
                relative_distance(consumed, clipped(ghost, arm.clip_norm)),
                relative_distance(running_statistics(snapshot(arm.model)), running_statistics(after)),
            )
            if smallest[BATCH] <= GATE:
                found.loss_error = worst(found.loss_error, abs(loss / ghost_loss - 1))
                return smallest
            with self.lock.randomness(step):
                consider(BATCH + "+", self.referee.parts(self.states[label], window, sizes, ghost=True))
        with self.lock.randomness(step):
            consider("", self.referee.parts(self.states[label], window, sizes))
        return smallest


@dataclass(frozen=True)
class Before:
    """What an arm's optimizer and moving average carried when a window began."""

    entries: Mapping[str, Tensor]  # the optimizer's state, flat
    step: Tensor | None  # its own counter
    learning_rate: float
    ema: Tensor | None  # None before the first average

    @staticmethod
    def of(arm: Arm) -> Before:
        counters = [state["step"] for state in arm.optimizer.state.values() if "step" in state]
        started = arm.ema is not None and int(arm.ema.n_averaged) > 0
        return Before(
            entries=optimizer_state(arm.optimizer),
            step=counters[0].clone() if counters else None,
            learning_rate=arm.optimizer.param_groups[0]["lr"],
            ema=flatten(arm.ema.module.parameters()) if arm.ema is not None and started else None,
        )


def _check_update(setting: Setting, arm: Arm, consumed: Tensor, start: Tensor, before: Before, found: Findings) -> None:
    """The step's outcome against a twin optimizer in the same state that is given the same gradient at the same weights."""
    twin = torch.nn.Parameter(start.clone())
    optimizer = make_optimizer(setting.config.optimizer, [twin])
    optimizer.param_groups[0]["lr"] = before.learning_rate
    if before.entries or before.step is not None:
        optimizer.state[twin] = {name: value.clone() for name, value in before.entries.items()}
        if before.step is not None:
            optimizer.state[twin]["step"] = before.step.clone()
    twin.grad = consumed.clone()
    optimizer.step()
    expected, reached = twin.detach(), flatten(arm.model.parameters())
    moved = torch.linalg.vector_norm(expected - start)
    difference = reached - expected
    # Rounding of the weights themselves: it looks large beside a tiny update, at the end of a cosine schedule for example.
    if torch.linalg.vector_norm(difference) > WEIGHT_ROUNDING * torch.linalg.vector_norm(start):
        found.update = max(found.update, _movement(difference, start, moved), key=_size)
    states = optimizer_state(optimizer)
    if arm.ema is not None and setting.config.ema_decay is not None:
        decay = setting.config.ema_decay
        states["ema"] = reached if before.ema is None else decay * before.ema + (1 - decay) * reached
    for name, error in _entry_errors(arm_state(arm), states).items():
        found.own_state_errors[name] = worst(found.own_state_errors.get(name, 0.0), error)


def _movement(difference: Tensor, along: Tensor, unit: Tensor) -> tuple[float, float]:
    """(||difference|| / unit, cosine of the difference with `along`)."""
    size = torch.linalg.vector_norm(difference)
    if size == 0:
        return 0.0, 0.0
    return float(size / unit), float(difference @ along / size / torch.linalg.vector_norm(along))


def _entry_errors(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative distance of each entry of the optimizer's state; infinite where one of the two lacks it."""
    return {
        name: relative_distance(state[name], reference[name]) if name in state and name in reference else math.inf
        for name in state.keys() | reference.keys()
    }


def _sample_counts(seen: Tensor, wanted: Tensor) -> tuple[int, int, int]:
    """(samples used more than once, samples of the window not seen, samples seen that are not the window's)."""
    used, counts = seen.unique(return_counts=True)
    return int((counts - 1).sum()), int((~torch.isin(wanted, seen)).sum()), int((~torch.isin(used, wanted)).sum())


def _more(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])
