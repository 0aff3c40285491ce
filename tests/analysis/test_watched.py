"""The counts of the watch's calibration, on the page."""

from __future__ import annotations

import csv
import io
from collections import Counter

import pandas as pd
import pytest

from accumulation_harness.analysis import watched
from accumulation_harness.analysis.content import Table, Text
from accumulation_harness.judge.cause import Cause
from accumulation_harness.watch import calibration


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    """A right loop and a wrong one for each of a few seeds, run here."""
    chosen = [calibration.drawn(seed, (16,)) for seed in range(6)]
    return [calibration.counted(one, fault) for one in chosen for fault in (None, Cause.loss_not_divided)]


def test_counts_are_those_of_the_loops(rows: list[dict[str, object]]) -> None:
    """Written and read again, summed in another way; each loop has its windows and one verdict."""
    back = list(csv.DictReader(io.StringIO(calibration.to_csv(rows))))
    assert tuple(back[0]) == calibration.COLUMNS
    found = Counter({name: sum(int(row[name]) for row in back) for name in calibration.COUNTS})
    assert found["loops"] == 12 and found["windows"] == 12 * calibration.WINDOWS
    assert sum(found[verdict] for verdict in calibration.VERDICTS) == 12
    wrong = [row for row in back if row["fault"] != calibration.RIGHT]
    assert sum(int(row["named"]) for row in wrong) == sum(int(row["different"]) for row in wrong) == found["different"] == 6
    assert {row["replayed"] for row in back} == {"0", "1"}, "both kinds are among these seeds"


def test_parameters_are_the_models() -> None:
    setting = calibration.drawn(3, (16,))
    first, middle, last = (12 * 16 + 16), (16 * 16 + 16), (16 * 7 + 7)
    assert setting.parameters == first + middle + last


COUNTS = f"""{",".join(calibration.COLUMNS)}
none,float32,500,0,30,120,28,1,1,0,1,0,0,abcdef0123,2.13
none,float16,500,1,10,40,10,0,0,0,0,0,0,abcdef0123,2.13
mean_of_means,float32,500,0,10,40,0,9,1,8,9,0,0,abcdef0123,2.13
mean_of_means,float16,500,1,10,40,0,10,0,10,7,0,3,abcdef0123,2.13
"""


def section(text: str) -> tuple[str, Table, Table]:
    made = watched.section(pd.read_csv(io.StringIO(text), keep_default_na=False))
    assert made is not None
    told, faults, right = made.blocks
    assert isinstance(told, Text) and isinstance(faults, Table) and isinstance(right, Table)
    return told.text, faults, right


def test_the_page_says_what_was_counted() -> None:
    text, faults, right = section(COUNTS)
    assert "attached to 40 random right loops of 160 windows" in text and "It calls 1 of 40 (2.5%" in text and "abcdef0" in text
    assert "Of 20 loops with a planted fault it sees 19, and names 18" in text
    assert faults.rows == (("mean_of_means", "20", "19", "16", "0", "3", "18 (68.3% to 98.8%)", "10 of 10"),)
    assert [row[:-1] for row in right.rows] == [
        ("float16", "500", "10", "40", "10", "10", "0"), ("float32", "500", "30", "120", "0", "28", "1"),
    ]  # fmt: skip


def test_nothing_is_said_of_nothing() -> None:
    assert watched.section(pd.read_csv(io.StringIO(COUNTS.splitlines()[0]))) is None


def test_the_record_is_large_enough() -> None:
    """At least 1,000 right windows, three precisions, several sizes, every fault of the calibration."""
    counts = watched.recorded()
    right = counts[counts["fault"] == watched.RIGHT]
    assert right["windows"].sum() >= 1000 and set(right["precision"]) == {"float32", "bfloat16", "float16"}
    assert right["parameters"].min() < 10_000 and right["parameters"].max() > 25_000_000
    assert set(counts["fault"]) - {watched.RIGHT} == {str(fault.cause) for fault in calibration.FAULTS}
    section(counts.to_csv(index=False))
