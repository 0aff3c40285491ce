"""The run in the target precision: losses, distances of weights and gradients by step (L3), and where the training ended."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accumulation_harness.config.arm_name import ACCUMULATED, ULP, ArmName
from accumulation_harness.judge.counters import Differences
from accumulation_harness.judge.gates import CLEARLY, COMPARABLE, STORED
from accumulation_harness.judge.verdict import Trajectory
from accumulation_harness.measure import noise_scale
from accumulation_harness.measure.lock_step import REFERENCE, ExactGradient, LockStep, Setting
from accumulation_harness.recipes import precision
from accumulation_harness.recipes.recipe import Arm, Recipe, evaluated
from accumulation_harness.referee.oracle import clipped, snapshot
from accumulation_harness.results.judged_arm import Ending
from accumulation_harness.results.step_row import StepRow
from accumulation_harness.workloads import Batch

Row = dict[str, Any]
OnStep = Callable[[int, list[Row]], None]  # (optimizer step, one row per arm)

JUMP = 100.0  # the null band has jumped when it is this many times its first value: some ReLU flipped
HELD_OUT_BATCH = 512
OF_NULLS = ("loss", "parameter_distance")  # what is kept of the steps of the null band


@dataclass(frozen=True)
class End:
    """What an arm has come to."""

    outcome: Ending
    finite: bool  # its weights
    overflows: tuple[int, ...]  # windows that float16's scaler skipped
    counters: Differences  # that are not the reference's
    foreign: Collection[int]  # windows of other samples


@dataclass
class Distances:
    """The target-precision run, by label: losses and d_t by step."""

    null_labels: tuple[str, ...]
    clearly: float  # times the full batch's, an error of a gradient that is no rounding
    losses: defaultdict[str, list[float]] = field(default_factory=partial(defaultdict, list))
    parameters: defaultdict[str, list[float]] = field(default_factory=partial(defaultdict, list))
    # Of the gradients by step, where they were measured.
    errors: defaultdict[str, dict[int, float]] = field(default_factory=partial(defaultdict, dict))
    ends: dict[str, End] = field(default_factory=dict)

    def finite(self, label: str) -> bool:
        """Whether the arm's weights stayed finite, and the losses but those of windows that overflowed."""
        end = self.ends[label]
        return end.finite and all(
            math.isfinite(loss) for step, loss in enumerate(self.losses[label]) if step not in end.overflows
        )

    @property
    def _band(self) -> list[float]:
        return [max(values) for values in zip(*(self.parameters[null] for null in self.null_labels), strict=True)]

    def left_at(self, label: str) -> int | None:
        """The first step at which an arm is COMPARABLE times outside the null band; None where there is none."""
        return next((t for ratio, t in self._ratios(label) if ratio > COMPARABLE), None)

    def _jump(self) -> int | None:
        """The band's first jump."""
        band = self._band
        first = next((value for value in band if value > 0), math.nan)
        return next((t for t, value in enumerate(band) if value > JUMP * first), None)

    def _ratios(self, label: str) -> list[tuple[float, int]]:
        """d_t over the band with t."""
        pairs = zip(self.parameters[label], self._band, strict=True)
        return [(d / null, t) for t, (d, null) in enumerate(pairs) if null > 0]

    def trajectory(self, label: str) -> Trajectory:
        """L3: d_t against the null band, up to the band's first jump; steps where the whole band is at zero say nothing."""
        jump, own = self._jump(), self.parameters[label]
        ratio, step = max((one for one in self._ratios(label) if jump is None or one[1] < jump), default=(math.nan, 0))
        usual = max([STORED, *self.errors[REFERENCE].values()])
        rough = {t: error for t, error in self.errors[label].items() if error > self.clearly * usual}
        return Trajectory(
            ratio=ratio, step=step, jump_step=jump, final_distance=own[-1], steps=len(own), rough=rough, usual_error=usual
        )


def train(
    setting: Setting,
    recipes: Mapping[str, Recipe],
    nulls: Mapping[str, Recipe],
    stream: Sequence[Tensor],
    on_step: OnStep,
    also: Collection[int] = (),
) -> Distances:
    """Train all arms and the nulls in the target precision; the null `ULP` starts one ulp away.

    A row has what the optimizer consumed beside the reference's gradient, the learning rate and, in float16, the loss scale;
    the error against float64 where the referee looks (NaN where float64 draws other masks), and the squares of `noise_scale`
    where its watch saw the window. Of a null, which is the band of d_t, it has the loss and d_t alone.

    Args:
        setting: The trial.
        recipes: Label -> recipe of each arm.
        nulls: Label -> recipe of each repetition of the full batch.
        stream: Sample ids, [n] int64 for each window.
        on_step: Called with the step's number and a row for each arm.
        also: Steps at which the referee looks beside its usual ones.

    Returns:
        How far weights went from the reference's, by arm and step.
    """
    config = setting.config
    lock = LockStep(setting.arms({**recipes, **nulls}), config.seed, band=nulls, offload=setting.offload, looks=False)
    _move_one_ulp(lock.arms[ULP].model)
    names = {label: ArmName.parse(label) for label in lock.arms}
    noise = noise_scale.watch(
        {label: lock.arms[label] for label in recipes if names[label].name == ACCUMULATED}, config.probe_every
    )
    distances = Distances(tuple(nulls), CLEARLY.get(config.precision, math.inf))
    for t, ids in enumerate(stream):
        exact = _exact_gradients(setting, lock, recipes.keys(), t, ids) if t % config.referee_every == 0 or t in also else None
        records = lock.step(ids, gradients="compared", exact=exact)
        squares: Mapping[str, Row] = noise_scale.read(noise)
        rows: list[Row] = []
        for label, record in records.items():
            distances.losses[label].append(record.loss)
            distances.parameters[label].append(record.parameter_distance)
            if record.gradient_error is not None and math.isfinite(record.gradient_error):
                distances.errors[label][t] = record.gradient_error
            own: Row = {name: value for name, value in vars(record).items() if label in recipes or name in OF_NULLS}
            rows.append(StepRow(**{"step": t, **names[label].columns, **own, **squares.get(label, {})}).known)
        on_step(t, rows)
    for label, arm in lock.arms.items():
        distances.ends[label] = End(
            outcome=outcome(arm, distances.losses[label]),
            finite=all(bool(torch.isfinite(p).all()) for p in arm.model.parameters()),
            overflows=tuple(lock.loss_scales[label].overflows),
            counters=lock.differing_counters(label),
            foreign=lock.foreign_windows[label],
        )
    return distances


def _exact_gradients(setting: Setting, lock: LockStep, judged: Collection[str], step: int, ids: Tensor) -> ExactGradient:
    """Make a function for the exact clipped gradient of a window, each arm's at its own parameters.

    It is one for all at the first step, where all stand alike.

    Args:
        setting: The trial.
        lock: The arms under way.
        judged: Labels of the arms that are judged.
        step: The number of the optimizer step, from 0.
        ids: [n] int64 samples of the window.

    Returns:
        Label -> [P] float64; None of an arm that is not judged, where float64 draws other masks, or there is no float64.
    """
    if setting.not_float64 or not setting.masks_are_shared:
        return lambda label: None
    referee, window = setting.referee(), setting.exact.batch(ids)

    def gradient(label: str) -> Tensor:
        with lock.randomness(step):
            return clipped(referee.gradient(snapshot(lock.arms[label].model), window), setting.config.clip_norm)

    first = gradient(REFERENCE) if step == 0 else None

    def exact(label: str) -> Tensor | None:
        if label not in judged:
            return None
        return gradient(label) if first is None else first

    return exact


def _move_one_ulp(model: nn.Module) -> None:
    """Move the first weight by one unit in the last place: the smallest perturbation there is."""
    with torch.no_grad():
        first = next(model.parameters()).reshape(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, math.inf)))


def outcome(arm: Arm, losses: Sequence[float]) -> Ending:
    """Return where a training ended.

    Args:
        arm: The arm.
        losses: The loss of every window.

    Returns:
        The last loss, the mean loss of the last tenth, held-out loss and accuracy, all per loss term.
    """
    tail = losses[-max(1, len(losses) // 10) :]
    found = evaluations(arm, arm.workload.held_out_batches(HELD_OUT_BATCH))
    return Ending(
        final_loss=losses[-1],
        tail_loss=sum(tail) / len(tail),
        held_out_loss=found["loss"],
        held_out_accuracy=found["accuracy"],
    )


def evaluations(arm: Arm, batches: Iterable[Batch]) -> dict[str, float]:
    """Evaluate a model.

    Args:
        arm: The arm, whose model is put into evaluation mode meanwhile.
        batches: The samples.

    Returns:
        `loss` and `accuracy`, sums over all samples divided by the number of loss terms; NaN for an accuracy that is not
        defined.
    """
    loss, correct, terms = 0.0, 0.0, 0.0
    with evaluated(arm), torch.no_grad(), precision.autocast(arm.precision, arm.device):
        for batch in batches:
            outputs = arm.workload.forward(arm.model, batch)
            loss += float(arm.workload.losses(outputs, batch).double().sum())
            correct += float(arm.workload.correct(outputs, batch).sum())
            terms += arm.workload.num_terms(batch).sum().item()
    return {"loss": loss / terms, "accuracy": correct / terms}
