"""Windows that are not the reference's: other rows, another number of optimizer steps, steps inside, micro-batches left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accumulation_harness.audit.compare.facts import RunFacts, StepFacts
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.rules.finding import finding
from accumulation_harness.judge.cause import Cause

MANY_MORE = 1.5  # times the reference's optimizer steps, from which on every backward is followed by one


def structure(run: RunFacts, steps: Sequence[StepFacts]) -> list[Finding]:
    """At most one finding, since what follows it cannot be aligned."""
    mine, reference = run.mine, run.reference
    if lost := [(step, count) for step, count in run.resumed if count and not _accounted(steps, step)]:
        return [_resumed(run, *lost[0])]
    differs = mine.steps != reference.steps or "different" in run.windows or any(not facts.gradients_agree for facts in steps)
    if differs and (mine.broken_windows or reference.broken_windows):
        return [_non_finite(run)]
    if mine.idle_steps > reference.idle_steps:
        return [_idle(run)]
    if mine.steps > reference.steps and _one_backward_each(run):
        return [_every_micro_batch(run)]
    first = next((i for i, rows in enumerate(run.windows) if rows == "different" and not _accounted(steps, i)), None)
    if first is not None:
        return [_other_rows(run, first, next((f for f in steps if f.step == first), None))]
    return [] if mine.steps == reference.steps else [_other_number(run)]


def _other_rows(run: RunFacts, place: int, facts: StepFacts | None) -> Finding:
    evidence = _windows(run)
    if run.foreign and not run.never:
        message = f"the windows hold {run.foreign} rows that N=1 leaves out"
        return finding(run, place, Cause.window_misplaced, "seen", evidence, message)
    if run.foreign and facts is not None and facts.window.drawn_outside:
        message = "the rows themselves are drawn at random per micro-batch"
        return finding(run, place, Cause.stochastic_layers, "seen", evidence, message)
    if run.foreign:
        message = "the windows hold rows that the reference never saw: other data, or rows mixed within a micro-batch"
        return finding(run, place, Cause.unexplained, "seen", evidence, message)
    if sum(run.repeated):
        return _repeated(run, place)
    message = f"optimizer step {place} takes other rows than at N=1: a window is dropped, cut short or straddles the epoch"
    return finding(run, place, Cause.window_misplaced, "seen", evidence, message)


def _other_number(run: RunFacts) -> Finding:
    place = min(run.mine.steps, run.reference.steps)
    if sum(run.repeated):
        return _repeated(run, place)
    end = ": the end of the data is left out" if run.mine.steps < run.reference.steps else ""
    message = f"{run.mine.steps} optimizer steps instead of {run.reference.steps}{end}"
    return finding(run, place, Cause.window_misplaced, "seen", _windows(run), message)


def _repeated(run: RunFacts, place: int) -> Finding:
    message = f"{sum(run.repeated)} rows are used more often than at N=1"
    return finding(run, place, Cause.samples_repeated, "seen", _windows(run), message)


def _windows(run: RunFacts) -> dict[str, Any]:
    return {
        "optimizer_steps": run.mine.steps,
        "reference_optimizer_steps": run.reference.steps,
        "backwards_per_step": list(run.mine.backwards),
        "reference_backwards_per_step": list(run.reference.backwards),
        "backwards_after_last_step": run.mine.pending,
        "rows_repeated": sum(run.repeated),
        "rows_never_seen": run.never,
        "rows_unknown_to_reference": run.foreign,
    }


def _accounted(steps: Sequence[StepFacts], index: int) -> bool:
    """Whether the gradients agree, or do without the rows of another optimizer's loss."""
    return any(f.step == index and (f.gradients_agree or f.fits.without_foreign <= f.gate) for f in steps)


def _one_backward_each(run: RunFacts) -> bool:
    """Every step follows one backward, while the reference's steps are as many times fewer as there are micro-batches."""
    most, usual = max(run.mine.backwards, default=0), max(run.reference.backwards, default=1)
    return most <= usual and run.mine.steps >= MANY_MORE * run.reference.steps


def _resumed(run: RunFacts, step: int, lost: int) -> Finding:
    evidence = {"backwards_lost": lost, "backwards_per_step": list(run.mine.backwards), "rows_never_seen": run.never}
    message = f"another optimizer goes on inside a window: the gradients of the {lost} micro-batches before it are lost"
    return finding(run, step, Cause.resume_in_window, "seen", evidence, message)


def _every_micro_batch(run: RunFacts) -> Finding:
    evidence = {
        "optimizer_steps": run.mine.steps,
        "reference_optimizer_steps": run.reference.steps,
        "backwards_per_step": list(run.mine.backwards),
    }
    message = f"the optimizer steps after every micro-batch: {run.mine.steps} steps instead of {run.reference.steps}"
    return finding(run, 0, Cause.step_every_micro_batch, "seen", evidence, message)


def _idle(run: RunFacts) -> Finding:
    mine = run.mine
    evidence = {
        "steps_that_moved_nothing": mine.idle_steps,
        "optimizer_steps": mine.steps,
        "state_steps": list(mine.state_steps),
    }
    message = f"{mine.idle_steps} optimizer steps inside windows move no parameter but advance the optimizer's state"
    return finding(run, 0, Cause.optimizer_state_per_micro_batch, "seen", evidence, message)


def _non_finite(run: RunFacts) -> Finding:
    mine, reference = run.mine, run.reference
    evidence = {
        "windows_with_non_finite_values": list(mine.broken_windows),
        "reference_windows_with_non_finite_values": list(reference.broken_windows),
        "steps_left_out_by_the_scaler": list(mine.skipped),
        "reference_steps_left_out_by_the_scaler": list(reference.skipped),
        "optimizer_steps": mine.steps,
        "reference_optimizer_steps": reference.steps,
        "backwards_per_step": list(mine.backwards),
    }
    message = "a micro-batch with non-finite values is left out or passed on by itself; the full batch goes as a whole"
    if mine.skipped != reference.skipped:
        left_out, usual = list(mine.skipped) or "none", list(reference.skipped) or "none"
        message = f"the GradScaler leaves out optimizer steps {left_out}, at N=1 {usual}: only one of the two overflows there"
    place = min((*mine.broken_windows, *reference.broken_windows))
    return finding(run, place, Cause.non_finite_micro_batch, "seen", evidence, message)
