"""The rule of `experiments/groupnorm.py`, on rows made by hand, and the page of real tiny trials."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import pytest

from accumulation_harness.analysis.question import Ruling
from accumulation_harness.experiments.groupnorm.answers import better_choice, predicted
from tests.experiments.accuracy_rows import BATCH, GROUP, SEEDS, results, run_of


@pytest.mark.parametrize("changes, verdict", [
    ({}, Ruling.conditional),
    ({"error": 1e-3}, Ruling.refuted),
    ({"group": dict.fromkeys(BATCH, 40.0)}, Ruling.refuted),
    ({"group": dict.fromkeys(BATCH, 1.0)}, Ruling.confirmed),
    ({"batch": dict.fromkeys(BATCH, 4.0)}, Ruling.refuted),  # within the margin everywhere: nothing is saved
    ({"jitter": 3.0, "batch": dict.fromkeys(BATCH, 4.5)}, Ruling.undecided),
])  # fmt: skip
def test_rule_of_b3(changes: dict[str, Any], verdict: Ruling) -> None:
    assert better_choice(results(**changes)).verdict == verdict


def test_b3_names_every_model_where_it_gains_and_where_it_loses() -> None:
    """A model that GroupNorm harms is not left out, whatever another gains."""
    conv = [
        row for seed in SEEDS for norm, error in (("batch", 3.0), ("group", 4.0))
        for row in run_of(norm, dict.fromkeys(BATCH, error), 32, seed, "conv")
    ]  # fmt: skip
    both = results()
    found = better_choice(dataclasses.replace(both, measurements=pd.concat([both.measurements, pd.DataFrame(conv)])))
    assert found.verdict == Ruling.conditional
    gains, loses = found.condition.split("; not for ")
    assert gains == "for mlp at b = 4, 2" and "conv at b = 32, 16, 8, 4, 2" in loses


@pytest.mark.parametrize("batch, group, holds", [
    (BATCH, GROUP, True),
    (BATCH | {4: 29.0}, GROUP, False),  # steepest from 8 to 4
    (BATCH, GROUP | {2: 9.0}, False),  # GroupNorm's rises too
    (BATCH, dict.fromkeys(GROUP, 1.0), False),  # better at the full batch
    ({32: 3.0, 8: 3.5}, {32: 4.0, 8: 4.0}, None),
])  # fmt: skip
def test_the_printed_prediction_is_compared(batch: dict[int, float], group: dict[int, float], holds: bool | None) -> None:
    assert predicted(results(batch, group)) is holds
    assert predicted(results(batch, group, error=1e-3)) is (None if holds is None else False)
