"""How figures look and become SVG: few colours that colour-blind readers can tell apart, the same bytes from the same numbers."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, VERMILLION, INK, GREY, BAND = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#22272e", "#7a828c", "#c9ced6"
DPI = 72  # at which a figure is written as SVG, and so is laid out
SHOWN, READABLE = 1.6, 0.88  # pixels that a point of a figure takes on a page, at most and at least
SERIES = (BLUE, ORANGE, GREEN, VERMILLION, "#CC79A7", "#56B4E9", INK, GREY)
_NO_XML = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|\xef\xbf[\xbe\xbf]")  # characters that a file of XML cannot hold
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: sharp, searchable, in the reader's font
    "text.parse_math": False,  # a name with dollars is a name
    "svg.hashsalt": "accumulation-harness",
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e7eaee",
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": "#4a515a",
    "ytick.color": "#4a515a",
    "legend.frameon": False,
    "lines.linewidth": 1.3,
}


@contextmanager
def style() -> Iterator[None]:
    """Give figures their look, while they are made and while they are written.

    Yields:
        Nothing.
    """
    with matplotlib.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure that is drawn as SVG.

    Args:
        width: In inches.
        height: In inches.

    Returns:
        The figure, without axes.
    """
    figure = Figure(figsize=(width, height))
    FigureCanvasSVG(figure)
    return figure


def to_svg(figure: Figure) -> bytes:
    """A whole SVG file without date, creator, or anything else that changes from run to run.

    Args:
        figure: Any figure.

    Returns:
        The file.
    """
    target = io.BytesIO()
    with style():
        figure.dpi = DPI
        # Once, and here: a figure that knows its layout engine is drawn twice, the first time for the layout alone.
        ConstrainedLayoutEngine().execute(figure)
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}".encode(), target.getvalue())


def inline(svg: bytes, prefix: str, alt: str) -> str:
    """Turn a figure into an element of a page: no prolog, ids of its own, one size of letters, and a description.

    Args:
        svg: A file, as `to_svg` writes it.
        prefix: What its ids begin with.
        alt: What those hear who cannot see it.

    Returns:
        An `svg` element. It shrinks with the page, but not below a width at which its letters can be read.
    """
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", text)
    head, _, body = text.partition(">")
    points = float(re.search(r'viewBox="0 0 ([\d.]+) ', head)[1])  # type: ignore[index]
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    head += f' style="max-width: {SHOWN * points:.0f}px; min-width: {READABLE * points:.0f}px"'
    return f'{head} role="img" aria-label="{escape(alt)}">{body}'


def by_steps(values: Sequence[int]) -> dict[int, str]:
    """A colour per number of accumulation steps, light to dark with N.

    Args:
        values: Numbers of accumulation steps.

    Returns:
        Number -> `#rrggbb`.
    """
    chosen = sorted(set(values))
    shades = matplotlib.colormaps["viridis"](np.linspace(0.72, 0.12, max(2, len(chosen))))  # lighter ones are lost on white
    return {n: matplotlib.colors.to_hex(shade) for n, shade in zip(chosen, shades, strict=False)}


class _OfOneDecade(LogLocator):
    """Ticks only where an axis spans a decade or so, and would have one label or none."""

    def __call__(self) -> Any:
        low, high = self.axis.get_view_interval()  # type: ignore[union-attr]
        return super().__call__() if high < 50 * low else []


def log_axis(axes: Axes, which: str, most: int = 6) -> None:
    """A logarithmic axis with at most `most` labels at whole decades, written 10⁻⁶.

    Args:
        axes: Axes, changed in place.
        which: `x` or `y`.
        most: Largest number of labels.
    """
    axes.set_xscale("log") if which == "x" else axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(base=10, numticks=most))
    axis.set_major_formatter(FuncFormatter(power_of_ten))
    axis.set_minor_locator(_OfOneDecade(base=10, subs=(2, 5), numticks=100))
    axis.set_minor_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axes.tick_params(axis="x" if which == "x" else "y", which="minor", length=0, labelsize=8)


def power_of_ten(value: float, _position: int | None = None) -> str:
    """10⁻⁶, or -10⁻⁶; 0 for zero.

    Args:
        value: A power of ten.
        _position: Position of the tick; not used.

    Returns:
        A text.
    """
    if value == 0:
        return "0"
    exponent = str(round(math.log10(abs(value)))).translate(_SUPERSCRIPT)
    return f"{'-' if value < 0 else ''}10{exponent}"


DASHED = (0, (4, 3))


def steps_axis(axes: Axes, values: Sequence[float]) -> None:
    """An axis of accumulation steps, or of rates: evenly spaced in log N, labelled with every N.

    Args:
        axes: Axes, changed in place.
        values: What is labelled.
    """
    chosen = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(chosen, [f"{n:g}" for n in chosen])
    axes.xaxis.minorticks_off()
    if chosen:
        axes.set_xlim(chosen[0] / 1.4, chosen[-1] * 1.4)
