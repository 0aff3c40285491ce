"""A window with one micro-batch that is not finite, met by the reference as well: who skips it, who steps, and on what.

With a loss scaler the right answer is to skip the whole window once, to halve the scale once and to move nothing; without one the
full batch's step is not finite, so the accumulated one must not be either. The window after it is one as any other: what of
the poisoned one stays behind (gradients that only a step clears) would end the training, or enter the next step.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accumulation_harness.config import Precision
from accumulation_harness.judge import counters
from accumulation_harness.judge.counters import Counter, Counts, Differences
from accumulation_harness.judge.gates import CLEAR_LEAST
from accumulation_harness.measure.lock_step import REFERENCE, LockStep, Setting, digest_of
from accumulation_harness.measure.optimizer_state import STEP
from accumulation_harness.measure.probe import inside_causes
from accumulation_harness.measure.update import carried
from accumulation_harness.recipes.recipe import Arm, Recipe
from accumulation_harness.referee.gradients import flatten, relative_distance
from accumulation_harness.referee.oracle import WHOLE, State, no_clipping, snapshot
from accumulation_harness.results.measurements import Measurement
from accumulation_harness.system import pytree
from accumulation_harness.system.state import Snapshot, moved, transforming
from accumulation_harness.system.state import snapshot as snapshot_of
from accumulation_harness.workloads import Batch, Workload

DEPENDS_ON = (
    "workload", "norm", "optimizer", "schedule", "clip_norm", "ema_decay", "device", "effective_batch",
    "accumulation_steps", "split", "seed",
)  # fmt: skip


# Of a window that is as any other.
RIGHT_AFTER: Mapping[str, float] = {Counter.after_poison: 1.0, Counter.error_after_poison: 0.0, Counter.left_by_poison: 0.0}


@dataclass(frozen=True, kw_only=True)
class PoisonedWindow:
    """What an arm did with the window."""

    steps: int  # optimizer steps taken in it; 0 where the scaler skipped it, or they moved nothing
    finite: bool  # its weights afterwards
    moved: bool  # weights, optimizer state or moving average are not what they were
    scale_before: float  # of the loss; 1 without a scaler
    scale_after: float  # 0 where the scaler has scaled nothing: the loop has one of its own, or none
    survivors: float  # relative distance of the consumed gradient to that of the finite micro-batches; infinite without a step
    after: Mapping[str, float] = field(default_factory=dict)  # what is wrong of the next window and was not before, by counter
    is_measured: bool = True

    def counters(self) -> Counts:
        """What must be the same as the reference's, exactly."""
        return {
            Counter.poisoned_steps: self.steps,
            Counter.poisoned_finite: self.finite,
            **({Counter.poisoned_scale: self.scale_after / self.scale_before} if self.scale_after else {}),
        }


UNSEEN = PoisonedWindow(steps=0, finite=True, moved=False, scale_before=1, scale_after=1, survivors=math.inf, is_measured=False)


def measurement(
    setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor]
) -> Measurement[dict[str, PoisonedWindow]]:
    """`measure`, as trials of our right arms share it: nothing but the scaler is the precision's.

    Args:
        setting: The trial's task, initial weights and windows.
        recipes: Name of an arm -> its recipe.
        windows: Numbers of the samples of each window.

    Returns:
        What identifies it, and how it is made.
    """
    precision = setting.config.precision
    settings = DEPENDS_ON + {Precision.float16: ("loss_scale",), Precision.float64: ("execution",)}.get(precision, ())
    depends_on = partial(setting.identity, settings, windows, is_scaled=precision == Precision.float16)
    return Measurement("poison", dict[str, PoisonedWindow], depends_on, partial(measure, setting, recipes, windows))


def measure(setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor]) -> dict[str, PoisonedWindow]:
    """Measure what arms do with a micro-batch that is not finite.

    They train `windows[0]` as it is, `windows[1]` with one sample poisoned, and any further one as it is. All in float64,
    with clipping and dropout off. The scaler is the configured precision's; a power of two, so exact in float64.

    Args:
        setting: The trial.
        recipes: Label -> recipe of all arms, the reference (`full`) too.
        windows: Sample ids, [n] int64, of two windows or three.

    Returns:
        Label -> steps, weights and loss scale after the poisoned window.
    """
    if setting.not_float64:
        return dict.fromkeys(recipes, UNSEEN)
    clip_norm = no_clipping(setting.config.clip_norm)
    arms = setting.arms(recipes, dropout=False, precision=Precision.float64, steps=len(windows), clip_norm=clip_norm)
    lock = LockStep(arms, setting.config.seed, offload=setting.offload)
    first, ids, *after = windows
    window = setting.exact.batch(ids)
    places = setting.exact.num_terms(window).nonzero().flatten().cpu()
    sample = window.rows(places[len(places) // 2 :][:1])
    before: dict[str, dict[str, float]] = {}  # what is wrong of a window already, where a later one is looked at
    with poisoned(list(arms.values()), dataclasses.replace(sample, ids=sample.ids[:0])) as asked:
        if after:
            before = _wrong(setting, lock, first)
        else:
            lock.step(first)
    by_outputs = [arm for arm in arms.values() if arm not in asked]
    meeting = Meeting(lock)
    scales = {label: arm.scaler.get_scale() for label, arm in arms.items()}
    with poisoned(list(arms.values()), sample, by_outputs) as met:
        lock.step(ids, around=meeting.around)
    always = {label for label, watch in lock.watches.items() if watch.left_over is not None}  # after a right window too
    found = dict[str, PoisonedWindow]()
    for label, arm in arms.items():
        # What did not meet the sample makes other inputs of the window's rows, and takes other losses than the workload's.
        if arm not in met or {label, REFERENCE} & meeting.refused:
            found[label] = UNSEEN
            continue
        found[label] = PoisonedWindow(
            steps=lock.watches[label].steps_in_window * meeting.moved[label],
            finite=bool(torch.isfinite(flatten(arm.model.parameters())).all()),
            moved=meeting.moved[label],
            scale_before=scales[label],
            scale_after=0.0 if getattr(arm.scaler, "_scale", None) is None else arm.scaler.get_scale(),
            survivors=_survivors(setting, arm, meeting.states.get(label, {}), lock.watches[label].gradient, window, sample.ids),
        )
    for one in after:
        wrong = _wrong(setting, lock, one)
        known = [label for label, own in found.items() if own.is_measured and not before[label] and label not in always]
        found |= {label: dataclasses.replace(found[label], after=wrong[label]) for label in known}
    return found


@dataclass
class Meeting:
    """What the poisoned window does to the arms."""

    lock: LockStep
    states: dict[str, State] = field(default_factory=dict)  # before, of those that consume what is finite
    moved: dict[str, bool] = field(default_factory=dict)  # whether anything of theirs has
    refused: set[str] = field(default_factory=set)  # those that raised

    @contextmanager
    def around(self, label: str) -> Iterator[None]:
        """Around an arm's window."""
        arm, watch, offload = self.lock.arms[label], self.lock.watches[label], self.lock.offload
        before, self.states[label] = _everything(arm), offload.put_all(snapshot(arm.model))
        try:
            yield
        except Exception:  # a loss that refuses what is not finite, an optimizer that decomposes its gradients
            self.refused.add(label)
        pairs = zip(before, _everything(arm), strict=True)
        self.moved[label] = any(not path.endswith(STEP) for pair in pairs for path in moved(*pair))  # but for what counts steps
        if watch.gradient is None or watch.is_lost or not (self.moved[label] or arm.scaler.is_enabled()):
            watch.gradient = None
            del self.states[label]
        offload.release()


def _wrong(setting: Setting, lock: LockStep, ids: Tensor) -> dict[str, dict[str, float]]:
    """Train a window: of each arm the steps, if none, and the error of its gradient, if any, beside the referee's.

    Of an arm whose weights are lost, or whose rows are not known, nothing is said.

    Returns:
        Label -> counter -> value.
    """
    found, referee, window = dict[str, dict[str, float]](), setting.referee(dropout=False), setting.exact.batch(ids)

    @contextmanager
    def around(label: str) -> Iterator[None]:
        arm, watch, state = lock.arms[label], lock.watches[label], snapshot(lock.arms[label].model)
        found[label] = {}
        try:
            yield
        except Exception:  # what refuses a window that is not finite may go on refusing
            return
        rows = torch.cat(arm.seen)
        if not (window.holds(rows) and bool(torch.isfinite(flatten(state[name] for name in referee.names)).all())):
            return
        if watch.gradient is None:
            found[label] = {Counter.after_poison: 0.0} if watch.left_over is None else {Counter.left_by_poison: math.inf}
            return
        cut, sizes = window.in_order(rows), [len(part) for part in arm.seen]
        insides = (WHOLE, *inside_causes(setting).values())
        errors = [relative_distance(watch.gradient, referee.within(state, cut, sizes, one)[1]) for one in insides]
        if not min(errors) <= CLEAR_LEAST:
            name = Counter.error_after_poison if watch.left_over is None else Counter.left_by_poison
            found[label] = {name: math.inf if watch.is_lost else min(errors)}
        setting.offload.release()

    lock.step(ids, around=around)
    return found


def differing(found: Mapping[str, PoisonedWindow], label: str) -> Differences:
    """Compare the counters of an arm with the reference's.

    Without a scaler the reference's weights are lost; an arm that leaves the whole window out, and moves nothing, is no
    worse.

    Args:
        found: What `measure` gave.
        label: The arm.

    Returns:
        Counter -> the arm's value and the reference's, where they differ.
    """
    own, after = found[label], {name: (value, RIGHT_AFTER[name]) for name, value in found[label].after.items()}
    if not own.is_measured or not (own.steps or own.moved or found[REFERENCE].finite):
        return after
    return after | counters.differing(own.counters(), found[REFERENCE].counters(), 0.0)


def _survivors(setting: Setting, arm: Arm, state: State, consumed: Tensor | None, window: Batch, sample: Tensor) -> float:
    """Smallest relative distance of what was `consumed`, if finite, to the window without the micro-batch of the id `sample`."""
    poison = int(sample)
    seen = torch.cat(arm.seen)
    # Where no backward has gone through the micro-batch at all, it is what is missing of the window.
    missing = window.ids[~torch.isin(window.ids, seen)]
    cut = [*arm.seen, missing] if len(missing) else arm.seen
    if consumed is None or not window.holds(torch.cat(cut)):
        return math.inf
    if len(missing) and poison in seen:
        return math.inf
    lost = next(k for k, ids in enumerate(cut) if poison in ids)
    referee, sizes = setting.referee(dropout=False), [len(ids) for ids in cut]
    window, apart = window.in_order(torch.cat(cut)), window.in_order(torch.cat([window.ids[window.ids != poison], sample]))
    kept, terms = (
        [k for k in range(len(cut)) if k != lost],
        [float(n.sum()) for n in setting.exact.num_terms(window).split(sizes)],
    )
    left = sum(terms) - terms[lost]
    # The others as they are, weighted up by terms, or by number.
    factors = (1.0, sum(terms) / left, len(cut) / len(kept)) if left else (1.0,)
    rests = [referee.share(state, window, sizes, kept, inside) for inside in (WHOLE, *inside_causes(setting).values())]
    errors = [relative_distance(consumed, factor * rest) for rest in rests for factor in factors]
    others = referee.share(state, apart, [len(apart) - 1, 1], [0])
    return min(*errors, relative_distance(consumed, _replaced(consumed, rests[0], others)))


def _replaced(consumed: Tensor, survivors: Tensor, others: Tensor) -> Tensor:
    """Predict the window's gradient when entries that are not finite become 0, in the sum or in the lost micro-batch's.

    Args:
        consumed: [P] what the arm consumed.
        survivors: [P] the gradient without the lost micro-batch.
        others: [P] the gradient of all samples but the poisoned one.

    Returns:
        [P], each entry that of `survivors`, of `others`, or 0: the nearest to `consumed`.
    """
    nearest, distance = torch.zeros_like(others), consumed.abs()
    for choice in (survivors, others):
        own = (choice - consumed).abs()
        nearest = torch.where(own < distance, choice, nearest)
        distance = torch.minimum(own, distance)
    return nearest


@contextmanager
def poisoned(arms: Sequence[Arm], sample: Batch, by_outputs: Collection[Arm] = ()) -> Iterator[list[Arm]]:
    """Make the loss of one sample infinite, so that its gradients are not finite, inside a context.

    Args:
        arms: The arms.
        sample: One row, or none.
        by_outputs: Arms whose loss is not their workload's; the output of their model is made infinite instead.

    Yields:
        A list of the arms that have met the sample so far; without one, of those that differentiate their workload's losses.
    """
    met: list[Arm] = []

    def losses(arm: Arm, own: Workload, outputs: Any, batch: Batch) -> Tensor:
        mine = torch.isin(batch.ids, sample.ids)
        found: Tensor = _infinite(own.losses(outputs, batch), mine)
        if len(sample) or transforming():
            met.extend([arm] * (arm not in by_outputs and (not len(sample) or bool(mine.any()))))
        elif found.requires_grad:  # losses may be taken for a log alone
            found.register_hook(lambda _: met.append(arm))
        return found

    def by_inputs(arm: Arm, _model: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:
        rows, own = next(pytree.tensors(inputs)), next(pytree.tensors(sample.inputs))
        if rows.shape[1:] != own.shape[1:]:
            return outputs
        mine = (rows == own.to(rows)).flatten(1).all(1)
        poisoned = _infinite(outputs, mine)
        has_rows = any(own is not other for own, other in zip(pytree.leaves(outputs), pytree.leaves(poisoned), strict=True))
        met.extend([arm] * (has_rows and bool(mine.any())))
        return poisoned

    workloads = [arm.workload for arm in arms]
    handles = [arm.model.register_forward_hook(partial(by_inputs, arm)) for arm in by_outputs]
    for arm in arms:
        arm.workload = copy.copy(own := arm.workload)
        vars(arm.workload)["losses"] = partial(losses, arm, own)
    try:
        yield met
    finally:
        for arm, own in zip(arms, workloads, strict=True):
            arm.workload = own
        for handle in handles:
            handle.remove()


def _infinite(outputs: Any, mine: Tensor) -> Any:
    """The outputs of a forward with the rows `mine` ([n] bool) of every floating tensor multiplied by infinity."""

    def multiplied(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() and len(leaf) == len(mine)):
            return leaf
        factors = torch.where(mine.to(leaf.device, non_blocking=True), math.inf, 1.0).to(leaf)
        return leaf * factors.view(-1, *[1] * (leaf.dim() - 1))

    return pytree.map_leaves(multiplied, outputs)


def _everything(arm: Arm) -> tuple[Snapshot, Snapshot]:
    """Digests of the weights, and of what is carried from step to step, but for buffers."""

    def digest(tensor: Tensor) -> Tensor:
        return torch.tensor(list(bytes.fromhex(digest_of([tensor]))))

    average = None if arm.ema is None else [*arm.ema.module.parameters()]
    return snapshot_of({"weights": [*arm.model.parameters()], "average": average}, digest), carried(arm.optimizer, digest)
