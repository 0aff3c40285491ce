"""How the length that a schedule was made for goes with the number of micro-batches: through names, functions and closures."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from accumulation_harness.lint import words
from accumulation_harness.lint.source import Source

LENGTH = re.compile(r"step|iter|max|total|len|epoch|num|batches|(^|\W)T")
LOADED = re.compile(r"load|iter|batches|dl\b|data(?!set)")


@dataclass(frozen=True)
class Length:
    """A number that grows as N to a `power`; whether it `counts` batches or is a setting; and the expression that makes it."""

    power: int = 0
    counts: bool = False
    at: ast.expr | None = None
    unsure: bool = False  # whether its batches may be windows

    @property
    def is_of_micro_batches(self) -> bool:
        """Whether it counts micro-batches, or updates N times over."""
        return self.power > 0 or (self.counts and self.power == 0)


def lengths(source: Source, step: ast.AST) -> Iterator[Length]:
    """Yield what the schedules are given that advance by a call.

    Args:
        source: The file.
        step: A call `scheduler.step()`; or that of an optimizer, which may hold a schedule.

    Yields:
        The length of each.
    """
    name = words.last(words.receiver(step)) if isinstance(step, ast.Call) else ""
    told = (
        "t_total" if re.search(f"engine|{words.OPTIMIZER.pattern}|{words.MODEL.pattern}", name) else "step|iter|max|total|lambda"
    )
    for made in source.made.get(name, []) if name else ():
        returned = [] if isinstance(made.func, ast.Attribute) else source.returned(words.dotted(made.func))
        for call in [one for one in returned if isinstance(one, ast.Call)] or [made]:
            given = [one for one in call.args[1:] if told != "t_total" and re.search(LENGTH, words.text(one))]
            given += [one.value for one in call.keywords if re.search(told, one.arg or "")]
            found = [
                one for one in (_length(source, one) for one in given if not source.is_number(one)) if one.power or one.counts
            ]
            yield from (replace(one, at=one.at or call) for one in found[-1:])  # the warm-up stands before the whole


def written(source: Source, target: ast.AST, counters: set[str]) -> Iterator[Length]:
    """Yield the lengths by which a learning rate is computed of a count: `count / length`, or in a function given both.

    Args:
        source: The file.
        target: `group["lr"]`, which is set.
        counters: What counts the updates, by last identifiers.

    Yields:
        The lengths.
    """
    for rate in (value for place, value in source.writes_rates if place is target):
        for node in (one for given in (rate, *source.given(rate)) for one in ast.walk(given)):
            match node:
                case ast.BinOp(op=ast.Div(), left=left, right=right):
                    given = [left, right]
                case ast.Call():
                    given = node.args if words.last(node.func) in source.functions else []
                case _:
                    continue
            others = [one for one in given if counters.isdisjoint(words.identifiers(one))]
            yield from (_length(source, one) for one in others if len(others) < len(given))


def _length(source: Source, node: ast.expr) -> Length:
    """Return the length that an expression is; each is looked at once, and one that is made from itself says nothing."""
    if node not in source.known:
        source.known[node] = Length()
        source.known[node] = _computed(source, node)
    found: Length = source.known[node]
    return found


def _computed(source: Source, node: ast.expr) -> Length:
    match node:
        case ast.BinOp(left=left, right=right, op=ast.Mult() | ast.Div() | ast.FloorDiv()):
            one, other = _length(source, left), _length(source, right)
            if isinstance(node.op, ast.Mult):
                return Length(one.power + other.power, one.counts or other.counts, node, one.unsure or other.unsure)
            if other.counts or other.power < 0:
                return Length()  # epochs that so many steps take, or a share of them
            cut = "batch" in words.text(right) and not one.counts
            return Length(
                one.power - (0 if cut else other.power),  # a size that N has divided is a micro-batch's
                one.counts or cut,
                node,
                cut and "len(" not in words.text(left) and words.batch(right) != "piece",
            )
        case ast.BinOp(left=left, right=right):
            return replace(_telling(_length(source, one) for one in (left, right)), at=node)
        case ast.Call() if words.last(node.func) == "len":
            return Length(counts=LOADED.search(words.text(node)) is not None)
        case ast.Call():
            given = (*node.args, *(one.value for one in node.keywords))  # of a function of another file, or of Python's own
            return _telling(_length(source, one) for one in (*source.returned(words.dotted(node.func)), *given))
        case ast.IfExp(body=body, orelse=orelse):
            return _telling(_length(source, one) for one in (body, orelse))
        case ast.Lambda(body=body):
            return _telling(_length(source, one) for one in words.inside(body, ast.Name))
        case ast.Name() | ast.Attribute() | ast.Subscript():
            if source.is_number(node):
                return Length(1)
            return _telling(_length(source, one) for one in source.given(node))
    return Length()


def _telling(found: Iterable[Length]) -> Length:
    """Return the one that says most: of several ways to make a length that which N divides."""
    return min(found, key=lambda one: (not (one.counts or one.power), one.power), default=Length())
