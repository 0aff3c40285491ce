"""Loops that accumulate: what runs for every micro-batch, and what runs once per window."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from accumulation_harness.lint import words
from accumulation_harness.lint.scope import Body, Loop, Scope, own, stored


@dataclass(frozen=True, eq=False)
class Window:
    """One accumulating loop.

    `every`: calls that each micro-batch reaches; `end`: calls that the last one of a window reaches; `number`: what the source
    calls the number of micro-batches, where it is told; `by_accelerate`: inside `with accelerator.accumulate(...)`, whose
    optimizers and schedules step, and clear, at the boundary by themselves.
    """

    scope: Scope
    loop: Body
    backwards: tuple[ast.Call, ...]
    every: tuple[ast.Call, ...]
    end: tuple[ast.Call, ...]
    number: ast.expr | None = None
    boundary: ast.expr | None = None
    by_accelerate: bool = False

    @property
    def targets(self) -> set[str]:
        """Names that the loop gives a new value for each micro-batch."""
        target = self.loop.target if isinstance(self.loop, (ast.For, ast.AsyncFor)) else ast.Pass()
        return words.names(target)

    @property
    def named(self) -> bool:
        """Whether the source itself speaks of accumulation or micro-batches here."""
        header = getattr(self.loop, "test", None) or getattr(self.loop, "iter", None)
        return words.accumulates(self.number) or words.accumulates(header) or words.accumulates(self.boundary)

    @property
    def clearing(self) -> set[str]:
        """Names whose `zero_grad` clears what the end of the window steps on: its optimizers, and the model of a single one."""
        names = {words.dotted(words.receiver(call)) for call in self.scope.calls() if words.last(call.func) == "zero_grad"}
        models = {name for name in names if words.MODEL.search(name.rpartition(".")[2].lower())}
        return self.optimizers | (models if len(self.optimizers) == len(models) == 1 else set())

    @property
    def optimizers(self) -> set[str]:
        """Names of what steps at the window's end."""
        return {name for call in self.end if (name := stepped(call))}


def windows(scope: Scope) -> list[Window]:
    """Return the accumulating loops of a scope."""
    found: dict[ast.AST, Window] = {}
    for window in (*_under_accumulate(scope), *_with_boundary(scope), *_nested(scope)):
        found.setdefault(window.loop, window)
    return list(found.values())


def stepped(call: ast.Call) -> str:
    """Return the name of the optimizer that a call steps, and an empty string of other calls."""
    if words.last(call.func) == "optimizer_step":
        return "optimizer"
    if words.last(call.func) != "step":
        return ""
    of = words.receiver(call)
    if words.SCALER.search(words.last(of)):
        return words.dotted(call.args[0]) if call.args else ""
    is_one = words.OPTIMIZER.search(words.last(of)) and not words.SCHEDULE.search(words.last(of))
    return words.dotted(of) if is_one else ""


def is_backward(call: ast.Call) -> bool:
    """Whether a call differentiates a loss."""
    return words.last(call.func) in ("backward", "manual_backward") and isinstance(call.func, ast.Attribute)


def is_boundary(test: ast.expr) -> bool:
    """Whether a test asks for the place in the window: `(i + 1) % n == 0`, `accelerator.sync_gradients`, `last`, `k == n - 1`.

    `n > 1` asks for a setting only.
    """
    if _number(test) is not None or any(map(words.BOUNDARY.search, words.identifiers(test))):
        return True
    compared = filter(words.accumulates, words.inside(test, ast.Compare))
    return any(not isinstance(one, ast.Constant) for node in compared for one in node.comparators)


def resolved(test: ast.expr, scope: Scope, loop: Body) -> ast.expr:
    """Return what a test stands for, where it is a name (or its opposite) that the loop gives a value once."""
    if isinstance(test, ast.UnaryOp):
        return resolved(test.operand, scope, loop)
    given = scope.values(ast.unparse(test), test.lineno, loop) if isinstance(test, (ast.Name, ast.Attribute)) else []
    one = given[0] if len(given) == 1 else None
    return one.value if isinstance(one, ast.Assign) else test


def reaches_all(scope: Scope, call: ast.AST, loop: Body) -> bool:
    """Whether each micro-batch reaches a call: only settings, which no iteration changes, may stand between."""
    changing = stored(loop)
    for test, _ in scope.tests(call, loop):
        seen = words.names(test.test) | {node.attr for node in words.inside(test.test, ast.Attribute)}
        varies = bool(seen & changing) or any(words.inside(test.test, ast.Call))
        if varies or is_boundary(test.test) or words.accumulates(test.test):
            return False
    return True


def _guard(scope: Scope, call: ast.Call, loop: Body) -> ast.expr | None:
    """Return the test that lets only the last micro-batch of a window through to a call."""
    tests = (resolved(test.test, scope, loop) for test, _ in scope.tests(call, loop))
    return next((test for test in tests if is_boundary(test)), None)


def _number(boundary: ast.expr) -> ast.expr | None:
    """Return `n` of `(i + 1) % n`."""
    return next((node.right for node in words.inside(boundary, ast.BinOp) if isinstance(node.op, ast.Mod)), None)


def _parted(scope: Scope, loop: Body) -> tuple[tuple[ast.Call, ...], tuple[ast.Call, ...]]:
    calls = [call for statement in loop.body for call in scope.calls(statement)]
    every = tuple(call for call in calls if reaches_all(scope, call, loop))
    return every, tuple(call for call in calls if _guard(scope, call, loop) is not None)


def _with_boundary(scope: Scope) -> Iterator[Window]:
    """Yield loops whose optimizer steps under a test of the boundary, and whose backward does not."""
    for step in (call for call in scope.calls() if stepped(call)):
        loop = scope.loop(step)
        while loop is not None and (boundary := _guard(scope, step, loop)) is None:
            loop = scope.loop(loop)  # `for optimizer in optimizers: optimizer.step()`
        if loop is None:
            continue
        every, end = _parted(scope, loop)
        backwards = tuple(call for call in scope.calls(loop) if is_backward(call) and call not in end)
        if backwards and not any(stepped(call) for call in every):
            assert boundary is not None
            yield Window(scope, loop, backwards, every, end, _number(boundary), boundary)


def _nested(scope: Scope) -> Iterator[Window]:
    """Yield loops over micro-batches: they have the backward, and the optimizer steps after them."""
    for backward in (call for call in scope.calls() if is_backward(call)):
        loop = scope.loop(backward)
        if loop is None or any(stepped(call) for call in scope.calls(loop)) or not is_over_micro_batches(scope, loop):
            continue
        outer = scope.loop(loop)
        inside = set(own(loop))
        end = tuple(call for call in scope.calls(outer) if call not in inside and call.lineno > loop.lineno)
        if any(stepped(call) and scope.loop(call) in (outer, _loop_of_steps(scope, call)) for call in end):
            every, _ = _parted(scope, loop)
            backwards = tuple(call for call in scope.calls(loop) if is_backward(call))
            yield Window(scope, loop, backwards, every, end, _times(loop))


def _loop_of_steps(scope: Scope, call: ast.Call) -> Loop | None:
    """Return the loop of `for optimizer in optimizers: optimizer.step()`."""
    loop = scope.loop(call)
    return loop if isinstance(loop, ast.For) and words.dotted(loop.target) == stepped(call) else None


def _times(loop: Loop) -> ast.expr | None:
    """Return `n` of `for _ in range(n)`."""
    over = loop.iter if isinstance(loop, (ast.For, ast.AsyncFor)) else None
    return over.args[-1] if isinstance(over, ast.Call) and words.last(over.func) == "range" and over.args else None


def is_over_micro_batches(scope: Scope, loop: Loop) -> bool:
    """Whether the header of a loop says that it goes over the micro-batches of one window."""
    header = loop.test if isinstance(loop, ast.While) else loop.iter
    if words.accumulates(header):
        return True
    outer = scope.loop(loop)
    if not isinstance(outer, ast.For) or not words.accumulates(outer.iter):
        return False
    return not words.names(outer.target).isdisjoint(words.names(header))


def _under_accumulate(scope: Scope) -> Iterator[Window]:
    """Yield loops with a backward inside `with accelerator.accumulate(...)`."""
    for node in scope.nodes:
        if not isinstance(node, (ast.With, ast.AsyncWith)) or not any(map(is_accumulate, node.items)):
            continue
        loop = scope.loop(node) or scope.node  # of a method that takes one step
        backwards = tuple(call for call in scope.calls(node) if is_backward(call))
        if backwards:
            every, end = _parted(scope, loop)
            yield Window(scope, loop, backwards, every, end, by_accelerate=True)


def is_accumulate(item: ast.withitem) -> bool:
    """Whether it is `with accelerator.accumulate(...)`."""
    call = item.context_expr
    return (
        isinstance(call, ast.Call) and words.last(call.func) == "accumulate" and "accelerator" in words.last(words.receiver(call))
    )
