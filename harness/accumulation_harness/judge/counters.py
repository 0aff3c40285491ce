"""L2: what an arm must do as often as the full batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from accumulation_harness.system.enums import StrEnum

Counts = Mapping[str, float]  # by `Counter`, or by a counter of one part (`Counter.of`)
Differences = Mapping[str, tuple[float, float]]  # those that differ: (arm, full batch)


SAME = 2.0**-50  # relative: a learning rate may be written in two ways, which round otherwise; whole numbers are further apart


class Counter(StrEnum):
    """A counter that must agree between arms, by the name that reasons and stored results use."""

    windows = "windows"
    samples = "samples counted"
    optimizer_steps = "optimizer steps"
    state_step = "optimizer state's step"
    schedule_index = "schedule index"
    learning_rate = "learning rate"  # of each parameter group
    batches_tracked = "BatchNorm num_batches_tracked"
    loss_scale = "loss scale"
    windows_with_other_samples = "windows with other samples"
    evaluated = "windows in evaluation mode"  # of a layer that this makes another one
    drawn_again = "micro-batches with the random numbers of other rows"
    windows_at_another_rate = "windows at another learning rate"
    poisoned_steps = "steps in a window with a non-finite micro-batch"
    poisoned_finite = "finite weights after a non-finite micro-batch"
    after_poison = "steps in the window after one with a non-finite micro-batch"
    error_after_poison = "relative error of the gradient in the window after one with a non-finite micro-batch"
    left_by_poison = "relative error of a gradient begun with what a window with a non-finite micro-batch has left"
    poisoned_scale = "loss scale's factor at a non-finite micro-batch"

    def of(self, part: str) -> str:
        """The key of this counter for one part, for example a parameter group."""
        return f"{self} of {part}"


def differing(arm: Counts, reference: Counts, rate: float) -> dict[str, tuple[float, float]]:
    """Return the counters that differ between an arm and the reference.

    Args:
        arm: Counters of the arm.
        reference: The same counters of the reference.
        rate: The learning rate that is scheduled.

    Returns:
        By name, (value of the arm, value of the reference).
    """
    return {name: (value, reference[name]) for name, value in arm.items() if not same(value, reference[name], rate)}


def same(arm: float, reference: float, rate: float) -> bool:
    """Whether two counters agree.

    Args:
        arm: The arm's.
        reference: The full batch's.
        rate: The learning rate that is scheduled: a factor of it is rounded relative to 1, as 1 + cos x is where it ends.

    Returns:
        Whether they are the same number, but for rounding.
    """
    return math.isclose(arm, reference, rel_tol=SAME, abs_tol=SAME * rate)


def described(differences: Differences) -> tuple[str, ...]:
    """Word each difference: "optimizer steps is 12, full batch 3".

    Args:
        differences: Counter -> the arm's value and the reference's.

    Returns:
        A phrase each.
    """
    return tuple(f"{name} is {arm:g}, full batch {reference:g}" for name, (arm, reference) in differences.items())
