"""What belongs to the end of a window and runs for every micro-batch: a clip, a schedule, an average, clearing, a step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accumulation_harness.judge.cause import Cause
from accumulation_harness.lint import words
from accumulation_harness.lint.division import weighs_by_itself
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.loss import Follower, differentiated
from accumulation_harness.lint.scope import LOOPS, Scope, own
from accumulation_harness.lint.source import Source
from accumulation_harness.lint.window import (
    Window,
    is_accumulate,
    is_backward,
    is_over_micro_batches,
    reaches_all,
    resolved,
    stepped,
)

OF_FINITENESS = {"isnan", "isfinite", "isinf"}


def hits(source: Source) -> Iterator[Hit]:
    """Yield the calls that are on the wrong side of a window's boundary."""
    for window in source.windows:
        for call in window.every:
            yield from _clip(call)
            yield from _average(call)
            yield from _decay(call)
            if not window.by_accelerate:
                yield from _schedule(call)
                yield from _scaler(window, call)
                yield from _clear(window, call)
        yield from _clip_before_division(window)
        yield from _cleared_before_the_last(window)
        yield from _skipped(window)
        if not window.by_accelerate:
            yield from _never_cleared(source, window)
    for scope in source.scopes:
        yield from _clip_before_unscale(scope)
        yield from _cleared_before_the_step(scope)
        yield from _step_inside(source, scope)


def is_clip(call: ast.Call) -> bool:
    """Whether gradients are clipped; with an infinite bound their norm is only measured."""
    bounds = {ast.unparse(node).strip("'\"") for node in words.inside(call, (ast.Attribute, ast.Constant))}
    return words.last(call.func) in words.CLIPS and not bounds & {"inf", "math.inf", "torch.inf", "np.inf"}


def is_of_scaler(call: ast.Call) -> bool:
    """Whether it is a method of a GradScaler."""
    return words.SCALER.search(words.last(words.receiver(call))) is not None


def _clip(call: ast.Call) -> Iterator[Hit]:
    if is_clip(call):
        yield Hit.at(
            call, Cause.clip_per_micro_batch, "gradients are clipped after every micro-batch, not once their sum is whole"
        )


def _average(call: ast.Call) -> Iterator[Hit]:
    name, of = words.last(call.func), words.last(words.receiver(call))
    moved = name in ("update", "step", "update_parameters", "update_ema") and words.AVERAGE.search(of)
    is_of_losses = any("loss" in text or ".item()" in text for text in (of, *map(ast.unparse, call.args)))
    if (moved or (words.AVERAGE.search(name) and "update" in name)) and not is_of_losses:
        yield Hit.at(call, Cause.ema_per_micro_batch, "the average of the weights moves with every micro-batch")


def _decay(call: ast.Call) -> Iterator[Hit]:
    """`p.data.mul_(1 - rate * decay)`."""
    shrinks = any(
        isinstance(one, ast.BinOp) and isinstance(one.op, ast.Sub) and ast.unparse(one.left) in ("1", "1.0") for one in call.args
    )
    if words.last(call.func) == "mul_" and shrinks and words.last(words.receiver(call)) in ("data", "p", "param"):
        yield Hit.at(call, Cause.weight_decay_per_micro_batch, "the weights decay with every micro-batch")


def _schedule(call: ast.Call) -> Iterator[Hit]:
    """A schedule that is told where it is (`step(epoch + i / batches)`) may be called at any time."""
    of = words.last(words.receiver(call))
    if words.last(call.func) == "step" and words.SCHEDULE.search(of) and not call.args and not call.keywords:
        yield Hit.at(call, Cause.schedule_per_micro_batch, "the schedule advances with every micro-batch")


def _scaler(window: Window, call: ast.Call) -> Iterator[Hit]:
    steps = {words.dotted(words.receiver(end)) for end in window.end if words.last(end.func) == "step"}
    if words.last(call.func) in ("update", "unscale_") and is_of_scaler(call) and words.dotted(words.receiver(call)) in steps:
        yield Hit.at(call, Cause.scaler_updated_in_window, "the loss scale is updated, or taken out, with every micro-batch")


def _clear(window: Window, call: ast.Call) -> Iterator[Hit]:
    if words.last(call.func) != "zero_grad" or window.scope.tests(call, window.loop) or len(window.backwards) > 1:
        return
    keeps = any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in own(window.loop))
    if words.dotted(words.receiver(call)) in window.clearing and not keeps:
        yield Hit.at(call, Cause.gradients_cleared_in_window, "gradients are cleared with every micro-batch: the last one counts")


def _cleared_before_the_last(window: Window) -> Iterator[Hit]:
    """Under the very test that lets the optimizer step, gradients are cleared before the last backward."""
    if window.boundary is None:
        return
    first = min(backward.lineno for backward in window.backwards)
    for call in window.end:
        if words.last(call.func) == "zero_grad" and call.lineno < first and words.dotted(words.receiver(call)) in window.clearing:
            tests = [resolved(test.test, window.scope, window.loop) for test, _ in window.scope.tests(call, window.loop)]
            if any(ast.unparse(test) == ast.unparse(window.boundary) for test in tests):
                sentence = "gradients are cleared before the last backward of a window"
                yield Hit.at(call, Cause.gradients_cleared_in_window, sentence)


def _never_cleared(source: Source, window: Window) -> Iterator[Hit]:
    step = next(call for call in window.end if stepped(call))
    made = source.made.get(stepped(step).rpartition(".")[2].lower(), [])
    of_torch = any("optim." in words.dotted(call.func) for call in made)
    if window.named and of_torch and not source.mentions("zero_grad", "grad", "set_to_none"):
        yield Hit.at(step, Cause.gradients_not_cleared, "nothing in this file clears the gradients")


def _clip_before_division(window: Window) -> Iterator[Hit]:
    divisions = [
        call.lineno
        for call in window.end
        if "grad" in (name := words.last(call.func))
        and ("div" in name or "average" in name)
        and any(map(words.accumulates, call.args))
    ]
    for clip in filter(is_clip, window.end):
        if any(clip.lineno < line for line in divisions):
            sentence = "gradients are clipped before they are divided by the number of micro-batches"
            yield Hit.at(clip, Cause.clip_before_unscale, sentence)


def _skipped(window: Window) -> Iterator[Hit]:
    """A micro-batch with a non-finite loss is passed over, and the rest of its window goes on."""
    for test, _ in window.scope.tests(window.backwards[0], window.loop):
        if OF_FINITENESS & {words.last(call.func) for call in words.inside(test.test, ast.Call)}:
            sentence = "a micro-batch that is not finite is left out, and its window goes on without it"
            yield Hit.at(test.test, Cause.non_finite_micro_batch, sentence)


def _clip_before_unscale(scope: Scope) -> Iterator[Hit]:
    calls = scope.calls()
    steps = [call for call in calls if words.last(call.func) == "step" and is_of_scaler(call)]
    scaled = any(words.last(call.func) == "scale" and is_of_scaler(call) for call in calls)
    if not steps or not scaled or any("unscale" in words.last(call.func) for call in calls):
        return
    for clip in filter(is_clip, calls):
        if any(clip.lineno < step.lineno and not scope.excluded(clip, step) for step in steps):
            yield Hit.at(clip, Cause.clip_before_unscale, "gradients are clipped while the loss scale is still in them")


def _cleared_before_the_step(scope: Scope) -> Iterator[Hit]:
    """`backward`, `zero_grad`, `step`, one after the other in one block."""
    for node in (scope.node, *scope.nodes):
        for block in (getattr(node, name, None) for name in ("body", "orelse")):
            if isinstance(block, list):
                loop = scope.loop(block[0]) if block else None
                backwards = [call.lineno for call in scope.calls(loop) if is_backward(call)] if loop is not None else []
                yield from _lost(block, waiting=any(line < block[0].lineno for line in backwards))


def _lost(block: list[ast.stmt], *, waiting: bool) -> Iterator[Hit]:
    cleared: ast.Call | None = None
    for statement in block:
        call = statement.value if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None
        if any(is_backward(inner) for inner in own(statement) if isinstance(inner, ast.Call)):
            waiting, cleared = True, None
        elif call is not None and waiting and words.last(call.func) == "zero_grad":
            cleared = call
        elif cleared is not None and call is not None and stepped(call) and _is_cleared(call, cleared):
            yield Hit.at(
                cleared, Cause.gradients_cleared_in_window, "gradients are cleared between the last backward and the step"
            )
            waiting, cleared = False, None
        elif cleared is not None and (call is None or not is_clip(call)):
            waiting, cleared = False, None


def _is_cleared(step: ast.Call, cleared: ast.Call) -> bool:
    """Whether a step, which is handed no closure, takes the gradients that were cleared."""
    name = words.dotted(words.receiver(cleared))
    closure = bool(step.args) and not is_of_scaler(step)
    return not closure and (stepped(step) == name or name == "model")


def _step_inside(source: Source, scope: Scope) -> Iterator[Hit]:
    """The optimizer steps after every backward in a loop that speaks of micro-batches, or divides by their number."""
    for loop in (node for node in scope.nodes if isinstance(node, LOOPS)):
        calls = [call for call in scope.calls(loop) if scope.loop(call) is loop]
        backwards = list(filter(is_backward, calls))
        steps = [call for call in calls if stepped(call) and reaches_all(scope, call, loop)]
        if len(backwards) != 1 or not steps or weighs_by_itself(source, backwards[0]):
            continue
        if any(map(words.accumulates, source.made.get(stepped(steps[0]).rpartition(".")[2].lower(), []))):
            continue  # the optimizer was told their number
        if any(isinstance(parent, ast.With) and any(map(is_accumulate, parent.items)) for _, parent in scope.above(steps[0])):
            continue
        node = differentiated(backwards[0])
        window = Window(scope, loop, tuple(backwards), (), ())
        divided = node is not None and bool(Follower(source, window).loss(node).by_number)
        if divided or is_over_micro_batches(scope, loop):
            yield Hit.at(steps[0], Cause.step_every_micro_batch, "the optimizer steps after every micro-batch")
