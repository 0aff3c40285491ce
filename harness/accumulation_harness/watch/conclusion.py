"""From what the judge has kept to a report: the verdict, and what could not be seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.status import Status
from accumulation_harness.watch.evidence import Finding
from accumulation_harness.watch.judge import REACH, Judge
from accumulation_harness.watch.report import Report

MOST_NOTES = 8
SAME = 2e-2  # relative difference of two totals that are one: that of 16-bit slopes
ROWS = "which rows a window holds (repeated, left out, of two epochs) and whether their labels are right"
BY_HAND = (
    "what the loop or a module keeps or moves by hand (averages, statistics and states, weights between windows and those that "
    "no watched optimizer holds, schedules, reported losses); "
    "what functions and modules with a backward of their own make of gradients; what a large batch would do"
)
NEIGHBOURS = (
    "whether the rows of a micro-batch act on each other (statistics by hand, a choice among them, random draws "
    "outside of dropout layers)"
)


# What a replay says of a gradient that is not the batch's, whatever has become of it: no news where the sum itself is wrong.
OF_ANY_GRADIENT = (Cause.unexplained, Cause.auxiliary_loss_scale)
AT_BOUNDARIES = (Cause.gradients_cleared_in_window, Cause.schedule_per_micro_batch)  # at which windows should end
FACTORS = (Cause.loss_not_divided, Cause.loss_divided_twice)  # where all weights are right, of the loss that was handed over


def concluded(judge: Judge) -> Report:
    """Conclude from all windows so far.

    Args:
        judge: What was seen of them.

    Returns:
        The report.
    """
    weights_right, _, of_weights = judge.weighed()
    weighed = judge.covered if weights_right else 0
    found = judge.found()
    handed = [cause for cause, one in found.items() if weighed and one.rung == "replay" and cause in FACTORS]
    of_loss = [found.pop(cause) for cause in handed]
    findings = tuple(_kept(judge, found))
    replays = sum(replayed.right for replayed in judge.replays)
    unseen = (ROWS, BY_HAND) if replays else (ROWS, BY_HAND, NEIGHBOURS)
    reasons = tuple(_reasons(judge, findings, of_weights, of_loss, unseen))
    normalised = Cause.batch_statistics in judge.properties and any(size > 1 for size in judge.sizes)
    doubted = (
        normalised
        or any(remark.is_doubt for remark in judge.remarks)
        or bool(judge.weights and not weights_right)
        or any(_doubts_of_all(judge))
    )
    unfound = Status.equivalent if (replays or (weighed and judge.summed)) and not doubted else Status.inconclusive
    return Report(
        verdict=Status.different if findings else unfound,
        windows=judge.windows,
        micro_batches=dict(sorted(judge.sizes.items())),
        findings=findings,
        reasons=reasons,
        properties=tuple(judge.properties.values()),
        checked={"sums": judge.summed, "weights": weighed, "replays": replays},
        metrics={**judge.metrics(), **judge.costs.metrics()},
        unseen=unseen,
    )


def _doubts_of_all(judge: Judge) -> Iterator[str]:
    """What shows in all windows together only."""
    if judge.labels[True] > 1 and not judge.labels[False]:
        yield "all micro-batches of a window have the same labels in the same order, in every window that was looked at"
    if judge.reaches_by_place:
        yield REACH
    if 0 < judge.first < judge.usual and judge.sizes[judge.usual] > 1:
        yield (
            f"the first window has {judge.first} of {judge.usual} micro-batches, as with a boundary that is counted from 0 "
            "(window_misplaced)"
        )
    steps = sum(judge.sizes.values())
    micro_batches = sum(size * many for size, many in judge.sizes.items())
    if micro_batches > steps and (of_them := {micro_batches, micro_batches + 1} & judge.laid_out):  # one more, to be safe
        yield (
            f"a schedule is laid out for {min(of_them)} steps, and the run took {steps} with {micro_batches} micro-batches "
            "(schedule_per_micro_batch)"
        )


def _kept(judge: Judge, found: Mapping[Cause, Finding]) -> Iterator[Finding]:
    """Those that are told; an optimizer that steps at every micro-batch leaves gradients behind for that reason."""
    every = judge.carried and judge.clean and set(judge.sizes) == {1}
    shrinks = Cause.clip_per_micro_batch in judge.findings  # in a short window by one factor, which could be any
    summed_wrongly = any(finding.rung == "sketch" for finding in found.values())
    for cause, finding in found.items():
        if summed_wrongly and finding.rung == "replay" and cause in OF_ANY_GRADIENT:
            continue
        if (cause is Cause.sum_rescaled_in_window and shrinks) or (cause in AT_BOUNDARIES and Cause.window_misplaced in found):
            continue
        if cause is Cause.gradients_cleared_in_window and Cause.optimizer_state_per_micro_batch in judge.findings:
            continue  # the state has taken them
        if cause is not Cause.gradients_not_cleared or not every:
            yield finding
        elif 0 < judge.still < judge.windows:
            message = "the optimizer is called after every micro-batch, and moves the weights in some calls only"
            yield replace(finding, cause=Cause.optimizer_state_per_micro_batch, rung="ledger", message=message)
        else:
            message = "the optimizer steps after every micro-batch, and gradients are cleared after several steps"
            yield replace(finding, cause=Cause.step_every_micro_batch, message=message)
    configured = judge.configured or 1
    if configured > max(1, judge.forwards) and set(judge.sizes) == {1} and judge.windows > 2 and not found:
        message = f"every window has one micro-batch, and {configured} are configured"
        yield Finding(cause=Cause.step_every_micro_batch, window=0, rung="ledger", message=message)


def _reasons(
    judge: Judge, findings: Sequence[Finding], of_weights: Sequence[str], of_loss: Sequence[Finding], unseen: Sequence[str]
) -> Iterator[str]:
    """List why a run is not `equivalent`, or what is wrong with it.

    Args:
        judge: What was seen of all windows.
        findings: The causes that were found.
        of_weights: Doubts about the weights of loss terms.
        of_loss: What a replay found and all weights contradict: it is the loss that was handed over.
        unseen: What a wrong run may have that no watch sees, however right all that it saw.

    Yields:
        A sentence each.
    """
    if not judge.windows and not judge.closures:
        yield (
            "no optimizer step was seen after a backward that reached its parameters: pass `gradient` where an engine keeps sums "
            "elsewhere, and watch without compiled autograd, which calls no hooks"
        )
    elif judge.sizes and max(judge.sizes) == 1 and not findings:
        yield "no window had more than one micro-batch: nothing was accumulated"
    if judge.closures:
        yield f"{judge.closures} steps were taken inside a backward, or differentiated inside themselves (closures): not judged"
    if judge.skipped:
        yield f"{judge.skipped} windows were left out by the loss scaler: a property of float16"
    if judge.left_over:
        yield f"{judge.left_over} micro-batches came after the last step and were not used in one"
    yield from _doubts_of_all(judge)
    for remark, times in judge.remarks.most_common(MOST_NOTES):
        yield f"{remark.sentence} ({times} windows)"
    for refused in dict.fromkeys(replayed.refused for replayed in judge.replays if replayed.refused):
        yield f"replay: {refused}"
    for finding in of_loss:
        yield f"replay: {finding.message}, though all loss terms weigh what they should: hand over `loss` undivided"
    if not judge.replays:
        yield "no window was replayed (pass `loss`): faults in the loss itself, such as in-batch negatives, were not looked for"
    yield from unseen
    if not findings:
        yield from of_weights
