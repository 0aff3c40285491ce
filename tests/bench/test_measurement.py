"""The table of measurements: targets that are met, missed, or not decided by the rounds."""

from __future__ import annotations

from accumulation_harness.bench.cost import Spread
from accumulation_harness.bench.measurement import Measurement, table


def test_the_table_says_what_was_missed() -> None:
    above = Measurement(part="p", name="above", unit="x", wall=Spread.of([1.0, 1.2, 1.3]), target=1.1)
    clearly = Measurement(part="p", name="clearly", unit="x", wall=Spread.of([1.2, 1.2, 1.3]), target=1.1)
    below = Measurement(part="p", name="below", unit="x", wall=Spread.of([1.2]), target=1.1, at_least=True)
    lines = table([above, below, clearly]).splitlines()
    assert "undecided" in lines[1] and "1 to 1.3" in lines[1] and "≤ 1.1" in lines[1]
    assert "met" in lines[2] and "≥ 1.1" in lines[2]
    assert "MISSED" in lines[3] and "undecided" not in lines[2] + lines[3] and lines[4].startswith("undecided:")


def test_a_target_is_decided_outside_the_interval_of_the_median() -> None:
    """A single outlier on the target's other side leaves it decided, half of the rounds there do not."""
    one = Measurement(part="p", name="", unit="x", wall=Spread.of([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.5]), target=1.1)
    half = Measurement(part="p", name="", unit="x", wall=Spread.of([1.0, 1.01, 1.02, 1.03, 1.04, 1.2, 1.3, 1.5]), target=1.1)
    assert (one.met, one.decided) == (True, True) and (half.met, half.decided) == (True, False)
    assert one.wall.high > 1.1  # or else the extremes would have decided it
    assert "undecided" not in table([one]) and Measurement(part="p", name="", unit="s", wall=one.wall).decided is None
