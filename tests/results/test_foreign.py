"""What is in a store and not of it: links, pipes, devices, folders. Nothing waits, nothing is followed, all of it is named."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accumulation_harness import status
from accumulation_harness.analysis import load, report
from accumulation_harness.config import ConfigError
from accumulation_harness.results import sweeps
from accumulation_harness.results.record import keep_others_out
from accumulation_harness.results.store import State, Store
from tests.stored_trials import store_trial

ROOT = Path(__file__).parents[2]
SUMMARY = {"arms": [], "environment": {}, "seconds": 0.0}


@pytest.fixture
def folder(results: Path) -> Path:
    return results / "equivalence" / store_trial(results)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


PLACES: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
}


CASES = [("trial.json", "a pipe"), ("steps.parquet", "a pipe"), ("../../other", "a pipe"), ("trial.json", "a device"),
         ("failed.json", "a device"), ("../other", "a device"), ("lock", "a folder"), ("../../.lock", "a folder")]  # fmt: skip


@pytest.mark.parametrize(("name", "what"), CASES)
def test_report_and_status_name_it_and_go_on(
    name: str, what: str, folder: Path, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_trial(results, seed=1)
    path = Path(os.path.normpath(folder / name))
    path.unlink(missing_ok=True)
    PLACES[what](path)
    status.main(["--results", str(results)])
    assert str(path) in capsys.readouterr().out
    assert report.main(["--results", str(results), "--out", str(tmp_path / "out")]) == 0
    assert str(path) in capsys.readouterr().err
    assert str(path) in (tmp_path / "out" / "provenance.html").read_text()


def test_a_pipe_in_the_place_of_a_note_is_no_note(results: Path) -> None:
    sweeps.announce(results, ["e/t"])
    os.mkfifo(results / sweeps.FOLDER / "pipe.json")
    assert [sweep.trials for sweep in sweeps.announced(results)] == [("e/t",)]


def test_a_file_in_the_place_of_the_notes_is_told(results: Path) -> None:
    results.mkdir()
    (results / sweeps.FOLDER).write_text("mine")
    sweeps.announce(results, ["e/t"])
    assert list(Store(results).foreign()) == [f"{results}/.sweeps is a file, not a folder"]
    assert (results / sweeps.FOLDER).read_text() == "mine"


@pytest.mark.parametrize("place", ["e", "e/t"])
def test_nothing_is_written_through_a_link(place: str, results: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = results / place
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(ConfigError, match=f"a store without links: .*{place} leads to .*outside"):
        Store(results).open_trial("e", "t", {})
    assert not Store(results).mark_failed("e", "t", "error")
    assert not Store(results).finished("e", "t")
    assert not list(outside.iterdir())


@pytest.mark.parametrize("name", ["lock", "../../.lock"])
def test_no_lock_is_made_through_a_link(name: str, results: Path, tmp_path: Path) -> None:
    folder = results / "e" / "t"
    folder.mkdir(parents=True)
    Path(os.path.normpath(folder / name)).symlink_to(tmp_path / "outside")
    with pytest.warns(UserWarning, match="set aside") if name == "lock" else pytest.raises(ConfigError):
        Store(results).open_trial("e", "t", {}).close()
    assert not (tmp_path / "outside").exists()


def test_damaged_step_rows_are_named_also_where_no_table_uses_them(folder: Path, results: Path) -> None:
    store_trial(results, seed=1)
    before = load.read(results)
    content = bytearray((folder / "steps.parquet").read_bytes())
    content[100] ^= 1
    (folder / "steps.parquet").write_bytes(content)
    assert [one.state for one in Store(results).status() if one.trial == folder.name] == [State.damaged]
    found = load.read(results)
    assert found.arms.equals(before.arms)
    assert [(one.trial, "checksum" in one.detail) for one in found.torn] == [(folder.name, True)]
    assert not found.missing


def test_nobody_else_may_write_what_is_stored(results: Path) -> None:
    previous = os.umask(0)
    try:
        with Store(results).open_trial("e", "t", {}) as writer:
            writer.add({"step": 0})
            modes = [path.stat().st_mode for path in [results, *results.rglob("*")]]
            writer.finish(SUMMARY)
        sweeps.announce(results, ["e/t"])
        modes += [path.stat().st_mode for path in results.rglob("*")]
        keep_others_out()
        assert os.umask(0) == 0o022
        os.umask(0o002)
        keep_others_out()
        assert os.umask(0) == 0o002  # a group that shares its files goes on to
    finally:
        os.umask(previous)
    assert not any(mode & stat.S_IWOTH for mode in modes)


def test_nobody_else_may_write_what_a_command_leaves(tmp_path: Path) -> None:
    small = ("steps=2", "algebra_steps=2", "effective_batch=8", "accumulation_steps=[2]", "tracking=offline")
    command = [sys.executable, "-m", "accumulation_harness", "run", *small, f"results={tmp_path}/results"]
    subprocess.run(command, umask=0, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/harness"})
    found = {str(path.relative_to(tmp_path)): path.lstat() for path in tmp_path.rglob("*") if not path.is_symlink()}
    assert any(name.endswith(".wandb") for name in found)
    assert not [name for name, one in found.items() if one.st_mode & (stat.S_IWOTH | stat.S_IWGRP)]
