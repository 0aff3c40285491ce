"""Processes that end when they should: on request, or with the process that started them; and commands that leave nothing."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Thread

from accumulation_harness.system import keeper
from accumulation_harness.system.terminal import told

GRACE_SECONDS = 5.0  # to end by themselves
LONGEST_FOLDER = 55  # bytes: the address of a socket may have 107, and multiprocessing's is 49 longer
OF_A_TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FEWEST_DESCRIPTORS = 32  # that a command can work with


def module_command(module: str) -> list[str]:
    """Python that runs one of our modules, whatever the files of the working directory are called (Python 3.10 has no `-P`)."""
    code = "import runpy, sys; sys.path[:] = filter(None, sys.path); runpy.run_module(sys.argv.pop(1), None, '__main__', True)"
    return [sys.executable, "-c", code, module]


class Command:
    """This process as a command that leaves nothing behind: no process, no temporary file, however it ends.

    Temporary files go to a folder of the command's own. A keeper (keeper.py) clears up after it; this process in its turn has a
    thread that starts the keeper anew when it is killed, and wakes it when it is stopped.
    """

    running: Command | None = None

    def __init__(self) -> None:
        self.folder = Path(_base(), f"harness-{secrets.token_hex(4)}")
        self._start_keeper()
        self.folder.mkdir(mode=0o700)  # after the start of the keeper: there is no moment at which nobody would remove it
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        self._ended = False
        self._guard = Thread(target=self._keep_keeper, daemon=True)
        self._guard.start()

    def _start_keeper(self) -> None:
        readable, self._pipe = os.pipe()
        self._keeper = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), str(self.folder)],
            {"KEEPS": str(self.folder)},  # a process without an environment is taken for one in its exec
            file_actions=[
                (os.POSIX_SPAWN_DUP2, readable, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),  # not ours: who reads our output waits for its end
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,  # out of reach of what is sent to our process group
            setsigmask=OF_A_TERMINAL,
        )
        os.close(readable)

    def _keep_keeper(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread, and interrupt its calls
        while True:
            with suppress(ChildProcessError):
                _, status = os.waitpid(self._keeper, os.WUNTRACED)
                if os.WIFSTOPPED(status):
                    os.kill(self._keeper, signal.SIGCONT)
                    continue
            if self._ended:
                return
            with suppress(OSError):  # nothing can be started just now
                os.close(self._pipe)
                self._start_keeper()
            time.sleep(keeper.POLL_SECONDS)

    def end(self) -> None:
        """Have the keeper clear up, and wait for it."""
        self._ended = True
        with suppress(OSError):  # it was killed this moment
            os.write(self._pipe, b"x")
        self._guard.join(keeper.PATIENCE_SECONDS)


def run_command(main: Callable[[], int]) -> int:
    """The exit code of `main`, the whole work of this process; whatever it starts or writes to a temporary folder ends with it.

    Ctrl-C ends it at once and in silence, as SIGTERM does, where `main` does not handle the signals itself.
    """
    return told(lambda: _kept(main))


def _kept(main: Callable[[], int]) -> int:
    """`main` under a keeper."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _check_descriptors()
        Command.running = Command()
    except OSError as error:
        where = error.filename or "TMPDIR"
        print(f"{where}: expected a temporary folder that can be written ({error.strerror})", file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    # The last of these calls: multiprocessing removes its own folder before (at -100). A fork of this process makes none of them.
    Finalize(None, Command.running.end, exitpriority=-1000)
    return main()


def leave(code: int) -> None:
    """End this process now, with all that it has started, wherever it hangs."""
    if Command.running is not None:
        Command.running.end()
    os._exit(code)


def _base() -> str:
    """The system's temporary folder; another one where its name is too long for the addresses of sockets."""
    usual = tempfile.gettempdir()
    short = (folder for folder in (usual, "/tmp", "/var/tmp") if len(os.fsencode(folder)) <= LONGEST_FOLDER)
    return next((folder for folder in short if os.access(folder, os.W_OK | os.X_OK)), usual)


def _check_descriptors() -> None:
    """Raise the soft limit of open files where it is too low; ValueError where that is not allowed."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEWEST_DESCRIPTORS:
        if hard != resource.RLIM_INFINITY and hard < FEWEST_DESCRIPTORS:
            raise ValueError(f"ulimit -n {hard}: expected at least {FEWEST_DESCRIPTORS} open files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEWEST_DESCRIPTORS, hard))


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes that are started inside have SIGINT blocked: Ctrl-C reaches all of a terminal, only the first of ours acts."""
    resource_tracker.ensure_running()  # else it is started with the first process, and that unblocks SIGINT
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def end(links: Sequence[Connection], workers: Sequence[BaseProcess]) -> None:
    """Ask workers to end, by a None through their `links`, and kill those that do not within GRACE_SECONDS."""
    for link in links:
        with suppress(OSError):
            link.send(None)
    for worker in workers:
        worker.join(GRACE_SECONDS)
        if worker.is_alive():
            worker.kill()
            worker.join()
    for link in links:
        link.close()


def die_with_parent(last: Callable[[], object] = lambda: None) -> Thread:
    """Have a thread end this process as soon as its parent is gone, after a call of `last`.

    Without it the children of a killed parent would go on, hold the locks of their trials and leave their files behind.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        last()
        os._exit(1)

    guard = Thread(target=watch, daemon=True)
    guard.start()
    return guard
