"""What a step did, given the gradient it consumed: against a twin of the optimizer that starts from the same state."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accumulation_harness.judge.gates import ALGEBRA_GATE, RESOLVED, STORED
from accumulation_harness.judge.signature import Movement, Signature, worst
from accumulation_harness.measure.lock_step import Setting, Taken
from accumulation_harness.measure.offload import Offload
from accumulation_harness.measure.optimizer_state import (
    STEP,
    copied,
    learning_rates,
    set_learning_rates,
    state_tensors,
    with_inner,
)
from accumulation_harness.recipes.determinism import kept_randomness, set_random_state
from accumulation_harness.recipes.recipe import Arm
from accumulation_harness.referee.gradients import flatten, relative_distance
from accumulation_harness.referee.oracle import Parts
from accumulation_harness.system.state import Snapshot, differing, in_place, snapshot

DECAY_TOLERANCE = 0.02  # relative: the weights may be those before or after the step
DECAYED_FIRST = 1e-6  # relative to the whole step: Adam turns a decay before the step into another step, by a few per cent
# With what torch keeps in an optimizer under names of its own, and its schedules do; a user's `_velocity` is state.
OF_TORCH = r"defaults\.|_step_count|_opt_called|_optimizer_\w+_hooks|_zero_grad_profile_name"
NO_STATE = re.compile(rf"\.params\[\d+\]$|\.(lr|initial_lr)$|\._warned_\w+$|^optimizer\.({OF_TORCH})")
BY_IDENTITY = re.compile(r"^(?!state\b|param_groups\b)([^\[]+)\[\d{9,}\]")  # what a mapping has by an object's identity
ATTRIBUTE = re.compile(r"\.params\[\d+\]\.")
WEIGHT_ROUNDING = 2.0**-50  # a few roundings of float64, relative


Advances = Callable[[str, object], bool]  # (name, value) of an entry of an optimizer's state -> whether it has advanced


def _is_count(name: str, value: object) -> bool:
    return name == STEP


def _is_moment(name: str, value: object) -> bool:
    return name != STEP and isinstance(value, Tensor) and value.dim() > 0


# What code that advances state by hand reaches.
BY_HAND: tuple[Advances, ...] = (_is_count, _is_moment, lambda *entry: _is_count(*entry) or _is_moment(*entry))


@dataclass(frozen=True)
class Before:
    """What an arm's optimizer and moving average carried when a window began."""

    optimizer: Optimizer  # a copy of the arm's, never stepped
    parameters: Sequence[nn.Parameter]  # that the copy would step
    ema: Tensor | None  # None before the first average

    @staticmethod
    def of(arm: Arm) -> Before:
        """What the arm's optimizer and moving average carry now."""
        started = arm.ema is not None and int(arm.ema.n_averaged) > 0
        return Before(
            *copied(arm.optimizer, list(arm.model.parameters())),
            ema=flatten(arm.ema.module.parameters()) if arm.ema is not None and started else None,
        )

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of the parameter groups."""
        return learning_rates(self.optimizer)

    def decay(self, rates: Sequence[float]) -> Tensor:
        """What one decoupled weight decay takes of the weights, as a factor: 0-dim, or [P] where groups decay differently."""
        groups = self.optimizer.param_groups
        each = [rate * float(group.get("weight_decay") or 0.0) for rate, group in zip(rates, groups, strict=True)]
        if len(set(each)) == 1:
            return torch.tensor(each[0], dtype=torch.float64, device=self.parameters[0].device)
        of = {p: one for one, group in zip(each, groups, strict=True) for p in group["params"]}
        return flatten(torch.full_like(p, of.get(p, 0.0)) for p in self.parameters)


@dataclass(frozen=True)
class Twin:
    """An optimizer's weights and state after a step."""

    weights: Tensor  # [P]
    state: Snapshot  # all that the optimizer carries but its parameters and rates

    @staticmethod
    def stepped(
        before: Before,
        taken: Taken,
        start: Tensor,
        consumed: Tensor,
        first: Sequence[Tensor] = (),
        *,
        decays: bool = True,
        advances: Advances | None = None,
        offload: Offload,
    ) -> Twin:
        """Take one plain step from `before` with a copy of the optimizer, as the arm took it.

        Args:
            before: The optimizer as it was before the step.
            taken: How the step was taken.
            start: [P] weights to start from.
            consumed: [P] gradient.
            first: Gradients that its state alone has taken in, at rates of zero.
            decays: Whether with the configured weight decay.
            advances: Tells the entries of the state that these have changed, the others being as before; without it, all.
            offload: Where large tensors are kept meanwhile.

        Returns:
            The copy after the step.
        """
        optimizer, parameters = copied(before.optimizer, before.parameters)
        offload.release()
        with kept_randomness(start.device):
            for gradient in first:
                set_learning_rates(optimizer, [0.0] * len(taken.rates))
                for group in optimizer.param_groups if not decays else ():
                    group["weight_decay"] = 0.0
                _give(parameters, start, gradient, taken.idle)
                optimizer.step()
            if advances is not None:
                optimizer, parameters = _partly_advanced(before, optimizer, parameters, advances)
            for group, own in zip(optimizer.param_groups, before.optimizer.param_groups, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = own.get("weight_decay")
            set_learning_rates(optimizer, taken.rates)
            if taken.randomness is not None:
                set_random_state(taken.randomness, start.device)
            _give(parameters, start, consumed, taken.idle)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return Twin.of(optimizer, parameters, offload)

    @staticmethod
    def of(optimizer: Optimizer, parameters: Sequence[nn.Parameter], offload: Offload) -> Twin:
        """Where an optimizer and its parameters are now."""
        offload.settle([*parameters, *state_tensors(optimizer)])
        return Twin(offload.put(flatten(parameters)), carried(optimizer))

    def state_errors(self, reference: Twin, before: Before) -> dict[str, float]:
        """The largest relative error by entry, in whatever parameter; of what is kept for no single one by its path.

        An attribute of a parameter that a step leaves as it was is the loop's: a buffer in which it adds gradients up. What goes
        by the identity of a parameter cannot be a copy's.

        Returns:
            Name of an entry -> error, of all entries.
        """
        found = {_entry(path): 0.0 for path in self.state.values if "]]." in path}
        apart = differing(self.state, reference.state, 0.0)
        if any(map(ATTRIBUTE.search, apart)):
            stepped = differing(reference.state, carried(before.optimizer), 0.0)
            apart = {path: one for path, one in apart.items() if path in stepped or not ATTRIBUTE.search(path)}
        keyed = {known[1] for twin in (self, reference) for path in twin.state.values if (known := BY_IDENTITY.match(path))}
        for path, one in apart.items():
            if path.partition("[")[0] in keyed:
                continue
            found[_entry(path)] = worst(found.get(_entry(path), 0.0), one.error)
        return found


def carried(optimizer: Optimizer, keep: Callable[[Tensor], Tensor] = in_place) -> Snapshot:
    """Take all that an optimizer keeps, except its parameters, its learning rates and attributes that others have set.

    Args:
        optimizer: Any optimizer.
        keep: What is kept of a tensor.

    Returns:
        Values by path.
    """
    own = snapshot({"optimizer": optimizer}, keep)
    values = {path.removeprefix("optimizer."): value for path, value in own.values.items() if not NO_STATE.search(path)}
    return Snapshot(values, own.unread)


def _entry(path: str) -> str:
    """Of what is kept for a parameter its name, `exp_avg`; of anything else the path without the group's number."""
    return path.rpartition("]].")[2] if "]]." in path else re.sub(r"groups\[\d+\]", "groups", path)


@torch.no_grad()
def _give(parameters: Sequence[nn.Parameter], weights: Tensor, gradient: Tensor, idle: Sequence[bool]) -> None:
    """Set weights and gradients from flat vectors; an idle parameter has none."""
    sizes = [p.numel() for p in parameters]
    for p, weight, own, is_idle in zip(parameters, weights.split(sizes), gradient.split(sizes), idle, strict=True):
        p.copy_(weight.view_as(p))
        p.grad = None if is_idle else torch.empty_like(p).copy_(own.view_as(p))


def _partly_advanced(
    before: Before, advanced: Optimizer, theirs: Sequence[Tensor], advances: Advances
) -> tuple[Optimizer, list[nn.Parameter]]:
    """A copy of the optimizer `before`, with those entries of state that the `advanced` one keeps for its parameters `theirs`."""
    optimizer, parameters = copied(before.optimizer, before.parameters)
    for own, other in zip(with_inner(optimizer), with_inner(advanced), strict=True):
        for p, q in zip(parameters, theirs, strict=True):
            own.state[p].update({name: value for name, value in other.state.get(q, {}).items() if advances(name, value)})
        for group, reached in zip(own.param_groups, other.param_groups, strict=True):
            group |= {STEP: reached[STEP]} if STEP in reached and advances(STEP, None) else {}
    return optimizer, parameters


def check_update(
    setting: Setting, arm: Arm, consumed: Tensor, taken: Taken, start: Tensor, before: Before, parts: Callable[[], Parts | None]
) -> Signature:
    """Compare what the arm's optimizer made of its gradient with what a copy of it makes, in the same state at the same weights.

    The twin is a copy of the optimizer with copies of the parameters: shapes, groups, state and attributes are the arm's own.
    Of the state tensors and numbers are compared; what is neither is copied for the twin, and not compared.

    Args:
        setting: The trial.
        arm: The arm after its step.
        consumed: [P] the gradient that its optimizer consumed.
        taken: How the step was taken.
        start: [P] the weights before it.
        before: The optimizer before it.
        parts: Makes the micro-batches' gradients; asked for only where the state is wrong.

    Returns:
        Relative errors of weights, state and moving average, also under each known fault.
    """
    twin = partial(Twin.stepped, before, taken, consumed=consumed, offload=setting.offload)

    def others() -> Iterator[Mapping[str, float]]:
        """The state's errors beside twins that have advanced for every micro-batch; one entry alone may have done so."""
        zeros = [torch.zeros_like(consumed)] * (len(arm.seen) - 1)
        hypotheses = [(zeros, False, None), *((each, True, None) for each in _partial_gradients(parts()))]
        for first, decays, advances in (*hypotheses, *((zeros, False, some) for some in BY_HAND)):
            with contextlib.suppress(Exception):  # a class of the user's own may know no rate of zero: then this says nothing
                yield own.state_errors(twin(start, first=first, decays=decays, advances=advances), before)

    right, own = twin(start), Twin.of(arm.optimizer, list(arm.model.parameters()), setting.offload)
    setting.offload.release()
    expected, reached = right.weights, own.weights
    difference, decay = reached - expected, before.decay(taken.rates)
    error = Movement()  # of the weights, relative to the update; zero within their rounding
    length = torch.linalg.vector_norm(start)
    # Rounding of the weights themselves: it looks large beside a tiny update, at the end of a cosine schedule for example.
    if not torch.linalg.vector_norm(difference) <= WEIGHT_ROUNDING * length:
        error = movement(difference, decayed(start, decay), torch.linalg.vector_norm(expected - start))
    shrunk = float(torch.linalg.vector_norm(difference) / length) if error.length else 0.0
    factors = factors_left(decay, arm, fewest=len(arm.seen) - 1)
    fits = is_decays(shrunk, start, factors) or any(
        relative_distance(twin(start * factor).weights - start, reached - start) <= DECAYED_FIRST for factor in factors
    )
    errors, advanced_error = _state_errors(own, right, before, lambda: twin(start)), 0.0
    if not all(value <= ALGEBRA_GATE for value in errors.values()):
        advanced_error = min((_worst_entry_of_best_twin(errors, each) for each in others()), default=math.inf)
        if setting.narrow_steps and advanced_error <= RESOLVED * STORED:  # state in float32, which rounds in another order
            advanced_error = 0.0
    average, average_error = _average_errors(setting, arm, before, start, reached)
    return Signature(
        update=error,
        decays_fit=fits,
        state_errors=errors | average,
        advanced_error=advanced_error,
        average_error=average_error,
    )


def _state_errors(own: Twin, right: Twin, before: Before, again: Callable[[], Twin]) -> dict[str, float]:
    """Of the state beside a twin's; zero of what two twins have otherwise: a clock, memory never written to, an identity."""
    errors = own.state_errors(right, before)
    if all(value <= ALGEBRA_GATE for value in errors.values()):
        return errors
    changing = again().state_errors(right, before)
    return {name: 0.0 if changing.get(name) else error for name, error in errors.items()}


def _average_errors(setting: Setting, arm: Arm, before: Before, start: Tensor, reached: Tensor) -> tuple[dict[str, float], float]:
    """The error of the moving average, by its name, where the trial keeps one; and, if wrong, of one moved too often."""
    decay = setting.config.ema_decay
    if arm.ema is None or decay is None:
        return {}, 0.0
    mean = flatten(arm.ema.module.parameters())
    right, *wrong = (relative_distance(mean, each) for each in _averages(before.ema, start, reached, decay, len(arm.seen)))
    return {"ema": right}, 0.0 if right <= ALGEBRA_GATE else min(wrong, default=math.inf)


def _worst_entry_of_best_twin(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """The largest error of an entry, each by the twin that it is nearer to."""
    return max((min(a[name], b.get(name, math.inf)) for name in a), default=0.0)


def _partial_gradients(parts: Parts | None) -> Iterator[Sequence[Tensor]]:
    """What an optimizer's state may have been given before the window's gradient: each micro-batch's, or the running sum."""
    for each in () if parts is None else (parts.shares, list(parts.parts)):
        yield each[:-1]
        yield list(accumulate(each))[:-1]


def _averages(before: Tensor | None, start: Tensor, reached: Tensor, decay: float, num: int) -> Iterator[Tensor]:
    """Predict the moving average after the window: the right one first, then those that moved for every micro-batch.

    Args:
        before: [P] the average; None where there is none yet, and the first weights are taken as they are.
        start: [P] the weights before the step.
        reached: [P] the weights after it.
        decay: d of m <- d m + (1 - d) w.
        num: N.

    Yields:
        [P] averages.
    """
    for early, late in ((0, 1), *(((num, 0), (num - 1, 1), (num, 1), (0, num)) if num > 1 else ())):
        mean = before
        for weights in [start] * early + [reached] * late:
            mean = weights if mean is None else decay * mean + (1 - decay) * weights
        assert mean is not None
        yield mean


def decayed(start: Tensor, decay: Tensor) -> Tensor:
    """Compute the direction in which a weight decay pulls: theta * decay, or theta itself without a decay.

    Args:
        start: [P] weights theta.
        decay: [P] decays of a step, or [] zero.

    Returns:
        [P] the direction, not normalised.
    """
    return start * decay if decay.dim() and bool(decay.any()) else start


def factors_left(decay: Tensor, arm: Arm, *, fewest: int) -> list[Tensor]:
    """What is left of the weights after `fewest` decoupled weight decays, up to one for every micro-batch.

    Args:
        decay: [P] decays of a step.
        arm: The arm, for its number of micro-batches.
        fewest: Decays of the first factor.

    Returns:
        (1 - decay)^k for k from `fewest` to N.
    """
    return [(1 - decay) ** k for k in range(max(1, fewest), len(arm.seen) + 1)]


def is_decays(shrunk: float, start: Tensor, factors: Sequence[Tensor]) -> bool:
    """Whether ||change|| / ||weights|| is what one of the `factors` makes of the weights [P].

    Args:
        shrunk: ||change|| / ||weights|| that was measured.
        start: [P] weights.
        factors: What decays may leave of them.

    Returns:
        True where one fits.
    """
    length = torch.linalg.vector_norm(start)
    made = (float(torch.linalg.vector_norm((1 - factor) * start) / length) for factor in factors)
    return shrunk == 0 or any(abs(shrunk - each) <= DECAY_TOLERANCE * shrunk for each in made)


def movement(difference: Tensor, along: Tensor, unit: Tensor) -> Movement:
    """||difference|| / unit, and the cosine of the difference with `along`.

    Args:
        difference: [P].
        along: [P].
        unit: Length that counts as 1.

    Returns:
        Length and cosine.
    """
    length = torch.linalg.vector_norm(difference)
    if length == 0:
        return Movement()
    return Movement(float(length / unit), float(difference @ along / length / torch.linalg.vector_norm(along)))
