"""The keeper of a command: a process that outlives it by a moment, and leaves nothing of it behind.

`python keeper.py COMMAND FOLDER`, with a pipe as its input. The keeper waits until the process COMMAND writes to the pipe, or is
gone for whatever reason. Then it kills every process that has FOLDER, or a folder inside, as its TMPDIR, and removes FOLDER. A
process that was stopped (SIGSTOP), or has left its group, its session or its parent, is found all the same.

It runs without site-packages and imports little, so that it is there after 0.02 s. Without /proc only FOLDER is removed.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Iterator

POLL_SECONDS = 0.1  # how soon a command that was killed is noticed
PATIENCE_SECONDS = 5.0  # for processes that do not go when they are killed: they hang in the kernel
EXEC_SECONDS = 1.0  # for processes that are in their exec: for a moment the kernel shows no environment of theirs


def main(command: int, folder: str) -> None:
    """Wait for the end of `command`, then clear up."""
    while os.getppid() == command and not select.select([0], [], [], POLL_SECONDS)[0]:
        pass
    called = time.monotonic()
    more = True
    while more and time.monotonic() < called + PATIENCE_SECONDS:
        in_exec = list(_in_exec())  # before the search: whoever ends its exec in between is found by one of the two
        more = any([_kill(process) for process in inside(folder)])
        more = more or (bool(in_exec) and time.monotonic() < called + EXEC_SECONDS)
        time.sleep(0.01 if more else 0.0)
    import shutil  # only now: the start matters

    shutil.rmtree(folder, ignore_errors=True)


def inside(folder: str) -> Iterator[int]:
    """Processes that were started with `folder`, or a folder inside, as their TMPDIR; this one is none of them."""
    mark = b"TMPDIR=" + os.fsencode(folder)
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{int(name)}/environ", "rb") as file:
                settings = file.read().split(b"\0")
        except (OSError, ValueError):  # gone, another user's, or no process
            continue
        if any(setting == mark or setting.startswith(mark + b"/") for setting in settings):
            yield int(name)


def _in_exec() -> Iterator[int]:
    """Processes that are younger than this one and have a program, but no environment (yet)."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{int(name)}/environ", "rb") as file:
                has_environment = bool(file.read(1))
            if not has_environment and os.readlink(f"/proc/{name}/exe") and _started(name) >= _started("self"):
                yield int(name)
        except (OSError, ValueError):  # gone, another user's, or no process
            continue


def _started(process: str) -> int:
    """Clock ticks from the start of the machine to that of `process`: the 22nd field, counted from behind its name."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def _kill(process: int) -> bool:
    """Whether a process had to be killed. Python's resource tracker goes by itself after the others, and removes semaphores."""
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            is_tracker = b"multiprocessing.resource_tracker" in file.read()
        os.kill(process, signal.SIGCONT if is_tracker else signal.SIGKILL)
    except OSError:  # it has just ended
        return False
    return not is_tracker


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
