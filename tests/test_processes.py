"""Commands that end in every way: nothing of them is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import ENVIRONMENT, eventually

# A command with a child that is in no group of its, one that dies with its parent, a temporary folder, and a fork.
PROGRAM = """
import multiprocessing, os, subprocess, sys, tempfile, time
from accumulation_harness.system.processes import die_with_parent, run_command
def wait():
    die_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(60)
def main():
    if not os.fork():
        sys.exit(0)
    detached = "import os, time; os.fork() and os._exit(0); time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", detached, os.getcwd()], start_new_session=True).wait()
    multiprocessing.get_context("spawn").Process(target=wait, daemon=True).start()
    print(tempfile.mkdtemp(), flush=True)
    time.sleep(60 if len(sys.argv) == 1 else 0.5)
    return 3
if __name__ == "__main__":
    sys.exit(run_command(main))
"""


@pytest.fixture(autouse=True)
def as_from_a_terminal():
    """A suite in the background, or under nohup, hands on to its processes that signals are ignored."""
    former = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


class Command:
    def __init__(self, folder, *arguments):
        (folder / "program.py").write_text(PROGRAM)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "program.py", *arguments],
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        said = [self.process.stdout.readline().strip() for _ in range(1 if arguments else 2)]
        self.temporary = next(Path(line) for line in said if not line.isdigit())
        self.child = next((int(line) for line in said if line.isdigit()), None)

    def left(self):
        """Processes that were started in the folder, whoever their parents are."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def start(tmp_path):
    started = []

    def make(*arguments):
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield make
    for command in started:
        for process in command.left():  # a daemon of a foreign program outlives SIGKILL
            process.kill()
        command.process.communicate()


def test_a_command_that_ends_has_cleared_up_before(start):
    command = start("0")
    assert command.process.wait(30) == 3
    assert not command.temporary.parent.exists() and eventually(lambda: not command.left())  # the kernel takes a moment to kill


@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGTERM, False), (signal.SIGHUP, True), (signal.SIGINT, True)])
def test_nothing_is_left_of_a_command_that_is_signalled(start, number, to_group):
    command = start()
    (os.killpg if to_group else os.kill)(command.process.pid, number)
    assert command.process.wait(30) == -number
    assert eventually(lambda: not command.left()) and not command.temporary.parent.exists()


@pytest.mark.parametrize("stopped", [False, True])
def test_what_dies_with_its_parent_does_so_after_sigkill(start, stopped):
    command = start()
    if stopped:
        os.kill(command.child, signal.SIGSTOP)
    command.process.kill()
    command.process.wait()
    assert eventually(lambda: command.child not in [process.pid for process in command.left()])
