"""The rules of the experiment on learning rates, on hand-built results and on a real tiny run."""

from __future__ import annotations

import pytest

from accumulation_harness.analysis import ledger
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.experiments.learning_rate import answers as learning_rate
from tests.experiments.optimizer_rows import BEST, Rows, results, trained

OPEN = Ruling.needs_full_grid


def beside(*, same: float = 1e-15, other: float = 0.3, loss: float = 0.5) -> Rows:
    rows: Rows = []
    for optimizer in ("sgd", "adam"):
        for lr in (0.1, 0.4, 1.6):
            off = same if lr == 0.1 else other
            about = {"trial": f"{optimizer}-{lr}", "study": "convergence", "optimizer": optimizer, "lr": lr, "seed": 0}
            rows += [about | {"arm": "full", "held_out_loss": loss if lr == 0.1 else 0.1}]
            rows += [about | {"arm": "accumulated", "held_out_loss": loss * (1 + off)}]
    return rows


def verdicts(rows: Rows) -> dict[str, Ruling]:
    found = ledger.findings(learning_rate.EXPERIMENT, results(rows))
    return {name: one.verdict for name, one in found.items()}


EXPECTED = {
    "C4": Ruling.conditional,
    "C5": Ruling.conditional,  # 0.08 nats above the best rate at B = 32, 0.16 at 128
    "G10": Ruling.undecided,
}
LINEAR = {8: 0.1, 32: 0.4, 128: 1.6}


@pytest.mark.parametrize(
    ("rows", "fell"),
    [
        ([*beside(), *trained()], {}),
        ([*beside(same=1e-8), *trained()], {"C4": Ruling.confirmed}),
        ([*beside(other=1e-3), *trained()], {"C4": OPEN}),  # blind: another rate changes nothing
        ([*beside(loss=2.2), *trained()], {"C4": OPEN}),  # nothing was learned
        # one best rate for all: nothing has to be raised, and linear scaling overshoots everywhere
        ([*beside(), *trained(best=dict.fromkeys(BEST, 0.1))], {"C4": Ruling.refuted, "C5": Ruling.refuted}),
        ([*beside(), *trained(best=LINEAR)], {"C5": Ruling.confirmed}),
        ([*beside(), *trained(best=LINEAR | {128: 3.2})], {"C5": Ruling.undecided}),  # the best rate is on the edge
        ([*beside(), *trained(seeds=4)], {"C5": OPEN, "G10": OPEN}),
        (trained(), {"C4": OPEN}),
        (beside(), dict.fromkeys(EXPECTED, OPEN)),
    ],
)
def test_verdicts(rows: Rows, fell: dict[str, Ruling]) -> None:
    assert verdicts(rows) == EXPECTED | fell


def test_a_better_batch_outside_the_range_contradicts_it() -> None:
    """By the loss of the two batches inside: 32 and 128."""
    rows = trained()
    for row in rows:
        row["judged_loss"] += 0.1 * (row["batch"] != 8) + 1e-3 * row["seed"]
    assert verdicts(rows)["G10"] == Ruling.refuted
    only = [row for row in rows if row["batch"] != 8]
    assert verdicts(only)["G10"] == OPEN
