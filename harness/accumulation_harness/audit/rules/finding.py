"""Findings as the rules make them, and the gates that several rules share."""

from __future__ import annotations

from typing import Any

from accumulation_harness.audit.compare.run import RunFacts
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.evidence import Finding, Kind
from accumulation_harness.compare.linear import WeightedSum
from accumulation_harness.judge.cause import Cause

CONDITION_LIMIT = 1e6  # of the micro-batch gradients; beyond it their weights mean nothing
UNEQUAL = 1e-2  # relative; weights that differ by more are not equal
SAME_FACTOR = 1e-3  # relative; a mean weight is N (or 1 / N) up to this, or up to the gate where that is wider
FACTOR_ROUNDINGS = 100.0  # by which the factors of two rows are unequal, where that is more than `UNEQUAL`
SAME_ROW = 1e-3  # relative, for a row's output and the direction of its slope
MOVED = 100.0  # roundings by which parameters move for no reason
ROW_ROUNDINGS = 30.0  # or, in coarse arithmetic, so many roundings


def finding(facts: RunFacts | StepFacts, step: int | None, cause: Cause, kind: Kind, message: str, **evidence: Any) -> Finding:
    """A finding about one optimizer, whose name stands first in the evidence. `step` is None for one about the whole run.

    Args:
        facts: What was measured of one optimizer, or of one pair of its steps.
        step: The optimizer step, or None.
        cause: The cause.
        kind: What is wrong: gradient, update, state.
        message: What happened, a sentence.
        evidence: Name -> number or text that the rule has read.

    Returns:
        The finding.
    """
    known = {"optimizer": facts.track, "what": kind, **evidence}
    return Finding(facts.accumulation_steps, step, cause, known, message, kind, facts.track)


def at(facts: StepFacts, cause: Cause, kind: Kind, message: str, **more: Any) -> Finding:
    """Make a finding about one optimizer step, with what is known of its gradient.

    Args:
        facts: What was measured of one pair of steps.
        cause: The cause.
        kind: What is wrong: gradient, update, state.
        message: What happened, a sentence.
        more: Name -> number or text that the rule has read besides.

    Returns:
        The finding.
    """
    known: dict[str, Any] = {"distance": facts.raw.distance, "gate": facts.gate}
    if facts.wrong:
        parts = facts.parts
        known |= {"scale": facts.raw.scale, "cosine": facts.raw.cosine, "backwards": facts.backwards, "rows": facts.rows}
        known |= {"right_weights": parts.weights, "residual": parts.residual, "condition": parts.condition}
    return finding(facts, facts.step, cause, kind, message, **known | more)


def equal(weights: tuple[float, ...]) -> bool:
    """Whether positive weights differ by no more than `UNEQUAL`.

    Args:
        weights: One for each micro-batch, above zero.

    Returns:
        True where they are equal.
    """
    return max(weights) - min(weights) <= UNEQUAL * max(weights)


def made_of(facts: StepFacts, parts: WeightedSum) -> bool:
    """Whether the parts make up what they should, with weights that mean something.

    Args:
        facts: What was measured of one pair of steps.
        parts: A gradient as a weighted sum.

    Returns:
        True where residual and condition are within their limits.
    """
    return parts.residual <= facts.gate and parts.condition <= CONDITION_LIMIT


def known_weights(facts: StepFacts, parts: WeightedSum) -> bool:
    """Whether several parts make up the gradient, and each counts by more than rounding moves its weight.

    Args:
        facts: What was measured of one pair of steps.
        parts: A gradient as a weighted sum.

    Returns:
        True where the weights can be read.
    """
    return len(parts.weights) > 1 and made_of(facts, parts) and min(parts.weights) > parts.rounding


def other_factors(facts: StepFacts) -> bool:
    """Decide whether the rows of one micro-batch have different factors.

    Their outputs are the same and their gradients point alike.
    Factors that differ by little count where outputs and gradients are known better than the gradients differ.

    Args:
        facts: The step, with its probe.

    Returns:
        True if they do.
    """
    rows, alike, rounding = facts.probe.by_row, same_row(facts), FACTOR_ROUNDINGS * facts.roundoff
    if rows is None or not (rows.outputs <= alike and rows.residual <= alike):
        return False
    fine = max(rows.outputs, rows.residual) <= facts.gate and rows.spread >= facts.raw.distance
    return rows.spread > max(rounding, facts.gate if fine else UNEQUAL)


def listed(weights: tuple[float, ...]) -> str:
    """Weights with three digits, for a message; 0 where three digits of the largest hold nothing of one.

    Args:
        weights: One for each micro-batch.

    Returns:
        `1, 0, 2`.
    """
    largest = max(map(abs, weights), default=0.0)
    return ", ".join(f"{w if abs(w) > SAME_FACTOR * largest else 0:.3g}" for w in weights)


def same_row(facts: StepFacts) -> float:
    """The relative distance below which two outputs (or slopes) of a row are the same in this arithmetic.

    Args:
        facts: What was measured of one pair of steps.

    Returns:
        The distance.
    """
    return max(SAME_ROW, ROW_ROUNDINGS * facts.roundoff)


def same_factor(facts: StepFacts) -> float:
    """The relative distance below which two factors of a gradient are the same.

    Args:
        facts: What was measured of one pair of steps.

    Returns:
        The distance.
    """
    return max(facts.gate, SAME_FACTOR)


def told(weights: tuple[float, ...]) -> str:
    """Say how often each micro-batch counts, and what that is: lost, subtracted, counted again.

    >>> told((1.0, 0.0, 0.0, 1.0))
    'micro-batches count 1, 0, 0, 1 times: numbers 2, 3 lost'
    >>> told((1.0, 1.0, -1.0, 2.0))
    'micro-batches count 1, 1, -1, 2 times: number 3 subtracted; number 4 counted 2 times'
    >>> told((0.5, 1.0))
    'micro-batches count 0.5, 1 times'
    >>> told((0.5, 0.5, 1.0))
    'micro-batches count 0.5, 0.5, 1 times: number 3 counted 2 times as often as others'

    Args:
        weights: Weight of each micro-batch in the gradient; 1 is right.

    Returns:
        One sentence.
    """
    largest = max(map(abs, weights), default=0.0)
    known = tuple(0.0 if abs(w) <= UNEQUAL * largest else w for w in weights)
    usual = max(known, key=lambda w: (sum(abs(v - w) <= UNEQUAL for v in known), -abs(w - 1)))
    often = sum(abs(v - usual) <= UNEQUAL for v in known) > 1 or usual == 1
    of_others = "" if abs(usual - 1) <= UNEQUAL else " as often as others"
    said: dict[str, list[str]] = {}
    for place, w in enumerate(known, 1):
        ratio = w / usual if usual > 0 else 0.0
        again = often and ratio > 1 + UNEQUAL and abs(ratio - round(ratio)) <= UNEQUAL
        if what := "lost" if w == 0 else "subtracted" if w < 0 else f"counted {round(ratio)} times{of_others}" if again else "":
            said.setdefault(what, []).append(str(place))
    reading = "; ".join(f"number{'s' * (len(places) > 1)} {', '.join(places)} {what}" for what, places in said.items())
    return f"micro-batches count {listed(known)} times" + (f": {reading}" if reading else "")
