"""What a section of the page is made of. How each of these looks is in `blocks.html.j2`."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis.figures.style import inline, to_svg
from accumulation_harness.judge import statistics
from accumulation_harness.judge.interval import Interval

TAKEN = ("claims", "reading", "provenance")  # ids of the page's own parts


@dataclass(frozen=True)
class Text:
    """A paragraph; `lead` says in a few words what it is about."""

    text: str
    lead: str = ""
    kind = "text"


@dataclass(frozen=True)
class Picture:
    """A figure with its caption, and a description for those who cannot see it; it is drawn at once."""

    name: str  # among those of its experiment
    figure: Figure
    alt: str
    caption: str
    svg: bytes = field(init=False)
    kind = "picture"

    def __post_init__(self) -> None:
        object.__setattr__(self, "svg", to_svg(self.figure))

    def inline(self, prefix: str) -> Markup:
        """As an element of a page whose ids begin with `prefix`."""
        return Markup(inline(self.svg, prefix, self.alt))

    def _repr_svg_(self) -> str:
        """As a notebook shows it: the very SVG of the report."""
        return self.svg.decode()


@dataclass(frozen=True)
class Table:
    """A table whose cells are already text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    folded: bool = False  # shown on demand
    kind = "table"


def table(head: str, rows: Iterable[Sequence[Any]], caption: str, *, folded: bool = False) -> Table:
    """A table from values.

    Args:
        head: Names of the columns, between bars.
        rows: Their values.
        caption: A sentence.
        folded: Whether it is shown only when asked for.

    Returns:
        The table.
    """
    return Table(tuple(head.split(" | ")), tuple(tuple(map(_cell, row)) for row in rows), caption, folded)


def table_by(
    rows: DataFrame, by: str, head: str, columns: Sequence[object], caption: str, *, folded: bool = False, **grouping: Any
) -> Table:
    """Make a table with a line for each group of rows, in pandas' order.

    Args:
        rows: Any table.
        by: Names of columns, between blanks; none: each row is a group.
        head: The names of the new table's columns, between bars.
        columns: For each of them "name" (the first value), "name median" (any reduction of pandas, or one of `REDUCTIONS`),
            either of these with a function for what it gives, or a function of the group's rows.
        caption: What it shows.
        folded: Whether the page shows it only when asked.
        grouping: Further arguments of pandas' `groupby`.

    Returns:
        The table.
    """
    groups = rows.groupby(by.split() or np.arange(len(rows)), **grouping)
    return table(head, ([_told(own, column) for column in columns] for _, own in groups), caption, folded=folded)


def _told(own: DataFrame, column: Any) -> object:
    if isinstance(column, tuple):
        return column[1](_told(own, column[0]))
    if callable(column):
        return column(own)
    name, _, how = column.partition(" ")
    return own[name].iloc[0] if not how else REDUCTIONS[how](own[name]) if how in REDUCTIONS else getattr(own[name], how)()


def _cell(value: Any) -> str:
    """A value as text: a count in full, another number as `number` writes it, an estimate with its interval."""
    if hasattr(value, "estimate"):
        return estimated(value)
    return number(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix; `state` is its verdict, or `explained` for a difference that an oracle reproduces."""

    state: str
    symbol: str
    count: str
    words: str


@dataclass(frozen=True)
class Matrix:
    """The matrix of verdicts: rows are workload x norm x optimizer, columns precision x N and the null."""

    precisions: tuple[tuple[str, int], ...]  # and the number of columns of each
    columns: tuple[str, ...]
    bodies: tuple[tuple[str, tuple[tuple[str, str, tuple[Cell | None, ...]], ...]], ...]  # workload, (norm, optimizer, cells)
    caption: str
    kind = "matrix"

    @property
    def starts(self) -> frozenset[int]:
        """The columns at which a precision begins."""
        return frozenset(accumulate((width for _, width in self.precisions), initial=0))


Block = Text | Picture | Table | Matrix


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: tuple[Block, ...]


def section(title: str, *blocks: Block | str | None) -> Section:
    """Make a section; a string becomes a paragraph, and None is left out.

    Args:
        title: Its heading.
        blocks: What it shows, in order.

    Returns:
        The section.
    """
    return Section(title, tuple(Text(block) if isinstance(block, str) else block for block in blocks if block is not None))


def plain(name: str) -> str:
    """A name as an id of the page and in a file's name: itself if it is short and plain, else what is plain in it, and a hash.

    Args:
        name: Any name.

    Returns:
        At most 100 letters, digits, `_.@-`.
    """
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,99}", name) and name not in TAKEN:
        return name
    return f"{re.sub('[^A-Za-z0-9_]+', '-', name)[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def number(value: float) -> str:
    """A number with two or three digits, as a reader wants it: 0.0123, 1.2e-15, or a dash for NaN.

    Args:
        value: Any number.

    Returns:
        A text.
    """
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def estimated(one: Interval) -> str:
    """An estimate with its interval: 0.0123 (0.01 to 0.015).

    Args:
        one: An estimate with its interval.

    Returns:
        A text.
    """
    return f"{number(one.estimate)} ({number(one.low)} to {number(one.high)})"


COUNTED = "trial|arm|run|row|cell|seed|window|step|image|configuration|order|model|setting|fault|point|epoch|sample|draw"
_ONE = re.compile(rf"(?<![\d.,])1 ({COUNTED})s\b")
_SAME_ENDS = re.compile(r"(?<![\w.])(-?\d[\d.]*(?:e[+-]?\d+)?) to \1(?![\d.]|e[+-])")


def worded(text: str) -> str:
    """Word a sentence made from numbers as a person would write it.

    >>> worded("medians of 1 trials, 4 to 4 times; 21 trials, 1.5 to 1.56")
    'medians of 1 trial, 4 times; 21 trials, 1.5 to 1.56'

    Args:
        text: Any sentence.

    Returns:
        The sentence, with singulars behind 1, and ranges without width as one number.
    """
    return _SAME_ENDS.sub(r"\1", _ONE.sub(r"1 \1", text))


def marked(text: str) -> Markup:
    """Show text of a page, in which `backticks` stand around code.

    >>> marked("two passes do, in `recipes/two_pass.py`, if n < 2")
    Markup('two passes do, in <code>recipes/two_pass.py</code>, if n &lt; 2')

    Args:
        text: Any text; what HTML would read is escaped.

    Returns:
        HTML.
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def share(part: int, whole: int) -> str:
    """How many of how many, in words.

    Args:
        part: How many.
        whole: Out of how many.

    Returns:
        `3 of 4`.
    """
    return f"{part} of {whole}"


def counted(which: Series[bool]) -> str:
    """How many of these are true, in words.

    Args:
        which: Flags.

    Returns:
        `3 of 4`.
    """
    return share(int(which.sum()), len(which))


def span(values: Series[float]) -> str:
    """The smallest to the largest.

    Args:
        values: Numbers.

    Returns:
        `LEAST to GREATEST`.
    """
    return f"{number(values.min())} to {number(values.max())}"


def ends(row: DataFrame) -> str:
    """Write the interval of a table's row.

    Args:
        row: One row with `low` and `high`.

    Returns:
        `LOW to HIGH`.
    """
    return f"{number(row['low'].iloc[0])} to {number(row['high'].iloc[0])}"


def _median_span(values: Series[float]) -> str:
    """The median, and of several values the smallest to the largest."""
    return number(values.median()) + (f" ({span(values)})" if len(values) > 1 else "")


def interval(values: Iterable[float]) -> str:
    """Mean and 95 % Student t interval, in words.

    Args:
        values: One for each seed.

    Returns:
        `MEAN (LOW to HIGH)`; without an interval for one value.
    """
    one = statistics.mean_interval([*map(float, values)])
    if math.isnan(one.low):
        return number(one.estimate)
    middle, low, high = (round(value, 3) + 0.0 for value in (one.estimate, one.low, one.high))  # no "-0.000"
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def power(differences: Sequence[float]) -> str:
    """The smallest difference that these paired differences could have shown, in words.

    Args:
        differences: One for each seed.

    Returns:
        A sentence; empty for fewer than two.
    """
    least = statistics.detectable(differences)
    return "" if math.isnan(least) else f"A difference of {number(least)} would have been seen with 80% power."


def names(values: Series[Any]) -> str:
    """List the values that occur.

    Args:
        values: Values of a column.

    Returns:
        `A, B`.
    """
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in sorted({*values} - {""}))


REDUCTIONS: dict[str, Callable[..., object]] = {
    "n": len, "names": names, "span": span, "counted": counted, "interval": interval, "median_span": _median_span,
    "detectable": statistics.detectable, "ended": lambda inside: "yes" if inside.all() else "no: an end",
}  # fmt: skip
