"""Real processes and real signals; the trials are those of tiny_trials.py."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accumulation_harness.config import Device, HarnessConfig
from accumulation_harness.config.identity import identity
from accumulation_harness.results.store import State, Store
from accumulation_harness.sweep import experiment
from tests.commands import ENVIRONMENT, eventually, is_alive
from tests.slow import few, slow

PROGRAM = Path(__file__).with_name("tiny_trials.py")


class Sweep:
    """A command over seeds 0, 1, … with one kind of trial each, and what it left behind."""

    def __init__(self, folder):
        self.folder = folder
        self.results = folder / "results"
        self.started = []

    def start(self, *kinds, workers=2, preload="", launcher="forkserver", stderr=subprocess.PIPE, seconds=0):
        seeds = ",".join(str(seed) for seed in range(len(kinds)))
        environment = {"TINY_KINDS": ",".join(kinds), "TINY_DIR": str(self.folder), "TINY_PRELOAD": preload}
        environment["PYTHONPATH"] = f"{PROGRAM.parent}:{ENVIRONMENT['PYTHONPATH']}:{self.folder}"
        settings = [f"seed={seeds}", f"workers={workers}", f"results={self.results}", f"hydra/launcher={launcher}"]
        settings += [f"trial_seconds={seconds}"]
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "-m", *settings],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,  # a process group of its own, as a shell gives to a command
            cwd=self.folder,
        )
        self.started.append(process)
        return process

    def run(self, *kinds, workers=2, **more):
        process = self.start(*kinds, workers=workers, **more)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def journal(self):
        """Seed and process of every trial that was started."""
        path = self.folder / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(seed), int(process)) for seed, process in map(str.split, lines)]

    def wait_for_starts(self, number):
        assert eventually(lambda: len(self.journal()) >= number)

    def go(self):
        (self.folder / "go").touch()

    def states(self):
        return {seed_of(status.trial): status.state for status in Store(self.results).status("single")}


def besides_progress(errors):
    return "".join(line for line in errors.splitlines(keepends=True) if not re.match(r"\d+/\d+ ended, ", line))


@pytest.fixture
def sweep(tmp_path):
    made = Sweep(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def seed_of(trial):
    found = re.search(r"-seed(\d+)-", trial)
    assert found
    return int(found[1])


def test_all_trials_run_and_a_second_call_has_nothing_to_do(sweep):
    code, output, errors = sweep.run("ok", "ok", "ok")
    assert (code, besides_progress(errors)) == (0, "")
    assert "3 trials done, 0 finished already, 0 failed." in output
    code, output, _ = sweep.run("ok", "ok", "ok")
    assert code == 0 and output.startswith("Nothing to do: 3 trials finished already.\n") and "The results are in " in output
    assert len(sweep.journal()) == 3
    assert sorted(os.listdir(sweep.folder)) == ["journal", "results"], "Hydra made folders of its own"


def test_a_trial_that_hangs_is_ended_and_told_where(sweep):
    code, _, errors = sweep.run("hang", "ok", "stubborn", seconds=3)
    assert code == 1
    assert len({*re.findall("^failed: .*: no end after trial_seconds=3$", errors, re.M)}) == 2
    assert "half of trial_seconds=3 has passed" in errors, errors
    assert 'tiny_trials.py", line' in errors, errors
    assert sweep.states() == {0: State.failed, 1: State.finished, 2: State.failed}


FAILURES = {
    "kill": ("killed by SIGKILL (by hand, or out of memory)", "output of trial 1"),
    "raise": ("RuntimeError: no such luck", "no such luck"),
    "exit": ("called sys.exit(0)", "sys.exit(0)"),
    "leave": ("ended with exit code 7 before it was finished", "output of trial 1"),
    "shout": ("RuntimeError: yyyy", "yyyy"),
    "thread": ("RuntimeError: no such luck", "no such luck"),
}


@pytest.mark.parametrize("kind", few(["kill"], FAILURES))
def test_a_failure_is_reported_and_the_others_go_on(sweep, kind):
    summary, detail = FAILURES[kind]
    code, output, errors = sweep.run("ok", kind, "ok")
    assert code == 1
    assert "2 trials done, 0 finished already, 1 failed." in output
    assert re.search(rf"^failed: digits-\S+-seed1-\w+: {re.escape(summary)}", errors, re.MULTILINE)
    assert len(errors) < 5000, "a long traceback is for failed.json"
    assert sweep.states() == {0: State.finished, 1: State.failed, 2: State.finished}
    (record,) = sweep.results.rglob("failed.json")
    assert str(record) in errors
    assert detail in json.loads(record.read_text())["traceback"]
    assert sweep.run("ok", "ok", "ok")[0] == 0 and set(sweep.states().values()) == {State.finished}
    assert [seed for seed, _ in sweep.journal()].count(0) == 1, "what has finished does not run again"


@pytest.mark.slow
def test_a_failure_under_another_launcher_is_seen_too(sweep):
    process = sweep.start("raise", "ok", launcher="basic")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "no such luck" in errors and "Traceback (most recent call last):\n  File" not in errors
    assert sweep.states() == {0: State.failed, 1: State.finished}


@pytest.mark.slow
def test_a_death_after_the_end_is_not_a_failure(sweep):
    code, output, errors = sweep.run("die_late")
    assert (code, sweep.states()) == (0, {0: State.finished})
    assert "1 trial done" in output and "finished, but then: killed by SIGKILL" in errors


def test_trials_on_a_gpu_are_others_than_on_a_cpu(monkeypatch, tmp_path):
    names = {}
    for has_cuda in (False, True):
        monkeypatch.setattr(experiment, "_has_cuda", lambda has_cuda=has_cuda: has_cuda)
        for device in Device:
            [cell] = experiment._distinct([HarnessConfig(device=device, results=str(tmp_path))])
            names[has_cuda, device] = cell.trial
            assert identity(experiment.resolved(cell.config).trial) == cell.trial, "the child stores it under the same name"
    assert names[False, Device.auto] == names[False, Device.cpu] == names[True, Device.cpu]
    assert names[True, Device.auto] == names[True, Device.cuda] == names[False, Device.cuda] != names[False, Device.auto]


def test_one_worker_runs_one_trial_at_a_time(sweep):
    process = sweep.start("wait", "ok", workers=1)
    sweep.wait_for_starts(1)
    time.sleep(0.5)
    assert len(sweep.journal()) == 1
    sweep.go()
    assert process.wait(30) == 0


@pytest.mark.parametrize(("number", "whole_group", "code"), [(signal.SIGINT, True, 130), slow(signal.SIGTERM, False, 143)])
def test_a_signal_stops_all_and_the_same_command_resumes(sweep, number, whole_group, code):
    process = sweep.start("ok", "wait", "stubborn", "ok", workers=2)
    sweep.wait_for_starts(3)
    time.sleep(0.2)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert errors.splitlines()[-1] == "Stopped: 1 of 4 trials are done; the same command resumes."
    assert "Traceback" not in errors
    assert not any(is_alive(child) for _, child in sweep.journal())
    sweep.go()
    assert sweep.run("ok", "wait", "ok", "ok")[0] == 0
    assert [seed for seed, _ in sweep.journal()].count(0) == 1


@pytest.mark.slow
def test_ctrl_c_while_the_fork_server_is_still_importing(sweep):
    (sweep.folder / "slow_import.py").write_text(f"import time\nopen('{sweep.folder}/importing', 'w')\ntime.sleep(1)\n")
    process = sweep.start("ok", preload="slow_import")
    assert eventually((sweep.folder / "importing").exists)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in errors and "Stopped" in errors


def test_children_die_with_a_killed_parent_and_the_next_call_resumes(sweep):
    process = sweep.start("wait", "wait")
    sweep.wait_for_starts(2)
    process.kill()
    process.wait()
    assert eventually(lambda: not any(is_alive(child) for _, child in sweep.journal()), seconds=5)
    assert set(sweep.states().values()) == {State.unfinished}
    sweep.go()
    assert sweep.run("wait", "wait")[0] == 0


def test_a_forkserver_that_is_killed_is_started_again_and_so_are_its_trials(sweep):
    process = sweep.start("wait", "ok", "wait", workers=2)
    sweep.wait_for_starts(3)
    child = dict(sweep.journal())[0]
    os.kill(int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    sweep.wait_for_starts(5)
    assert not is_alive(child)
    sweep.go()
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, besides_progress(errors)) == (0, "")
    assert sorted(seed for seed, _ in sweep.journal()) == [0, 0, 1, 2, 2]


def test_two_sweeps_at_once_run_no_trial_twice_and_both_end_when_all_is_done(sweep):
    kinds = ["wait"] + ["ok"] * 7
    processes = [sweep.start(*kinds) for _ in range(2)]
    assert eventually(lambda: sorted({seed for seed, _ in sweep.journal()}) == list(range(8)))
    time.sleep(0.5)
    assert [process.poll() for process in processes] == [None, None], "one left while the other's trial was under way"
    sweep.go()
    assert [process.wait(20) for process in processes] == [0, 0]
    assert sorted(seed for seed, _ in sweep.journal()) == list(range(8))


@pytest.mark.slow
def test_a_trial_of_a_sweep_that_died_is_taken_over(sweep):
    first = sweep.start("wait")
    sweep.wait_for_starts(1)
    second = sweep.start("wait")
    time.sleep(1.0)
    first.kill()
    sweep.wait_for_starts(2)
    sweep.go()
    assert second.wait(20) == 0


def test_results_that_cannot_be_written_stop_before_the_first_trial(sweep):
    sweep.results.write_text("a file")
    code, output, errors = sweep.run("ok")
    assert (code, output) == (2, ""), errors
    assert errors == f"results={sweep.results}: expected a folder that can be written (File exists: {sweep.results})\n"
    assert not sweep.journal()


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(sweep):
    leader, follower = pty.openpty()
    process = sweep.start("ok", "raise", stderr=follower)
    os.close(follower)
    shown = b""
    while True:
        try:
            shown += os.read(leader, 65536)
        except OSError:  # the terminal of a process that has ended
            break
    os.close(leader)
    assert process.wait(20) == 1
    assert "━" in shown.decode() and "2/2" in shown.decode() and "1 failed" in shown.decode()
    _, output, errors = sweep.run("ok", "raise")
    assert errors.splitlines()[0] == "1 of 2 trials are finished already."
    assert re.fullmatch(r"1/2 ended, 1 running, 0 failed, 0:0\d elapsed, time left not known yet", errors.splitlines()[1])
    assert "\x1b" not in errors and "ended" not in output
