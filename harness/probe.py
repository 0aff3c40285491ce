"""A probe of L0: what an arm's optimizer consumed in a window, beside the referee's gradient and those of known faults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.causes import WindowFacts, hypotheses, stale
from harness.config import Norm
from harness.diagnosis import BATCH, GATE, Attribution, WrongWindow, telling
from harness.gradients import by_group, by_tensor, compare, decompose, flatten, relative_distance
from harness.lock_step import LockStep, Setting
from harness.oracle import WHOLE, Inside, Parts, Referee, State, clipped, running_statistics, snapshot
from harness.recipe import Arm
from harness.update import Before, Update, check_update, is_decays, movement, size
from harness.verdict import worst
from harness.workloads import Batch

REMEMBERED = 4  # windows whose first weights are kept, to recognise a forward with old ones


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
    steps_in_window: tuple[int, int] = (1, 1)  # most optimizer steps in a window, and its micro-batches
    decays_fit: bool = True  # every movement along the weights is what that many decays make
    advanced_error: float = 0.0  # of the state against one that was advanced for every micro-batch
    update: tuple[float, float] = (0.0, 0.0)
    own_state_errors: dict[str, float] = field(default_factory=dict)
    samples: tuple[int, int, int] = (0, 0, 0)  # repeated, missing, foreign

    def add(self, update: Update) -> None:
        self.update = max(self.update, update.parameters, key=size)
        self.decays_fit &= update.decays_fit
        self.advanced_error = worst(self.advanced_error, update.advanced_error)
        for name, error in update.states.items():
            self.own_state_errors[name] = worst(self.own_state_errors.get(name, 0.0), error)


@dataclass(frozen=True)
class Taken:
    """A window as an arm took it, and what its optimizer consumed."""

    arm: Arm
    step: int
    window: Batch  # in the order in which the arm saw its samples
    sizes: list[int]  # of its micro-batches
    consumed: Tensor  # [P]
    state: State  # parameters and buffers at its start


class Probe:
    """Compares what each optimizer consumed with the referee's gradient at the very parameters it was computed at."""

    def __init__(self, setting: Setting, lock: LockStep, referee: Referee) -> None:
        self.setting, self.lock, self.referee = setting, lock, referee
        self.contexts = inside_causes(setting)
        self.states: dict[str, State] = {}
        self.consumed_before: dict[str, Tensor | None] = {}
        self.carried: dict[str, Before] = {}
        self.earlier: dict[str, list[Tensor]] = {label: [] for label in lock.arms}  # weights at the start of earlier windows

    def before(self) -> None:
        """Remember every arm's parameters, buffers and optimizer state at the window's start."""
        for label, arm in self.lock.arms.items():
            self.states[label] = snapshot(arm.model)
            self.consumed_before[label] = self.lock.watches[label].gradient
            self.carried[label] = Before.of(arm)
        self.lock.watch_forwards(True)

    def remember(self) -> None:
        """Keep the weights with which a window, probed or not, began: the very first ones and the last few."""
        for label, arm in self.lock.arms.items():
            kept = self.earlier[label]
            kept.append(flatten(arm.model.parameters()))
            if len(kept) > REMEMBERED:
                del kept[1]

    def after(self, label: str, ids: Tensor, step: int, loss: float, found: Findings) -> None:
        """Add what the arm did with the window `ids` to its findings."""
        arm, watch, state = self.lock.arms[label], self.lock.watches[label], self.states[label]
        self.lock.watch_forwards(False)
        window, seen = self.setting.exact.batch(ids), torch.cat(arm.seen)
        found.probes += 1
        found.steps_in_window = max(found.steps_in_window, (watch.steps_in_window, len(arm.seen)))
        found.samples = _more(found.samples, _sample_counts(seen, ids))
        start = flatten(state[name] for name in self.referee.names)
        if watch.last_forward is not None:
            moved = movement(watch.last_forward - start, start, torch.linalg.vector_norm(start))
            found.moved = max(found.moved, moved, key=size)
            # before the last forward the last decay, and perhaps the first, have not acted
            rate = self.carried[label].learning_rate
            found.decays_fit &= is_decays(moved[0], arm, rate, fewest=len(arm.seen) - 2)
        if watch.gradient is None:
            found.gradient_error = math.nan
            return
        with self.lock.randomness(step):
            exact_loss, gradient = self.referee.loss_and_gradient(state, window)
        exact = clipped(gradient, arm.clip_norm)
        if watch.steps_in_window == 1:
            # A schedule that ticks inside the window is a fault of its own: the step is judged by the rate that it took.
            before = dataclasses.replace(self.carried[label], learning_rate=watch.rate)
            found.add(check_update(self.setting, arm, watch.gradient, start, before))
        error = relative_distance(watch.gradient, exact)
        found.gradient_error = worst(found.gradient_error, error)
        found.unequal_terms |= (
            len({int(self.setting.exact.num_terms(self.setting.exact.batch(part)).sum()) for part in arm.seen}) > 1
        )
        if window.holds(seen):
            terms = self.setting.exact.num_terms(window.in_order(seen)).split([len(part) for part in arm.seen])
            found.unequal_terms |= len({int(n.sum()) for n in terms}) > 1
        if error <= GATE:
            found.loss_error = worst(found.loss_error, abs(loss / exact_loss - 1))
        elif window.holds(seen):
            taken = Taken(arm, step, window.in_order(seen), [len(part) for part in arm.seen], watch.gradient, state)
            found.errors.append(telling(self._errors(label, taken, loss, found), error) if watch.steps_in_window == 1 else {})
            if found.worst is None or not error <= found.worst.distance:
                found.worst = self._wrong_window(taken, exact)

    def _wrong_window(self, taken: Taken, exact: Tensor) -> WrongWindow:
        with self.lock.randomness(taken.step):
            parts = self.referee.parts(taken.state, taken.window, taken.sizes)
        arm, right = taken.arm, [n * len(taken.sizes) / max(1, sum(parts.terms)) for n in parts.terms]

        def attributed(index: slice | Tensor) -> Attribution:
            a, g = taken.consumed[index], exact[index]
            near, apart = compare(a, g), decompose(a, [part[index] for part in parts.parts])
            weights = tuple(w / r if r else math.nan for w, r in zip(apart.weights, right, strict=True))
            return Attribution(
                distance=near.distance,
                scale=near.scale,
                cosine=near.cosine,
                weights=weights,
                residual=apart.residual,
                condition=apart.condition,
            )

        return WrongWindow(
            step=taken.step,
            samples=len(taken.window),
            micro_batches=len(taken.sizes),
            clip_norm=arm.clip_norm,
            whole=attributed(slice(None)),
            groups={name: attributed(index) for name, index in by_group(arm.model, arm.optimizer).items()},
            tensors={name: attributed(index) for name, index in by_tensor(arm.model).items()},
        )

    def _errors(self, label: str, taken: Taken, loss: float, found: Findings) -> dict[str, float]:
        """Cause -> error of its best variant; also beside what the model computes within micro-batches (BatchNorm)."""
        smallest: dict[str, float] = {}
        if not bool(torch.isfinite(taken.consumed).all()):
            return smallest
        arm, several = taken.arm, len(taken.sizes) > 1
        for cause, inside in self.contexts.items() if several else ():
            with self.lock.randomness(taken.step):
                own_loss, gradient, after = self.referee.within(taken.state, taken.window, taken.sizes, inside)
            smallest[cause] = relative_distance(taken.consumed, clipped(gradient, arm.clip_norm))
            if inside.statistics:
                moved = relative_distance(running_statistics(snapshot(arm.model)), running_statistics(after))
                smallest[cause] = worst(smallest[cause], moved)
            if smallest[cause] <= GATE:
                found.loss_error = worst(found.loss_error, abs(loss / own_loss - 1))
                return smallest
        everywhere = {"": WHOLE} | ({f"{cause}+": inside for cause, inside in self.contexts.items()} if several else {})
        for tell in (hypotheses, stale):
            for prefix, inside in everywhere.items():
                for name, gradient in tell(self._facts(label, taken, inside)):
                    cause = prefix + name.partition("#")[0]
                    smallest[cause] = min(smallest.get(cause, math.inf), relative_distance(taken.consumed, gradient))
            if min(smallest.values()) <= GATE:
                break  # weights of earlier windows cost a forward each: only for what nothing else explains
        return smallest

    def _facts(self, label: str, taken: Taken, inside: Inside) -> WindowFacts:
        arm, watch = taken.arm, self.lock.watches[label]

        def parts(state: State) -> Parts:
            with self.lock.randomness(taken.step):
                return self.referee.parts(state, taken.window, taken.sizes, inside)

        of = parts(taken.state)
        return WindowFacts(
            parts=of,
            configured_steps=arm.recipe.accumulation_steps,
            configured_terms=sum(of.terms) / len(taken.window) * self.setting.config.effective_batch,
            max_norm=arm.clip_norm,
            loss_scale=arm.scaler.get_scale(),
            left_over=watch.left_over,
            consumed_before=self.consumed_before[label],
            penalty=self.referee.penalty_gradient(taken.state) if self.setting.exact.penalty else None,
            decay=self.setting.config.optimizer.weight_decay * flatten(taken.state[name] for name in self.referee.names),
            earlier=(self._stale(parts, taken.state, weights) for weights in self.earlier[label][:-1]),
        )

    def _stale(self, parts: Callable[[State], Parts], state: State, weights: Tensor) -> Parts:
        """`parts` of a forward at other `weights`; the penalty is that of the weights themselves."""
        old = {**state, **self._named(weights)}
        of = parts(old)
        if not self.setting.exact.penalty:
            return of
        difference = self.referee.penalty_gradient(state) - self.referee.penalty_gradient(old)
        return Parts(tuple(part + difference for part in of.parts), of.terms)

    def _named(self, flat: Tensor) -> State:
        shapes = [parameter.shape for parameter in self.referee.model.parameters()]
        pieces = flat.split([shape.numel() for shape in shapes])
        return {name: piece.view(shape) for name, piece, shape in zip(self.referee.names, pieces, shapes, strict=True)}


def inside_causes(setting: Setting) -> dict[str, Inside]:
    """What this trial's model and loss compute within a micro-batch, by the cause that it has when they are accumulated."""
    coupling, causes = setting.exact.coupling, {}
    if setting.config.norm == Norm.batch:
        causes[BATCH] = Inside(statistics=True)
    if coupling:
        causes[coupling] = Inside(loss=True)
    if len(causes) == 2:
        causes[f"{BATCH}+{coupling}"] = Inside(statistics=True, loss=True)
    return causes


def _sample_counts(seen: Tensor, wanted: Tensor) -> tuple[int, int, int]:
    """(samples used more than once, samples of the window not seen, samples seen that are not the window's)."""
    known = seen[seen >= 0]  # others have no id
    used, counts = known.unique(return_counts=True)
    foreign = int((~torch.isin(used, wanted)).sum()) + len(seen) - len(known)
    return int((counts - 1).sum()), int((~torch.isin(wanted, seen)).sum()), foreign


def _more(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])
