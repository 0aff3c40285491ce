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
        found = list(_environments())  # one look: a process in its exec, without an environment yet, is seen as that
        more = any([_kill(process) for process, settings in found if _is_inside(settings, folder)])
        more = more or (time.monotonic() < called + EXEC_SECONDS and any(_is_in_exec(*one) for one in found))
        time.sleep(0.01 if more else 0.0)
    import shutil  # only now: the start matters

    shutil.rmtree(folder, ignore_errors=True)


def _environments() -> Iterator[tuple[int, bytes]]:
    """Every process that is ours to read, with its environment: `NAME=value`, each with a zero byte behind it."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{int(name)}/environ", "rb") as file:
                settings = file.read()
        except (OSError, ValueError):  # gone, another user's, or no process
            continue
        yield int(name), settings


def _is_inside(settings: bytes, folder: str) -> bool:
    """Whether a process with this environment was started with `folder`, or a folder inside, as its TMPDIR; the keeper is not."""
    mark = b"TMPDIR=" + os.fsencode(folder)
    return any(setting == mark or setting.startswith(mark + b"/") for setting in settings.split(b"\0"))


def _is_in_exec(process: int, settings: bytes) -> bool:
    """Whether it is younger than this process and has a program, but no environment (yet)."""
    try:
        return not settings and bool(os.readlink(f"/proc/{process}/exe")) and _started(str(process)) >= _started("self")
    except OSError:  # it has just ended, or is the kernel's
        return False


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
