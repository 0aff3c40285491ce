"""How the length that a schedule was made for goes with the number of micro-batches: through names, functions and closures."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from accumulation_harness.lint import words
from accumulation_harness.lint.source import Source

DEEPEST = 9
LOADED = re.compile(r"load|iter|batches|dl\b|data(?!set)")
WINDOWS = re.compile("total|global|effective|accum")  # batch sizes that are a window's


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


def lengths(source: Source, schedule: ast.AST) -> Iterator[Length]:
    """Yield what the schedules are given that advance by a call.

    Args:
        source: The file.
        schedule: A call `scheduler.step()`.

    Yields:
        The length of each argument but the optimizer and rates.
    """
    of = words.receiver(schedule) if isinstance(schedule, ast.Call) else None
    for made in source.made.get(words.last(of), []):
        returned = [] if isinstance(made.func, ast.Attribute) else source.returned(words.dotted(made.func))
        calls = [one for one in returned if isinstance(one, ast.Call)] or [made]
        for call in calls:
            yield from (
                replace(found, at=found.at or call)
                for one in [
                    *call.args[1:],
                    *(one.value for one in call.keywords if re.search("step|iter|max|total|lambda", one.arg or "")),
                ]
                if (found := _length(source, one, DEEPEST)).power or found.counts
            )


def _length(source: Source, node: ast.expr, depth: int) -> Length:
    if not depth:
        return Length()
    match node:
        case ast.BinOp(left=left, right=right, op=ast.Mult() | ast.Div() | ast.FloorDiv()):
            one, other = _length(source, left, depth - 1), _length(source, right, depth - 1)
            if isinstance(node.op, ast.Mult):
                return Length(one.power + other.power, one.counts or other.counts, node, one.unsure or other.unsure)
            if other.counts:
                return Length()  # epochs that so many steps take
            by = words.text(right)
            cut = "batch" in by and not one.counts
            return Length(
                one.power - other.power,
                one.counts or cut,
                node,
                cut and not ("len(" in words.text(left) and not WINDOWS.search(by)),
            )
        case ast.BinOp(left=left, right=right):
            return replace(_telling(_length(source, one, depth - 1) for one in (left, right)), at=node)
        case ast.Call() if words.last(node.func) == "len" or "length" in words.last(node.func):
            return Length(counts=LOADED.search(words.text(node)) is not None)
        case ast.Call():
            found = _telling(_length(source, one, depth - 1) for one in source.returned(words.dotted(node.func)))
            is_object = words.dotted(node.func).rpartition(".")[2][:1].isupper()  # no length, whatever it was made with
            if not (found.power or found.counts or is_object):  # of another file, or what it returns is a function
                each = [_length(source, one, depth - 1) for one in (*node.args, *(one.value for one in node.keywords))]
                found = Length() if any(one.power > 0 for one in each) and any(one.counts for one in each) else _telling(each)
            return found
        case ast.IfExp(body=body, orelse=orelse):
            return _telling(_length(source, one, depth - 1) for one in (body, orelse))
        case ast.Lambda(body=body):
            return _telling(_length(source, one, depth - 1) for one in words.inside(body, ast.Name))
        case ast.Name() | ast.Attribute() | ast.Subscript():
            if source.is_number(node):
                return Length(1)
            return _telling(_length(source, one, depth - 1) for one in source.given(node))
    return Length()


def _telling(found: Iterable[Length]) -> Length:
    """Return the one that says most: of several ways to make a length that which N divides."""
    return min(found, key=lambda one: (not (one.counts or one.power), one.power), default=Length())
