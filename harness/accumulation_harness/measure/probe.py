"""A probe of L0: what an arm's optimizer consumed in a window, beside the referee's gradient and those of known faults."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from accumulation_harness.judge.cause import Cause, Causes
from accumulation_harness.judge.gates import ALGEBRA_GATE, CLEAR_LEAST, COMPARABLE, RESOLVED
from accumulation_harness.judge.signature import Attribution, Errors, Samples, Signature, WrongWindow, clearly_nearer
from accumulation_harness.measure.lock_step import REFERENCE, Forward, LockStep, Setting
from accumulation_harness.measure.optimizer_state import state_tensors
from accumulation_harness.measure.update import Before, check_update, decayed, movement
from accumulation_harness.recipes.determinism import set_random_state
from accumulation_harness.recipes.hand_written import FOREIGN, NO_SAMPLE
from accumulation_harness.recipes.recipe import Arm
from accumulation_harness.referee.gradients import by_group, by_tensor, compare, decompose, flatten, relative_distance
from accumulation_harness.referee.hypotheses import Hypothesis, WindowFacts, counted, hypotheses, partly, stale
from accumulation_harness.referee.oracle import (
    WHOLE,
    Inside,
    Loss,
    Parts,
    Referee,
    State,
    clipped,
    running_statistics,
    snapshot,
)
from accumulation_harness.workloads import Batch

Computed = Callable[[State], tuple[Loss, Tensor]]  # a window's objective and its gradient [P], at a state
FEW_ULPS = 2.0**-50  # relative, of float64: what a dot product rounds
REMEMBERED = 4, 16  # windows, at least and at most, whose first weights are kept, to recognise a forward with old ones
REMEMBERED_BYTES = 2**26  # that these may take, of one arm


@dataclass(frozen=True)
class ConsumedWindow:
    """A window as an arm saw it, and the gradient that its optimizer consumed."""

    arm: Arm
    step: int
    window: Batch
    consumed: Tensor  # [P]
    state: State  # parameters and buffers at its start
    stale: Tensor | None  # [P] weights of an earlier window that its last forward has used
    exact: Tensor  # [P] the referee's gradient at its start
    draws: Sequence[Forward] = ()  # of its forwards, where they are looked at
    is_cut: bool = False  # whether the arm left rows of the window out, none with loss terms

    @cached_property
    def rows(self) -> list[Tensor]:
        """The ids of each micro-batch's samples; one that is met again (another forward, a second view) counts the first time."""
        met, rows = set[int](), list[Tensor]()
        for part in self.arm.seen:
            new = [i for i in dict.fromkeys(part.tolist()) if i not in met]
            met.update(new)
            rows += [torch.tensor(new, dtype=part.dtype, device=part.device)] if new else []
        return rows if rows and self.required.holds(torch.cat(rows)) else self.arm.seen

    def clipped(self, gradient: Tensor) -> Tensor:
        """A gradient as the arm would clip it."""
        return clipped(gradient, self.arm.clip_norm, self.arm.recipe.clip_epsilon)

    @cached_property
    def required(self) -> Batch:
        """The window but for rows without loss terms that the arm left out."""
        return self.arm.workload.required(self.window, torch.cat(self.arm.seen))

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch."""
        return [len(part) for part in self.rows]

    @property
    def is_whole(self) -> bool:
        """Whether the arm saw the window's samples with loss terms, and no other window's."""
        return self.required.holds(torch.cat(self.rows))

    @property
    def in_its_order(self) -> ConsumedWindow:
        """With the window's rows as the arm saw them, of one that `is_whole`."""
        is_cut = self.is_cut or len(self.required) < len(self.window)
        return dataclasses.replace(self, window=self.required.in_order(torch.cat(self.rows)), is_cut=is_cut)


@dataclass(frozen=True)
class Within:
    """A window's gradient with what the model computes within micro-batches, beside what was consumed."""

    errors: Errors = field(default_factory=dict)
    resolved: Errors = field(default_factory=dict)  # what float64 resolves of those that are not exact
    loss_error: float = 0.0  # of the reported loss, where it is exact
    statistics_error: float = 0.0  # of the running statistics, likewise

    @property
    def is_exact(self) -> bool:
        """Whether it gives what was consumed."""
        return min(self.errors.values(), default=math.inf) <= ALGEBRA_GATE


class NotRemembered(Exception):
    """What is wrong in a window takes earlier windows to name."""


class Probe:
    """Compares what each optimizer consumed with the referee's gradient at the very parameters it was computed at."""

    def __init__(
        self, setting: Setting, lock: LockStep, referee: Referee, *, remembers: bool, by: float = FEW_ULPS, draws: bool = False
    ) -> None:
        """`remembers`: keeps weights and gradients of earlier windows, without which `after` raises `NotRemembered`.

        `by`: what the arms' format resolves of a weight, relative; `draws`: the models draw random numbers.
        """
        self.setting, self.lock, self.referee, self.remembers, self.by = setting, lock, referee, remembers, by
        self.contexts = inside_causes(setting)
        self.drawn = drawn_inside(self.contexts) if draws else {}
        self.arms = {label: arm for label, arm in lock.arms.items() if lock.watches[label].compares}
        self.states: dict[str, State] = {}
        self.usual: Tensor | None = None  # [P] the reference's weights at the start of the window
        self.consumed_before: dict[str, Tensor | None] = {}
        self.carried: dict[str, Before] = {}
        self.earlier: dict[str, list[Tensor]] = {label: [] for label in lock.arms}  # weights at the start of earlier windows
        self.started: dict[str, set[tuple[float, float]]] = {label: set() for label in lock.arms}  # fingerprints of all of them
        self.furthest = dict.fromkeys(lock.arms, -1.0)  # relative error of the worst gradient so far, which is taken apart

    def before(self, label: str) -> None:
        """Keep an arm's parameters, buffers and optimizer state at the window's start, until `after` or `forget`."""
        arm, watch, offload = self.lock.arms[label], self.lock.watches[label], self.setting.offload
        state = snapshot(arm.model)
        watch.began = offload.put(flatten(state[name] for name in self.referee.names))
        self.states[label] = offload.put_all(state | self._named(watch.began))
        if label == REFERENCE:
            self.usual = watch.began
        if self.remembers:
            self.consumed_before[label] = watch.gradient if watch.written is None else watch.written
        self.carried[label] = carried = Before.of(arm)
        for parameter, name in zip(carried.parameters, self.referee.names, strict=True):
            if parameter.dtype == state[name].dtype:
                parameter.data = self.states[label][name]  # the same numbers: they are there once
        offload.settle([*carried.parameters, *state_tensors(carried.optimizer)])

    def forget(self, label: str) -> None:
        """Let go of what is kept of the arm for this window."""
        watch = self.lock.watches[label]
        watch.began = watch.last_forward = None
        if not self.remembers:
            watch.gradient = watch.written = None
        del self.states[label]
        self.carried.pop(label, None)

    def remember(self) -> None:
        """Keep the weights with which a window, probed or not, began: the very first ones and the last ones."""
        for label, arm in self.arms.items():
            start, kept = flatten(arm.model.parameters()), self.earlier[label]
            self.started[label].add(_fingerprint(start))
            if not self.remembers:
                continue
            kept.append(self.setting.offload.put(start))
            self.setting.offload.release()
            least, most = REMEMBERED
            if len(kept) > max(least, min(most, REMEMBERED_BYTES // (8 * self.setting.num_parameters))):
                del kept[1]

    def after(self, label: str, ids: Tensor, step: int) -> Signature:
        """What the arm did with the window `ids`."""
        arm, watch, state = self.lock.arms[label], self.lock.watches[label], self.states[label]
        start, watch.began, loss = watch.began, None, watch.loss.item()
        assert start is not None
        window = self.setting.exact.batch(ids)
        self.setting.offload.release()
        stale = self._stale_forward(label)
        found = self._inside(label, window, start, stale)
        if watch.gradient is None:
            skipped = int(self.lock.watches[REFERENCE].steps_in_window > 0)
            return dataclasses.replace(found, gradient_error=math.nan, skipped_windows=skipped)
        seen = ConsumedWindow(arm, step, window, watch.gradient, state, stale, exact=watch.gradient, draws=watch.draws)
        if not watch.is_lost and watch.steps_in_window == 1 and watch.taken is not None:
            # A schedule that ticks inside the window is a fault of its own: the step is judged by the rates that it took.
            parts = partial(self._parts, seen.in_its_order) if seen.is_whole else lambda: None
            update = check_update(self.setting, arm, watch.gradient, watch.taken, start, self.carried[label], parts)
            found = found.merged(update)
        del self.carried[label]
        exact_loss, gradient = self._at(seen)(state)
        gradient = self.setting.offload.put(gradient)
        self.setting.offload.release()
        seen = dataclasses.replace(seen, exact=gradient)
        if watch.is_lost:
            return found.merged(self._lost(seen, start))
        found = found.merged(self._gradient(label, seen, gradient, loss, exact_loss))
        reproduced = min((error for window_errors in found.wrong_windows for error in window_errors.values()), default=math.inf)
        # Rows may be other views of the window's, be used twice for a part of the loss each, or have no gradient.
        is_known = min(found.gradient_error, reproduced) <= ALGEBRA_GATE
        return dataclasses.replace(found, samples=Samples()) if is_known else found

    def jump(self, label: str, ids: Tensor, step: int) -> float:
        """The relative distance of the exact gradients at the arm's weights and at the reference's, all else being the arm's."""
        assert self.usual is not None
        state, window = self.states[label], self.setting.exact.batch(ids)

        def gradient(state: State) -> Tensor:
            with self.lock.randomness(step):
                return self.referee.gradient(state, window)

        return relative_distance(gradient(state), gradient({**state, **self._named(self.usual)}))

    def _lost(self, seen: ConsumedWindow, start: Tensor) -> Signature:
        """Of a consumed gradient that is not finite: wrong where the window's own is well within range, else not measured."""
        if not _in_range(start, seen.exact):
            return Signature(gradient_error=math.nan)
        contexts = self._contexts(seen.in_its_order).items() if seen.is_whole else ()
        known = {causes: self._at(seen.in_its_order, inside)(seen.state)[1] for causes, inside in contexts}
        whole = Attribution(distance=math.inf, scale=math.inf)
        return Signature(
            gradient_error=math.inf,
            wrong_windows=({causes: 0.0 for causes, one in known.items() if not bool(torch.isfinite(one).all())},),
            worst_window=WrongWindow(step=seen.step, whole=whole),
        )

    def _inside(self, label: str, window: Batch, start: Tensor, stale: Tensor | None) -> Signature:
        """What happened inside the window, whatever was consumed at its end."""
        arm, watch = self.lock.arms[label], self.lock.watches[label]
        seen = torch.cat(arm.seen)
        found = Signature(
            probes=1,
            steps_in_window=max((1, 1), (watch.steps_in_window, len(arm.seen))),
            steps_before_last_forward=watch.steps_before_last_forward,
            samples=_count_samples(seen, arm.workload.required(window, seen).ids, arm.strangers),
        )
        if watch.last_forward is None or stale is not None:
            return found
        before = self.carried[label]
        decay = before.decay(before.rates)
        moved = movement(watch.last_forward - start, decayed(start, decay), torch.linalg.vector_norm(start))
        return dataclasses.replace(found, moved=moved)

    def _gradient(self, label: str, seen: ConsumedWindow, gradient: Tensor, loss: float, exact_loss: Loss) -> Signature:
        """The consumed gradient beside the window's own [P], clipped, and beside those of the causes where it is wrong."""
        arm, samples = seen.arm, torch.cat(seen.arm.seen)
        taken = seen.in_its_order if seen.is_whole else None
        exact = seen.clipped(gradient)
        stepped_once = self.lock.watches[label].steps_in_window == 1
        error = relative_distance(seen.consumed, exact)
        found = Signature(gradient_error=error, unequal_terms=self._unequal_terms(seen))
        whole = self._at(seen)
        resolution = 0.0
        if error > ALGEBRA_GATE:
            resolution = self._resolved(seen, error, (exact_loss, gradient))
            if RESOLVED * resolution < error <= CLEAR_LEAST:
                resolution = max([resolution, *(relative_distance(one, gradient) for one in self._added_up(seen))])
        if error <= max(ALGEBRA_GATE, RESOLVED * resolution):
            if (off := self._worst_tensor(seen, gradient)) > ALGEBRA_GATE:  # no fault is told by the gradient as a whole
                known = self._small_within(seen) if stepped_once and seen.is_whole else {}
                worst = None if taken is None else self._wrong_window(taken, exact)
                return dataclasses.replace(found, gradient_error=off, wrong_windows=(known,), worst_window=worst)
            own = [self._loss_error(seen, loss, (exact_loss, gradient), whole)]
            if own[0] > ALGEBRA_GATE and taken is not None:
                own += [loss_error(arm, loss, self._at(taken, one)(taken.state)[0]) for one in self._contexts(taken).values()]
            return dataclasses.replace(
                found, gradient_error=error if error <= ALGEBRA_GATE else 0.0, resolution=resolution, loss_error=min(own)
            )
        if not _in_range(seen.consumed, gradient):
            return dataclasses.replace(found, gradient_error=math.nan)
        if taken is not None:
            within = self._within(taken, loss) if stepped_once else Within()
            is_known = within.is_exact or not stepped_once or not bool(torch.isfinite(taken.consumed).all())
            errors = within.errors if is_known else self._errors(label, taken, within)
            is_furthest, self.furthest[label] = not error <= self.furthest[label], max(error, self.furthest[label])
            return dataclasses.replace(
                found,
                wrong_windows=(clearly_nearer(errors, error),),
                worst_window=self._wrong_window(taken, exact) if is_furthest else None,
                loss_error=within.loss_error,
                statistics_error=within.statistics_error,
                replayed=0 < len(taken.sizes) <= len(taken.draws),
            )
        if stepped_once and len(samples) and bool((samples >= 0).all()):
            return dataclasses.replace(found, other_samples=(self._beside(label, seen),))
        return found

    def _resolved(self, seen: ConsumedWindow, error: float, exact: tuple[Loss, Tensor], inside: Inside = WHOLE) -> float:
        """What float64 resolves of a gradient off by `error`, as far as that can decide; `exact`: as `inside` gives it."""
        resolution = self._resolution(seen, exact, self._at(seen, inside), error)[1]
        return self._bounded(resolution, self._again(seen, inside), exact[1]) if error <= RESOLVED * resolution else resolution

    def _worst_tensor(self, seen: ConsumedWindow, gradient: Tensor, inside: Inside = WHOLE) -> float:
        """The largest relative error of a tensor whose gradient is small beside the whole; zero where float64 resolves no more.

        `gradient`: the window's, with what `inside` says computed within micro-batches. Clipping hands what the largest tensors
        round on to all others.

        Returns:
            A relative error ||a - g|| / ||g|| over the elements of one tensor.
        """
        places, compute = list(by_tensor(self.referee.model).values()), self._at(seen, inside)
        exact = seen.clipped(gradient)
        lengths, gaps = (
            torch.stack(torch._foreach_norm([one[place] for place in places])) for one in (exact, seen.consumed - exact)
        )
        suspects = (gaps > ALGEBRA_GATE * lengths) & (lengths > FEW_ULPS * torch.linalg.vector_norm(exact))
        if not bool(suspects.any()):
            return 0.0
        others = [*(compute(state)[1] for state in self._moved_by_rounding(seen)), *self._added_up(seen, inside)]
        moved = [seen.clipped(one) for one in others]
        again, worst_error = self._again(seen, inside), 0.0
        for k in suspects.nonzero().flatten().tolist():
            resolved = max(relative_distance(one[places[k]], exact[places[k]]) for one in moved)
            resolved = self._bounded(resolved, again[places[k]], gradient[places[k]])
            error = float(gaps[k] / lengths[k])
            worst_error = max(worst_error, error if error > RESOLVED * resolved else 0.0)
        return worst_error

    def _small_within(self, seen: ConsumedWindow) -> Errors:
        """What is computed within micro-batches, where that gives small tensors as they are; nothing where it does not."""
        taken = seen.in_its_order
        for causes, inside in self._contexts(taken).items():
            if self._worst_tensor(taken, self._at(taken, inside)(taken.state)[1], inside) <= ALGEBRA_GATE:
                return {causes: 0.0}
        return {}

    def _contexts(self, taken: ConsumedWindow) -> dict[Causes, Inside]:
        """What may be computed within the window's micro-batches."""
        own = self.contexts if len(taken.sizes) > 1 or taken.is_cut or self.setting.exact.orders_rows else {}
        return {**own, **(self.drawn if len(taken.draws) >= len(taken.sizes) else {})}

    @contextmanager
    def _drawing(self, taken: ConsumedWindow, inside: Inside) -> Iterator[None]:
        """With the window's draws; those of forwards inside it begin where the arm's began."""
        began_at = iter([own.began_at for own in taken.draws] if inside.draws else [])

        def begin(*_: object) -> None:
            if (state := next(began_at, None)) is not None:
                set_random_state(state, self.setting.device)

        with self.lock.randomness(taken.step):
            handle = self.referee.model.register_forward_pre_hook(begin)
            try:
                yield
            finally:
                handle.remove()

    def _at(self, taken: ConsumedWindow, inside: Inside = WHOLE, of: Literal[1, 2] = 1) -> Computed:
        """The window's objective and gradient (`of` 2: the running statistics after it) by the state, as `inside` says."""

        def compute(state: State) -> tuple[Loss, Tensor]:
            with self._drawing(taken, inside):
                found = self.referee.within(state, taken.window, taken.sizes, inside)
            return found[0], found[of]

        return compute

    def _parts(self, taken: ConsumedWindow, inside: Inside = WHOLE, state: State | None = None) -> Parts:
        """The window's gradient by micro-batches, at its own state unless told."""
        with self._drawing(taken, inside):
            return self.referee.parts(state or taken.state, taken.window, taken.sizes, inside)

    def _added_up(self, seen: ConsumedWindow, inside: Inside = WHOLE) -> list[Tensor]:
        """The window's gradient [P] as a sum over micro-batches in the arm's order, of one that `is_whole`.

        Where gradients of rows cancel and the loss is linear in the weights, this alone shows what their sum is rounded to.

        Returns:
            The gradient, or nothing.
        """
        return [self._parts(seen.in_its_order, inside).gradient] if seen.is_whole else []

    def _again(self, seen: ConsumedWindow, inside: Inside = WHOLE) -> Tensor:
        """[P] the window's gradient at the same weights, rounded otherwise: by forwards of its micro-batches.

        Where these compute something else (BatchNorm), with the rows of each in the opposite order.

        Returns:
            The gradient; NaN where its rows are not known, or their order matters.
        """
        if not seen.is_whole or self.setting.exact.orders_rows or self.setting.exact.is_stateful:
            return torch.full_like(seen.exact, math.nan)
        if not any(one.statistics for one in self.contexts.values()):
            return self._at(seen.in_its_order, dataclasses.replace(inside, statistics=True))(seen.state)[1]
        turned = self.setting.exact.batch(torch.cat([part.flip(0) for part in seen.rows]))
        return self._at(dataclasses.replace(seen, window=turned), inside)(seen.state)[1]

    def _bounded(self, resolution: float, again: Tensor, exact: Tensor) -> float:
        """A resolution, but no more than COMPARABLE times what the gradient `again`, at the same weights, shows.

        Weights that stand on a kink (pruned, clipped to a limit, the largest of a quantised row) leave it when they are moved,
        and what moves then is no rounding of the loop's.

        Returns:
            The smaller one; the resolution as it is where `again` is not known.
        """
        bound = COMPARABLE * max(relative_distance(again, exact), self.by)  # NaN stays
        return resolution if math.isnan(bound) else min(resolution, bound)

    def _moved_by_rounding(self, seen: ConsumedWindow) -> Iterator[State]:
        """Three states with weights moved by a few units in the last place, but those of which nothing depends smoothly.

        A weight without any gradient may be read in steps (a sign, a whole number), which a move of the least size would
        change.

        Yields:
            Parameters and buffers.
        """
        generator, slopes = self.setting.generator(seen.step), self._named(seen.exact)
        for _ in range(3):
            moved = {name: moved_by_rounding(seen.state[name], generator, self.by) for name in self.referee.names}
            yield seen.state | {name: torch.where(slopes[name] == 0, seen.state[name], one) for name, one in moved.items()}

    def _loss_error(self, seen: ConsumedWindow, reported: float, exact: tuple[Loss, Tensor], compute: Computed) -> float:
        """The error of the reported loss; zero where float64 does not resolve more of the loss itself."""
        error = loss_error(seen.arm, reported, exact[0])
        return 0.0 if error > ALGEBRA_GATE and error <= RESOLVED * self._resolution(seen, exact, compute, error)[0] else error

    def _resolution(
        self, seen: ConsumedWindow, exact: tuple[Loss, Tensor], compute: Computed, error: float
    ) -> tuple[float, float]:
        """Of a loss l and its gradient g: |l(theta') - l| / magnitude and ||g(theta') - g|| / ||g||, each the largest of three.

        Of fewer where `error` is COMPARABLE times what it is compared with, which no further one changes.

        `exact` is (l, g) as `compute` gives them at the weights theta themselves.

        theta' is moved by a few units in the last place at random. Two right ways to compute l and g in float64 are no nearer
        to each other than about this, since each rounds as much on its way. It is large where the samples' gradients cancel, at
        the end of a training for example, and where weights have decayed so far that rounding is all there is.

        Returns:
            The two numbers, of the loss and of its gradient.
        """
        of_loss = of_gradient = 0.0
        for loss, gradient in map(compute, self._moved_by_rounding(seen)):
            of_loss, of_gradient = (
                max(of_loss, exact[0].error(loss.value)),
                max(of_gradient, relative_distance(gradient, exact[1])),
            )
            if error > COMPARABLE * RESOLVED * max(of_loss, of_gradient):
                break
        return of_loss, of_gradient

    def _unequal_terms(self, seen: ConsumedWindow) -> bool:
        """Whether the micro-batches, as the data has them or as the window does, have different numbers of loss terms."""
        exact = self.setting.exact
        terms = {exact.num_terms(exact.batch(part)).sum().item() for part in seen.arm.seen if len(part)}
        if len(terms) == 1 and seen.is_whole:
            terms = {n.sum().item() for n in exact.num_terms(seen.in_its_order.window).split(seen.sizes)}
        return len(terms) > 1

    def _beside(self, label: str, seen: ConsumedWindow) -> Errors:
        """Causes -> error of their best variant, of the samples that the arm saw in place of its window's."""
        other = dataclasses.replace(seen, window=self.setting.exact.batch(torch.cat(seen.arm.seen)), stale=None)
        facts = self._facts(label, other, WHOLE)
        share = sum(facts.parts.terms) / float(self.setting.exact.num_terms(seen.window).sum())
        alone = (facts.clipped(times * facts.parts.gradient) for times in (1, share))
        smallest: dict[Causes, float] = {(): min(relative_distance(seen.consumed, gradient) for gradient in alone)}
        _keep_smallest(smallest, seen.consumed, hypotheses(facts))
        return smallest

    def _wrong_window(self, taken: ConsumedWindow, exact: Tensor) -> WrongWindow:
        self.setting.offload.release()
        parts = self._parts(taken)
        arm, right = taken.arm, [n * len(taken.sizes) / (sum(parts.terms) or 1) for n in parts.terms]

        def attributed(*places: slice) -> Attribution:
            def own(vector: Tensor) -> Tensor:
                pieces = [vector[place] for place in places]
                return pieces[0] if len(pieces) == 1 else self.setting.offload.put(torch.cat(pieces))

            a = own(taken.consumed)
            near, apart = compare(a, own(exact)), decompose(a, [own(part) for part in parts.parts])
            weights = tuple(w / r if r else math.nan for w, r in zip(apart.weights, right, strict=True))
            return Attribution(**vars(near), **(vars(apart) | {"weights": weights}))

        return WrongWindow(
            step=taken.step,
            whole=attributed(slice(None)),
            groups={name: attributed(*places) for name, places in by_group(arm.model, arm.optimizer).items()},
            tensors={
                name: relative_distance(taken.consumed[place], exact[place]) for name, place in by_tensor(arm.model).items()
            },
        )

    def _within(self, taken: ConsumedWindow, loss: float) -> Within:
        """What the model computes within the micro-batches (BatchNorm), up to the first of it that gives what was consumed.

        Returns:
            The errors; those of the reported `loss` and of the running statistics as well, where one explains the gradient.
        """
        errors: dict[Causes, float] = {}
        resolved: dict[Causes, float] = {}
        for causes, inside in self._contexts(taken).items():
            with self._drawing(taken, inside):
                own_loss, gradient, after = self.referee.within(taken.state, taken.window, taken.sizes, inside)
            own = own_loss, self.setting.offload.put(gradient)
            del gradient  # as large as the model
            errors[causes] = relative_distance(taken.consumed, taken.clipped(own[1]))
            if errors[causes] > ALGEBRA_GATE:
                resolved[causes] = RESOLVED * self._resolved(taken, errors[causes], own, inside)
                errors[causes] = 0.0 if errors[causes] <= resolved[causes] else errors[causes]
            if errors[causes] <= ALGEBRA_GATE:
                of_statistics = self._statistics_error(taken, inside, (own_loss, after)) if inside.statistics else 0.0
                return Within(errors, resolved, self._loss_error(taken, loss, own, self._at(taken, inside)), of_statistics)
        return Within(errors, resolved)

    def _statistics_error(self, taken: ConsumedWindow, inside: Inside, exact: tuple[Loss, Tensor]) -> float:
        """The error of the running statistics beside `exact` ones, with the loss; zero where float64 resolves no more.

        In deep layers they are as ill-conditioned as what they normalise.

        Returns:
            A relative error ||a - s|| / ||s||.
        """
        compute = self._at(taken, inside, of=2)
        error = relative_distance(running_statistics(dict(taken.arm.model.named_buffers())), exact[1])
        unresolved = ALGEBRA_GATE < error <= RESOLVED * self._resolution(taken, exact, compute, error)[1]
        return 0.0 if unresolved else error

    def _errors(self, label: str, taken: ConsumedWindow, within: Within) -> Errors:
        """Causes -> error of their best variant, also beside what is computed `within` the micro-batches."""
        smallest, contexts = {**within.errors}, {(): WHOLE} | self._contexts(taken)
        for tell in (hypotheses, stale):
            for context, inside in contexts.items():
                found: dict[Causes, float] = {}
                _keep_smallest(found, taken.consumed, tell(self._facts(label, taken, inside)), context)
                near = within.resolved.get(context, 0.0)
                for causes, error in found.items():
                    smallest[causes] = min(smallest.get(causes, math.inf), 0.0 if error <= near else error)
            if min(smallest.values()) <= ALGEBRA_GATE:
                return smallest  # weights of earlier windows cost a forward each: only for what nothing else explains
        for context, inside in contexts.items():
            for read in (counted, partly):
                _keep_smallest(smallest, taken.consumed, read(self._facts(label, taken, inside), taken.consumed), context)
        return smallest

    def _facts(self, label: str, taken: ConsumedWindow, inside: Inside) -> WindowFacts:
        if not self.remembers:
            raise NotRemembered
        arm, watch = taken.arm, self.lock.watches[label]
        of, parts = self._parts(taken, inside), partial(self._parts, taken, inside)
        # Weights of earlier windows: those a forward was seen to use, then those that are remembered.
        earlier = ([] if taken.stale is None else [taken.stale]) + self.earlier[label][:-1]
        return WindowFacts(
            parts=of,
            configured_steps=arm.recipe.accumulation_steps,
            configured_terms=sum(of.terms) / len(taken.window) * self.setting.config.effective_batch,
            max_norm=arm.clip_norm,
            clip_epsilon=arm.recipe.clip_epsilon,
            loss_scale=arm.scaler.get_scale(),
            left_over=watch.left_over,
            consumed_before=self.consumed_before[label],
            penalty=self.referee.penalty_gradient(taken.state) if self.setting.exact.penalty else None,
            decay=self.setting.config.optimizer.weight_decay * flatten(taken.state[name] for name in self.referee.names),
            earlier=(self._stale(parts, taken.state, weights) for weights in earlier),
            tensors=[parameter.numel() for parameter in self.referee.model.parameters()],
            tells_counts=self.by == FEW_ULPS,
        )

    def _stale_forward(self, label: str) -> Tensor | None:
        """The weights of the window's last forward, if they are not those it began with but exactly those an earlier one did."""
        used = self.lock.watches[label].last_forward
        return None if used is None or _fingerprint(used) not in self.started[label] else used

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


def moved_by_rounding(weights: Tensor, generator: torch.Generator, by: float = FEW_ULPS) -> Tensor:
    """Weights in float64 moved by a few units in the last place, at random.

    Args:
        weights: Any shape.
        generator: Draws the signs.
        by: What they are moved by at most, relative to themselves and their mean.

    Returns:
        The same shape in float64.
    """
    signs = 2 * torch.rand(weights.shape, generator=generator, dtype=torch.float64).to(weights.device) - 1
    return weights + by * signs * (weights.abs() + weights.abs().mean())


def inside_causes(setting: Setting) -> dict[Causes, Inside]:
    """What this trial's model and loss compute within a micro-batch, by the causes that it has when they are accumulated.

    Args:
        setting: The trial's task, initial weights and windows.

    Returns:
        Causes -> what a micro-batch computes.
    """
    exact, causes = setting.exact, dict[Causes, Inside]()
    mixes = setting.has_batch_norm or exact.mixes_rows
    moves = exact.is_stateful or (exact.moves_state and not mixes)
    model = (Cause.batch_statistics,) * mixes + (Cause.stateful_forward,) * moves
    if model:
        causes[model] = Inside(statistics=True)
    if exact.coupling:
        if not (model and exact.pools_rows):  # such a loss is computed with the forward of the micro-batch
            causes[(exact.coupling,)] = Inside(loss=True)
        if model:
            causes[(*model, exact.coupling)] = Inside(statistics=True, loss=True)
    return causes


def drawn_inside(contexts: Mapping[Causes, Inside]) -> dict[Causes, Inside]:
    """The same, of a model that draws random numbers in each forward.

    Args:
        contexts: As of `inside_causes`.

    Returns:
        Causes -> what a micro-batch computes.
    """
    whole: dict[Causes, Inside] = {} if any(one.statistics for one in contexts.values()) else {(): WHOLE}
    both = {**whole, **contexts}
    return {(*causes, Cause.stochastic_layers): dataclasses.replace(one, draws=True) for causes, one in both.items()}


def _keep_smallest(smallest: dict[Causes, float], consumed: Tensor, variants: Iterable[Hypothesis], context: Causes = ()) -> None:
    """By cause, beside those of its context, the smallest relative distance of `consumed` to the cause's variants, in place."""
    for cause, gradient in variants:
        causes = (*context, cause)
        smallest[causes] = min(smallest.get(causes, math.inf), relative_distance(consumed, gradient))


def _in_range(*vectors: Tensor) -> bool:
    """Whether float32 could hold them: beyond, a training has exploded, and float64 resolves nothing of it either."""
    return all(float(torch.linalg.vector_norm(one)) <= torch.finfo(torch.float32).max for one in vectors)


def _fingerprint(weights: Tensor) -> tuple[float, float]:
    """Two numbers that weights have in common only when they are the same, or as good as."""
    return float(weights.sum()), float(weights @ weights)


def loss_error(arm: Arm, reported: float, exact: Loss) -> float:
    """`Loss.error`; zero within the format that the loss was reported in.

    Args:
        arm: The arm, for the format of its loss.
        reported: The loss that it reported.
        exact: The reference's.

    Returns:
        |a - g| / |g|.
    """
    error = exact.error(reported)
    return 0.0 if error <= arm.loss_resolution else error


def _count_samples(seen: Tensor, wanted: Tensor, strangers: int = 0) -> Samples:
    """How the ids of the samples an arm saw differ from its window's; rows that are none have negative ids, or are counted."""
    used, counts = seen[seen >= 0].unique(return_counts=True)
    return Samples(
        repeated=int((counts - 1).sum()),
        missing=int((~torch.isin(wanted, seen)).sum()),
        foreign=int((~torch.isin(used, wanted)).sum()) + int((seen == FOREIGN).sum()),
        unknown=strangers + int((seen == NO_SAMPLE).sum()),
    )
