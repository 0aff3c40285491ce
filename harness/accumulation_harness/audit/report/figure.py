"""What was measured, as bars: how often each micro-batch counts, how far each window is off, in which module it begins."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.report.conclusion import Conclusion, Line
from accumulation_harness.audit.rules.finding import UNEQUAL
from accumulation_harness.compare.linear import WeightedSum
from accumulation_harness.judge.status import short

COLUMNS = 32  # of the longest bar of a text
MOST = 16  # bars that are drawn
BEYOND = "log scale; bars begin at rounding"
ROW, LABEL, BAR, WIDTH = 18, 150, 260, 840  # pixels of an SVG
LETTERS = 100  # in its width
STYLE = (
    "text{font:13px ui-monospace,monospace;fill:#22272e}.title{font-weight:bold}.bar{fill:#0072b2}.first{fill:#d55e00}"
    ".mark{stroke:#7a828c;stroke-dasharray:3}@media(prefers-color-scheme:dark){text{fill:#e6e9ec}}"
)


class Bar(NamedTuple):
    """One line of a chart."""

    label: str
    value: float  # negative: of a weight that is subtracted
    said: str  # the number, and what belongs to it
    is_first: bool = False  # whether the difference begins here


@dataclass(frozen=True)
class Chart:
    """Bars of one unit."""

    title: str
    bars: Sequence[Bar]
    mark: float = 0.0  # the value that is right

    @property
    def unit(self) -> float:
        """The longest bar, or the mark."""
        return max(self.mark, *(abs(bar.value) for bar in self.bars)) or 1.0

    @property
    def left_out(self) -> str:
        """How many bars are not drawn; empty where all are."""
        return f"and {len(self.bars) - MOST} more" if len(self.bars) > MOST else ""


def charts(conclusion: Conclusion) -> list[Chart]:
    """List the charts of each arm that differs: weights and modules where they are known, and the distances of all windows.

    Args:
        conclusion: What the audit concluded.

    Returns:
        In the order in which they are drawn.
    """
    wrong = [line for line in conclusion.lines if line.arm.findings]
    return [*decisive(conclusion), *_by_title(map(_distances, wrong or conclusion.lines))]


def decisive(conclusion: Conclusion) -> list[Chart]:
    """List the charts that say what is wrong: weights of the micro-batches, and the module in which a difference begins.

    Args:
        conclusion: What the audit concluded.

    Returns:
        At most two for each optimizer that differs.
    """
    pairs = [(line, line.first) for line in conclusion.lines if line.arm.findings]
    wrong = [(line, step) for line, step in pairs if step is not None and not step.agrees]
    return _by_title(chart for line, step in wrong for chart in (_weights(line, step), _modules(line, step)))


def _by_title(made: Iterable[Chart | None]) -> list[Chart]:
    """The first of each title."""
    found: dict[str, Chart] = {}
    for chart in made:
        if chart is not None:
            found.setdefault(chart.title, chart)
    return [*found.values()]


def _weights(line: Line, step: StepFacts) -> Chart | None:
    if step.gate > UNEQUAL or not (known(step, step.taken) and known(step, step.parts)):
        return None
    counts = [own / w if abs(w) > UNEQUAL else math.inf for own, w in zip(step.taken.weights, step.parts.weights, strict=True)]
    if not max(map(abs, counts)) < math.inf or all(abs(count - 1) <= UNEQUAL for count in counts):
        return None
    of = f" in {', '.join(step.only[:4])}" if step.only else ""
    said = f"how often each micro-batch counts{of} (1: as it should)"
    title = f"N={line.arm.accumulation_steps}, optimizer step {step.step}: {said}"
    return Chart(title, [Bar(f"micro-batch {k}", count, _counted(count)) for k, count in enumerate(counts, 1)], mark=1.0)


def _counted(count: float) -> str:
    what = ": lost" if abs(count) <= UNEQUAL else ": subtracted" if count < 0 else ""
    return short(round(count, 3) + 0.0) + what


def known(step: StepFacts, parts: WeightedSum) -> bool:
    """Whether the parts make up the vector, each with one weight and no other.

    Args:
        step: What was measured of one pair of steps.
        parts: A gradient as a weighted sum.

    Returns:
        True where the weights may be shown.
    """
    return len(parts.weights) > 1 and parts.residual <= step.gate and parts.told_apart


def _distances(line: Line) -> Chart | None:
    steps = line.facts.steps
    bars = [Bar(f"step {s.step}", beyond(s.raw.distance, s.gate), _off(s.raw.distance, s.gate)) for s in steps]
    name = f"N={line.arm.accumulation_steps}, {line.arm.arithmetic}, {line.facts.run.track}"
    return Chart(f"{name}: how far each gradient is from the whole batch's ({BEYOND})", bars) if bars else None


def _off(distance: float, gate: float) -> str:
    """Say how far off something is.

    >>> _off(0.646, 1.7e-6), _off(1e-8, 1.7e-6)
    ('off by 64.6%: 380,000 times rounding', 'the same, up to rounding')

    Returns:
        Its distance, and that in parts of what rounding explains.
    """
    times = f": {float(f'{distance / gate:.2g}'):,.0f} times rounding" if gate and distance < math.inf else ""
    return f"off by {short(100 * distance)}%{times}" if distance > gate else "the same, up to rounding"


def _modules(line: Line, step: StepFacts) -> Chart | None:
    """The modules around the one in which the difference begins, and those inside it."""
    path = next((f.evidence["module"] for f in line.arm.findings if f.evidence.get("module")), None)
    if path is None:
        return None
    parts = path.split(".")
    above = {".".join(parts[:depth]) for depth in range(len(parts) + 1)}
    off: dict[str, float] = {}
    for tensor, seen in step.tensors.items():
        inside = tensor.split(".")[:-1]
        for depth in range(1, len(inside) + 1):
            module = ".".join(inside[:depth])
            if ".".join(inside[: depth - 1]) in above:
                off[module] = max(off.get(module, 0.0), seen.distance)
    bars = [
        Bar(
            "  " * module.count(".") + module.rpartition(".")[2],
            beyond(apart, step.gate),
            _off(apart, step.gate) + " ◀ it begins here" * (module == path),
            module == path,
        )
        for module, apart in off.items()
    ]
    title = f"N={line.arm.accumulation_steps}, optimizer step {step.step}: how far each module's gradient is off ({BEYOND})"
    return Chart(title, bars) if path in off else None


def beyond(distance: float, gate: float) -> float:
    """Measure how far a distance is above a gate, in powers of ten.

    >>> beyond(1e-3, 1e-7), beyond(1e-8, 1e-7)
    (4.0, 0.0)

    Args:
        distance: A relative distance.
        gate: What rounding explains.

    Returns:
        log10(distance / gate); 0 within the gate.
    """
    return max(0.0, math.log10(distance / gate)) if gate > 0 and 0 < distance < math.inf else 0.0


def lines(chart: Chart) -> Iterator[str]:
    """Draw a chart for a terminal; `┊` stands at what is right, and a weight that is subtracted is hatched.

    Args:
        chart: Bars with their unit.

    Yields:
        Lines of a terminal.
    """
    scale, shown = COLUMNS / chart.unit, chart.bars[:MOST]
    width = max(4, *(len(bar.label) for bar in shown))
    at = round(chart.mark * scale)
    yield chart.title
    for bar in shown:
        drawn = ("█" if bar.value > 0 else "▒") * round(abs(bar.value) * scale)
        if at:
            drawn = drawn.ljust(at) + "┊" if len(drawn) <= at else f"{drawn[:at]}┊{drawn[at:]}"
        label = bar.label.rjust(width) if at else bar.label.ljust(width)
        yield f"{label} {drawn} {bar.said}"
    if chart.left_out:
        yield f"{' ' * width} {chart.left_out}"


def text(conclusion: Conclusion) -> str:
    """The charts as one SVG.

    Args:
        conclusion: What the audit concluded.

    Returns:
        An SVG document.
    """
    asked = f"Is training with N micro-batches the same computation as with one batch of {conclusion.batch_size}?"
    title = f"{asked} {conclusion.verdict}"
    found = dict.fromkeys(f"N={f.accumulation_steps}, {f.cause}: {f.message}" for f in conclusion.findings)
    drawn, y = [_text(0, -6, title, "title")], 0
    for line in (row for said in found for row in textwrap.wrap(said, LETTERS, subsequent_indent="    ")):
        y += ROW
        drawn.append(_text(0, y, line))
    y += ROW * (2 if found else 1)
    for chart in charts(conclusion):
        for row in textwrap.wrap(chart.title, LETTERS):
            drawn.append(_text(0, y, row, "title"))
            y += ROW
        y -= ROW
        scale, top = BAR / chart.unit, y + 6
        for bar in chart.bars[:MOST]:
            y += ROW
            length = abs(bar.value) * scale
            kind = "first" if bar.is_first or bar.value < 0 else "bar"
            drawn.append(
                _text(0, y, bar.label) + f'<rect class="{kind}" x="{LABEL}" y="{y - 12}" width="{length:.1f}" height="14"/>'
            )
            drawn.append(_text(LABEL + max(length, chart.mark * scale) + 8, y, bar.said))
        if chart.mark:
            at = LABEL + chart.mark * scale
            drawn.append(f'<path class="mark" d="M{at:.1f} {top}V{y + 4}"/>')
        if chart.left_out:
            y += ROW
            drawn.append(_text(LABEL, y, chart.left_out))
        y += 2 * ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -24 {WIDTH + 20} {y + 24}" role="img"><style>{STYLE}</style>'
    return "\n".join([head, f"<title>{escape(title)}</title>", *drawn, "</svg>\n"])


def _text(x: float, y: float, words: str, kind: str = "label") -> str:
    """Blanks in front of a name are its depth in the model."""
    indent = 8 * (len(words) - len(words.lstrip()))
    return f'<text class="{kind}" x="{x + indent:.1f}" y="{y}">{escape(words.strip())}</text>'
