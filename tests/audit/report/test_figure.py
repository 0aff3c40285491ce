"""Bars: how often each micro-batch counts, how far windows are off, and where a difference begins."""

from xml.etree import ElementTree

import pytest
import torch

from accumulation_harness.audit import audit
from accumulation_harness.audit.report.figure import BAR, decisive
from tests.audit import test_place
from tests.audit.loops.frame import At, sgd
from tests.slow import slow

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def counting(counts):
    """Least squares whose micro-batches count so often."""

    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3).double()
        for _, parts in At(batch_size, accumulation_steps, model, sgd(model)).windows(X.split):
            for rows, count in zip(parts, counts if accumulation_steps > 1 else (1,), strict=True):
                (count * model(rows).square().mean() / accumulation_steps).backward()

    return train


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ((1, 0.5, 1, 1), ["█" * 32 + "┊", "█" * 16 + " " * 16 + "┊", "█" * 32 + "┊", "█" * 32 + "┊"]),
        slow((4, 4, 4, 4), ["█" * 8 + "┊" + "█" * 24] * 4),
        slow((1, 1, -2, 1), ["█" * 16 + "┊", "█" * 16 + "┊", "▒" * 16 + "┊" + "▒" * 16, "█" * 16 + "┊"]),
        ((1, 1, 1, 1), []),
    ],
)
def test_each_micro_batch_has_its_bar(counts, wanted):
    said = str(audit(counting(counts), batch_size=20, accumulation_steps=(4,))).splitlines()
    drawn = [line for line in said if "┊" in line]
    assert [line[len("micro-batch 1 ") :].rstrip("-.0123456789: subtraced") for line in drawn] == wanted
    said = [line.rpartition("┊")[2].lstrip("█▒ ") for line in drawn]
    assert [float(each.partition(":")[0]) for each in said] == [float(count) for count in counts] * bool(wanted)


@pytest.mark.slow
def test_a_difference_that_begins_in_a_module_is_marked_there():
    train = test_place.planted(test_place.swaps_rows, "blocks.1.mlp.0")
    report = audit(train, batch_size=test_place.B, accumulation_steps=[3])
    tree = next(chart for chart in decisive(report) if "each module" in chart.title)
    first = [bar for bar in tree.bars if bar.is_first]
    assert [bar.label.split() for bar in first] == [["0"]] and "it begins here" in first[0].said
    assert any("◀" in line for line in str(report).splitlines())


def test_the_figure_shows_every_window_beside_what_rounding_explains():
    report = audit(counting((1, 0.5, 1, 1)), batch_size=20, accumulation_steps=(4,))
    drawn = ElementTree.fromstring(report.told("svg"))
    said = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert said[0].endswith("one batch of 20? different") and any("count 1, 0.5, 1, 1 times" in words for words in said)
    steps = report.results[0].facts[0].steps
    assert [words for words in said if words.startswith("step ")] == [f"step {step.step}" for step in steps]
    bars = [float(rect.get("width")) for rect in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(bars) == 4 + len(steps) and max(bars) == BAR
