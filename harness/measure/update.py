"""What a step did, given the gradient it consumed: against a twin optimizer that starts from the same state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from harness.judge.gates import ALGEBRA_GATE
from harness.judge.signature import Movement, Signature
from harness.measure.lock_step import Setting, optimizer_state
from harness.recipes.recipe import Arm, make_optimizer
from harness.referee.gradients import flatten, relative_distance
from harness.referee.oracle import Parts

DECAY_TOLERANCE = 0.02  # relative: the weights may be those before or after the step
DECAYED_FIRST = 1e-6  # relative to the whole step: Adam turns a decay before the step into another step, by a few per cent
WEIGHT_ROUNDING = 2.0**-50  # a few roundings of float64, relative


@dataclass(frozen=True)
class Before:
    """What an arm's optimizer and moving average carried when a window began."""

    entries: Mapping[str, Tensor]  # the optimizer's state, flat
    step: Tensor | None  # its own counter
    learning_rate: float
    ema: Tensor | None  # None before the first average

    @staticmethod
    def of(arm: Arm) -> Before:
        """What the arm's optimizer and moving average carry now."""
        counters = [state["step"] for state in arm.optimizer.state.values() if "step" in state]
        started = arm.ema is not None and int(arm.ema.n_averaged) > 0
        return Before(
            entries=optimizer_state(arm.optimizer, arm.model.parameters()),
            step=counters[0].clone() if counters else None,
            learning_rate=arm.optimizer.param_groups[0]["lr"],
            ema=flatten(arm.ema.module.parameters()) if arm.ema is not None and started else None,
        )

    def decayed(self, arm: Arm) -> Before:
        """The same with its moments decayed once more for each micro-batch but the last, as if gradients of zero had come."""
        group, more = arm.optimizer.param_groups[0], len(arm.seen) - 1
        beta1, beta2 = group.get("betas", (group.get("momentum", 0.0), 1.0))
        decays = {"momentum_buffer": beta1, "exp_avg": beta1, "exp_avg_sq": beta2}
        entries = {name: value * decays.get(name, 1.0) ** more for name, value in self.entries.items()}
        return dataclasses.replace(self, entries=entries, step=None if self.step is None else self.step + more)


def check_update(
    setting: Setting, arm: Arm, consumed: Tensor, start: Tensor, before: Before, parts: Callable[[], Parts | None]
) -> Signature:
    """What the arm's optimizer made of the gradient it consumed [P], beside a twin in the same state at the same weights.

    `start` [P]: the weights before the step. `parts`: the micro-batch gradients, asked for only where the state is wrong.
    """
    expected, states = _twin(setting, consumed, start, before)
    reached = flatten(arm.model.parameters())
    difference = reached - expected
    error = Movement()  # of the weights, relative to the update; zero within their rounding
    length = torch.linalg.vector_norm(start)
    # Rounding of the weights themselves: it looks large beside a tiny update, at the end of a cosine schedule for example.
    if torch.linalg.vector_norm(difference) > WEIGHT_ROUNDING * length:
        error = movement(difference, start, torch.linalg.vector_norm(expected - start))
    shrunk = float(torch.linalg.vector_norm(difference) / length) if error.length else 0.0
    fits = is_decays(shrunk, arm, before.learning_rate, fewest=len(arm.seen) - 1) or any(
        relative_distance(_twin(setting, consumed, start * shrink, before)[0] - start, reached - start) <= DECAYED_FIRST
        for shrink in decays(arm, before.learning_rate, fewest=len(arm.seen) - 1)
    )
    own = optimizer_state(arm.optimizer, arm.model.parameters())
    errors = entry_errors(own, states)
    advanced_error = 0.0
    if not all(value <= ALGEBRA_GATE for value in errors.values()):
        twins = [_twin(setting, consumed, start, before.decayed(arm))]
        twins += [_twin(setting, consumed, start, before, first) for first in partial_gradients(parts())]
        # one entry alone may have advanced
        advanced_error = min(_worst_entry_of_best_twin(errors, entry_errors(own, advanced)) for _, advanced in twins)
    average_error = 0.0
    if arm.ema is not None and setting.config.ema_decay is not None:
        mean = flatten(arm.ema.module.parameters())
        right, *wrong = averages(before.ema, start, reached, setting.config.ema_decay, len(arm.seen))
        errors["ema"] = relative_distance(mean, right)
        if not errors["ema"] <= ALGEBRA_GATE:
            average_error = min(relative_distance(mean, each) for each in wrong) if wrong else math.inf
    return Signature(
        update=error, decays_fit=fits, state_errors=errors, advanced_error=advanced_error, average_error=average_error
    )


def _worst_entry_of_best_twin(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """The largest error of an entry, each by the twin that it is nearer to."""
    return max((min(a[name], b.get(name, math.inf)) for name in a), default=0.0)


def partial_gradients(parts: Parts | None) -> Iterator[Sequence[Tensor]]:
    """What an optimizer's state may have been given before the window's gradient: each micro-batch's, or the running sum."""
    for each in () if parts is None else (parts.shares, list(parts.parts)):
        yield each[:-1]
        yield list(accumulate(each))[:-1]


def averages(before: Tensor | None, start: Tensor, reached: Tensor, decay: float, num: int) -> Iterator[Tensor]:
    """The moving average after the window: the right one first, then those that moved for every micro-batch.

    `before`: None where there is none yet, and the first weights are taken as they are. Weights at `start`, and after the step.
    """
    for early, late in ((0, 1), *(((num, 0), (num - 1, 1), (num, 1), (0, num)) if num > 1 else ())):
        mean = before
        for weights in [start] * early + [reached] * late:
            mean = weights if mean is None else decay * mean + (1 - decay) * weights
        assert mean is not None
        yield mean


def _twin(
    setting: Setting, consumed: Tensor, start: Tensor, before: Before, first: Sequence[Tensor] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weights and optimizer state after one plain step from `before`; `first`: gradients that its state alone has taken in."""
    twin = torch.nn.Parameter(start.clone())
    optimizer = make_optimizer(setting.config.optimizer, [twin])
    optimizer.param_groups[0]["lr"] = before.learning_rate
    if before.entries or before.step is not None:
        optimizer.state[twin] = {name: value.clone() for name, value in before.entries.items()}
        if before.step is not None:
            optimizer.state[twin]["step"] = before.step.clone()
    for gradient in first:
        optimizer.param_groups[0]["lr"] = 0.0
        twin.grad = gradient.clone()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = before.learning_rate
    twin.grad = consumed.clone()
    optimizer.step()
    return twin.detach(), optimizer_state(optimizer, [twin])


def is_decays(shrunk: float, arm: Arm, learning_rate: float, *, fewest: int) -> bool:
    """Whether ||change|| / ||weights|| is what `fewest` more weight decays make, up to one for every micro-batch."""
    made = (1 - shrink for shrink in decays(arm, learning_rate, fewest=fewest))
    return shrunk == 0 or any(abs(shrunk - each) <= DECAY_TOLERANCE * shrunk for each in made)


def decays(arm: Arm, learning_rate: float, *, fewest: int) -> list[float]:
    """What is left of the weights after `fewest` decoupled weight decays, up to one for every micro-batch."""
    one = learning_rate * arm.optimizer.param_groups[0]["weight_decay"]
    return [(1 - one) ** k for k in range(max(1, fewest), len(arm.seen) + 1)]


def movement(difference: Tensor, along: Tensor, unit: Tensor) -> Movement:
    """||difference|| / unit, and the cosine of the difference with `along`."""
    length = torch.linalg.vector_norm(difference)
    if length == 0:
        return Movement()
    return Movement(float(length / unit), float(difference @ along / length / torch.linalg.vector_norm(along)))


def entry_errors(state: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative distance of each entry of the optimizer's state; infinite where one of the two lacks it."""
    return {
        name: relative_distance(state[name], reference[name]) if name in state and name in reference else math.inf
        for name in {**state, **reference}
    }
