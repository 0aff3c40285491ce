"""From what an arm showed to the names of what is wrong with it. Plain numbers; no torch, and never the fault's own name.

Gradient faults are named by exact oracles (`causes.py`), the others by what moved when nothing should have. Two faults at once
give two causes, or `unexplained`; nothing is named that does not fit every window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GATE = 1e-12  # relative, float64: as the gate of L0
PARALLEL = 0.999  # cosine beyond which a movement counts as along the weights
VANISHED = 1e-3  # of a gradient's entries, more than in the full batch's: underflow
UNEXPLAINED = "unexplained"
BATCH = "batch_statistics"
OCCASIONAL = {"short_window_divided_by_n", "resume_in_window"}  # they leave most windows right; their look-alikes leave none
INHERENT = {BATCH, "stochastic_layers", "non_separable_loss"}  # of the model, not of the loop


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """A consumed gradient a, or a part of it, beside the referee's g and its micro-batch gradients g_k."""

    distance: float  # ||a - g|| / ||g||
    scale: float  # ||a|| / ||g||
    cosine: float
    weights: tuple[float, ...]  # of a on the g_k, by least squares, relative to what they should be
    residual: float  # ||part of a outside their span|| / ||a||
    condition: float  # of the g_k at unit length; the weights mean nothing when it is huge


@dataclass(frozen=True, kw_only=True)
class WrongWindow:
    """A probed window whose consumed gradient was not the referee's."""

    step: int
    samples: int
    micro_batches: int
    clip_norm: float | None
    whole: Attribution
    groups: Mapping[str, Attribution]  # by the optimizer's parameter groups
    tensors: Mapping[str, Attribution]

    @property
    def distance(self) -> float:
        return self.whole.distance


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Everything the diagnosis looks at."""

    probes: int = 0
    wrong: int = 0  # probed windows whose gradient was wrong
    worst: WrongWindow | None = None  # the one with the largest distance
    explanations: Mapping[str, float] = field(default_factory=dict)  # cause -> largest error of its oracle over the wrong windows
    at_rest: tuple[str, ...] = ()  # causes that alone explain at least one wrong window
    beside: Mapping[str, float] = field(default_factory=dict)  # the same of windows with other samples; "": no cause but those
    resolved: Mapping[str, float] = field(default_factory=dict)  # cause -> gap that is left when its factor is removed
    moved_in_window: float = 0.0  # largest ||theta(last forward) - theta(start)|| / ||theta(start)||
    moved_along_weights: float = 0.0  # cosine of that movement with theta
    steps_in_window: tuple[int, int] = (1, 1)  # most optimizer steps seen in one window, and its micro-batches
    steps_before_last_forward: int = 0  # most optimizer steps in one window before its last forward
    skipped_windows: int = 0  # probed windows in which the full batch stepped and the arm did not
    decays_fit: bool = True  # movements of the weights along themselves are those of a decay per micro-batch
    advanced_error: float = math.inf  # of the state against one that advanced for every micro-batch
    average_error: float = math.inf  # of the moving average against one that moved for every micro-batch
    update_error: float = 0.0  # parameters after a step against a twin optimizer given the same state and gradient
    update_along_weights: float = 0.0  # cosine of that error with theta
    state_errors: Mapping[str, float] = field(default_factory=dict)  # the same for the entries of the optimizer's state
    loss_error: float = 0.0  # reported loss against the one differentiated, relative, where the gradient is exact
    repeated_samples: int = 0
    missing_samples: int = 0
    foreign_samples: int = 0  # of other windows
    unknown_rows: int = 0  # that a backward went through and that are no training samples
    survivors_error: float = math.inf  # consumed in a window with a non-finite micro-batch, against the others' gradient


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    causes: tuple[str, ...]
    explained: bool  # every gradient is reproduced exactly, and every other cause is an exact count
    sentences: tuple[str, ...]

    @property
    def cause(self) -> str:
        """As in the tables: several causes joined by `+`."""
        return "+".join(self.causes)


def diagnose(signature: Signature, counters: Mapping[str, tuple[float, float]]) -> Diagnosis:
    """Name the causes of an arm that is `different`. `counters`: those that differ, (arm, reference)."""
    found: dict[str, str] = {}
    exact = True
    found |= _samples(signature)
    found |= _beside(signature) if found else {}
    found |= _inside_the_window(signature)
    disturbed = bool(found)  # gradients of these windows are wrong for a reason that is already named
    if signature.wrong and not disturbed:
        causes, exact = _gradients(signature)
        found |= causes
    if not disturbed:
        found |= _update(signature, counters)
    found |= _counters(signature, counters, found)
    if found.keys() <= INHERENT and signature.survivors_error <= GATE:
        found["non_finite_micro_batch"] = (
            "a micro-batch that was not finite was dropped and the window stepped on the others, where the full batch does not"
        )
    if not found:
        found[UNEXPLAINED] = _evidence(signature, counters)
        exact = False
    return Diagnosis(causes=tuple(found), explained=exact and UNEXPLAINED not in found, sentences=tuple(found.values()))


def roughness(zeros: float, full_zeros: float) -> tuple[str, tuple[str, ...]]:
    """The cause of a rounding error that is larger than the full batch's, where it can be told, and the sentence for it.

    `zeros`, `full_zeros`: share of the gradient's entries that vanished, of the arm and of the full batch.
    """
    if zeros - full_zeros > VANISHED:
        sentence = f"{zeros:.1%} of the gradient's entries vanished, {full_zeros:.1%} in the full batch: underflow"
        return "underflow_from_division", (sentence,)
    return "", ()


def telling(errors: Mapping[str, float], distance: float) -> dict[str, float]:
    """The causes that bring the gradient at least ten times nearer than no cause at all, of one wrong window.

    Just above the gate the right gradient itself is near, and so is every cause that hardly changes it.
    """
    return {cause: error for cause, error in errors.items() if error <= distance / 10}


def alone(windows: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """The causes that explain at least one of the wrong windows."""
    return tuple(sorted({cause for window in windows for cause, error in window.items() if error <= GATE}))


def explanations(windows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Cause -> its largest error over the wrong windows, for the causes that say something of every one of them.

    Each window maps a cause to the smallest error of its variants. A second cause beside the model's own (BatchNorm) may be at
    rest in a window (a short-window fault in a full one), where the first alone explains it.
    """

    def error(window: Mapping[str, float], cause: str) -> float:
        alone = window.get(cause.rpartition("+")[0], math.inf)
        return min(window.get(cause, math.inf), alone)

    causes = sorted(set().union(*windows))
    worst = {cause: max(error(window, cause) for window in windows) for cause in causes}
    return {cause: value for cause, value in worst.items() if math.isfinite(value)}


def _samples(signature: Signature) -> dict[str, str]:
    if signature.repeated_samples:
        return {"samples_repeated": f"{signature.repeated_samples} samples were used twice within a window"}
    if signature.unknown_rows:
        told = f"a backward went through {signature.unknown_rows} rows that are no training samples"
        if not signature.missing_samples:
            return {"foreign_gradients": f"{told}, beside all of the window's samples"}
        return {UNEXPLAINED: f"{told}; windows lacked {signature.missing_samples} of their samples"}
    if signature.missing_samples or signature.foreign_samples:
        return {
            "window_misplaced": f"windows lacked {signature.missing_samples} of their samples and held "
            f"{signature.foreign_samples} of other windows"
        }
    return {}


def _beside(signature: Signature) -> dict[str, str]:
    """A second cause, that turns the gradient of the samples the arm saw into what it consumed in every such window."""
    fitting = [cause for cause, error in signature.beside.items() if error <= GATE]
    if not fitting or "" in fitting:
        return {}
    cause = min(fitting, key=list(SENTENCES).index)
    return {cause: f"of the samples that it saw: {SENTENCES[cause]}"}


def _inside_the_window(signature: Signature) -> dict[str, str]:
    steps, micro_batches = signature.steps_in_window
    if steps > 1:
        told = f"the optimizer stepped {steps} times inside one window of {micro_batches} micro-batches"
        if signature.moved_in_window == 0 and signature.steps_before_last_forward:
            return {"optimizer_state_per_micro_batch": f"{told}, and only the last one moved the weights"}
        every = steps == micro_batches and signature.moved_in_window > 0
        return {"step_every_micro_batch" if every else "window_misplaced": told}
    if signature.skipped_windows:
        return {"window_misplaced": f"{signature.skipped_windows} of the probed windows ended without an optimizer step"}
    if signature.moved_in_window > GATE and signature.steps_before_last_forward:
        return {"window_misplaced": "the optimizer stepped before the window's last micro-batch"}
    if signature.moved_in_window > GATE:
        told = f"by {signature.moved_in_window:.1e} inside the window"
        if signature.moved_along_weights < -PARALLEL and signature.decays_fit:
            return {"weight_decay_per_micro_batch": f"the weights shrank {told}"}
        return {UNEXPLAINED: f"the parameters moved {told}"}
    return {}


def _gradients(signature: Signature) -> tuple[dict[str, str], bool]:
    """Causes of wrong gradients, and whether they are exact."""
    assert signature.worst is not None
    worst = signature.worst
    for cause, gap in signature.resolved.items():
        if gap <= GATE:
            return {cause: f"{describe(worst)}; without that factor the gap closes to {gap:.0e}"}, True
    fitting = {cause: error for cause, error in signature.explanations.items() if error <= GATE}
    if not fitting:
        return {UNEXPLAINED: describe(worst)}, False
    chosen = _simplest(fitting, signature)
    return {cause: f"{describe(worst)}: {SENTENCES.get(cause, cause)}" for cause in chosen.split("+")}, True


def _simplest(fitting: Mapping[str, float], signature: Signature) -> str:
    """The cause to name where several reproduce the gradients: one cause before two, then the order of `SENTENCES`."""
    order = list(SENTENCES)
    always = signature.wrong == signature.probes
    names = [cause for cause in fitting if not (cause == "resume_in_window" and always and len(fitting) > 1)]
    occasional = [cause for cause in names if cause.split("+")[-1] in OCCASIONAL and _rests(cause, signature)]
    return min(occasional or names, key=lambda cause: (cause.count("+"), order.index(cause.split("+")[-1])))


def _rests(cause: str, signature: Signature) -> bool:
    """Whether some probed window was right but for the cause that comes before the last."""
    context = cause.rpartition("+")[0]
    return context in signature.at_rest if context else signature.wrong < signature.probes


def _update(signature: Signature, counters: Mapping[str, tuple[float, float]]) -> dict[str, str]:
    """The gradient was consumed and something else happened than one plain optimizer step."""
    found = {}
    wrong_entries = {name: error for name, error in signature.state_errors.items() if not error <= GATE}
    if "ema" in wrong_entries:
        fits = signature.average_error <= GATE
        told = f"the moving average of the weights is off by {wrong_entries.pop('ema'):.1e} after a step"
        found["ema_per_micro_batch" if fits else UNEXPLAINED] = told
    state_step, steps = counters.get("optimizer state's step"), counters.get("optimizer steps")
    if state_step == steps:  # it counts the steps that were taken
        state_step = None
    if wrong_entries or state_step:
        entries = ", ".join(f"{name} by {error:.1e}" for name, error in wrong_entries.items())
        count = f"; its step is {state_step[0]:g} instead of {state_step[1]:g}" if state_step else ""
        fits = not wrong_entries or signature.advanced_error <= GATE
        found["optimizer_state_per_micro_batch" if fits else UNEXPLAINED] = (
            f"the optimizer's state is off after a step, given its gradient: {entries}{count}"
        )
    elif not signature.update_error <= GATE:
        if abs(signature.update_along_weights) > PARALLEL and signature.decays_fit:
            found["weight_decay_per_micro_batch"] = (
                f"after a step the parameters are off by {signature.update_error:.1e} of the update, along the weights themselves"
            )
        else:
            found[UNEXPLAINED] = f"after a step the parameters are off by {signature.update_error:.1e} of the update"
    return found


def _counters(signature: Signature, counters: Mapping[str, tuple[float, float]], found: Mapping[str, str]) -> dict[str, str]:
    causes = {}
    schedule = counters.get("schedule index")
    steps = counters.get("optimizer steps")
    with_the_steps = steps is not None and schedule is not None and schedule[0] == steps[0]
    if schedule and schedule[0] > schedule[1] and not with_the_steps and "step_every_micro_batch" not in found:
        causes["schedule_per_micro_batch"] = f"the schedule ticked {schedule[0]:g} times, not {schedule[1]:g}"
    if steps and found.keys() <= INHERENT:
        causes["window_misplaced"] = f"the optimizer stepped {steps[0]:g} times, not {steps[1]:g}"
    tracked = counters.get("BatchNorm num_batches_tracked")
    if tracked and not signature.wrong and not found:
        causes[BATCH] = f"BatchNorm's running statistics moved {tracked[0]:g} times, not {tracked[1]:g}"
    samples = counters.get("samples counted")
    if samples:
        causes["counter_wrong"] = f"{samples[0]:g} samples were counted, {samples[1]:g} were seen"
    if not signature.loss_error <= GATE:
        causes["loss_report_differs"] = f"the reported loss is off by {signature.loss_error:.1e} where the gradient is exact"
    return causes


def describe(window: WrongWindow) -> str:
    """The evidence of one window in a sentence."""
    whole = window.whole
    parallel = 1 - whole.cosine
    if abs(parallel) < 1e-9:
        return f"the accumulated gradient is {whole.scale:.6g} times the full batch's in the same direction"
    shown = ", ".join(f"{w:.3g}" for w in whole.weights[:6]) + (", ..." if len(whole.weights) > 6 else "")
    outside = f", {whole.residual:.1e} of it outside their span" if whole.residual > 1e-9 else ""
    return (
        f"the accumulated gradient differs by {whole.distance:.1e}{_where(window)} (scale {whole.scale:.4g}, "
        f"1 - cosine {parallel:.1e}); the micro-batches enter with {shown} of their right weights{outside}"
    )


def _where(window: WrongWindow) -> str:
    """The tensors that differ, or the parameter group where it is all of one, when others do not."""
    wrong = {name for name, one in window.tensors.items() if not one.distance <= GATE}
    groups = [name for name, one in window.groups.items() if not one.distance <= GATE]
    if not 0 < len(wrong) < len(window.tensors):
        return ""
    group = f" of the parameter group {groups[0]}" if len(groups) == 1 < len(window.groups) else ""
    return f", in {', '.join(sorted(wrong))}{group} alone"


def _evidence(signature: Signature, counters: Mapping[str, tuple[float, float]]) -> str:
    if signature.worst is not None:
        return describe(signature.worst)
    differing = "; ".join(f"{name} is {arm:g}, full batch {reference:g}" for name, (arm, reference) in counters.items())
    return differing or "the trajectories part although the probed gradients agree"


# Order matters where two causes reproduce the same gradient (equal lengths, N = 2): the commoner fault is named.
SENTENCES = {
    "loss_not_divided": "the loss is not divided by the number of micro-batches",
    "loss_divided_twice": "the loss is divided twice by the number of micro-batches",
    "mean_of_means": "means over micro-batches are averaged although their numbers of loss terms differ",
    "short_window_divided_by_n": "a short window is divided by the configured number of micro-batches",
    "gradients_cleared_in_window": "gradients are cleared inside the window: only the last micro-batch counts",
    "accumulator_overwritten": "only the first micro-batch's gradient is kept",
    "gradients_not_cleared": "the gradients of the window before were not cleared",
    "foreign_gradients": "gradients of something else were there before the first backward",
    "clip_before_unscale": "gradients are clipped on the wrong scale, before unscaling or dividing",
    "clip_per_micro_batch": "clipping acts inside the window",
    "scaler_updated_in_window": "the loss scale changed inside the window",
    "low_precision_accumulator": "the running sum is rounded to a narrow format",
    "weight_decay_per_micro_batch": "the weight decay is in the gradient once for every micro-batch",
    "auxiliary_loss_scale": "the penalty is not weighted as the loss is",
    "cached_weights_stale": "the forward used the weights of an earlier window",
    "resume_in_window": "the first micro-batches of a window were lost",
    "batch_statistics": "BatchNorm normalises by the micro-batch's statistics, as Ghost BatchNorm in the full batch does",
    "non_separable_loss": "a sample's loss hangs on the others it is computed with, and a micro-batch has fewer",
    "normaliser_depends_on_split": "what the loss takes from the window (a mean, a deviation) is taken from the micro-batch",
}
