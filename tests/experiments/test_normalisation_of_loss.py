from __future__ import annotations

import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.analysis.question import ClaimResult
from accumulation_harness.experiments.normalisation_of_loss.answers import CLAIMS

Row = dict[str, object]
EMPTY = pd.DataFrame({"experiment": []})


def decide(name: str, arms: list[Row] = [], measurements: list[Row] = []) -> ClaimResult:  # noqa: B006 - never changed
    (one,) = [claim for claim in CLAIMS if claim.id == name]
    return one.decide(load.Results(pd.DataFrame(arms) if arms else EMPTY, pd.DataFrame(measurements), EMPTY, ()))


def arm(name: str, verdict: str = "equivalent", **changes: object) -> Row:
    usual: Row = {"arm": name, "verdict": verdict, "cause": name if verdict == "different" else "", "optimizer": "sgd",
             "scale": 1.0, "unequal_terms": False, "short_windows": 0, "accumulation_steps": 4, "gradient_error": 0.1,
             "final_distance": 0.1, "steps": 3}  # fmt: skip
    return usual | changes


RIGHT = arm("accumulated", gradient_error=1e-16)
UNDIVIDED = arm("loss_not_divided", "different", scale=4.0)
EVEN, UNEVEN = arm("mean_of_means"), arm("mean_of_means", "different", unequal_terms=True)
SHORT = arm("short_window_divided_by_n", "different", short_windows=1, unequal_terms=True)


@pytest.mark.parametrize(
    ("name", "arms", "verdict"),
    [
        ("A3", [RIGHT, UNDIVIDED], "conditional"),
        ("A3", [RIGHT, UNDIVIDED | {"scale": 1.0, "gradient_error": 1e-16}], "confirmed"),
        ("A3", [RIGHT | {"gradient_error": 1e-3}, UNDIVIDED], "refuted"),
        ("A3", [RIGHT, RIGHT | {"gradient_error": 1e-3}, UNDIVIDED], "needs the full grid"),
        ("A3", [RIGHT, UNDIVIDED | {"scale": 3.9}], "needs the full grid"),
        ("A3", [RIGHT], "needs the full grid"),
        ("A4", [RIGHT, UNDIVIDED], "refuted"),
        ("A4", [RIGHT, UNDIVIDED | {"scale": 3.99}], "conditional"),
        ("A4", [RIGHT, arm("loss_not_divided")], "confirmed"),
        ("A4", [RIGHT], "needs the full grid"),
        ("A4", [RIGHT | {"verdict": "different"}, UNDIVIDED], "needs the full grid"),
        ("A9", [RIGHT, EVEN, UNEVEN, SHORT], "conditional"),
        ("A9", [RIGHT, EVEN, UNEVEN | {"verdict": "equivalent"}, SHORT | {"verdict": "equivalent"}], "confirmed"),
        ("A9", [RIGHT, EVEN | {"verdict": "different"}, UNEVEN, SHORT], "refuted"),
        ("A9", [RIGHT, EVEN, UNEVEN], "needs the full grid"),
        ("A9", [RIGHT | {"verdict": "different"}, EVEN, UNEVEN, SHORT], "needs the full grid"),
    ],
)
def test_rules_on_arms(name: str, arms: list[Row], verdict: str) -> None:
    assert str(decide(name, arms).verdict) == verdict


def loop(name: str, tail: int, **changes: object) -> Row:
    usual: Row = {"study": "epoch_tail", "arm": name, "effective_batch": 64, "accumulation_steps": 4, "tail_samples": tail,
                  "steps": 48, "windows": 48, "leaked_samples": 0, "unused_samples": 0, "gradient_error": 1e-15}  # fmt: skip
    return usual | changes


LOST: Row = {"steps": 46, "leaked_samples": 28, "unused_samples": 28, "gradient_error": 0.7}
LOOPS = [loop("as_written", 0), loop("complete", 0), loop("complete", 28)]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([*LOOPS, loop("as_written", 28, **LOST)], "conditional"),
        ([*LOOPS, loop("as_written", 28)], "confirmed"),
        ([*LOOPS, loop("as_written", 28), loop("as_written", 28, **LOST)], "refuted"),
        ([*LOOPS[:2], loop("complete", 28, gradient_error=1e-3), loop("as_written", 28, **LOST)], "needs the full grid"),
        (LOOPS[:2], "needs the full grid"),
    ],
)
def test_rule_of_the_loop(rows: list[Row], verdict: str) -> None:
    assert str(decide("A10", measurements=rows).verdict) == verdict


def update(optimizer: str, num: int, divided: float, undivided: float) -> list[Row]:
    both = (("accumulated", divided), ("loss_not_divided", undivided))
    return [{"study": "update_size", "trial": optimizer, "optimizer": optimizer, "accumulation_steps": num, "arm": name,
             "first_update": size, "mean_update": size} for name, size in both]  # fmt: skip


@pytest.mark.parametrize(
    ("sgd", "adam", "verdict"),
    [
        ((0.5, 4.0), (1.1, 1.1), "conditional"),
        ((2.5, 20.0), (1.1, 1.1), "confirmed"),  # grows although divided
        ((0.5, 0.5), (1.1, 1.1), "refuted"),
        ((0.5, 3.9), (1.1, 1.1), "refuted"),  # larger, and not N times
        (None, (1.1, 1.1), "needs the full grid"),
    ],
)
def test_rule_of_the_update(sgd: tuple[float, float] | None, adam: tuple[float, float], verdict: str) -> None:
    found = {"sgd": sgd, "adam": adam}
    rows = [row for name, sizes in found.items() if sizes for row in (*update(name, 1, 1.0, 1.0), *update(name, 8, *sizes))]
    assert str(decide("A16", measurements=rows).verdict) == verdict
