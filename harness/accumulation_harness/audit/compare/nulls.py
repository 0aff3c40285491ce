"""Which runs say how far rounding moves a gradient: those that make the reference's computation on the reference's rows."""

from __future__ import annotations

from collections.abc import Sequence

from accumulation_harness.audit.compare.comparison import ShapeError, facts
from accumulation_harness.audit.compare.facts import Facts
from accumulation_harness.audit.compare.floors import COARSE_GATE, Floor
from accumulation_harness.audit.evidence import Run

NEAR = 100.0  # gates of the other nulls, within which another order of the rows is rounding; but not beyond `COARSE_GATE`


def not_rounding(permuted: Run, reference: Run, nulls: Sequence[Run], *, drift: bool) -> str | None:
    """What a run with its rows in another order does besides; None where it differs by rounding, as the `nulls` do."""
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
        if step.window.rows == "different":
            return f"its optimizer step {step.step} takes other rows"
        apart = max(step.consumed.distance, step.raw.distance)
        if apart > max(step.gate, min(NEAR * step.gate, COARSE_GATE)):
            return f"its gradient differs by {apart:.2g} at optimizer step {step.step}, where rounding explains {step.gate:.2g}"
    return None
