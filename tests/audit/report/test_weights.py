"""Bars of how often each micro-batch counts."""

import pytest
import torch

from accumulation_harness.audit import audit
from accumulation_harness.audit.report.weights import COLUMNS, MOST, bars

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def counting(counts):
    """Least squares whose micro-batches count so often."""

    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for window in X.split(batch_size * accumulation_steps):
            optimizer.zero_grad()
            for rows, count in zip(window.split(batch_size), counts if accumulation_steps > 1 else (1,), strict=True):
                (count * model(rows).square().mean() / accumulation_steps).backward()
            optimizer.step()

    return train


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ((1, 0.5, 1, 1), ["█" * 32 + "┊", "█" * 16 + " " * 16 + "┊", "█" * 32 + "┊", "█" * 32 + "┊"]),
        ((4, 4, 4, 4), ["█" * 8 + "┊" + "█" * 24] * 4),
        ((1, 1, -2, 1), ["█" * 16 + "┊", "█" * 16 + "┊", "▒" * 16 + "┊" + "▒" * 16, "█" * 16 + "┊"]),
        ((1, 1, 1, 1), []),
    ],
)
def test_each_micro_batch_has_its_bar(counts, wanted):
    said = str(audit(counting(counts), batch_size=20, accumulation_steps=(4,))).splitlines()
    drawn = [line for line in said if "┊" in line]
    assert [line[5:].rpartition(" ")[0].rstrip() for line in drawn] == wanted
    assert [float(line.split()[-1]) for line in drawn] == [float(count) for count in counts] * bool(wanted)


def test_no_more_are_drawn_than_can_be_read():
    drawn = list(bars((1.0,) * 20 + (0.0,) * 20))
    assert len(drawn) == MOST + 1 and drawn[-1].split() == ["and", "24", "more"] and drawn[0].count("█") == COLUMNS
