"""The rules on counted bytes and on the texts' arithmetic: each ruling has rows that give it, and rows that do not."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.load import Results
from analysis.question import Ruling
from experiments.accounting import CLAIMS, spread_over_n

RULES = {claim.id: claim.decide for claim in CLAIMS}
PARAMETERS = 1000


def results(*, gradient_at_8: int = 4, state: int = 8, optimizer: str = "adam") -> Results:
    """Bytes of two trials at N = 1 and 8; the arguments are bytes per parameter."""
    rows = [
        {"trial": trial, "optimizer": optimizer, "num_parameters": PARAMETERS, "accumulation_steps": num,
         "parameter_bytes": 4 * PARAMETERS, "gradient_bytes": each * PARAMETERS, "state_bytes": state * PARAMETERS}
        for trial in ("a", "b") for num, each in ((1, 4), (8, gradient_at_8))
    ]  # fmt: skip
    return Results(pd.DataFrame(), pd.DataFrame(rows), pd.DataFrame(), ())


def test_what_theory_expects() -> None:
    assert {name: decide(results()).verdict for name, decide in RULES.items()} == {one.id: one.expects for one in CLAIMS}
    assert RULES["D7"](results()).measured == pytest.approx(1.3 * 16), "weights, gradients and two moments of 4 bytes each"


@pytest.mark.parametrize(
    ("given", "fell"),
    [
        (results(gradient_at_8=8), {"D4": Ruling.conditional, "D5": Ruling.confirmed}),
        (results(state=0), {"D7": Ruling.confirmed, "D11": Ruling.refuted}),
        (results(state=4), {"D7": Ruling.refuted, "D11": Ruling.refuted}),
        (results(optimizer="sgd"), {"D7": Ruling.needs_full_grid, "D11": Ruling.needs_full_grid}),
    ],
)
def test_what_would_change_a_verdict(given: Results, fell: dict[str, Ruling]) -> None:
    assert {name: RULES[name](given).verdict for name in fell} == fell


def test_the_spread_is_relative_and_within_a_trial() -> None:
    rows = results(gradient_at_8=5).measurements
    assert spread_over_n(rows, ["gradient_bytes"]) == pytest.approx(0.25)
    assert spread_over_n(rows, ["parameter_bytes", "gradient_bytes"]) == pytest.approx(1 / 8)
