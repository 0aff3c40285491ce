"""Learning rates that nobody showed: how far an optimizer goes along the updates that known rules make of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np

from accumulation_harness.audit.evidence import Step, Vector
from accumulation_harness.compare.linear import weighted_sum

FOLLOWS = 1e-3  # relative; what a rule may leave of an update that is its own
ROUNDED = 0.01  # relative; what rounding of the weights may add to that: the direction is known even so
SMALL = 0.02  # of a typical element of the gradient, below which the least divisor of a rule, which is not known, decides
SAME_RATE = 0.01  # relative; rates of one optimizer that differ by less are one
FEWEST = 4  # elements that make up two directions by chance
SETTINGS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.99), (0.9, 0.98), (0.95, 0.95), (0.5, 0.999))  # shares kept of moments
KEPT = (0.9, 0.95, 0.99, 0.8)
Rule = Callable[[Sequence[Vector]], Iterator[Vector]]
Fed = Callable[[Step], Sequence[Vector]]


def _momentum(gradients: Sequence[Vector], kept: float, *, ahead: bool = False) -> Iterator[Vector]:
    """m = kept m + g; `ahead` as Nesterov does."""
    mean = np.zeros_like(gradients[0])
    for g in gradients:
        mean = kept * mean + g
        yield g + kept * mean if ahead else mean


def _adam(gradients: Sequence[Vector], first: float, second: float, *, corrected: bool) -> Iterator[Vector]:
    """m / sqrt(v); with no mean it is RMSprop's."""
    mean = square = np.zeros_like(gradients[0])
    for t, g in enumerate(gradients, 1):
        mean, square = first * mean + (1 - first) * g, second * square + (1 - second) * g * g
        m, v = (mean / (1 - first**t), square / (1 - second**t)) if corrected else (mean, square)
        yield m / np.sqrt(np.where(v > 0, v, 1.0))


def _signs(gradients: Sequence[Vector], now: float, later: float) -> Iterator[Vector]:
    """Lion's."""
    mean = np.zeros_like(gradients[0])
    for g in gradients:
        yield np.sign(now * mean + (1 - now) * g)
        mean = later * mean + (1 - later) * g


RULES: tuple[partial[Iterator[Vector]], ...] = (
    partial(_momentum, kept=0.0),
    *(partial(_adam, first=a, second=b, corrected=c) for c in (True, False) for a, b in SETTINGS),
    *(partial(_momentum, kept=kept, ahead=ahead) for kept in KEPT for ahead in (False, True)),
    *(partial(_adam, first=0.0, second=kept, corrected=c) for c in (False, True) for kept in (*KEPT, 0.999)),
    *(partial(_signs, now=0.9, later=later) for later in (0.99, 0.95, 0.9)),
)


def rates(steps: Sequence[Step], among: Iterable[int] = range(len(RULES))) -> dict[int, tuple[float, ...]]:
    """Find the learning rates r in movement = -r (direction + c weights), of each rule whose directions make up every update.

    Directions with corrected moments and without are multiples, by numbers that go with the step: no update tells which it was.

    Args:
        steps: Those of one optimizer from its first on, with the gradients that it took.
        among: Places of the rules that are tried: of the reference all, of another run those that fit the reference.

    Returns:
        Place of the rule -> one for each step.
    """
    return {k: found for k in among if (found := _along(RULES[k], steps))}


def fed(steps: Sequence[Step], among: Mapping[int, Sequence[Sequence[float]]], n: int) -> str:
    """Find what rules were given in a window, where what they make of its gradient is not how far it moves.

    Args:
        steps: Those of one optimizer from its first on, with the gradients that it took and what micro-batches gave.
        among: Places of the rules that fit the reference -> its rates, step by step.
        n: Number of micro-batches.

    Returns:
        `each`: the gradient of each micro-batch; `again`: that of the window n times, or twice; empty where neither fits.
    """
    for k, rated in among.items():
        usual = [one[0] for one in rated[: len(steps)]]

        def fits(given: Fed, *, added: bool = True, rule: Rule = RULES[k], usual: Sequence[float] = usual) -> bool:
            found = _along(rule, steps, given, added=added)  # at another rate a multiple says nothing
            return len(found) == len(usual) > 0 and np.allclose(found, usual, rtol=SAME_RATE, atol=0)

        if any(fits(partial(_times, count=count)) for count in {2, n}):
            return "again"
        if any(fits(_each, added=added) for added in (True, False)):
            return "each"
    return ""


def _times(step: Step, count: int = 1) -> Sequence[Vector]:
    return (step.gradient,) * count


def _each(step: Step) -> Sequence[Vector]:
    return [b.contribution for b in step.backwards if b.contribution is not None]


def ahead(rule: int, counts: Vector) -> tuple[float, ...]:
    """By what a rule's updates are longer where its moments are corrected for other counts than 1, 2, 3 and so on.

    Args:
        rule: Its place.
        counts: One for each step.

    Returns:
        A factor for each step; none of a rule that corrects nothing.
    """
    said = RULES[rule].keywords
    if not said.get("corrected"):
        return ()
    usual = np.arange(1, len(counts) + 1)
    of_count = [np.sqrt(1 - said["second"] ** count) / (1 - said["first"] ** count) for count in (counts, usual)]
    return tuple((of_count[0] / of_count[1]).tolist())


def _along(rule: Rule, steps: Sequence[Step], given: Fed = _times, *, added: bool = True) -> tuple[float, ...]:
    """`added`: whether a step makes all the updates of its window, or the last one."""
    each = [given(step) for step in steps]
    gradients = [g for its in each for g in its]
    if not all(each) or not gradients or any(g.shape != gradients[0].shape or not np.isfinite(g).all() for g in gradients):
        return ()
    keep = np.all([np.abs(g) > SMALL * np.sqrt(np.mean(g * g)) for g in gradients], axis=0)
    if np.count_nonzero(keep) < FEWEST:
        return ()
    found = []
    directions = rule([g[keep] for g in gradients])
    for step, its in zip(steps, each, strict=True):
        made = [*islice(directions, len(its))]
        moved, direction = step.movement[keep], np.sum(made if added else made[-1:], axis=0)
        fit = weighted_sum(moved, [-direction, -step.before[keep]]) if moved.any() else None
        rounding = max(step.roundoffs) * np.linalg.norm(step.before[keep])  # much of a movement at small rates
        if fit is not None and not fit.residual <= FOLLOWS + min(float(rounding / np.linalg.norm(moved)), ROUNDED):
            return ()
        found.append(0.0 if fit is None else fit.weights[0])
    return tuple(found)
