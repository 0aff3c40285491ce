"""What is differentiated, followed back to where it was computed: its divisors, and what kind of losses it is made of."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from accumulation_harness.lint import words
from accumulation_harness.lint.scope import Scope
from accumulation_harness.lint.source import Source
from accumulation_harness.lint.window import Window

Kind = Literal["mean", "model", "sum", "unknown"]
PASSED_ON = {"float", "to", "double", "contiguous", "squeeze", "requires_grad_", "clone", "type"}


@dataclass
class Loss:
    """A differentiated expression.

    `kinds`: of its addends that are not sums themselves (`model`: `outputs.loss`); `divisors`: expressions that it is divided
    by; `scaled`: it is multiplied by what may be a division in other words; `uneven`: some of its addends are divided by the
    number of micro-batches, and others by nothing; `padded`: it is a mean that leaves out labels.
    """

    kinds: set[Kind] = field(default_factory=set)
    divisors: list[ast.expr] = field(default_factory=list)
    scaled: bool = False
    uneven: bool = False
    padded: bool = False
    leaves: list[ast.expr] = field(default_factory=list)

    @property
    def by_number(self) -> list[ast.expr]:
        """The divisors that name the number of micro-batches."""
        return [divisor for divisor in self.divisors if words.accumulates(divisor)]

    @classmethod
    def of(cls, addends: Iterable[Loss]) -> Loss:
        """Return that of several addends."""
        total = cls()
        for other in addends:
            total.kinds |= other.kinds
            total.divisors += other.divisors
            total.leaves += other.leaves
            total.scaled |= other.scaled
            total.uneven |= other.uneven
            total.padded |= other.padded
        return total


def differentiated(call: ast.Call) -> ast.expr | None:
    """Return what a `backward` differentiates; None where it is given a gradient to start from, or nothing can be said."""
    of = words.receiver(call)
    if words.last(call.func) == "manual_backward" or words.FRAMEWORK.search(words.last(of)):
        return call.args[0] if call.args else None
    return None if call.args else of


class Follower:
    """Follows an expression back through the assignments of a window's loop, or of its scope."""

    def __init__(self, source: Source, window: Window) -> None:
        self.source, self.window = source, window
        self.scope: Scope = window.scope

    def loss(self, node: ast.expr, seen: frozenset[ast.AST] = frozenset()) -> Loss:
        """Return what an expression is; `seen` are the assignments on the way to it."""
        match node:
            case ast.BinOp(op=ast.Div()):
                return self._divided(node.left, node.right, seen)
            case ast.BinOp(op=ast.Mult()):
                return self._multiplied(node.left, node.right, seen)
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self._sum([node.left, node.right], seen)
            case ast.UnaryOp():
                return self.loss(node.operand, seen)
            case ast.IfExp():
                return Loss.of(self.loss(one, seen) for one in (node.body, node.orelse))
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return self._named(node, seen)
            case ast.Call():
                return self._call(node, seen)
        return Loss({"unknown"}, leaves=[node])

    def _divided(self, node: ast.expr, by: ast.expr, seen: frozenset[ast.AST]) -> Loss:
        loss = self.loss(node, seen)
        loss.uneven = False
        if loss.kinds == {"sum"} and (_is_sum(by) or self._counts_rows(by)):  # a mean, written out
            loss.kinds, loss.padded = {"mean"}, loss.padded or "mask" in ast.unparse(by)
        elif not isinstance(by, ast.Constant):  # as in `loss / 2`
            loss.divisors.append(by)
        return loss

    def _counts_rows(self, node: ast.expr) -> bool:
        """Whether a divisor is the length of what the loop goes over: `len(ids)`."""
        if not isinstance(node, ast.Call) or words.last(node.func) != "len" or len(node.args) != 1:
            return False
        name = ast.unparse(node.args[0])
        return name in self.window.targets and not words.WHOLE.search(name)

    def _is_numbering(self, node: ast.expr) -> bool:
        """Whether labels are the numbers of the rows: `torch.arange(n)`."""
        given = self.scope.values(ast.unparse(node), node.lineno + 1) if isinstance(node, ast.Name) else []
        return any("arange(" in ast.unparse(one) for one in (node, *given))

    def _multiplied(self, left: ast.expr, right: ast.expr, seen: frozenset[ast.AST]) -> Loss:
        first, second = self.loss(left, seen), self.loss(right, seen)
        loss, factor, text = (first, second, right) if _better(first, second) else (second, first, left)
        named = any("scale" in name or "inv" in name or "frac" in name or "world" in name for name in words.identifiers(text))
        loss.scaled |= named or words.accumulates(text) or bool(factor.divisors)
        loss.scaled |= bool(words.COUNT.search(ast.unparse(text)))
        return loss

    def _sum(self, nodes: list[ast.expr], seen: frozenset[ast.AST]) -> Loss:
        nodes = [node for node in nodes if not isinstance(node, ast.Constant)]
        parts = [self.loss(node, seen) for node in nodes]
        total = Loss.of(parts)
        for part, node in zip(parts, nodes, strict=True):
            if not part.divisors and not part.scaled:
                others = [other for other in parts if other is not part and other.divisors]
                of_weights = ".parameters()" in ast.unparse(node) or ".weight" in ast.unparse(node)
                told = bool(part.kinds & {"mean", "model", "sum"}) and any(other.by_number for other in others)
                total.uneven |= told or (of_weights and bool(others))
        return total

    def _named(self, node: ast.Name | ast.Attribute | ast.Subscript, seen: frozenset[ast.AST]) -> Loss:
        name = ast.unparse(node)
        inside = self.scope.values(name, node.lineno + 1, self.window.loop)
        given = [one for one in inside or self.scope.values(name, node.lineno + 1) if one not in seen]
        if not given:
            field_of_outputs = (words.last(node) == "loss" and isinstance(node, ast.Attribute)) or "'loss'" in name
            return Loss({"model" if field_of_outputs else "unknown"}, leaves=[node])
        return Loss.of(self._given(one, seen | {one}) for one in given)

    def _given(self, one: ast.stmt | ast.withitem, seen: frozenset[ast.AST]) -> Loss:
        if isinstance(one, ast.withitem):
            return self.loss(one.context_expr, seen)
        if isinstance(one, ast.AugAssign):
            by_itself = ast.BinOp(one.target, one.op, one.value)
            return self.loss(ast.copy_location(by_itself, one), seen)
        assert isinstance(one, (ast.Assign, ast.AnnAssign))
        return self.loss(one.value, seen) if one.value is not None else Loss()

    def _call(self, node: ast.Call, seen: frozenset[ast.AST]) -> Loss:
        name, of = words.last(node.func), words.receiver(node)
        if name in ("div", "div_", "true_divide") and of is not None and node.args:
            return self._divided(of, node.args[0], seen)
        if name in ("mul", "mul_") and of is not None and node.args:
            return self._multiplied(of, node.args[0], seen)
        if name in PASSED_ON and of is not None:
            return self.loss(of, seen)
        if name in ("scale", "scale_loss") and node.args:
            return self.loss(node.args[0], seen)
        if name == "sum" and of is not None and not node.args and not node.keywords:
            return Loss({"sum"}, leaves=[node])
        if name == "mean" and of is not None:
            inner = self.loss(of, seen)
            return inner if inner.kinds == {"model"} else Loss({"mean"}, inner.divisors, inner.scaled, leaves=[node])
        return self._of_call(node, name)

    def _of_call(self, node: ast.Call, name: str) -> Loss:
        made_by = [node.func] if isinstance(node.func, ast.Call) else self.source.made.get(name, [])
        if name in words.MEAN_LOSSES and len(node.args) > 1 and self._is_numbering(node.args[1]):
            return Loss({"unknown"}, leaves=[node])  # rows against each other: how it is to be weighed, the text does not tell
        if name in words.MEAN_LOSSES:
            return _by_arguments(node, node)
        losses = [call for call in made_by if words.last(call.func).endswith("loss")]
        if losses:
            return Loss.of(_by_arguments(call, node) for call in losses)
        reductions = [keyword.value for keyword in node.keywords if keyword.arg == "reduction"] + node.args
        told = {one.value for one in reductions if isinstance(one, ast.Constant)} & {"mean", "sum"}
        if told:
            return Loss({"mean" if "mean" in told else "sum"}, leaves=[node])
        if words.CRITERION.search(name) and not made_by and name not in self.source.functions:
            return Loss({"mean"}, leaves=[node])
        return Loss({"unknown"}, leaves=[node])


def _by_arguments(call: ast.Call, leaf: ast.expr) -> Loss:
    """Judge one of torch's losses by `reduction`, `ignore_index` and `weight`."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    reduction = given.get("reduction")
    if None in given or (reduction is not None and not isinstance(reduction, ast.Constant)):
        return Loss({"unknown"}, leaves=[leaf])
    if isinstance(reduction, ast.Constant) and reduction.value != "mean":
        return Loss({"sum"}, leaves=[leaf])
    return Loss({"mean"}, padded="ignore_index" in given, leaves=[leaf])


def _is_sum(node: ast.expr) -> bool:
    """Whether it ends in `.sum()`, perhaps with a guard against 0."""
    return any(words.last(inner.func) == "sum" for inner in words.inside(node, ast.Call))


def _better(first: Loss, second: Loss) -> bool:
    """Whether the first factor of a product is the loss, rather than its weight."""
    order: list[Kind] = ["mean", "sum", "model"]
    return next((kind in first.kinds for kind in order if kind in first.kinds | second.kinds), True)


def losses(source: Source, window: Window) -> Iterator[tuple[ast.Call, Loss]]:
    """Yield the backwards of a window's micro-batches, and what each differentiates."""
    for backward in window.backwards:
        node = differentiated(backward)
        if node is not None:
            yield backward, Follower(source, window).loss(node)
