"""Faults of one optimizer step that need no inference: they were seen happening in its window."""

from __future__ import annotations

import math
from typing import Any

from accumulation_harness.audit.compare.facts import StepFacts
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.rules.finding import at
from accumulation_harness.judge.cause import Cause

SHRINKING = -0.99  # cosine of a movement with the parameters, below which they shrink
MOVED = 100.0  # roundings by which parameters move for no reason
ONE_NORM = 1e-4  # relative; norms that differ by less are one


def seen_directly(facts: StepFacts) -> list[Finding]:
    """Where gradients agree, movements inside the window and gradients carried over; scaling and clipping where they differ."""
    found = [
        *(_moves(facts) or _moved_further(facts)),
        *_moved_before(facts),
        *_clipped_while_scaled(facts),
        *_not_cleared(facts),
    ]
    if facts.gradients_agree:
        return found
    return [*found, *_loss_scale(facts), *_clipped_inside(facts), *_other_limit(facts)]


def _moves(facts: StepFacts) -> list[Finding]:
    window = facts.window
    if window.moves <= window.reference_moves:
        return []
    evidence = {"times": window.moves, "cosine_with_parameters": window.move_along_weights}
    shrinking = f"the parameters shrink {window.moves} times in the window, outside the optimizer's step"
    return _moved(facts, evidence, shrinking, f"the parameters move {window.moves} times inside the window")


def _moved_further(facts: StepFacts) -> list[Finding]:
    """Equal gradients, and between a backward and the step the parameters go further than at N=1."""
    window = facts.window
    if not facts.gradients_agree or window.moved_apart <= MOVED * facts.precision.roundoff:
        return []
    evidence = {"apart": window.moved_apart, "cosine_with_parameters": window.apart_along_weights}
    shrinking = "the parameters shrink by more than at N=1 inside the window, outside the optimizer's step"
    return _moved(facts, evidence, shrinking, "the parameters are moved inside the window, otherwise than at N=1")


def _moved(facts: StepFacts, evidence: dict[str, Any], shrinking: str, otherwise: str) -> list[Finding]:
    """A movement inside the window: decay where it is along the parameters, and towards zero."""
    if evidence["cosine_with_parameters"] < SHRINKING:
        return [at(facts, Cause.weight_decay_per_micro_batch, "seen", evidence, shrinking)]
    return [at(facts, Cause.unexplained, "seen", evidence, otherwise)]


def _moved_before(facts: StepFacts) -> list[Finding]:
    apart = facts.window.moved_before
    if facts.gradients_agree or apart <= MOVED * facts.precision.roundoff:
        return []
    message = "something other than the optimizer has moved the parameters since its step before, otherwise than at N=1"
    return [at(facts, Cause.unexplained, "seen", {"apart": apart, "distance": facts.raw.distance}, message)]


def _clipped_while_scaled(facts: StepFacts) -> list[Finding]:
    if not facts.scaling.clips_scaled:
        return []
    message = "gradients are clipped while the loss scale is still in them"
    return [at(facts, Cause.clip_before_unscale, "seen", {"scale": facts.consumed.scale}, message)]


def _not_cleared(facts: StepFacts) -> list[Finding]:
    if not (facts.accumulator.stale and facts.gradients_agree) and not facts.fits.stale <= facts.gate:
        return []
    message = "the gradients of the window before are still there, and the step uses them"
    return [at(facts, Cause.gradients_not_cleared, "seen", {"scale": facts.consumed.scale}, message)]


def _loss_scale(facts: StepFacts) -> list[Finding]:
    evidence: dict[str, Any] = {"scale": facts.consumed.scale}
    if facts.scaling.loss_scales > 1:
        message = f"the loss scale changes inside the window ({facts.scaling.loss_scales} values)"
        return [at(facts, Cause.scaler_updated_in_window, "seen", evidence, message)]
    if facts.scaling.unscaled_inside and facts.fits.sums <= facts.gate:
        message = "gradients are unscaled inside the window: those of earlier micro-batches are divided by the loss scale again"
        evidence = {"times": facts.scaling.unscaled_inside, **evidence}
        return [at(facts, Cause.scaler_updated_in_window, "seen", evidence, message)]
    return []


def _clipped_inside(facts: StepFacts) -> list[Finding]:
    scaling, norms = facts.scaling, facts.scaling.rescaled
    shared = {"scale": facts.consumed.scale, "cosine": facts.consumed.cosine}
    inside = scaling.clips_inside if not scaling.clips_scaled else 0
    if inside and (facts.fits.scaled_sum <= facts.gate or (not scaling.reference_clips_inside and _not_the_sum(facts))):
        message = f"clipped {inside} times inside the window"
        message += "; unclipped, the sum is the full gradient" if facts.fits.scaled_sum <= facts.gate else ""
        evidence = {"active_clips_inside": scaling.clips_inside, **shared}
        return [at(facts, Cause.clip_per_micro_batch, "seen", evidence, message)]
    if _one_norm(norms) and facts.fits.sums <= facts.gate:
        message = f"the gradients are scaled to a norm of {norms[0]:.4g} inside the window; unscaled, the sum is right"
        return [at(facts, Cause.clip_per_micro_batch, "seen", {"norms_after_scaling": norms, **shared}, message)]
    return []


def _not_the_sum(facts: StepFacts) -> bool:
    """Whether the step took something else than the sum of what the backwards gave."""
    return facts.gate < facts.fits.own_sum < math.inf


def _other_limit(facts: StepFacts) -> list[Finding]:
    """The gradients before clipping agree."""
    mine, usual = facts.scaling.limits
    if not (facts.raw.distance <= facts.gate < facts.consumed.distance) or not abs(mine - usual) > 0:
        return []
    message = f"equal gradients, clipped to {mine:.4g} where N=1 clips to {usual:.4g}"
    return [at(facts, Cause.unexplained, "seen", {"limit": mine, "reference_limit": usual}, message)]


def _one_norm(norms: tuple[float, ...]) -> bool:
    """Several times scaled to the same norm: that is clipping, by whatever code."""
    return len(norms) > 1 and max(norms) - min(norms) <= ONE_NORM * max(norms)
