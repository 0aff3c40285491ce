"""How often each micro-batch counts in the gradient that the optimizer took: as bars for a terminal, as a table for an issue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.report.conclusion import Conclusion
from accumulation_harness.audit.report.remedies import short
from accumulation_harness.audit.rules.finding import UNEQUAL
from accumulation_harness.compare.linear import WeightedSum

COLUMNS = 32  # of the longest bar
MOST = 16  # micro-batches that are drawn


def bars(counts: Sequence[float]) -> Iterator[str]:
    """One line for each weight, in units of the right one; `┊` stands at 1, and a weight that is subtracted is hatched."""
    unit = COLUMNS / max(1.0, *map(abs, counts))
    for place, count in enumerate(counts[:MOST], 1):
        bar = ("█" if count > 0 else "▒") * round(abs(count) * unit)
        line = bar.ljust(round(unit)) + "┊" if len(bar) <= round(unit) else f"{bar[: round(unit)]}┊{bar[round(unit) :]}"
        yield f"{place:>4} {line} {short(round(count, 3) + 0.0)}"
    if len(counts) > MOST:
        yield f"     and {len(counts) - MOST} more"


def weights_of(conclusion: Conclusion) -> dict[str, list[str]]:
    """Title -> bars: of each arm and optimizer whose weights are known and wrong, at the first optimizer step that differs."""
    found: dict[str, list[str]] = {}
    for line in conclusion.lines:
        step = line.first
        if step is None or step.agrees or not line.arm.findings or not (_known(step, step.taken) and _known(step, step.parts)):
            continue
        right = step.parts.weights
        counts = [own / w if abs(w) > UNEQUAL else math.inf for own, w in zip(step.taken.weights, right, strict=True)]
        if max(map(abs, counts)) < math.inf and any(abs(count - 1) > UNEQUAL for count in counts):
            title = f"N={line.arm.accumulation_steps}, optimizer step {step.step}: how often each micro-batch counts (1 is right)"
            found.setdefault(title, list(bars(counts)))
    return found


def _known(step: StepFacts, parts: WeightedSum) -> bool:
    """Whether the parts make up the vector, each with one weight and no other."""
    return len(parts.weights) > 1 and parts.residual <= step.gate and parts.told_apart
