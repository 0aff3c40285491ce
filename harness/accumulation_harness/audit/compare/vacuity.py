"""What must have been compared before two runs that agree are equal for a reason; and which runs measure rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accumulation_harness.audit.compare.comparison import ShapeError, facts
from accumulation_harness.audit.compare.floors import COARSE_GATE, COARSE_ROUNDOFF, Floor
from accumulation_harness.audit.compare.run import Facts, steps_of
from accumulation_harness.audit.compare.windows import effective
from accumulation_harness.audit.evidence import Run


def nothing_compared(candidate: Run, reference: Run, one: Run, compared: Sequence[Facts]) -> str | None:
    """Decide whether the agreement of two runs says anything.

    Args:
        candidate: The audited function at N.
        reference: What it was compared with.
        one: The audited function at N=1, which is the reference where there is no independent one.
        compared: For each optimizer what was compared.

    Returns:
        Why it says nothing; None where it does.
    """
    if not any(item.steps for item in compared):
        rates = sorted({rate for step in reference.steps for rate in step.lrs})[:4]
        known = ", ".join(f"{rate:.3g}" for rate in rates) or "unknown"
        return f"no optimizer step moves a weight (learning rates {known}): nothing was compared"
    if not (_has_gradient(candidate) and _has_gradient(reference)):
        if all(step.skipped for step in reference.steps):
            return "the GradScaler leaves out every optimizer step: nothing was compared"
        return "no optimizer step takes a gradient other than zero: nothing was compared"
    if candidate.accumulation_steps > one.accumulation_steps and not _accumulates(candidate, one):
        return (
            f"it makes {_per_step(candidate)} per optimizer step, and at N=1 {_per_step(one)}: the function does not use its "
            "arguments, or takes its samples in the same parts at N=1 (one by one, say)"
        )
    return _too_coarse(reference, compared)


def _has_gradient(run: Run) -> bool:
    """Whether some step that was not left out took a gradient."""
    steps = [step for track in run.tracks for step in effective(track) if not step.skipped]
    return any(step.gradient.any() and np.isfinite(step.gradient).all() for step in steps)


def _accumulates(candidate: Run, one: Run) -> bool:
    """Whether a step has more forwards or backwards, or a loss of more terms; true where none are seen (weights handed over)."""
    steps = [max([1, *(len(effective(track)) for track in run.tracks)]) for run in (candidate, one)]
    pairs = ((candidate.backwards, one.backwards), (candidate.forwards, one.forwards))
    more = any(a / steps[0] > b / steps[1] for a, b in pairs) or candidate.summed > one.summed
    return more or not any(b for _, b in pairs)


def _per_step(run: Run) -> str:
    return f"{run.forwards / run.num_steps:.3g} forwards and {run.backwards / run.num_steps:.3g} backwards"


def _too_coarse(reference: Run, compared: Sequence[Facts]) -> str | None:
    """In 32 bits and more, a hundredth of the gradient that is called rounding may as well be a fault."""
    if reference.roundoff > COARSE_ROUNDOFF:
        return None
    worst = max(steps_of(compared), key=lambda step: 0.0 if step.taken_inside else step.raw.distance)
    if worst.raw.distance <= COARSE_GATE or worst.taken_inside:
        return None
    return (
        f"the gradient of optimizer step {worst.step} differs by {worst.raw.distance:.2g}, and rounding alone moves it as far: a "
        "fault of that size cannot be told from it; take fewer or smaller steps, or give the function a `dtype` parameter"
    )


NEAR = 100.0  # gates of the other nulls, within which another order of the rows is rounding; but not beyond `COARSE_GATE`


def not_rounding(permuted: Run, reference: Run, nulls: Sequence[Run], *, drift: bool) -> str | None:
    """What a run with its rows in another order does besides; None where it differs by rounding, as the `nulls` do.

    Args:
        permuted: The run with its rows in another order.
        reference: The run with whole batches.
        nulls: Runs that differ from the reference by rounding alone.
        drift: Whether weights may drift apart as those of the nulls do.

    Returns:
        A sentence, or None.
    """
    if permuted.error is not None:
        return permuted.error
    try:
        compared = facts(permuted, reference, Floor(nulls, drift=drift))
    except ShapeError as error:
        return f"it makes {error}"
    for item in compared:
        if item.run.mine.steps != item.run.reference.steps:
            return f"it takes {item.run.mine.steps} optimizer steps instead of {item.run.reference.steps}"
        if found := _first_difference(item):
            return found
    return None


def _first_difference(item: Facts) -> str | None:
    for step in item.steps:
        if step.rows == "different":
            return f"its optimizer step {step.step} takes other rows"
        apart = max(step.consumed.distance, step.raw.distance)
        if apart > max(step.gate, min(NEAR * step.gate, COARSE_GATE)):
            return f"its gradient differs by {apart:.2g} at optimizer step {step.step}, where rounding explains {step.gate:.2g}"
    return None
