"""Measurements that trials share: made once, whatever happens at the same time."""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from accumulation_harness.results import measurements
from accumulation_harness.results.measurements import Measurement, Measurements
from accumulation_harness.system.enums import StrEnum
from tests.commands import eventually


class Colour(StrEnum):
    red = "red"
    blue = "blue"


@dataclass(frozen=True)
class Part:
    size: float
    name: str | None = None


@dataclass(frozen=True)
class Whole:
    pair: tuple[int, float]
    by_colours: Mapping[tuple[Colour, ...], float]
    parts: Mapping[str, Part]
    best: Part | None = None


WHOLE = Whole((2, 0.1 + 0.2), {(): math.inf, (Colour.red, Colour.blue): 1e-300}, {"a": Part(-0.0)}, Part(3.0, "b"))


def measurement(make, seed=0):
    return Measurement("toy", Whole, lambda: {"seed": seed}, make)


def never():
    raise AssertionError("was to be found")


def stored(root):
    return sorted((root / measurements.FOLDER).iterdir())


def test_it_is_made_once_and_tells_by_whom(tmp_path, monkeypatch):
    first, second = Measurements(tmp_path, "a/one"), Measurements(tmp_path, "a/two")
    assert first.of(measurement(lambda: WHOLE)) == WHOLE
    found = second.of(measurement(never))
    assert found == WHOLE and math.copysign(1, found.parts["a"].size) == -1 and type(min(found.by_colours)) is tuple
    assert list(first.used.values()) == list(second.used.values()) == ["a/one"]
    other = Whole((1, 1.0), {}, {})
    assert second.of(measurement(lambda: other, seed=1)) == other, "what it depends on is another"
    assert list(second.used.values()) == ["a/one", "a/two"] and len(stored(tmp_path)) == 2
    monkeypatch.setattr(measurements, "code", lambda: "another")
    assert second.of(measurement(lambda: other)) == other, "another version of the code measures again"


def changed(path):
    path.write_bytes(path.read_bytes().replace(b"red", b"rod"))


def a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-9]), changed, Path.unlink, a_folder])
def test_what_is_damaged_is_made_again(tmp_path, damage):
    Measurements(tmp_path).of(measurement(lambda: WHOLE))
    damage(stored(tmp_path)[0])
    again = Whole((7, 7.0), {}, {})
    assert Measurements(tmp_path).of(measurement(lambda: again)) == again
    if damage is not a_folder:
        assert Measurements(tmp_path).of(measurement(never)) == again


def slowly(root, log):
    def make():
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return WHOLE

    assert Measurements(root).of(measurement(make)) == WHOLE


def started(root, log):
    process = multiprocessing.get_context("fork").Process(target=slowly, args=(root, log))
    process.start()
    return process


def test_many_at_once_make_it_once(tmp_path):
    log = tmp_path / "log"
    many = [started(tmp_path, log) for _ in range(4)]
    assert eventually(lambda: Measurements(tmp_path).is_being_made(measurement(never)))
    for process in many:
        process.join()
        assert process.exitcode == 0
    assert len(log.read_text().splitlines()) == 1
    assert not Measurements(tmp_path).is_being_made(measurement(never))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_dies_or_stops_over_it_is_not_waited_for(tmp_path, monkeypatch, how):
    monkeypatch.setattr(measurements, "MOST_WAIT", 0.3)
    ours, own = Measurements(tmp_path, "ours"), Whole((3, 3.0), {}, {})
    process = started(tmp_path, tmp_path / "log")
    assert eventually(lambda: ours.is_being_made(measurement(never)))
    os.kill(process.pid, how)
    try:
        assert ours.of(measurement(lambda: own)) == own
    finally:
        process.kill()
        process.join()
    if how is signal.SIGKILL:  # its lock is free: ours is kept
        assert Measurements(tmp_path).of(measurement(never)) == own
