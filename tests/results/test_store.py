"""The store keeps numbers bit for bit, tells damaged files from good ones, and survives being killed at any moment."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import multiprocessing
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from accumulation_harness.config import ConfigError
from accumulation_harness.results import locks, record
from accumulation_harness.results.rows import RowError, RowFile, from_parquet, read_rows, to_parquet
from accumulation_harness.results.store import State, Store, StoredTrial, StoreError, StoreWarning, TrialTaken

DOUBLES = st.floats(allow_subnormal=True, allow_nan=True, allow_infinity=True)
SUMMARY: dict[str, Any] = {"arms": [{"arm": "accumulated", "scale": 1.0}], "environment": {"torch": "2.13.0"}, "seconds": 1.5}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def run_trial(store: Store, trial: str = "t", num_rows: int = 3) -> Path:
    """A finished trial; returns its folder."""
    with store.open_trial("e", trial, {"seed": 0}) as writer:
        for step in range(num_rows):
            writer.add({"step": step, "loss": step / 7})
        writer.finish(SUMMARY)
    return store.folder("e", trial)


def bits(value: float) -> bytes:
    """The bytes of a double; one value for every NaN."""
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


# Numbers


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(DOUBLES, min_size=1, max_size=30))
@example([-0.0, 0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, math.inf, -math.inf, math.nan, 1.7976931348623157e308, 0.1])
def test_doubles_survive_bit_for_bit(tmp_path: Path, values: list[float]) -> None:
    path = tmp_path / f"{time.monotonic_ns()}.jsonl"
    file = RowFile(path)
    for value in values:
        file.append({"value": value})
    file.close()
    rows = read_rows(path)
    expected = [bits(value) for value in values]
    assert [bits(float(row["value"] or 0.0)) if row["value"] else bits(row["value"]) for row in rows] == expected  # type: ignore[arg-type]
    assert [bits(value) for value in from_parquet(to_parquet(rows))["value"]] == expected


def test_doubles_would_not_survive_pandas_own_reader() -> None:
    """The must-differ of the test above: the usual way to read JSON lines does change numbers."""
    import io

    import pandas as pd

    generator = random.Random(0)
    values = [generator.uniform(-1, 1) for _ in range(200)]
    lines = "\n".join(json.dumps({"value": value}) for value in values)
    assert pd.read_json(io.StringIO(lines), lines=True)["value"].tolist() != values


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.lists(st.none() | st.text(st.characters(codec="utf-8"))))
@settings(max_examples=50, deadline=None)
def test_integers_and_texts_survive_with_gaps(integers: list[int], texts: list[str | None]) -> None:
    frame = from_parquet(to_parquet([*({"whole": value} for value in integers), *({"text": value} for value in texts)]))
    assert frame["whole"].dropna().tolist() == integers
    assert frame["whole"].isna().sum() == len(texts)
    if texts:
        assert [None if value is None or value != value else value for value in frame["text"]][len(integers) :] == texts


def test_columns_that_come_late_are_kept_in_order_of_appearance() -> None:
    frame = from_parquet(to_parquet([{"a": 1}, {"b": 0.5, "a": 2}, {"c": True, "a": 3}]))
    assert list(frame.columns) == ["a", "b", "c"]
    assert frame["a"].tolist() == [1, 2, 3]
    assert frame["b"].tolist()[1] == 0.5


def test_trial_without_rows(store: Store) -> None:
    run_trial(store, num_rows=0)
    (trial,) = store.trials()
    assert (trial.num_rows, len(store.steps(trial))) == (0, 0)


@pytest.mark.parametrize(
    ("first", "second"),
    [(1.0, "text"), ("text", 1), (True, 1.0), (0.5, 2**53 + 1), (None, [1]), (None, {}), (None, 2**63), (None, "\ud800")],
)
def test_rows_that_could_not_be_kept_exactly_are_refused_at_once(store: Store, first: Any, second: Any) -> None:
    with store.open_trial("e", "t", {}) as writer:
        writer.add({"x": first})
        with pytest.raises(RowError, match="column 'x'"):
            writer.add({"x": second})
        writer.add({"x": first})  # a refused row leaves no trace
        assert len(read_rows(writer.folder / "steps.jsonl")) == 2


def test_whole_numbers_may_stand_among_doubles(store: Store) -> None:
    with store.open_trial("e", "t", {}) as writer:
        for value in (0, 0.5, 2**53):
            writer.add({"x": value})
        writer.finish(SUMMARY)
    assert store.steps(next(store.trials()))["x"].tolist() == [0.0, 0.5, 2.0**53]


# Lines


def test_torn_last_line_is_dropped_and_only_that(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    whole = b'{"a": 1}\n{"a": 2}\n'
    for torn in (b"", b'{"a": 3}', b'{"a"', b"\xff\x00"):
        path.write_bytes(whole + torn)
        assert read_rows(path) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("line", [b'{"a": ', b"", b"[1]", b"\xff", b"\x00" * 20])
def test_other_damage_names_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    with pytest.raises(RowError, match=r"steps\.jsonl, line 2"):
        read_rows(path)


# A trial's life


def test_finished_trial_is_read_back_whole(store: Store) -> None:
    arms = [{"arm": "accumulated", "algebra_error": 3e-16, "scale": math.nan, "evidence": {"null": [1e-7, math.inf]}}]
    with store.open_trial("e", "t", {"seed": 0, "steps": [2, 4]}) as writer:
        writer.add({"step": 1, "loss": 0.1})
        writer.finish({**SUMMARY, "arms": arms, "extra": 1})
    (trial,) = store.trials("e")
    assert (trial.experiment, trial.trial, trial.config, trial.seconds) == ("e", "t", {"seed": 0, "steps": [2, 4]}, 1.5)
    assert repr(trial.arms) == repr(arms)  # repr: NaN is not equal to itself
    assert (trial.record["extra"], trial.record["format"], trial.environment) == (1, 1, {"torch": "2.13.0"})
    assert store.steps(trial).to_dict("records") == [{"step": 1, "loss": 0.1}]
    assert json.loads((trial.folder / "trial.json").read_text())["steps"] == 1  # plain JSON for everybody else
    assert sorted(os.listdir(trial.folder)) == ["config.json", "steps.parquet", "trial.json"]
    assert [status.state for status in store.status()] == [State.finished]


def test_finished_trial_is_not_taken_again(store: Store) -> None:
    folder = run_trial(store)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(TrialTaken, match="is finished"):
        store.open_trial("e", "t", {})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_running_trial_is_not_taken_by_another(store: Store) -> None:
    with store.open_trial("e", "t", {}) as writer:
        writer.add({"a": 1})
        assert [status.state for status in store.status()] == [State.running]
        with pytest.raises(TrialTaken, match="is running"):
            Store(store.root).open_trial("e", "t", {})
        assert not store.mark_failed("e", "t", "somebody else's opinion")
        assert read_rows(writer.folder / "steps.jsonl") == [{"a": 1}]
    assert [status.state for status in store.status()] == [State.unfinished]


def test_exception_is_kept_and_the_next_attempt_starts_from_nothing(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.open_trial("e", "t", {}) as writer:
        writer.add({"a": 1})
        raise ZeroDivisionError("the reason")
    (status,) = store.status()
    assert (status.state, status.detail) == (State.failed, "ZeroDivisionError: the reason")
    assert "test_store.py" in json.loads((writer.folder / "failed.json").read_text())["traceback"]
    (writer.folder / "wandb").mkdir()
    with store.open_trial("e", "t", {}) as again:
        assert sorted(os.listdir(again.folder)) == ["config.json", "lock", "steps.jsonl"]
        again.add({"a": 2})
        again.finish(SUMMARY)
    assert store.steps(next(store.trials()))["a"].tolist() == [2]


def test_interrupt_is_no_failure(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.open_trial("e", "t", {}):
        raise KeyboardInterrupt
    assert [status.state for status in store.status()] == [State.unfinished]


def test_death_seen_from_outside(store: Store) -> None:
    assert store.mark_failed("e", "t", "killed by signal 9")
    assert [(status.state, status.detail) for status in store.status()] == [(State.failed, "killed by signal 9")]
    run_trial(store)
    assert not store.mark_failed("e", "t", "too late")
    assert [status.state for status in store.status()] == [State.finished]


def test_summary_is_checked(store: Store) -> None:
    with store.open_trial("e", "t", {}) as writer:
        with pytest.raises(ValueError, match="seconds"):
            writer.finish({"arms": [], "environment": {}})
        with pytest.raises(ValueError, match="reserved"):
            writer.finish({**SUMMARY, "config": {}})
        writer.finish(SUMMARY)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "t.set-aside-1", "nul\0"])
def test_names_are_plain(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="expected the name of a folder"):
        store.folder("e", name)


# Damage


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("position", [0, 20, 79, 80, 200, -2])
def test_one_flipped_bit_is_seen_named_and_set_aside(store: Store, position: int) -> None:
    folder = run_trial(store)
    flip(folder / "trial.json", position)
    damaged = (folder / "trial.json").read_bytes()
    with pytest.warns(StoreWarning, match=r"e/t/trial\.json"):
        assert list(store.trials()) == []
    assert not store.finished("e", "t")
    assert [status.state for status in store.status()] == [State.damaged]
    with pytest.warns(StoreWarning, match=r"e/t set aside as t\.set-aside-1: .*trial\.json"):
        run_trial(store)
    assert (folder.with_name("t.set-aside-1") / "trial.json").read_bytes() == damaged
    assert [trial.trial for trial in store.trials()] == ["t"]


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 100, b'{"sha256": "'])
def test_cut_off_trial_json_is_not_a_trial(store: Store, content: bytes) -> None:
    folder = run_trial(store)
    (folder / "trial.json").write_bytes(content)
    with pytest.warns(StoreWarning, match="checksum"):
        assert list(store.trials()) == []


def test_damaged_steps_are_an_error_and_run_again(store: Store) -> None:
    folder = run_trial(store)
    (trial,) = store.trials()
    flip(folder / "steps.parquet", 30)
    with pytest.raises(StoreError, match=r"steps\.parquet: checksum"):
        store.steps(trial)
    assert not store.finished("e", "t")
    with pytest.warns(StoreWarning, match=r"steps\.parquet: checksum"):
        run_trial(store)
    (folder / "steps.parquet").unlink()
    with pytest.raises(StoreError, match=r"steps\.parquet: No such file"):
        store.steps(next(store.trials()))
    with pytest.warns(StoreWarning, match="set aside as t.set-aside-2"):
        run_trial(store)


def test_record_of_another_trial_or_another_format_is_not_taken_for_ours(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    misplaced = run_trial(store, "a").rename(store.folder("e", "b"))
    with pytest.warns(StoreWarning, match="belongs to e/a"):
        assert list(store.trials()) == []
    misplaced.rename(store.folder("e", "a"))
    monkeypatch.setattr("accumulation_harness.results.store.FORMAT", 2)
    run_trial(store, "c")
    with pytest.warns(StoreWarning, match="format 2, this version reads 1"):
        assert [trial.trial for trial in store.trials()] == ["a"]


@pytest.mark.parametrize("foreign", ["notes.txt", "steps.jsonl/", "lock/", "link"])
def test_what_is_not_ours_is_set_aside_never_lost(store: Store, foreign: str) -> None:
    folder = store.folder("e", "t")
    folder.mkdir(parents=True)
    if foreign.endswith("/"):
        (folder / foreign).mkdir()
        (folder / foreign / "precious").write_text("mine")
    elif foreign == "link":
        (folder / "steps.jsonl").symlink_to(store.root / "elsewhere")
        (store.root / "elsewhere").write_text("mine")
    else:
        (folder / foreign).write_text("mine")
    with pytest.warns(StoreWarning, match=r"e/t set aside as t\.set-aside-1"):
        run_trial(store)
    assert [
        path.read_text()
        for path in store.root.rglob("*")
        if path.is_file() and path.name in ("precious", "notes.txt", "elsewhere")
    ] == ["mine"]


@pytest.mark.parametrize("where", ["e", "e/t"])
def test_file_in_the_place_of_a_folder_is_set_aside(store: Store, where: str) -> None:
    path = store.root / where
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    path.with_name(path.name + ".set-aside-1").write_text("an older one")
    with pytest.warns(StoreWarning, match=r"is not a folder"):
        run_trial(store)
    assert path.with_name(path.name + ".set-aside-2").read_text() == "mine"
    assert path.with_name(path.name + ".set-aside-1").read_text() == "an older one"


def test_foreign_things_beside_trials_are_ignored(store: Store) -> None:
    run_trial(store)
    (store.root / "README").write_text("x")
    (store.root / "e" / "README").write_text("x")
    (store.root / "other" / "folder").mkdir(parents=True)
    assert [trial.trial for trial in store.trials()] == ["t"]
    assert [status.trial for status in store.status()] == ["t"]
    assert list(store.trials("nothing")) == []
    assert list(Store(store.root / "nowhere").trials()) == []


# Disks


def test_root_that_is_no_folder_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "results"):
        with pytest.raises(ConfigError, match=r"results=.*a folder that can be written"):
            Store(root).check_writable()
        with pytest.raises(ConfigError, match=r"results=.*a folder that can be written"):
            Store(root).open_trial("e", "t", {})


READ_ONLY = """
import os, sys
from accumulation_harness.config import ConfigError
from accumulation_harness.results.store import Store
if os.getuid() == 0:
    os.setuid(65534)  # root may write anywhere
store = Store(sys.argv[1])
assert [trial.trial for trial in store.trials()] == ["t"], "a reader needs no right to write"
assert [status.state for status in store.status()] == ["finished"]
for attempt in (store.check_writable, lambda: store.open_trial("e", "u", {})):
    try:
        attempt()
    except ConfigError as error:
        assert "Permission denied" in str(error), error
    else:
        raise AssertionError("no error")
"""


def test_root_without_the_right_to_write(store: Store, tmp_path: Path) -> None:
    run_trial(store)
    for path in (store.root / ".lock", store.root / "e", store.root):
        path.chmod(0o555)
    for path in (tmp_path, *tmp_path.parents[:3]):  # pytest's own folders are closed to others; root becomes nobody in the child
        path.chmod(path.stat().st_mode | 0o011)
    result = subprocess.run([sys.executable, "-c", READ_ONLY, str(store.root)], capture_output=True, text=True, check=False)
    store.root.chmod(0o755)
    (store.root / "e").chmod(0o755)
    assert result.returncode == 0, result.stderr


def test_full_disk_while_writing_rows(store: Store) -> None:
    run_trial(store, "good")
    with (
        pytest.raises(StoreError, match=r"the disk is full\. Finished trials are safe"),
        store.open_trial("e", "t", {}) as writer,
    ):
        writer.add({"a": 1})
        writer._rows.close()
        writer._rows._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the kernel's own full disk
        writer.add({"a": 2})
    assert [trial.trial for trial in store.trials()] == ["good"]
    run_trial(store)


@pytest.mark.parametrize("name", ["steps.parquet", "trial.json"])
def test_full_disk_while_finishing_leaves_nothing_half_finished(store: Store, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_trial(store, "good")
    fsync, full = os.fsync, {"now": False}

    def failing(descriptor: int) -> None:
        if full["now"] and name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr("accumulation_harness.results.record.os.fsync", failing)
    with pytest.raises(StoreError, match="the disk is full"), store.open_trial("e", "t", {}) as writer:
        writer.add({"a": 1})
        full["now"] = True
        writer.finish(SUMMARY)
    full["now"] = False
    assert [trial.trial for trial in store.trials()] == ["good"]
    run_trial(store)
    assert sorted(trial.trial for trial in store.trials()) == ["good", "t"]


# Many processes, and SIGKILL

NUM_TRIALS, NUM_ROWS = 80, 12
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["pandas", "pyarrow.parquet", "accumulation_harness.results.store", "hypothesis", "pytest"]
)  # pyarrow loads pandas


def expected_rows(trial: str) -> list[dict[str, Any]]:
    generator = random.Random(trial)
    return [{"step": step, "loss": generator.uniform(-1, 1)} for step in range(NUM_ROWS)]


def work(root: str, pipe: Any, pause: float) -> None:
    """Runs every trial that is still open, and says so after each row."""
    store, acknowledge = Store(root), pipe.detach()
    for number in range(NUM_TRIALS):
        trial = f"trial-{number:02}"
        if store.finished("e", trial):
            continue
        try:
            writer = store.open_trial("e", trial, {"number": number})
        except TrialTaken:
            continue
        with writer:
            for row in expected_rows(trial):
                writer.add(row)
                os.write(acknowledge, f"{trial} {row['step']}\n".encode())
                time.sleep(pause)
            writer.finish(SUMMARY)
            os.write(acknowledge, f"{trial} finished\n".encode())


def start(root: Path, acknowledge: int, pause: float = 0.0005) -> Any:
    process = processes.Process(target=work, args=(str(root), DupFd(acknowledge), pause))
    process.start()
    return process


def acknowledged(pipe: int, at_least: int = 0) -> list[list[str]]:
    """What the pipe holds, as pairs of trial and word, once it holds that many."""
    words: list[list[str]] = []
    while len(words) < at_least or select.select([pipe], [], [], 0)[0]:
        words += [line.split(" ") for line in os.read(pipe, 1 << 20).decode().splitlines()]
    return words


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def check_everything_readable(store: Store, words: list[list[str]]) -> None:
    """No warning, no damage, and every row or trial that was acknowledged is there."""
    finished = {trial.trial: trial for trial in store.trials()}
    for trial, word in words:
        if word == "finished":
            assert store.steps(finished[trial]).to_dict("records") == expected_rows(trial)
        elif trial not in finished:
            rows = read_rows(store.folder("e", trial) / "steps.jsonl")
            assert rows == expected_rows(trial)[: len(rows)]
            assert len(rows) > int(word)
    assert all(status.state in (State.finished, State.unfinished) for status in store.status())


def test_killed_at_random_moments_nothing_is_lost_or_repeated(store: Store, pipe: tuple[int, int]) -> None:
    generator = random.Random(0)
    finished: dict[str, bytes] = {}
    for attempt in range(16):
        process = start(store.root, pipe[1])
        # Every other kill waits for all rows of a trial, and so falls into its end or the start of the next one.
        num_words = NUM_ROWS + 13 * generator.randrange(2) if attempt % 2 else generator.randint(1, 26)
        words = acknowledged(pipe[0], at_least=num_words)
        time.sleep(generator.uniform(0, 0.004))
        assert process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        check_everything_readable(store, words + acknowledged(pipe[0]))
        for trial in store.trials():  # what was finished once is never written again
            content = (trial.folder / "trial.json").read_bytes()
            assert finished.setdefault(trial.trial, content) == content
    assert 0 < len(finished) < NUM_TRIALS, "the kills must have fallen into the work"
    process = start(store.root, pipe[1], pause=0)
    process.join()
    trials = list(store.trials())
    assert len(trials) == NUM_TRIALS
    for stored in trials:
        assert store.steps(stored).to_dict("records") == expected_rows(stored.trial)
        # a kill between the appearance of trial.json and the clean-up leaves the finished trial's own files behind
        left_over = set(os.listdir(stored.folder)) - {"config.json", "steps.parquet", "trial.json"}
        assert left_over <= {"lock", "steps.jsonl"}


def test_many_writers_share_the_work_without_doing_any_twice(store: Store, pipe: tuple[int, int]) -> None:
    crowd = [start(store.root, pipe[1], pause=0.001) for _ in range(4)]
    for process in crowd:
        process.join()
    assert [process.exitcode for process in crowd] == [0] * 4
    done = [trial for trial, word in acknowledged(pipe[0]) if word == "finished"]
    assert len(done) == len(set(done)) == NUM_TRIALS
    assert len(list(store.trials())) == NUM_TRIALS


def test_file_is_whole_before_it_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trial.json"
    path.write_bytes(b"old")
    replace, seen = os.replace, []

    def watched(source: Path, target: Path) -> None:
        seen.append((source.read_bytes(), target.read_bytes()))
        replace(source, target)

    monkeypatch.setattr("accumulation_harness.results.record.os.replace", watched)
    record.write_atomically(path, b"new")
    assert seen == [(b"new", b"old")]
    assert path.read_bytes() == b"new"


def test_two_processes_may_write_the_same_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two sweeps of the same trials do that start together, be it in two containers under the same process number."""
    path, replace = tmp_path / "note.json", os.replace

    def interrupted(source: Path, target: Path) -> None:
        monkeypatch.setattr("accumulation_harness.results.record.os.replace", replace)
        record.write_atomically(path, b"theirs")
        replace(source, target)

    monkeypatch.setattr("accumulation_harness.results.record.os.replace", interrupted)
    record.write_atomically(path, b"ours")
    assert path.read_bytes() == b"ours" and [entry.name for entry in tmp_path.iterdir()] == ["note.json"]


def test_lock_file_removed_by_its_last_holder_is_no_lock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our open and our flock the holder finishes and a third process takes the trial up."""
    holder = store.open_trial("e", "t", {})
    flock, others = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr("accumulation_harness.results.store.fcntl.flock", flock)
        holder.close()
        others.append(os.open(holder.folder / "lock", os.O_RDWR | os.O_CREAT))
        flock(others[0], fcntl.LOCK_EX)
        flock(descriptor, operation)

    monkeypatch.setattr("accumulation_harness.results.store.fcntl.flock", late)
    assert locks.take(holder.folder / "lock") is None
    os.close(others[0])


def test_ten_thousand_trials_are_listed_in_seconds(store: Store) -> None:
    arms = [{"arm": f"arm{n}", **{f"column{c}": c / 7 for c in range(20)}, "evidence": {"null": [0.1] * 10}} for n in range(6)]
    folder = run_trial(store, "t0")
    (trial,) = store.trials()
    for number in range(1000):
        target = folder.with_name(f"t{number}")
        target.mkdir(exist_ok=True)
        body = {**trial.record, "trial": target.name, "arms": arms}
        body.pop("sha256")
        content = (",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in body.items()) + "}\n").encode()
        (target / "trial.json").write_bytes(record._first_line(content) + b"\n" + content)
    fastest = math.inf
    for _ in range(3):
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert sum(isinstance(trial, StoredTrial) for trial in store.trials()) == 1000
        fastest = min(fastest, time.perf_counter() - begin)
    assert fastest < 0.5  # a tenth of the number; 0.05 s when the machine is idle
