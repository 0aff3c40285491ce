"""The rules of `experiments/replicas.py`, on rows made by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from accumulation_harness.analysis.load import Results
from accumulation_harness.experiments.replicas.answers import CLAIMS, wire_ratios

Row = dict[str, object]
EMPTY = pd.DataFrame({"experiment": []})
SCALE, APART = "replica_scale", "replicas_not_synchronised"


def decide(name: str, rows: list[Row]) -> str:
    (one,) = [claim for claim in CLAIMS if claim.id == name]
    return str(one.decide(Results(EMPTY, pd.DataFrame(rows), EMPTY, ())).verdict)


def right(unequal: bool, **changes: object) -> Row:
    row: Row = {"arm": "ddp", "unequal_terms": unequal, "expected": "", "cause": "", "gradient_error": 1e-16}
    return row | {"rank_distance": 0.0, "ends_apart": 0.0, "trajectory_error": 1e-15} | changes


def wrong(expected: str, **changes: object) -> Row:
    return right(True) | {"expected": expected, "cause": expected, "gradient_error": 0.5, "rank_distance": 0.2} | changes


BOTH = [right(False), right(True)]
WRONG = [wrong(SCALE), wrong(APART)]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([*BOTH, *WRONG], "confirmed"),
        ([*BOTH, wrong(SCALE), wrong(APART, cause="unexplained")], "conditional"),
        ([*BOTH, wrong(SCALE), wrong(APART, gradient_error=1e-15)], "refuted"),
        ([right(False), right(True, gradient_error=1e-6), *WRONG], "refuted"),
        ([right(False), right(True, trajectory_error=1e-2), *WRONG], "refuted"),
        ([right(False), right(True, ends_apart=1e-6), *WRONG], "refuted"),
        ([right(False), right(True, cause="unexplained"), *WRONG], "refuted"),
        ([right(True), *WRONG], "needs the full grid"),
        ([*BOTH, wrong(SCALE)], "needs the full grid"),
    ],
)
def test_rule_of_synchronising_once(rows: list[Row], verdict: str) -> None:
    assert decide("D10", rows) == verdict


def sent(n: int, once: float, every: float) -> list[Row]:
    pairs = {"mean_of_scaled": once, "ddp": once, "mean_every_micro_batch": every, "ddp_every_backward": every}
    return [{"trial": "t", "accumulation_steps": n, "arm": arm, "gradient_bytes": size} for arm, size in pairs.items()]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([*sent(1, 80, 80), *sent(8, 80, 640)], "conditional"),
        ([*sent(1, 80, 80), *sent(8, 80, 80)], "refuted"),
        ([*sent(1, 160, 160), *sent(8, 80, 640)], "refuted"),
        ([*sent(1, 640, 640), *sent(8, 80, 640)], "confirmed"),
        (sent(8, 80, 640), "needs the full grid"),
        (sent(1, 80, 80), "needs the full grid"),
    ],
)
def test_rule_of_communication(rows: list[Row], verdict: str) -> None:
    assert decide("D9", rows) == verdict


def test_ratios_are_within_a_trial() -> None:
    other = [row | {"trial": "u"} for row in (*sent(1, 10, 10), *sent(4, 10, 40))]
    ratios = wire_ratios(pd.DataFrame([*sent(1, 80, 80), *sent(8, 80, 640), *other]))
    assert (
        sorted(zip(ratios["trial"], ratios["every"], ratios["true_batch"], strict=True)) == [("t", 8, 1)] * 2 + [("u", 4, 1)] * 2
    )
