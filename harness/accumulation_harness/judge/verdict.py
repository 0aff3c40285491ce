"""From evidence to a verdict. Plain numbers in, plain words out: no torch, so a stored trial can be judged again.

The levels L0 to L3, their gates and the reasons for them: docs/equivalence.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accumulation_harness.config import Precision
from accumulation_harness.judge.cause import INHERENT, Cause, Causes, joined
from accumulation_harness.judge.counters import Differences, described
from accumulation_harness.judge.diagnosis import VANISHED, Found, diagnose, underflow_cause
from accumulation_harness.judge.gates import (
    ALGEBRA_GATE,
    CLEAR_MOST,
    COMPARABLE,
    CONFIRMED,
    LEAST,
    RESOLUTION,
    ROUNDING_GATE,
    SCALE_FACTOR,
    STORED,
    SUMMED,
    TRAJECTORY_GATE,
    clear_gate,
    coarse_gate,
)
from accumulation_harness.judge.signature import Decomposition, Signature, worst
from accumulation_harness.system.enums import StrEnum

CLEARLY_VANISHED = (
    2.5e-2  # share of the entries; planted, a division took 4.1 % and more, a loss with in-batch negatives up to 1.3 %
)
IN_SPAN = 100.0  # times, that an error is larger than what of it is outside the span of the micro-batch gradients
STORED_FACTOR = 1e-3  # relative, within which a factor is a number of micro-batches
CLOSES = 0.5  # of the gap: a factor is named when its removal closes more than that


WIDENED = (
    "the task or the loop casts to a narrower format: for the comparison in float64 these casts were widened, which changes "
    "nothing in exact arithmetic"
)
NARROW_STEPS = (
    "the optimizer takes no step in float64: in that comparison it stepped float32 copies of the weights, on gradients in float64"
)
UNCOPIED = (
    "a copy of the optimizer takes another step than itself: single steps were not compared, the weights over all windows were"
)
NOT_POISONED = (
    "not measured was what the loop does with a loss that is not finite: it takes other losses than the task's, or what it calls "
    "refuses such numbers"
)
UNSEEN_ROWS = "not seen was whether the loop accumulates: a transform hides the rows of its forwards"
SHARED_DRAWS = (
    "the model draws random numbers, and both runs happened to draw the same ones for every row: that is certain only where they "
    "are drawn per sample; with another shape, another row order or a GPU it does not hold"
)

ROUNDED_ONCE = (Precision.bfloat16, Precision.float16)  # products add up in float32: a shuffled full batch hardly moves


class Doubt(StrEnum):
    """Why an arm cannot be judged; each value is the beginning of the sentence that says so and what would help."""

    diverged = "a loss or a parameter became non-finite: try a smaller optimizer.lr, or fewer steps"
    diverged_at_once = "in float64 the full batch itself diverged in the first window: try a smaller optimizer.lr"
    unresolved = "rounding in float64 alone moves the gradients of this model by more than the gate"
    overflowed = "rounding could not be measured"
    vanished = "the gradient vanishes in float16: try a larger loss_scale"
    unmeasured = "not a number in float64"
    not_accumulated = "the loop passes every window as one batch: it does not accumulate, so that there was nothing to compare"
    no_float64 = "the task does not compute in float64"
    no_gradient = "the gradient of the first window is zero: try other data, or another seed"


class Outcome(StrEnum):
    """The verdict on an arm."""

    equivalent = "equivalent"
    degraded = "degraded"
    different = "different"
    inconclusive = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Algebra:
    """Check L0: the errors of an arm in float64."""

    gradient_error: float  # largest over the probes, clipping as configured, off and active
    state_error: float  # optimizer state after the first step, largest over its entries
    trajectory_error: float  # largest ||theta_acc - theta_full|| / ||theta_full - theta_0||, before `parted_at`
    loss_error: float  # reported loss against the loss whose gradient was consumed, relative, where that gradient is exact
    steps: int
    floor: float  # the gradient error of a permuted full batch: what this model can resolve
    clipping_active: bool  # some window was really clipped: otherwise the clipping test was vacuous
    clipped_share: float  # of the windows of the configured run
    short_windows: int  # windows smaller than the effective batch
    unequal_terms: bool  # some micro-batches of a window had different numbers of loss terms
    not_float64: str = ""  # why the task has no float64, where it has none: the numbers are then those of float32
    draws: bool = False  # the model draws random numbers in training: dropout, or noise
    widened: bool = False  # its code narrows numbers inside, and was run with these widened
    narrow_steps: bool = False  # its optimizer takes no step in float64, and was given parameters and gradients in float32
    parted_at: int | None = (
        None  # window from which on rounding is amplified; each one since was compared at the arm's own weights
    )
    probes: int = 0  # windows of the run whose gradients and steps were compared one by one
    poisoned: bool = True  # a window with a loss that is not finite was trained as well
    carried: tuple[str, ...] = ()  # what else the model carries otherwise than the full batch's, in words: no training reads it

    @property
    def error(self) -> float:
        """`algebra_error` of the tables; NaN where there is no float64."""
        return math.nan if self.not_float64 else worst(self.gradient_error, self.state_error)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rounding of the gradient, or of one parameter group's; NaN for trials in float64."""

    ratio: float = math.nan  # median error of the arm over median error of the full batch
    low: float = math.nan  # of the errors' ratio, as exact limits that hold with 95 % at whatever look it was decided
    high: float = math.nan
    full_error: float = math.nan  # median over permutations of ||g_full - g_64|| / ||g_64||
    arm_error: float = math.nan  # the same of the arm


@dataclass(frozen=True, kw_only=True)
class Rounding(Decomposition, Part):
    """Check L1: rounding in the target precision, at the initial weights, relative to float64, and in micro-batch gradients."""

    groups: Mapping[str, Part] = field(default_factory=dict)  # by the optimizer's parameter groups
    permutations: int = 0  # that it took to decide
    scale: float = math.nan  # natural order: ||a|| / ||g_64||
    cosine: float = math.nan
    full_factor: float = math.nan  # `factor` of the full batch, median over permutations
    factor_range: float = math.nan  # the largest less the smallest over permutations, of the full batch and of the arm together
    dimensions: int = 0  # entries of the gradient
    zeros: float = math.nan  # share of the entries that are not zero in float64 and exactly zero here
    full_zeros: float = math.nan  # the same of the full batch
    skipped: int = 0  # permutations whose gradient overflowed and was skipped by the loss scaler
    windows: int = 1  # that were tried: a rejection counts when further windows confirm it, and the last one's numbers are here

    @property
    def factor(self) -> float:
        """<a, g_64> / ||g_64||^2, the least-squares factor of the arm's gradient on the exact one."""
        return self.scale * self.cosine if self.scale else 0.0


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """Check L3: how far the weights drift (reported, never a gate), and the gradients along the training against float64."""

    ratio: float  # largest d_t over the largest null at t, before the null's first jump
    step: int = 0  # t of that
    jump_step: int | None  # first step with null > 100 times the null of the first step
    final_distance: float
    steps: int = 0  # windows of the training
    rough: Mapping[int, float] = field(default_factory=dict)  # window -> an error that is CLEARLY above all of the full batch's
    usual_error: float = math.nan  # the largest of those


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that was measured of one arm."""

    precision: Precision
    algebra: Algebra
    rounding: Rounding
    trajectory: Trajectory
    counters: Differences  # L2
    signature: Signature = field(default_factory=Signature)
    narrow: Signature = field(default_factory=Signature)  # the same in the format under test, where L1 cannot tell
    ablation: Mapping[str, float] = field(default_factory=dict)  # factor -> share of the gap that its removal closes
    finite: bool = True  # losses and parameters stayed finite, the losses of windows that overflowed apart
    overflows: tuple[int, ...] = ()  # windows of the run in float16 that the loss scaler skipped
    full_overflows: tuple[int, ...] = ()  # the same of the full batch
    overflows_alone: bool = False  # no other arm that is known to be right has skipped any

    def stored(self) -> dict[str, Any]:
        """As in the store: plain JSON types."""
        seen = {"signature": self.signature.stored(), "narrow": self.narrow.stored() if self.narrow.probes else None}
        return dataclasses.asdict(self) | seen


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on an arm, with its causes and reasons."""

    verdict: Outcome
    causes: Causes = ()  # empty when there is nothing to explain
    explained: bool = False
    reasons: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """As in the tables: several causes joined by `+`."""
        return joined(self.causes)


def judge(evidence: Evidence) -> Verdict:
    """Judge one arm: checks L0 and L2 decide `different`, then L1 decides `degraded`.

    Args:
        evidence: Everything that was measured of the arm.

    Returns:
        The verdict, with its causes and reasons.
    """
    if evidence.algebra.not_float64:
        return _judged_in_float32(evidence)
    verdict = _judged(evidence)
    algebra = evidence.algebra
    seen = (
        f"compared: {algebra.steps} windows in float64, {algebra.probes} of them micro-batch by micro-batch, "
        f"and {evidence.trajectory.steps} in {evidence.precision}"
    )
    judged_right = verdict.verdict in (Outcome.equivalent, Outcome.degraded)
    notes = (
        (SHARED_DRAWS,) * (algebra.draws and judged_right)
        + (NOT_POISONED,) * (judged_right and not algebra.poisoned)
        + (WIDENED,) * algebra.widened
        + (NARROW_STEPS,) * algebra.narrow_steps
        + (UNCOPIED,) * evidence.signature.uncopied
    )
    return dataclasses.replace(verdict, reasons=(*verdict.reasons, *notes, seen))


def _judged_in_float32(evidence: Evidence) -> Verdict:
    """Judge an arm whose task does not compute in float64: what differs clearly is `different`, and nothing is equivalent.

    A gradient that no cause reproduces has to differ in every window: in a single one a ReLU may have flipped.

    Args:
        evidence: What was measured of the arm.

    Returns:
        `different` with its causes, or `inconclusive`.
    """
    algebra, signature = evidence.algebra, evidence.signature
    gate = coarse_gate(algebra.floor)
    unseen = (
        f"{Doubt.no_float64} ({algebra.not_float64}): not measured were rounding (L1), the reported loss, windows that are not "
        f"finite, and differences of a gradient below {gate:.0e} (the shuffled full batch differs by {algebra.floor:.1e})"
    )
    if not evidence.finite and not evidence.counters:
        return Verdict(verdict=Outcome.inconclusive, reasons=(Doubt.diverged, unseen))
    diagnosis = diagnose(signature, evidence.counters)
    flipped = signature.wrong < max(3, signature.probes) and diagnosis.causes == (Cause.unexplained,)
    wrong = (*_coarse_failures(signature, gate), *described(evidence.counters))
    if wrong and not (flipped and not evidence.counters):
        reasons = (*diagnosis.sentences, *wrong, unseen)
        return Verdict(verdict=Outcome.different, causes=diagnosis.causes, reasons=reasons)
    seen = f"in float32 gradients differ by at most {algebra.gradient_error:.1e} in {signature.probes} windows; counters agree"
    return Verdict(verdict=Outcome.inconclusive, reasons=(unseen, seen))


def _coarse_failures(signature: Signature, gate: float) -> tuple[str, ...]:
    """List what fails of L0 in float32.

    Args:
        signature: The errors of the windows.
        gate: The largest relative error that counts as none.

    Returns:
        A phrase each.
    """
    measures = (
        ("gradients", signature.gradient_error),
        ("updates, given their gradients,", worst(signature.update.magnitude, signature.moved.magnitude)),
        ("optimizer state after a step", worst(0.0, *signature.state_errors.values())),
        ("reported loss", signature.loss_error),
    )
    return _above(((what, error, gate) for what, error in measures), Precision.float32)


def _judged(evidence: Evidence) -> Verdict:
    doubt = _unjudgeable(evidence)
    if doubt:
        return Verdict(verdict=Outcome.inconclusive, reasons=(doubt,))
    if evidence.algebra.floor > ALGEBRA_GATE:
        return _judged_above(evidence)
    vanished: Found = {}
    if evidence.precision == Precision.float16:  # the other formats have float32's range
        vanished = underflow_cause(evidence.rounding.zeros, evidence.rounding.full_zeros)
    wrong = (*algebra_failures(evidence.algebra), *described(evidence.counters))
    if wrong:
        diagnosis = diagnose(evidence.signature, evidence.counters)
        # A loop with a fault of its own may rightly have other zeros than the full batch, and so may any where that has some.
        zeros, of_full = evidence.rounding.zeros, evidence.rounding.full_zeros
        clearly = of_full <= VANISHED and zeros - of_full > CLEARLY_VANISHED
        is_inherent = INHERENT.issuperset(diagnosis.causes)
        also = vanished if clearly and (is_inherent or not evidence.signature.wrong) else {}
        also = also or (_in_format(evidence) if is_inherent else {})
        unread = _unread(evidence.algebra) if evidence.signature.follows and evidence.algebra.parted_at is None else ()
        return Verdict(
            verdict=Outcome.different,
            causes=(*diagnosis.causes, *also),
            explained=diagnosis.explained and not also and not unread,
            reasons=(
                *dict.fromkeys((*diagnosis.sentences, *also.values(), *wrong, *unread)),
                *[str(Doubt.diverged)] * (not (evidence.finite or evidence.signature.is_lost)),
            ),
        )
    doubt = _unmeasured(evidence.precision, evidence.algebra, evidence.rounding)
    if doubt:
        return Verdict(verdict=Outcome.inconclusive, reasons=(doubt,))
    aside = _remarks(evidence)
    rough = (*rounding_failures(evidence.precision, evidence.rounding), *_later_failures(evidence), *_overflowed_alone(evidence))
    by_weights = _weighted_otherwise(evidence.rounding)
    alone = (by_weights if rough else {}) | _in_format(evidence, is_rough=bool(rough))
    if alone:
        return Verdict(verdict=Outcome.different, causes=tuple(alone), reasons=(*alone.values(), *rough, *aside))
    if rough:
        reasons = (*vanished.values(), *rough, *_attribution(evidence.ablation), *aside)
        return Verdict(verdict=Outcome.degraded, causes=tuple(vanished), reasons=reasons)
    return Verdict(verdict=Outcome.equivalent, reasons=aside)


def _in_format(evidence: Evidence, *, is_rough: bool = False) -> Found:
    """Name what is wrong in the format under test, where float64 shows nothing but what the model is.

    Args:
        evidence: What was measured of the arm: probes in that format too, errors within its rounding as zeros.
        is_rough: Whether its gradients are known to be rounded more than the full batch's.

    Returns:
        Causes with a sentence each; in fewer than CONFIRMED windows those alone that reproduce the gradients.
    """
    narrow = evidence.narrow
    if not narrow.probes:
        return {}
    diagnosis, furthest = diagnose(narrow, {}), narrow.worst_window
    found = dict(zip(diagnosis.causes, diagnosis.sentences, strict=True))
    if (
        evidence.precision == Precision.float16 and furthest is not None and furthest.whole.scale == 0
    ):  # no clearing leaves nothing
        found = underflow_cause(1.0, evidence.rounding.full_zeros) or found
    is_confirmed = max(narrow.wrong_steps, 0 if is_rough else narrow.wrong) >= CONFIRMED
    known = INHERENT | (set() if is_confirmed else {Cause.unexplained})
    return {cause: f"in {evidence.precision} alone: {sentence}" for cause, sentence in found.items() if cause not in known}


def _judged_above(evidence: Evidence) -> Verdict:
    """Of an arm whose model resolves less in float64 than L0 asks for: what differs clearly is `different`, nothing is right."""
    floor, gate = evidence.algebra.floor, clear_gate(evidence.algebra.floor)
    doubt = f"{Doubt.unresolved}: at its first weights a shuffled full batch differs by {floor:.1e}"
    measures = _algebra_measures(evidence.algebra)[:-1]  # trajectories part by what rounding becomes
    failures = _above((what, error, gate) for what, error, _ in measures)
    diagnosis = diagnose(evidence.signature.above(gate, gate), evidence.counters)
    is_certain = gate <= CLEAR_MOST or diagnosis.explained
    explained = diagnosis.explained and bool(failures or gate <= CLEAR_MOST)
    if not (evidence.finite and (evidence.counters or (failures and is_certain))):
        return Verdict(verdict=Outcome.inconclusive, reasons=(doubt,))
    return Verdict(
        verdict=Outcome.different,
        causes=diagnosis.causes,
        explained=explained,
        reasons=(*diagnosis.sentences, *failures, *described(evidence.counters), f"{doubt}: smaller differences are not judged"),
    )


def _unread(algebra: Algebra) -> tuple[str, ...]:
    """List what else the model carries otherwise than the full batch's, or the oracle's whose trajectory the arm's is.

    Args:
        algebra: The errors in float64.

    Returns:
        The first three, a phrase each.
    """
    return tuple(f"{one}, and the training did not depend on it" for one in algebra.carried[:3])


def _remarks(evidence: Evidence) -> tuple[str, ...]:
    """List what a reader of an arm with the right algebra has to know although it decides nothing.

    Args:
        evidence: What was measured of the arm.

    Returns:
        A sentence each.
    """
    algebra, told = evidence.algebra, [*_unread(evidence.algebra)]
    path = evidence.trajectory
    if path.ratio > COMPARABLE and evidence.precision not in ROUNDED_ONCE:
        told.append(
            f"in {evidence.precision} the weights are {path.ratio:.0e} times as far from the large batch's as a shuffled batch's "
            f"at window {path.step}; the run in float64 is exact"
        )
    parted = algebra.parted_at
    if parted is not None:
        told.append(
            f"from window {parted} on this training amplifies rounding, so that any two trajectories diverge: each window since "
            "was compared at the arm's own weights, and is exact"
        )
    if evidence.overflows != evidence.full_overflows and not _overflowed_alone(evidence):
        own, full = (", ".join(map(str, steps)) or "none" for steps in (evidence.overflows, evidence.full_overflows))
        told.append(
            f"float16 overflowed and the loss scaler skipped windows {own} (full batch: {full}): a property of the format at "
            "this loss scale, not of the loop; a smaller loss_scale avoids it"
        )
    return tuple(told)


def _unjudgeable(evidence: Evidence) -> str:
    """Say why an arm cannot be judged.

    Args:
        evidence: What was measured of the arm.

    Returns:
        A sentence; empty where it can be.
    """
    # One that ran away is judged when its float64 gradients were finite and wrong at its own weights: that may be why.
    own = (evidence.algebra.gradient_error, evidence.algebra.state_error)
    lost = evidence.signature.is_lost
    if not (evidence.finite or lost or any(ALGEBRA_GATE < error < math.inf for error in own)):
        return Doubt.diverged
    return Doubt.diverged_at_once if evidence.algebra.steps < 1 else ""


def _unmeasured(precision: str, algebra: Algebra, own: Rounding) -> str:
    """Say why an arm in which nothing is wrong so far cannot be called right.

    Args:
        precision: The precision under test.
        algebra: The errors in float64.
        own: The rounding in that precision.

    Returns:
        A sentence; empty where it can be.
    """
    if math.isnan(algebra.trajectory_error):  # the arm has run away in float64, the full batch has not
        return Doubt.diverged
    failed = [what for what, error, _ in _algebra_measures(algebra) if math.isnan(error)]
    if failed:
        return f"{Doubt.unmeasured}: {', '.join(failed)}"
    if precision == Precision.float64:
        return ""
    if math.isnan(own.scale) and own.full_error <= LEAST:
        return Doubt.no_gradient
    if own.scale == 0 and own.full_zeros == 1:
        return Doubt.vanished
    if not all(map(math.isfinite, (own.ratio, own.high, own.factor))):
        return f"{Doubt.overflowed}: gradients overflowed in {precision}; try a smaller loss_scale"
    return ""


def _algebra_measures(algebra: Algebra) -> tuple[tuple[str, float, float], ...]:
    """List what L0 decides on.

    Args:
        algebra: The errors in float64.

    Returns:
        Name, relative error and gate of each.
    """
    return (
        ("gradients", algebra.gradient_error, ALGEBRA_GATE),
        ("optimizer state after one step", algebra.state_error, ALGEBRA_GATE),
        ("reported loss", algebra.loss_error, ALGEBRA_GATE),
        (f"parameters over {algebra.steps} steps", algebra.trajectory_error, TRAJECTORY_GATE),
    )


def algebra_failures(algebra: Algebra) -> tuple[str, ...]:
    """Describe which measures of check L0 are above their gates.

    Args:
        algebra: The measures. NaN, a measurement that failed, is not a failure here.

    Returns:
        A sentence for each.
    """
    return _above(_algebra_measures(algebra))


def _above(measures: Iterable[tuple[str, float, float]], of: Precision = Precision.float64) -> tuple[str, ...]:
    return tuple(f"{what} differ by {error:.1e} in {of} (gate {gate:.0e})" for what, error, gate in measures if error > gate)


def rounding_failures(precision: str, own: Rounding) -> tuple[str, ...]:
    """Describe which measures of check L1 are above their gates.

    Args:
        precision: The precision under test.
        own: The measures of the arm.

    Returns:
        A sentence for each; none in float64, where check L0 has measured the rounding.
    """
    if precision == Precision.float64:
        return ()
    failures, error = [], own.ratio * own.full_error
    if not own.high <= ROUNDING_GATE and not error <= STORED:
        failures.append(f"rounding error is {own.ratio:.2f} times the full batch's (95 % up to {own.high:.2f})")
    # Constants of the format (1 / N, 1 / b) are rounded as well: four of them are off by twice its resolution at most.
    off, allowed = abs(own.factor - own.full_factor), ROUNDING_GATE * RESOLUTION[precision] + SCALE_FACTOR * own.factor_range
    if off > allowed:
        failures.append(f"gradient scale is off by {off:.1e} (allowed {allowed:.1e})")
    # A group of a few numbers may be exact by luck, and the full batch may lose it as well: only what is clearly outside counts.
    limit = ROUNDING_GATE * max(RESOLUTION[precision], SUMMED * math.sqrt(len(own.weights)) * STORED)
    return tuple(failures) or tuple(
        f"in parameter group {name} rounding error is {part.ratio:.2f} times the full batch's ({part.arm_error:.1e})"
        for name, part in own.groups.items()
        if part.full_error < 1 and part.low > ROUNDING_GATE and part.arm_error > limit
    )


def _later_failures(evidence: Evidence) -> tuple[str, ...]:
    """List what fails of gradients after the first windows; in a single window a ReLU may have flipped.

    Args:
        evidence: What was measured of the arm.

    Returns:
        A sentence, or nothing.
    """
    rough = evidence.trajectory.rough
    if evidence.precision == Precision.float64 or len(rough) < CONFIRMED:
        return ()
    off = f"gradients are off by up to {max(rough.values()):.1e}, the full batch's by {evidence.trajectory.usual_error:.1e}"
    return (f"in {evidence.precision} from window {min(rough)} on {off}",)


def _overflowed_alone(evidence: Evidence) -> tuple[str, ...]:
    """Say in which windows the arm overflowed, where no right one ever did."""
    if not (evidence.overflows and evidence.overflows_alone):
        return ()
    steps = ", ".join(map(str, evidence.overflows))
    return (f"float16 overflowed in windows {steps}, and in none of the full batch, a shuffled one or a right loop",)


def _weighted_otherwise(own: Rounding) -> Found:
    """Name the cause of an error in the span of the micro-batches' gradients, which rounding leaves in every direction.

    Args:
        own: The rounding in the precision under test.

    Returns:
        The cause and a sentence; nothing where the error leaves the span.
    """
    num, outside = len(own.weights), own.residual * own.scale
    error = math.sqrt(max(0.0, 1 - 2 * own.factor + own.scale**2))  # in the natural order, of which the weights are
    if not (2 * num <= own.dimensions and outside <= min(error, own.arm_error) / IN_SPAN):
        return {}
    even = max(own.weights) - min(own.weights) <= SCALE_FACTOR * max(outside, STORED) * abs(own.factor)
    named = {float(num): Cause.loss_not_divided, 1 / num: Cause.loss_divided_twice}
    near = (cause for factor, cause in named.items() if even and num > 1 and abs(own.factor / factor - 1) <= STORED_FACTOR)
    shown = ", ".join(f"{weight:.4g}" for weight in own.weights[:6]) + (", ..." if num > 6 else "")
    sentence = f"in the format under test alone the micro-batches count {shown} times, {outside:.1e} of it outside their span"
    return {next(near, Cause.unexplained): f"{sentence}: no rounding does that"}


def _attribution(ablation: Mapping[str, float]) -> tuple[str, ...]:
    """Word the factors whose removal closes at least half of the gap.

    Args:
        ablation: Factor -> share of the gap that its removal closes.

    Returns:
        A phrase each, the largest share first.
    """
    closing = sorted(((share, factor) for factor, share in ablation.items() if share >= CLOSES), reverse=True)
    return tuple(f"without {factor} {share:.0%} of the gap closes" for share, factor in closing)
