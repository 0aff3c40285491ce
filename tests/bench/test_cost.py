"""What is measured is what was spent: real processes, also grandchildren, and calls of known length."""

from __future__ import annotations

import sys
import time

import pytest

from accumulation_harness.bench.cost import CommandFailed, Cost, Spread, alternate, of_call, of_command, ratios, seconds

BURN = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass"


def test_a_spread_is_the_median_between_the_extremes() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0, 3, (1.0, 10.0))
    assert Spread.of([1.0, 2.0]).median == 1.5


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that becomes ten times slower between rounds changes no ratio; the medians of the two sides would."""
    above = [Cost(wall=2.0, cpu=4.0, peak=0), Cost(wall=20.0, cpu=40.0, peak=0), Cost(wall=2.2, cpu=4.4, peak=0)]
    below = [Cost(wall=1.0, cpu=1.0, peak=0), Cost(wall=10.0, cpu=10.0, peak=0), Cost(wall=1.0, cpu=1.0, peak=0)]
    wall, cpu = ratios(above, below)
    assert (wall, cpu) == (Spread(2.0, 2.0, 2.2, 3, (2.0, 2.2)), Spread(4.0, 4.0, 4.4, 3, (4.0, 4.4)))
    assert seconds(above)[0].median == 2.2


def test_sides_take_turns_at_going_first() -> None:
    order: list[str] = []

    def side(name: str) -> Cost:
        order.append(name)
        return Cost(1.0, 1.0, 1)

    costs = alternate({"a": lambda: side("a"), "b": lambda: side("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(own) for name, own in costs.items()} == {"a": 3, "b": 3}


def test_rounds_go_on_until_the_seconds_are_over() -> None:
    """And are as many as were asked for, however long they take."""

    def nap() -> Cost:
        return of_call(lambda: time.sleep(0.02))

    assert 2 < len(alternate({"a": nap}, 2, least_seconds=0.5)["a"]) <= 25
    assert len(alternate({"a": nap}, 2, least_seconds=0.01)["a"]) == 2


def test_a_call_that_sleeps_takes_time_and_no_processor() -> None:
    asleep = of_call(lambda: time.sleep(0.2))
    assert asleep.wall >= 0.2 and asleep.cpu < 0.1
    busy = of_call(lambda: exec(BURN.format(0.2)))
    assert busy.cpu >= 0.2


def test_a_command_is_charged_for_its_grandchildren() -> None:
    """Also for one that it does not wait for."""
    nested = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {BURN.format(0.5)!r}])"
    alone = of_command([sys.executable, "-c", "pass"])
    waited = of_command([sys.executable, "-c", f"{nested}; p.wait()"])
    left = of_command([sys.executable, "-c", nested])
    assert alone.cpu < 0.4 and waited.cpu >= 0.5 and left.cpu >= 0.5
    assert alone.peak > 2**20


def test_a_command_that_fails_says_what_it_printed() -> None:
    with pytest.raises(CommandFailed, match="no such luck"):
        of_command([sys.executable, "-c", "raise SystemExit('no such luck')"])
    assert of_command([sys.executable, "-c", "raise SystemExit(3)"], accept=(3,)).wall > 0
