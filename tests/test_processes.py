"""Commands that are killed in every way: nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from accumulation_harness.system import keeper
from accumulation_harness.system.processes import LONGEST_FOLDER, _base
from tests.chaos.processes import alive, check_nothing_is_left, surroundings

# A command with a child that is in no group of its, a temporary folder, and a fork that ends as any process does.
PROGRAM = """
import os, subprocess, sys, tempfile, time
from accumulation_harness.system.processes import run_command
def main():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    print(tempfile.mkdtemp(), flush=True)
    time.sleep(float(sys.argv[1]))
    return 3
if __name__ == "__main__":
    sys.exit(run_command(main))
"""


class Command:
    def __init__(self, folder: Path, seconds: float) -> None:
        (folder / "program.py").write_text(PROGRAM)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "program.py", str(seconds)],
            cwd=folder,
            env=surroundings(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.temporary = Path(self.process.stdout.readline().strip())

    def others(self, role: str) -> list[int]:
        return [one.pid for one in alive(self.folder) if one.role == role and one.pid != self.process.pid]


Start = Callable[[float], Command]


@pytest.fixture(autouse=True)
def as_from_a_terminal() -> Iterator[None]:
    """A suite in the background, or under nohup, hands on to its processes that signals are ignored."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command in a folder with a short name, as its temporary folder has to have."""
    started: list[Command] = []
    with tempfile.TemporaryDirectory() as folder:

        def make(seconds: float) -> Command:
            started.append(Command(Path(folder), seconds))
            return started[-1]

        yield make
        while left := list(alive(Path(folder))):  # more than one look: a process in its exec is not seen
            for one in left:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
            time.sleep(0.05)
        for command in started:
            command.process.communicate()


def test_a_command_that_ends_has_cleared_up_before(start: Start) -> None:
    command = start(0.1)
    _, errors = command.process.communicate(timeout=20)
    assert (command.process.returncode, errors) == (3, "")
    assert not command.temporary.parent.exists()
    assert not list(alive(command.folder))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("to_group", [False, True])
def test_nothing_is_left_of_a_command_that_is_killed(start: Start, number: int, to_group: bool) -> None:
    command = start(60)
    (os.killpg if to_group else os.kill)(command.process.pid, number)
    _, errors = command.process.communicate(timeout=20)
    assert (command.process.returncode, errors) == (-number, "")
    check_nothing_is_left(command.folder)
    assert not command.temporary.parent.exists()


def test_a_process_is_known_from_its_first_moment(tmp_path: Path) -> None:
    """In its exec a process shows no environment: one in ten is met there, and only `_is_in_exec` does not overlook it."""
    for _ in range(100):
        process = subprocess.Popen(["sleep", "60"], env={"TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]})
        try:
            [settings] = [settings for pid, settings in keeper._environments() if pid == process.pid]
            assert keeper._is_in_exec(process.pid, settings) or keeper._is_inside(settings, str(tmp_path))
        finally:
            process.kill()
            process.wait()


def test_a_keeper_is_not_taken_for_a_process_in_its_exec(start: Start) -> None:
    """It would wait for itself, and for those of other commands: a second at the end of every command."""
    [its_keeper] = start(60).others("keeper")
    assert [keeper._is_in_exec(pid, settings) for pid, settings in keeper._environments() if pid == its_keeper] == [False]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_keeper_cannot_be_done_away_with(start: Start, number: int) -> None:
    command = start(60)
    [its_keeper] = command.others("keeper")
    os.kill(its_keeper, number)
    time.sleep(0.5)
    assert command.others("keeper") and command.process.poll() is None
    command.process.kill()
    command.process.wait()
    check_nothing_is_left(command.folder)


def test_what_is_stopped_is_ended_too(start: Start) -> None:
    command = start(60)
    for other in command.others("other"):
        os.kill(other, signal.SIGSTOP)
    os.killpg(command.process.pid, signal.SIGSTOP)
    command.process.kill()
    command.process.wait()
    check_nothing_is_left(command.folder)


def test_ctrl_c_while_python_imports_a_command(tmp_path: Path) -> None:
    """At any import after the first of ours, which `-X importtime` tells when it is done."""
    for module in (
        "accumulation_harness.sweep.status",
        "accumulation_harness.audit",
        "accumulation_harness.analysis.report",
        "accumulation_harness.sweep",
    ):
        arguments = [sys.executable, "-X", "importtime", "-m", module, "--help"]
        process = subprocess.Popen(
            arguments, env=surroundings(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        while next(process.stderr, "harness").rpartition("|")[2].strip() != "harness":
            pass
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=20)[1]
        assert process.returncode == -signal.SIGINT and "Traceback" not in told, module


def test_a_temporary_folder_with_a_long_name_gives_way_to_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for length in (LONGEST_FOLDER - 5, LONGEST_FOLDER - 4):  # /tmp/ before it
        monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * length}")
        monkeypatch.setattr(os, "access", lambda folder, mode: True)
        assert (_base() == "/tmp") == (length == LONGEST_FOLDER - 4)


def test_too_few_descriptors_are_told(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"ulimit -n 12; exec {sys.executable} -m accumulation_harness.sweep.status"],
        env=surroundings(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (2, "ulimit -n 12: expected at least 32 open files\n")
