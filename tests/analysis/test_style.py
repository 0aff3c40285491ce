from __future__ import annotations

import pytest
from matplotlib.lines import Line2D

from accumulation_harness.analysis.figures.style import log_axis, new_figure, style, to_svg


@pytest.mark.parametrize(
    ("limits", "labels"), [((2e-3, 9e-3), ["2e-03", "5e-03"]), ((1e-6, 1.0), [])], ids=["within a decade", "over decades"]
)
def test_where_there_is_no_whole_decade_others_are_labelled(limits: tuple[float, float], labels: list[str]) -> None:
    axes = new_figure(3, 3).subplots()
    log_axis(axes, "y")
    axes.set_ylim(*limits)
    found = axes.yaxis.get_ticklabels(minor=True)
    assert [text.get_text() for text in found] == labels


class Counted(Line2D):
    """A line that counts how often it is drawn."""

    times = 0

    def draw(self, renderer: object) -> None:
        self.times += 1
        super().draw(renderer)  # type: ignore[arg-type]


def test_a_figure_is_laid_out_and_drawn_once() -> None:
    with style():
        figure = new_figure(4, 2)
        for axes in figure.subplots(1, 2):
            axes.set_ylabel("a label as high as the figure")
        line = axes.add_line(Counted([0, 1], [0, 1], label="a line"))
        figure.legend(loc="outside upper left")
    drawn = to_svg(figure).decode()
    assert line.times == 1 and "a line" in drawn
    left, right = figure.axes
    gap = right.get_tightbbox().x0 - left.get_tightbbox().x1  # type: ignore[union-attr]
    assert 0 < gap < 30, "the layout made room for the label between them"
