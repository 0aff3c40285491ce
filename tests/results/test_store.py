"""The store keeps numbers bit for bit, tells damaged files from good ones, and survives being killed at any moment."""

import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from accumulation_harness.config import ConfigError
from accumulation_harness.results.record import read_trial, write_record
from accumulation_harness.results.store import State, Store, StoreError, StoreWarning, TrialTaken
from accumulation_harness.system import files
from accumulation_harness.system.files import keep_others_out
from tests.commands import python

DOUBLES = st.floats(allow_subnormal=True, allow_nan=True, allow_infinity=True)
SUMMARY = {"arms": [{"arm": "accumulated", "scale": 1.0}], "environment": {"torch": "2.13.0"}, "seconds": {}}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results")


def run_trial(store, trial="t", num_rows=3):
    """A finished trial; returns its folder."""
    with store.open_trial("e", trial, {"seed": 0}) as writer:
        for step in range(num_rows):
            writer.add({"step": step, "loss": step / 7})
        writer.finish(SUMMARY)
    return store.folder("e", trial)


def states(store):
    return {status.trial: status.state for status in store.status()}


def bits(value):
    """The bytes of a double; one value for every NaN."""
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


SPECIAL = [-0.0, 0.0, 5e-324, -5e-324, 2.2250738585072014e-308, math.inf, -math.inf, math.nan, 1.7976931348623157e308, 0.1]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(DOUBLES, min_size=1, max_size=30), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30))
@example(SPECIAL, [0])
def test_numbers_survive_bit_for_bit(tmp_path, doubles, integers):
    store = Store(tmp_path / f"{time.monotonic_ns()}")
    with store.open_trial("e", "t", {}) as writer:
        writer.add(*({"value": value, "text": f"é{value}"} for value in doubles))
        writer.finish({**SUMMARY, "arms": [{"values": doubles, "evidence": {"whole": integers}}]})
    trial = read_trial(store.folder("e", "t"), evidence=True)
    steps = store.steps(trial)
    assert [bits(value) for value in steps["value"]] == [bits(value) for value in doubles]
    assert steps["text"].tolist() == [f"é{value}" for value in doubles]
    [arm] = trial.arms
    assert [bits(value) for value in arm["values"]] == [bits(value) for value in doubles]
    assert arm["evidence"]["whole"] == integers


def test_columns_may_come_late(store):
    with store.open_trial("e", "t", {}) as writer:
        writer.add({"a": 1}, {"b": 0.5, "a": 2}, {"c": True, "a": 3})
        writer.finish(SUMMARY)
    steps = store.steps(next(store.trials()))
    assert list(steps) == ["a", "b", "c"] and steps["a"].tolist() == [1, 2, 3] and steps["b"].tolist()[1] == 0.5


def test_finished_trial_is_read_back_whole_and_not_taken_again(store):
    arms = [{"arm": "accumulated", "algebra_error": 3e-16, "scale": math.nan, "evidence": {"null": [1e-7, math.inf]}}]
    with store.open_trial("e", "t", {"seed": 0, "steps": [2, 4]}) as writer:
        writer.add({"step": 1, "loss": 0.1})
        writer.finish({**SUMMARY, "arms": arms, "extra": 1})
    (trial,) = store.trials("e")
    assert repr(read_trial(trial.folder, evidence=True).arms) == repr(arms)  # repr: NaN is not equal to itself
    assert "evidence" not in trial.arms[0], "the longest part is read by those who ask for it"
    assert (trial.experiment, trial.trial, trial.config, trial.record["extra"]) == ("e", "t", {"seed": 0, "steps": [2, 4]}, 1)
    assert store.steps(trial).to_dict("records") == [{"step": 1, "loss": 0.1}]
    assert json.loads((trial.folder / "trial.json").read_text())["steps"] == 1  # plain JSON for everybody else
    before = {path.name: path.read_bytes() for path in trial.folder.iterdir()}
    assert sorted(before) == ["steps.parquet", "trial.json"]
    with pytest.raises(TrialTaken, match="is finished"):
        store.open_trial("e", "t", {})
    assert {path.name: path.read_bytes() for path in trial.folder.iterdir()} == before
    assert not store.mark_failed("e", "t", "too late") and states(store) == {"t": State.finished}


def test_running_trial_is_not_taken_by_another(store):
    with store.open_trial("e", "t", {}):
        assert states(store) == {"t": State.running}
        with pytest.raises(TrialTaken, match="is running"):
            Store(store.root).open_trial("e", "t", {})
        assert not store.mark_failed("e", "t", "somebody else's opinion")
    assert states(store) == {"t": State.unfinished}


def test_exception_is_kept_and_the_next_attempt_starts_from_nothing(store):
    with pytest.raises(ZeroDivisionError), store.open_trial("e", "t", {}) as writer:
        writer.add({"a": 1})
        raise ZeroDivisionError("the reason")
    (status,) = store.status()
    assert (status.state, status.detail) == (State.failed, "ZeroDivisionError: the reason")
    assert "test_store.py" in json.loads((writer.folder / "failed.json").read_text())["traceback"]
    (writer.folder / "wandb").mkdir()
    (writer.folder / f"trial.json.123{files.PARTIAL}").touch()
    with pytest.raises(KeyboardInterrupt), store.open_trial("e", "t", {}):
        raise KeyboardInterrupt
    assert states(store) == {"t": State.unfinished}, "an interrupt is no failure"
    assert not list(writer.folder.iterdir())
    assert store.mark_failed("e", "t", "killed by signal 9") and states(store) == {"t": State.failed}
    run_trial(store)
    assert sorted(os.listdir(writer.folder)) == ["steps.parquet", "trial.json"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "t.damaged-1", "nul\0", "\udcff", "é" * 101])
def test_names_are_plain(store, name):
    assert store.folder("e", "é" * 100), "200 bytes"
    with pytest.raises(ValueError, match="expected the name of a folder"):
        store.folder("e", name)


# Damage


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def a_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def of_another(path):
    other = read_trial(path.parent).record | {"trial": "other"}
    write_record(path.parent, other)


DAMAGES = {
    **{f"bit {n}": ("trial.json", lambda path, n=n: flip(path, n)) for n in (0, 79, 200)},
    **{f"{text!r:.9}": ("trial.json", lambda path, text=text: path.write_text(text)) for text in ("", "{}")},
    "of another trial": ("trial.json", of_another),
    "a pipe": ("trial.json", a_pipe),
    "a device": ("trial.json", a_device),
    "a bit of the steps": ("steps.parquet", lambda path: flip(path, 30)),
    "no steps": ("steps.parquet", Path.unlink),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_seen_named_kept_and_run_again(store, damage):
    name, act = DAMAGES[damage]
    folder = run_trial(store)
    good = run_trial(store, "good")
    act(folder / name)
    left = {path.name for path in folder.iterdir()}
    [status] = [status for status in store.status() if status.trial == "t"]
    assert status.state == State.damaged and str(folder / name) in status.detail
    assert not store.finished("e", "t")
    if name == "trial.json":
        with pytest.warns(StoreWarning, match=r"e/t/trial\.json"):
            assert [trial.folder for trial in store.trials()] == [good]
    else:
        with pytest.raises(StoreError, match=r"e/t/steps\.parquet"):
            store.steps(read_trial(folder))
    with pytest.warns(StoreWarning, match=r"e/t renamed to t\.damaged-1: .*"):
        run_trial(store)
    assert {path.name for path in folder.with_name("t.damaged-1").iterdir()} == left
    assert states(store) == {"t": State.finished, "good": State.finished}


@pytest.mark.parametrize("linked", ["e", "e/t", ".locks", ".locks/e"])
def test_nothing_is_written_through_a_link(store, tmp_path, linked):
    (tmp_path / "outside" / "wandb").mkdir(parents=True)
    link = store.root / linked
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="link"):
        run_trial(store)
    assert [path.name for path in (tmp_path / "outside").rglob("*")] == ["wandb"]
    link.unlink()
    run_trial(store)


def test_what_is_beside_trials_is_left_alone(store):
    run_trial(store)
    (store.root / "README").write_text("x")
    (store.root / "e" / "README").write_text("x")
    (store.root / "other" / "folder").mkdir(parents=True)
    assert states(store) == {"t": State.finished} and len(list(store.trials())) == 1
    assert list(Store(store.root / "nowhere").status()) == []


# Disks


def test_root_that_is_no_folder_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "results"):
        for attempt in (Store(root).check_writable, lambda root=root: Store(root).open_trial("e", "t", {})):
            with pytest.raises(ConfigError, match=r"results=.*a folder that can be written"):
                attempt()


READER = """
import filelock  # what is imported later cannot be read by nobody
import os, sys
from accumulation_harness.config import ConfigError
from accumulation_harness.results.store import Store
if os.getuid() == 0:
    os.setuid(65534)  # root may write anywhere
store = Store(sys.argv[1])
assert {status.trial: str(status.state) for status in store.status()} == {"t": "finished", "now": "running", "left": "unfinished"}
for attempt in (store.check_writable, lambda: store.open_trial("e", "u", {})):
    try:
        attempt()
    except ConfigError as error:
        assert "Permission denied" in str(error), error
    else:
        raise AssertionError("no error")
"""


def test_a_store_of_somebody_else_can_be_read(store, tmp_path):
    run_trial(store)
    store.open_trial("e", "left", {}).close()
    for path in (tmp_path, *tmp_path.parents[:3]):  # pytest's own folders are closed to others; root becomes nobody in the child
        path.chmod(path.stat().st_mode | 0o011)
    with store.open_trial("e", "now", {}):
        python("-c", READER, store.root)


def test_file_is_whole_before_it_is_seen(tmp_path, monkeypatch):
    """Also where another process writes it at the same moment, be it in another container under the same process number."""
    path, replace, seen = tmp_path / "trial.json", os.replace, []

    def watched(source, target):
        seen.append((source.read_bytes(), target.read_bytes()))
        if len(seen) == 1:
            files.write_atomically(path, b"theirs")
        replace(source, target)

    path.write_bytes(b"old")
    monkeypatch.setattr("accumulation_harness.system.files.os.replace", watched)
    files.write_atomically(path, b"ours")
    assert seen == [(b"ours", b"old"), (b"theirs", b"old")]
    assert path.read_bytes() == b"ours" and [entry.name for entry in tmp_path.iterdir()] == ["trial.json"]


def test_what_a_killed_writer_left_is_removed_and_what_another_writes_is_not(tmp_path):
    left, written, others = (tmp_path / f"{name}{files.PARTIAL}" for name in ("[a].json.12", "[a].json.34", "b.json.56"))
    for path, age in ((left, files.LEFT_SECONDS + 60), (written, 0), (others, files.LEFT_SECONDS + 60)):
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    files.write_atomically(tmp_path / "[a].json", b"new")
    assert {*tmp_path.iterdir()} == {tmp_path / "[a].json", written, others}


def test_nobody_else_may_write_what_is_stored(store):
    previous = os.umask(0)
    try:
        keep_others_out()
        run_trial(store)
        modes = [path.stat().st_mode for path in [store.root, *store.root.rglob("*")]]
        os.umask(0o002)
        keep_others_out()
        assert os.umask(0) == 0o002  # a group that shares its files goes on to
    finally:
        os.umask(previous)
    assert len(modes) > 4 and not any(mode & stat.S_IWOTH for mode in modes)


# Many processes, and signals

NUM_TRIALS = 30
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["pandas", "pyarrow.parquet", "accumulation_harness.results.store", "hypothesis", "pytest"])


def expected_rows(trial):
    generator = random.Random(trial)
    return [{"step": step, "loss": generator.uniform(-1, 1)} for step in range(12)]


def work(root):
    """Runs every trial that is still open, and notes in the journal which it has finished."""
    store = Store(root)
    for trial in (f"trial-{number:02}" for number in range(NUM_TRIALS)):
        try:
            writer = store.open_trial("e", trial, {})
        except TrialTaken:
            continue
        with writer:
            for row in expected_rows(trial):
                writer.add(row)
                time.sleep(0.0002)
            writer.finish(SUMMARY)
            with open(Path(root) / "journal", "a") as journal:
                journal.write(f"{trial}\n")


class Killed(RuleBasedStateMachine):
    """Workers come, are signalled, and files are damaged, in any order; nothing is lost, repeated or altered."""

    def __init__(self):
        super().__init__()
        self.store = Store(mkdtemp(prefix="store-"))
        self.workers = []
        self.marks = {}
        self.damaged = 0

    @rule()
    def start(self):
        if len(self.workers) < 3:
            self.workers.append(processes.Process(target=work, args=(str(self.store.root),)))
            self.workers[-1].start()

    @rule(seconds=st.floats(0, 0.05), number=st.sampled_from([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
    def strike(self, seconds, number):
        time.sleep(seconds)
        if self.workers:
            worker = self.workers.pop(0)
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(worker.pid, number)
            worker.join()
            worker.close()

    @rule()
    def look(self):
        """What was finished once is there, and was not written again."""
        found = list(self.store.status())
        stats = {one.trial: (one.folder / "trial.json").stat() for one in found if one.state == State.finished}
        marks = {trial: (stat.st_ino, stat.st_mtime_ns) for trial, stat in stats.items()}
        assert marks.items() >= self.marks.items()
        self.marks = marks
        assert sum(one.state == State.damaged for one in found) <= self.damaged

    @rule(deletes=st.booleans())
    def damage(self, deletes):
        for trial in list(self.marks)[:1]:
            folder = self.store.folder("e", trial)
            shutil.rmtree(folder) if deletes else flip(folder / "trial.json", 100)
            self.damaged += 1
            del self.marks[trial]

    def teardown(self):
        for worker in self.workers:
            worker.join()
        last = processes.Process(target=work, args=(str(self.store.root),))
        last.start()
        last.join()
        assert last.exitcode == 0
        trials = list(self.store.trials())
        assert len(trials) == NUM_TRIALS
        for trial in trials:
            assert self.store.steps(trial).to_dict("records") == expected_rows(trial.trial)
            assert sorted(os.listdir(trial.folder)) == ["steps.parquet", "trial.json"]
        done = (self.store.root / "journal").read_text().splitlines()
        assert len(done) <= NUM_TRIALS + self.damaged, "a finished trial was run again"
        shutil.rmtree(self.store.root)


TestKilled = Killed.TestCase
TestKilled.settings = settings(max_examples=5, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
