"""What a section of the page is made of; the template knows how each of these looks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Text:
    text: str
    kind = "text"


@dataclass(frozen=True)
class Picture:
    name: str  # of its file, without suffix
    figure: Figure
    alt: str
    caption: str
    kind = "picture"


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    folded: bool = False  # shown on demand
    kind = "table"


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix; `state` is its verdict, or `explained` for a difference that an oracle reproduces."""

    state: str
    symbol: str
    count: str
    words: str


@dataclass(frozen=True)
class Matrix:
    """Rows workload x norm x optimizer, columns precision x N and the null."""

    precisions: tuple[tuple[str, int], ...]  # and the number of columns of each
    columns: tuple[str, ...]
    bodies: tuple[tuple[str, tuple[tuple[str, str, tuple[Cell | None, ...]], ...]], ...]  # workload, (norm, optimizer, cells)
    caption: str
    kind = "matrix"

    @property
    def starts(self) -> frozenset[int]:
        """Columns at which a precision begins."""
        return frozenset(accumulate((width for _, width in self.precisions), initial=0))


Block = Text | Picture | Table | Matrix


@dataclass(frozen=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


def number(value: float) -> str:
    """Two or three digits, as many as a reader wants: 0.0123, 1.2e-15, or a dash where there is no number."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}"
