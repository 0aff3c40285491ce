"""What a name stands for while a loop is followed: a number, a loss with its weight, a function, or something unknown."""

from __future__ import annotations

import ast
import operator
from collections import ChainMap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from accumulation_harness.lint import words

MOST_TERMS = 256
Kind = str  # "mean", "sum", "rows" (of a loss that is not reduced), "model" (what a model returns as its loss) or "unknown"
Value = Any  # an int or float, None, a text, a tuple of values, or one of the classes below


class Part(float):
    """A number that follows from the number of micro-batches in a window; any other number is a setting of its own."""


class Length(int):
    """How long something is that may be the loader or the rows of a batch, or what was computed from that."""


@dataclass(frozen=True)
class Thing:
    """What the text does not tell; `name` is how the source calls it, `of` the class of the file that made it."""

    name: str
    of: str = ""
    negated: bool = False  # of a test
    exists: bool = False  # the test is one for None
    counts: bool = False  # made by a call that is given the number of micro-batches
    at: ast.expr | None = None  # the call that made it


@dataclass(frozen=True)
class Items:
    """What a loop goes over: values, or (None) as many unknown ones as there are batches in the loader."""

    values: tuple[Value, ...] | None
    by_number: bool = False
    cut: bool = False  # pieces of one batch


@dataclass(frozen=True, eq=False)
class Function:
    """A function of the file, with what it sees of the function around it, and with `self`."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    sees: ChainMap[str, Value]
    instance: Thing | None = None


@dataclass(frozen=True)
class Term:
    """An addend of a loss. `weight`: the product of what depends on N; None where something unknown weighs it, too."""

    kind: Kind
    weight: float | None = 1.0
    by_number: float = 1.0  # the part of the weight that divides by N
    literals: tuple[float, ...] = ()  # numbers by which it is divided that are no known function of N
    whole: str = ""  # by what the whole window holds
    padded: bool = False
    masked: bool = False
    at: ast.expr | None = None  # where it was last divided or multiplied by N

    def divided(self, by: float | None) -> Term:
        """Return the term divided by what follows from N; None: by something unknown."""
        weight = None if self.weight is None or not by else self.weight / by
        return replace(self, weight=weight, by_number=self.by_number / (by or 1))


@dataclass(frozen=True)
class Loss:
    """A sum of terms; `scaled` is the name of a GradScaler."""

    terms: tuple[Term, ...]
    scaled: str = ""

    @classmethod
    def of(cls, kind: Kind, **known: Any) -> Loss:
        """Return a loss of one term."""
        return cls((Term(kind, **known),))

    def each(self, change: Callable[[Term], Term]) -> Loss:
        """Return the loss with every term changed."""
        return replace(self, terms=tuple(map(change, self.terms)))

    def reduced(self, kind: Kind) -> Loss:
        """Return `loss.sum()` or `loss.mean()`: of rows, if it was masked before."""
        return self.each(
            lambda term: replace(term, kind=term.kind if term.kind in ("model", "mean") and not term.masked else kind)
        )

    def divided(self, by: Value, text: ast.expr) -> Loss:
        """Return `loss / by`."""
        written = words.text(text) + (by.name if isinstance(by, Thing) else "")  # a name, and what it was made of
        counts = any(word in written for word in (".sum()", "len(", "numel", ".size(0)", ".shape[0]"))
        of_window = any(map(words.WHOLE.search, words.identifiers(text)))

        def term(one: Term) -> Term:
            if by == 1 and not isinstance(by, (Part, Length)):
                return one
            if one.kind == "sum" and counts and not of_window and not isinstance(by, Part):
                return replace(one, kind="mean", padded=one.masked or "mask" in written)
            if isinstance(by, Part):
                return replace(one.divided(by), at=text)
            if isinstance(by, (int, float)) and not isinstance(by, Length):
                return replace(one, literals=(*one.literals, by))
            return replace(one, weight=None, whole=words.text(text) if of_window else one.whole)

        return self.each(term)

    def multiplied(self, factor: Value, text: ast.expr) -> Loss:
        """Return `loss * factor`; a weight of a term says nothing about N, a scale may be a division in other words."""
        if isinstance(factor, Part):
            return self.each(lambda one: replace(one.divided(1 / factor if factor else None), at=text))
        if isinstance(factor, (int, float)) and not isinstance(factor, Length):
            return self
        if isinstance(factor, Loss):
            return self
        unsure = any(map(words.SCALE.search, words.identifiers(text))) or words.COUNT.search(words.text(text))
        return self.each(lambda one: replace(one, masked=True, weight=None if unsure else one.weight))

    @classmethod
    def total(cls, parts: Iterable[Loss]) -> Loss:
        """Return the sum of losses; of more than `MOST_TERMS` terms, as sums of sums in loops make them, nothing is known."""
        parts = tuple(parts)
        terms = tuple(dict.fromkeys(term for part in parts for term in part.terms))
        return cls(
            terms if len(terms) <= MOST_TERMS else (Term("unknown", None),),
            next((part.scaled for part in parts if part.scaled), ""),
        )


@dataclass
class Event:
    """What a run did: `kind` to `name`, by a call that stands in the source at `node`."""

    kind: str
    node: ast.expr | ast.stmt
    name: str = ""
    loss: Loss | None = None
    loops: tuple[tuple[ast.AST, int, bool], ...] = field(
        default=()
    )  # each loop around it but those over optimizers, its iteration, and whether it counts to N
    each: tuple[int, ...] = ()  # the iterations of loops over optimizers
    synchronised: bool = True
    scaled: str = ""  # by what: of a backward and a step a GradScaler, of a clip its limit

    @property
    def place(self) -> tuple[object, ...]:
        """Where it stands in the source, and for which of the optimizers of a loop."""
        return self.node, *self.each


OPERATORS: dict[type[ast.operator | ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def arithmetic(how: ast.operator, left: Value, right: Value) -> Value:
    """Return the result where both are numbers, and None otherwise.

    Args:
        how: The operator.
        left: Its left value.
        right: Its right value.

    Returns:
        A number, or None.
    """
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)) or abs(left) + abs(right) > 1e9:
        return None
    try:
        result = OPERATORS[type(how)](left, right)
    except (KeyError, ZeroDivisionError):
        return None
    if isinstance(left, Part) or isinstance(right, Part):
        return Part(result)
    return Length(result) if isinstance(left, Length) or isinstance(right, Length) else result
