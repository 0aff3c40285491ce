"""From what an arm showed to the names of what is wrong with it. Plain numbers; no torch, and never the fault's own name.

Gradient faults are named by exact oracles (`referee/hypotheses.py`), the others by what moved when nothing should have. Two
faults at once give two causes, or `unexplained`; nothing is named that does not fit every window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from accumulation_harness.judge.cause import INHERENT, MEANINGS, PRIORITY, Cause, Causes
from accumulation_harness.judge.counters import Counter, Differences, described
from accumulation_harness.judge.gates import ALGEBRA_GATE
from accumulation_harness.judge.signature import Signature, WrongWindow, explanations

PARALLEL = 0.999  # cosine beyond which a movement counts as along the weights
# Of a gradient's entries, more than in the full batch's: underflow. Planted, it took 9 % and more; micro-batches whose gradients
# rightly are others (in-batch negatives) had up to 0.1 % in 1,951 random trials.
VANISHED = 1e-2
SAME_DIRECTION = 1e-9  # of a distance, what is more than the change in length of a gradient only scaled; least residual
ROUNDED = 1e-15  # of the length of a gradient
OCCASIONAL = {Cause.short_window_divided_by_n, Cause.resume_in_window}  # they leave most windows right; their look-alikes none

Found = dict[Cause, str]  # cause -> the sentence of its evidence


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The causes of an arm that is `different`, with a sentence of evidence for each."""

    causes: Causes
    explained: bool  # every gradient is reproduced exactly, and every other cause is an exact count
    sentences: tuple[str, ...]


def diagnose(signature: Signature, counters: Differences) -> Diagnosis:
    """Name the causes of an arm that is `different`.

    Args:
        signature: How its windows differ, and from which hypotheses.
        counters: Those that differ from the full batch's.

    Returns:
        The causes with a sentence each, and whether they explain everything.
    """
    found: Found = {}
    exact = True
    found |= _samples(signature)
    found |= _beside_other_samples(signature) if found else {}
    found |= _inside_the_window(signature)
    disturbed = bool(found)  # gradients of these windows are wrong for a reason that is already named
    if signature.wrong and not disturbed:
        causes, exact = _gradients(signature)
        found |= causes
    if not disturbed:
        found |= _update(signature, counters)
    if not signature.drawn_error <= ALGEBRA_GATE and Counter.evaluated not in counters:
        found[Cause.stochastic_layers] = (
            f"with the draws of the model the accumulated gradient differs by {signature.drawn_error:.1e}; "
            f"without them by {signature.gradient_error:.0e}"
        )
        exact = exact and bool(signature.drawn)
        beside = (cause for cause in signature.drawn if cause not in INHERENT | {*found})
        found |= {cause: f"beside the draws of its forwards: {MEANINGS[cause].sentence}" for cause in beside}
    if not found:
        found |= {cause: f"{MEANINGS[cause].sentence}: its run is the arm's over all windows" for cause in signature.follows}
    found |= _counters(signature, counters, found)
    if found.keys() <= INHERENT and signature.survivors_error <= ALGEBRA_GATE:
        found[Cause.non_finite_micro_batch] = (
            "a micro-batch that was not finite was dropped and the window stepped on the others, where the full batch does not"
        )
    unnamed = _unnamed(signature, counters, found)
    if unnamed or not found:
        found[Cause.unexplained] = unnamed or _evidence(signature, counters)
    return Diagnosis(causes=tuple(found), explained=exact and Cause.unexplained not in found, sentences=tuple(found.values()))


def _unnamed(signature: Signature, counters: Differences, found: Found) -> str:
    """What is known to be wrong and has no name; empty where nothing is."""
    if evaluated := counters.get(Counter.evaluated):
        return f"layers were in evaluation mode in {evaluated[0]:g} windows, in the full batch's training in {evaluated[1]:g}"
    if repeated := counters.get(Counter.drawn_again):
        return f"{repeated[0]:g} micro-batches drew the random numbers that other rows had drawn: a seed is set inside the run"
    if signature.replayed and not signature.drawn and signature.drawn_error > ALGEBRA_GATE:
        return "the exact gradient with the very draws that its forwards made is another one"
    if not signature.statistics_error <= ALGEBRA_GATE:
        return (
            f"running statistics are off by {signature.statistics_error:.1e} from those of the micro-batches in turn, where the "
            "gradients are those: another forward has moved them, or none has"
        )
    if found.keys() <= INHERENT and math.isfinite(signature.strayed_at):
        return (
            f"from window {signature.strayed_at:.0f} on its weights are no longer those of a run with that alone, although each "
            "gradient and each step since was compared and is: a rate, or something else that is no part of them, was changed"
        )
    return ""


def underflow_cause(zeros: float, full_zeros: float) -> Found:
    """Name underflow as the cause of a rounding error that is larger than the full batch's.

    Args:
        zeros: Share of the gradient's entries that vanished in the arm, from 0 to 1.
        full_zeros: The same of the full batch.

    Returns:
        The cause and a sentence where the shares differ by more than `VANISHED`; else nothing.
    """
    if zeros - full_zeros > VANISHED:
        sentence = f"{zeros:.1%} of the gradient's entries vanished, {full_zeros:.1%} in the full batch: underflow"
        return {Cause.underflow_from_division: sentence}
    return {}


def _samples(signature: Signature) -> Found:
    samples = signature.samples
    if samples.repeated:
        return {Cause.samples_repeated: f"{samples.repeated} samples were used twice within a window"}
    if samples.unknown:
        seen = f"a backward went through {samples.unknown} rows that are no training samples"
        if not samples.missing:
            return {Cause.foreign_gradients: f"{seen}, beside all of the window's samples"}
        return {Cause.unexplained: f"{seen}; windows lacked {samples.missing} of their samples"}
    if samples.missing or samples.foreign:
        seen = f"windows lacked {samples.missing} of their samples and held {samples.foreign} of other windows"
        return {Cause.window_misplaced: seen}
    return {}


def _beside_other_samples(signature: Signature) -> Found:
    """A second cause, that turns the gradient of the samples the arm saw into what it consumed in every such window."""
    fitting = [causes for causes, error in explanations(signature.other_samples).items() if error <= ALGEBRA_GATE]
    if not fitting or () in fitting:
        return {}
    cause = min((causes[-1] for causes in fitting), key=PRIORITY.__getitem__)
    return {cause: f"of the samples that it saw: {MEANINGS[cause].sentence}"}


def _inside_the_window(signature: Signature) -> Found:
    steps, micro_batches = signature.steps_in_window
    moved = signature.moved.length
    if steps > 1:
        seen = f"the optimizer stepped {steps} times inside one window of {micro_batches} micro-batches"
        if moved == 0 and signature.steps_before_last_forward:
            return {Cause.optimizer_state_per_micro_batch: f"{seen}, and only the last one moved the weights"}
        every = steps == micro_batches and moved > 0
        return {Cause.step_every_micro_batch if every else Cause.window_misplaced: seen}
    if signature.skipped_windows:
        return {Cause.window_misplaced: f"{signature.skipped_windows} of the probed windows ended without an optimizer step"}
    if moved > ALGEBRA_GATE and signature.steps_before_last_forward:
        return {Cause.window_misplaced: "the optimizer stepped before the window's last micro-batch"}
    if moved > ALGEBRA_GATE:
        seen = f"by {moved:.1e} inside the window"
        if signature.moved.along_weights < -PARALLEL:  # a decay, whatever its size
            return {Cause.weight_decay_per_micro_batch: f"the weights shrank {seen}"}
        return {Cause.unexplained: f"the parameters moved {seen}"}
    return {}


def _gradients(signature: Signature) -> tuple[Found, bool]:
    """Causes of wrong gradients, and whether they are exact."""
    assert signature.worst_window is not None
    worst = signature.worst_window
    fitting = {causes: error for causes, error in signature.explanations.items() if error <= ALGEBRA_GATE}
    if not fitting:
        return {Cause.unexplained: _describe(worst)}, False
    return {cause: f"{_describe(worst)}: {MEANINGS[cause].sentence}" for cause in _simplest(fitting, signature)}, True


def _simplest(fitting: Mapping[Causes, float], signature: Signature) -> Causes:
    """The causes to name where several reproduce the gradients: one before two, then by priority."""

    def resumes_twice(causes: Causes) -> bool:  # as no run does
        return causes[-1] == Cause.resume_in_window and signature.wrong_in_a_run.get(causes[:-1], 0) > 1

    candidates = [causes for causes in fitting if not resumes_twice(causes)] or [*fitting]
    occasional = [causes for causes in candidates if causes[-1] in OCCASIONAL and _rests(causes, signature)]
    return min(occasional or candidates, key=lambda causes: (len(causes), PRIORITY[causes[-1]]))


def _rests(causes: Causes, signature: Signature) -> bool:
    """Whether some probed window was right but for the causes before the last."""
    context = causes[:-1]
    return context in signature.sufficient_alone if context else signature.wrong < signature.probes


def _update(signature: Signature, counters: Differences) -> Found:
    """The gradient was consumed and something else happened than one plain optimizer step."""
    found: Found = {}
    wrong_entries = {name: error for name, error in signature.state_errors.items() if not error <= ALGEBRA_GATE}
    if "ema" in wrong_entries:
        fits = signature.average_error <= ALGEBRA_GATE
        seen = f"the moving average of the weights is off by {wrong_entries.pop('ema'):.1e} after a step"
        found[Cause.ema_per_micro_batch if fits else Cause.unexplained] = seen
    steps = counters.get(Counter.optimizer_steps)
    state_step = next((pair for name, pair in counters.items() if name.startswith(Counter.state_step)), None)
    if state_step == steps:  # it counts the steps that were taken
        state_step = None
    update = signature.update
    if wrong_entries or state_step:
        entries = ", ".join(f"{name} by {error:.1e}" for name, error in wrong_entries.items())
        count = f"; its step is {state_step[0]:g} instead of {state_step[1]:g}" if state_step else ""
        fits = signature.advanced_error <= ALGEBRA_GATE if wrong_entries else bool(state_step and state_step[0] > state_step[1])
        found[Cause.optimizer_state_per_micro_batch if fits else Cause.unexplained] = (
            f"the optimizer's state is off after a step, given its gradient: {entries}{count}"
        )
    elif not update.length <= ALGEBRA_GATE:
        seen = f"after a step the parameters are off by {update.length:.1e} of the update"
        if abs(update.along_weights) > PARALLEL and signature.decays_fit:
            found[Cause.weight_decay_per_micro_batch] = f"{seen}, along the weights themselves"
        else:
            found[Cause.unexplained] = seen
    return found


def _counters(signature: Signature, counters: Differences, found: Found) -> Found:
    causes: Found = {}
    schedule, steps = counters.get(Counter.schedule_index), counters.get(Counter.optimizer_steps)
    with_the_steps = steps is not None and schedule is not None and schedule[0] == steps[0]
    if schedule and schedule[0] > schedule[1] and not with_the_steps and Cause.step_every_micro_batch not in found:
        causes[Cause.schedule_per_micro_batch] = f"the schedule ticked {schedule[0]:g} times, not {schedule[1]:g}"
    if steps and found.keys() <= INHERENT:
        causes[Cause.window_misplaced] = f"the optimizer stepped {steps[0]:g} times, not {steps[1]:g}"
    tracked = counters.get(Counter.batches_tracked)
    if tracked and not signature.wrong and not found:
        causes[Cause.batch_statistics] = f"BatchNorm's running statistics moved {tracked[0]:g} times, not {tracked[1]:g}"
    if left := counters.get(Counter.left_by_poison):
        causes[Cause.gradients_not_cleared] = (
            f"after a window that is not finite the gradients stayed: the next one's are off by {left[0]:.1e}"
        )
    samples = counters.get(Counter.samples)
    if samples:
        causes[Cause.counter_wrong] = f"{samples[0]:g} samples were counted, {samples[1]:g} were seen"
    if not signature.loss_error <= ALGEBRA_GATE:
        causes[Cause.loss_report_differs] = f"the reported loss is off by {signature.loss_error:.1e} where the gradient is exact"
    return causes


def _describe(window: WrongWindow) -> str:
    """Put the evidence of one window into a sentence.

    Args:
        window: A window whose gradient is wrong.

    Returns:
        The distance, scale, cosine and weights of the micro-batches, as far as they say something.
    """
    whole = window.whole
    if math.isinf(whole.distance):
        return f"in window {window.step} the accumulated gradient is not finite; the full batch's, at the same weights, is"
    parallel = 1 - whole.cosine
    # By lengths: a cosine, whose rounding hides angles below 1e-8, is that of a small error in any direction.
    if whole.distance - abs(whole.scale - 1) <= SAME_DIRECTION * whole.distance + ROUNDED:
        return f"the accumulated gradient is {whole.scale:.9g} times the full batch's in the same direction"
    digits, outside = 6, ""  # weights are known to what is outside their span
    if whole.residual > SAME_DIRECTION:
        digits, outside = 3, f", {whole.residual:.1e} of it outside their span"
    known = [w for w in whole.weights if not math.isnan(w)]
    which = "micro-batches" if len(known) == len(whole.weights) else "micro-batches that have loss terms"
    shown = ", ".join(f"{round(w, 9):.{digits}g}" for w in known[:6]) + (", ..." if len(known) > 6 else "")
    return (
        f"the accumulated gradient differs by {whole.distance:.1e}{_where(window)} (scale {whole.scale:.4g}, "
        f"1 - cosine {parallel:.1e}); the {which} enter with {shown} of their right weights{outside}"
    )


def _where(window: WrongWindow) -> str:
    """The tensors that differ, or the parameter group where it is all of one, when others do not."""
    wrong = {name for name, distance in window.tensors.items() if not distance <= ALGEBRA_GATE}
    groups = [name for name, one in window.groups.items() if not one.distance <= ALGEBRA_GATE]
    if not 0 < len(wrong) < len(window.tensors):
        return ""
    group = f" of the parameter group {groups[0]}" if len(groups) == 1 < len(window.groups) else ""
    return f", in {', '.join(sorted(wrong))}{group} alone"


def _evidence(signature: Signature, counters: Differences) -> str:
    if signature.worst_window is not None:
        return _describe(signature.worst_window)
    return "; ".join(described(counters)) or "the weights diverge although the gradients that were probed agree"
