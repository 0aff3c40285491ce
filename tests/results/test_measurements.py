"""Measurements that trials share: made once, whatever happens at the same time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accumulation_harness.results import measurements
from accumulation_harness.results.measurements import Measurement, Measurements
from accumulation_harness.results.store import Store

Asked = Callable[[], dict[str, float]]


def measurement(make: Asked, seed: int = 0) -> Measurement[dict[str, float]]:
    return Measurement("toy", dict[str, float], lambda: {"seed": seed}, make)


def never() -> dict[str, float]:
    raise AssertionError("was to be found")


def stored(root: Path) -> list[Path]:
    return sorted((root / measurements.FOLDER).glob("*.json"))


def test_it_is_made_once_and_tells_by_whom(tmp_path: Path) -> None:
    first, second = Measurements(tmp_path, "a/one"), Measurements(tmp_path, "a/two")
    made = first.of(measurement(lambda: {"x": 0.1}))
    found = second.of(measurement(never))
    assert made == found == {"x": 0.1}
    assert list(first.used.values()) == list(second.used.values()) == ["a/one"]
    assert second.of(measurement(lambda: {"x": 2.0}, seed=1)) == {"x": 2.0}, "what it depends on is another"
    assert list(second.used.values()) == ["a/one", "a/two"] and len(stored(tmp_path)) == 2
    assert not list((tmp_path / measurements.FOLDER).glob("*.lock"))


def test_another_version_of_the_code_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Measurements(tmp_path).of(measurement(lambda: {"x": 1.0}))
    monkeypatch.setattr(measurements, "code", lambda: "another")
    assert Measurements(tmp_path).of(measurement(lambda: {"x": 2.0})) == {"x": 2.0}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def changed(path: Path) -> None:
    path.write_text(path.read_text().replace("0.5", "0.7"))


def of_another_kind(path: Path) -> None:
    from accumulation_harness.results.record import write_checked

    write_checked(path, {"made_by": "x", "result": [["x", "text"]]})


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut, changed, of_another_kind, Path.unlink, a_folder])
def test_what_is_damaged_is_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    Measurements(tmp_path).of(measurement(lambda: {"x": 0.5}))
    damage(stored(tmp_path)[0])
    assert Measurements(tmp_path).of(measurement(lambda: {"x": 0.25})) == {"x": 0.25}
    if damage is not a_folder:
        assert Measurements(tmp_path).of(measurement(never)) == {"x": 0.25}


def test_nothing_is_written_through_a_link_or_without_a_folder(tmp_path: Path) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store.mkdir()
    elsewhere.mkdir()
    (store / measurements.FOLDER).symlink_to(elsewhere)
    for root in (store, tmp_path / "none", None):
        assert Measurements(root).of(measurement(lambda: {"x": 1.0})) == {"x": 1.0}
    assert not any(elsewhere.iterdir()) and not (tmp_path / "none").exists()
    assert any(measurements.FOLDER in line for line in Store(store).foreign())


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Measurements(tmp_path).of(measurement(never))
    assert not list((tmp_path / measurements.FOLDER).iterdir())


def slowly(root: Path, log: Path) -> None:
    def make() -> dict[str, float]:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return {"x": 1.0}

    assert Measurements(root).of(measurement(make)) == {"x": 1.0}


def started(root: Path, log: Path) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=slowly, args=(root, log))
    process.start()
    return process  # type: ignore[return-value]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_many_at_once_make_it_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    many = [started(tmp_path, log) for _ in range(4)]
    until(lambda: Measurements(tmp_path).is_being_made(measurement(never)))
    for process in many:
        process.join()
        assert process.exitcode == 0
    assert len(log.read_text().splitlines()) == 1
    assert not Measurements(tmp_path).is_being_made(measurement(never))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_dies_or_stops_over_it_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(measurements, "MOST_WAIT", 0.3)
    log, ours = tmp_path / "log", Measurements(tmp_path, "ours")
    process = started(tmp_path, log)
    until(lambda: ours.is_being_made(measurement(never)))
    assert process.pid is not None
    os.kill(process.pid, how)
    try:
        assert ours.of(measurement(lambda: {"x": 3.0})) == {"x": 3.0}
    finally:
        process.kill()
        process.join()
    if how is signal.SIGKILL:  # its lock is free: ours is kept
        assert json.loads(stored(tmp_path)[0].read_text())["made_by"] == "ours"
