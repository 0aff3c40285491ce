"""A probe of L0: what an arm's optimizer consumed in a window, beside the referee's gradient and those of known faults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from harness.config import Norm
from harness.judge.diagnosis import BATCH, GATE, Attribution, WrongWindow, telling
from harness.judge.verdict import worst
from harness.measure.lock_step import REFERENCE, LockStep, Setting
from harness.measure.update import Before, Update, check_update, is_decays, movement, size
from harness.recipes.hand_written import FOREIGN, NO_SAMPLE
from harness.recipes.recipe import Arm
from harness.referee.gradients import by_group, by_tensor, compare, decompose, flatten, relative_distance
from harness.referee.hypotheses import WindowFacts, hypotheses, partly, stale
from harness.referee.oracle import WHOLE, Inside, Parts, Referee, State, clipped, running_statistics, snapshot
from harness.workloads import Batch

REMEMBERED = 4, 16  # windows, at least and at most, whose first weights are kept, to recognise a forward with old ones
REMEMBERED_BYTES = 2**26  # that these may take, of one arm


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
    beside: list[dict[str, float]] = field(default_factory=list)  # of windows with other samples: the same, for those samples
    loss_error: float = 0.0
    moved: tuple[float, float] = (0.0, 0.0)  # how far inside a window, and its cosine with the weights
    steps_in_window: tuple[int, int] = (1, 1)  # most optimizer steps in a window, and its micro-batches
    decays_fit: bool = True  # every movement along the weights is what that many decays make
    steps_before_last_forward: int = 0  # most optimizer steps in a window before the last forward that a backward went through
    skipped: int = 0  # windows in which the reference stepped and the arm did not
    advanced_error: float = 0.0  # of the state against one that was advanced for every micro-batch
    average_error: float = 0.0  # of the moving average against one that was moved for every micro-batch
    update: tuple[float, float] = (0.0, 0.0)
    own_state_errors: dict[str, float] = field(default_factory=dict)
    samples: tuple[int, int, int, int] = (0, 0, 0, 0)  # repeated, missing, of other windows, no training samples at all

    def add(self, update: Update) -> None:
        self.update = max(self.update, update.parameters, key=size)
        self.decays_fit &= update.decays_fit
        self.advanced_error = worst(self.advanced_error, update.advanced_error)
        if not update.states.get("ema", 0.0) <= GATE:
            self.average_error = worst(self.average_error, update.average_error)
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
    stale: Tensor | None = None  # [P] weights of an earlier window that its last forward has used


class Probe:
    """Compares what each optimizer consumed with the referee's gradient at the very parameters it was computed at."""

    def __init__(self, setting: Setting, lock: LockStep, referee: Referee) -> None:
        self.setting, self.lock, self.referee = setting, lock, referee
        self.contexts = inside_causes(setting)
        self.states: dict[str, State] = {}
        self.consumed_before: dict[str, Tensor | None] = {}
        self.carried: dict[str, Before] = {}
        self.earlier: dict[str, list[Tensor]] = {label: [] for label in lock.arms}  # weights at the start of earlier windows
        self.started: dict[str, set[tuple[float, float]]] = {label: set() for label in lock.arms}  # fingerprints of all of them

    def before(self) -> None:
        """Remember every arm's parameters, buffers and optimizer state at the window's start."""
        for label, arm in self.lock.arms.items():
            self.states[label] = snapshot(arm.model)
            self.consumed_before[label] = self.lock.watches[label].gradient
            self.carried[label] = Before.of(arm)
        self.lock.watch_forwards(True)

    def remember(self) -> None:
        """Keep the weights with which a window, probed or not, began: the very first ones and the last ones."""
        for label, arm in self.lock.arms.items():
            kept = self.earlier[label]
            kept.append(flatten(arm.model.parameters()))
            self.started[label].add(fingerprint(kept[-1]))
            least, most = REMEMBERED
            if len(kept) > max(least, min(most, REMEMBERED_BYTES // kept[-1].nbytes)):
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
        stale = self._stale_forward(label, start)
        found.steps_before_last_forward = max(found.steps_before_last_forward, watch.steps_before_last_forward)
        if watch.last_forward is not None and stale is None:
            moved = movement(watch.last_forward - start, start, torch.linalg.vector_norm(start))
            found.moved = max(found.moved, moved, key=size)
            # before the last forward the last decay, and perhaps the first, have not acted
            rate = self.carried[label].learning_rate
            found.decays_fit &= is_decays(moved[0], arm, rate, fewest=len(arm.seen) - 2)
        if watch.gradient is None:
            found.gradient_error = math.nan
            found.skipped += self.lock.watches[REFERENCE].steps_in_window > 0
            return
        with self.lock.randomness(step):
            exact_loss, gradient = self.referee.loss_and_gradient(state, window)
        exact = clipped(gradient, arm.clip_norm)
        if watch.steps_in_window == 1:
            # A schedule that ticks inside the window is a fault of its own: the step is judged by the rate that it took.
            before = dataclasses.replace(self.carried[label], learning_rate=watch.rate)
            parts = partial(self._parts_of, label, window, state, step)
            found.add(check_update(self.setting, arm, watch.gradient, start, before, parts))
        error = relative_distance(watch.gradient, exact)
        found.gradient_error = worst(found.gradient_error, error)
        found.unequal_terms |= (
            len({int(self.setting.exact.num_terms(self.setting.exact.batch(part)).sum()) for part in arm.seen}) > 1
        )
        if window.holds(seen):
            terms = self.setting.exact.num_terms(window.in_order(seen)).split([len(part) for part in arm.seen])
            found.unequal_terms |= len({int(n.sum()) for n in terms}) > 1
        if error <= GATE:
            found.loss_error = worst(found.loss_error, loss_error(arm, loss, exact_loss))
        elif window.holds(seen):
            taken = Taken(arm, step, window.in_order(seen), [len(part) for part in arm.seen], watch.gradient, state, stale)
            found.errors.append(telling(self._errors(label, taken, loss, found), error) if watch.steps_in_window == 1 else {})
            if found.worst is None or not error <= found.worst.distance:
                found.worst = self._wrong_window(taken, exact)
        elif watch.steps_in_window == 1 and bool((seen >= 0).all()):
            found.beside.append(self._beside(label, arm, step, window, watch.gradient, state))

    def _beside(self, label: str, arm: Arm, step: int, window: Batch, consumed: Tensor, state: State) -> dict[str, float]:
        """Cause -> error of its best variant, of the samples that the arm saw in place of its window's; "": no other cause."""
        seen = self.setting.exact.batch(torch.cat(arm.seen))
        taken = Taken(arm, step, seen, [len(part) for part in arm.seen], consumed, state)
        facts, smallest = self._facts(label, taken, WHOLE), dict[str, float]()
        share = sum(facts.parts.terms) / float(self.setting.exact.num_terms(window).sum())
        alone = [("", clipped(times * facts.parts.gradient, arm.clip_norm)) for times in (1, share)]
        keep_smallest(smallest, consumed, (*alone, *hypotheses(facts)))
        return smallest

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
                found.loss_error = worst(found.loss_error, loss_error(arm, loss, own_loss))
                return smallest
        everywhere = {"": WHOLE} | ({f"{cause}+": inside for cause, inside in self.contexts.items()} if several else {})
        for tell in (hypotheses, stale):
            for prefix, inside in everywhere.items():
                keep_smallest(smallest, taken.consumed, tell(self._facts(label, taken, inside)), prefix)
            if min(smallest.values()) <= GATE:
                return smallest  # weights of earlier windows cost a forward each: only for what nothing else explains
        keep_smallest(smallest, taken.consumed, partly(self._facts(label, taken, WHOLE), taken.consumed))
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
            earlier=(self._stale(parts, taken.state, weights) for weights in self._earlier(label, taken)),
            tensors=[parameter.numel() for parameter in self.referee.model.parameters()],
        )

    def _earlier(self, label: str, taken: Taken) -> list[Tensor]:
        """Weights of earlier windows: those a forward was seen to use, then those that are remembered."""
        return ([] if taken.stale is None else [taken.stale]) + self.earlier[label][:-1]

    def _stale_forward(self, label: str, start: Tensor) -> Tensor | None:
        """The weights of the window's last forward, if they are not those it began with but exactly those an earlier one did."""
        used = self.lock.watches[label].last_forward
        if used is None or torch.equal(used, start) or fingerprint(used) not in self.started[label]:
            return None
        return used

    def _parts_of(self, label: str, window: Batch, state: State, step: int) -> Parts | None:
        """The micro-batch gradients of a window; None where the arm saw others than its samples."""
        seen = self.lock.arms[label].seen
        if not window.holds(torch.cat(seen)):
            return None
        with self.lock.randomness(step):
            return self.referee.parts(state, window.in_order(torch.cat(seen)), [len(part) for part in seen])

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


def keep_smallest(smallest: dict[str, float], consumed: Tensor, variants: Iterable[tuple[str, Tensor]], prefix: str = "") -> None:
    """By cause, the smallest relative distance of `consumed` to the cause's variants, in place."""
    for name, gradient in variants:
        cause = prefix + name.partition("#")[0]
        smallest[cause] = min(smallest.get(cause, math.inf), relative_distance(consumed, gradient))


def fingerprint(weights: Tensor) -> tuple[float, float]:
    """Two numbers that weights have in common only when they are the same, or as good as."""
    return float(weights.sum()), float(weights @ weights)


def loss_error(arm: Arm, reported: float, exact: float) -> float:
    """Relative; zero within the format that the loss was reported in."""
    error = abs(reported / exact - 1)
    return 0.0 if error <= arm.loss_resolution else error


def _sample_counts(seen: Tensor, wanted: Tensor) -> tuple[int, int, int, int]:
    """(samples used more than once, samples of the window not seen, samples of other windows, rows that are no samples)."""
    known = seen[seen >= 0]  # others have no id
    used, counts = known.unique(return_counts=True)
    foreign = int((~torch.isin(used, wanted)).sum()) + int((seen == FOREIGN).sum())
    return int((counts - 1).sum()), int((~torch.isin(wanted, seen)).sum()), foreign, int((seen == NO_SAMPLE).sum())


def _more(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])
