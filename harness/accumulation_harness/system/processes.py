"""Processes that end when they should: on request, or with the process that started them; and commands that leave nothing."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from multiprocessing.util import Finalize
from threading import Thread
from types import FrameType
from typing import Any, NoReturn, TypeVar

from accumulation_harness.system.terminal import reporting_errors

GRACE_SECONDS = 5.0  # to end by themselves
OF_A_TERMINAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2), Linux

Value = TypeVar("Value")
_command = 0  # the process that `run_command` has, whose forks are none


def module_command(module: str) -> list[str]:
    """Build the command that runs one of our modules in a Python that dies with this process (in Linux).

    It works whatever the files of the working directory are called, for which Python 3.10 has no `-P`.

    Args:
        module: Its dotted name.

    Returns:
        A command, to which arguments can be appended.
    """
    code = "import runpy, sys; sys.path[:] = filter(None, sys.path); runpy.run_module(sys.argv.pop(1), None, '__main__', True)"
    dies = f"import ctypes; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, 9); " if sys.platform == "linux" else ""
    return [sys.executable, "-c", dies + code, module]


def run_command(main: Callable[[], int]) -> int:
    """Run the whole work of this process; whatever it starts or writes to a temporary folder ends with it.

    Ctrl-C ends it at once and in silence, as SIGTERM does, where `main` does not handle the signals itself. After SIGKILL
    what has called `die_with_parent` is gone, and the temporary folder is left.

    Args:
        main: The work. It returns an exit code.

    Returns:
        The exit code of `main`, or `BAD_INPUT` where its output, a file or memory was refused, which stderr then says.
    """
    return reporting_errors(lambda: _kept(main))


def _kept(main: Callable[[], int]) -> int:
    """`main` with a temporary folder of its own, and its descendants in reach."""
    global _command
    try:
        folder = tempfile.mkdtemp(prefix="harness-")
    except OSError as error:
        print(f"TMPDIR: expected a temporary folder that can be written ({error.strerror})", file=sys.stderr)
        return 2
    _command = os.getpid()
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a descendant leaves behind becomes a child of ours
    for number in OF_A_TERMINAL:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    # The last of these calls: multiprocessing removes its own folder before (at -100). A fork of this process makes none of them.
    Finalize(None, _clear_up, exitpriority=-1000)
    return main()


def is_command() -> bool:
    """Whether this process runs under `run_command`.

    Returns:
        False in a child process, and where the package is used as a library.
    """
    return _command == os.getpid()


def _clear_up() -> None:
    """Kill all that this command has started, and remove its temporary folder."""
    if not is_command():
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, OF_A_TERMINAL)  # one that comes meanwhile would begin anew
    with suppress(ModuleNotFoundError):  # of an install for audits alone, which end the group of what they start
        _kill_descendants()
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


def _kill_descendants() -> None:
    import psutil

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "multiprocessing.resource_tracker" in " ".join(process.cmdline()):
                process.resume()  # it goes by itself, after the others
            else:
                process.kill()
                process.wait(GRACE_SECONDS)


def leave(code: int) -> NoReturn:
    """End this process now, with all that it has started, wherever it hangs.

    Args:
        code: The exit code.
    """
    _clear_up()
    os._exit(code)


def _end(number: int, _frame: FrameType | None) -> None:
    _clear_up()
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_A_TERMINAL)
    os.kill(os.getpid(), number)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in processes that are started inside.

    Ctrl-C reaches every process of a terminal, and only the first of ours is to act.

    Yields:
        Nothing; the mask of the caller is restored afterwards.
    """
    resource_tracker.ensure_running()  # else it is started with the first process, and that unblocks SIGINT
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class NoAnswer(Exception):
    """A process that ended before it had answered; `code` is its exit code."""

    def __init__(self, code: int | None) -> None:
        how = f"ended with exit code {code}" if code is None or code >= 0 else f"was ended by {signal.Signals(-code).name}"
        super().__init__(f"its process {how}")
        self.code = code


def answered(function: Callable[..., Value], *args: Any, method: str = "spawn", seconds: float | None = None) -> Value:
    """Call a function in a process of its own, which has ended when this returns.

    Args:
        function: A function of a module, to be pickled by name.
        args: Its arguments, picklable.
        method: How the process is started; a `forkserver` that is at work has imported what a trial needs.
        seconds: How long it may take; without it, any time.

    Returns:
        What it returned. What it raised is raised here.

    Raises:
        NoAnswer: The process ended before it answered; it has the exit code.
        TimeoutError: It took longer than `seconds`.
    """  # noqa: DOC501 (EOFError is caught here)
    context: Any = get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args))
    try:
        with interrupts_blocked():
            process.start()
        sender.close()
        if not wait([receiver, process.sentinel], seconds):
            raise TimeoutError
        if not receiver.poll():
            raise EOFError
        is_good, found = receiver.recv()
    except EOFError:
        process.join()
        raise NoAnswer(process.exitcode) from None
    finally:
        process.kill()
        process.join()
    if is_good:
        return found  # type: ignore[no-any-return]
    raise found


def _answer(sender: Connection, function: Callable[..., object], args: Sequence[Any]) -> None:
    die_with_parent()
    try:
        answer: tuple[bool, object] = True, function(*args)
    except Exception as error:
        answer = False, error
    sender.send(answer)
    os._exit(0)  # whatever threads are left


def end(links: Sequence[Connection], workers: Sequence[BaseProcess]) -> None:
    """Ask workers to end, by a None through their links, and kill those that do not within `GRACE_SECONDS`.

    Args:
        links: Our end of each worker's connection; closed afterwards.
        workers: The processes; all have ended when this returns.
    """
    for link in links:
        with suppress(OSError):
            link.send(None)
    for worker in workers:
        worker.join(GRACE_SECONDS)
        worker.kill()
        worker.join()
    for link in links:
        link.close()


def die_with_parent() -> None:
    """Have this process end as soon as its parent is gone, in Linux also while it is stopped.

    Without it the children of a killed parent would go on, and hold the locks of their trials.
    """
    parent = parent_process()
    assert parent is not None
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def prctl(option: int, value: int) -> None:
    """Call `prctl` of the kernel, in Linux; elsewhere do nothing.

    Args:
        option: Its first argument, `PR_SET_PDEATHSIG` say.
        value: Its second argument.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
