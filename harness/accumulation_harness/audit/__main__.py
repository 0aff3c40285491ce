"""The command line: `accumulation-harness audit FILE.py:FUNCTION --batch-size 32 --accumulation-steps 4,16`.

Exit code 0: equivalent; 1: different; 2: could not be run or judged. With `--launched` this is one rank of several, and rank 0
judges.

The audited code runs in a process of its own (`command.py`), and nothing that ends it there says how this one ends: only what the
judging code hands over does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from accumulation_harness.audit.command import parsed, read_script, refused, subject_of
from accumulation_harness.system.processes import module_command, run_command
from accumulation_harness.system.terminal import BAD_INPUT, one_line

GRACE_SECONDS = 5.0  # for what the audited code does at its end, after everything has been judged
LOOK_SECONDS = 0.2  # how often it is looked whether the process is still there


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit, print and save; the exit code. `arguments` are those of the command line unless given.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        0 for `equivalent`, 1 for `different`, 2 for what could not be judged.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parsed(given)  # refused at once
    if options.explain:
        read_script(options)
        from accumulation_harness.audit.explain import explained

        try:
            print(explained(options), end="")
        except (ValueError, SyntaxError) as refusal:  # a file that is not there, or is no Python
            print(one_line(refusal), file=sys.stderr)
            return BAD_INPUT
        return 0
    try:
        code, said, error = answer(given)
    except Ended as end:
        code, said, error = refused(options, subject_of(options), f"audit could not run: {end}")
    print(said, end="", flush=True)
    print(error, end="", file=sys.stderr)
    return code


class Ended(Exception):
    """The process of the audited code has ended without an answer."""


def answer(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run an audit in a process of its own. It leaves no process of its group behind.

    Args:
        arguments: The command line of the audit.

    Returns:
        What the process of the audited code hands over: exit code, stdout, stderr.

    Raises:
        Ended: It handed over nothing.
    """
    link, theirs = Pipe()
    command = [*module_command("accumulation_harness.audit.command"), str(theirs.fileno()), *arguments]
    apart: Any = {"pass_fds": [theirs.fileno()], "stdin": subprocess.DEVNULL, "start_new_session": True}
    with link, subprocess.Popen(command, **apart) as process:
        theirs.close()
        try:
            while not link.poll(LOOK_SECONDS) and process.poll() is None:
                pass
            received = _received(link)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if received is not None:
        return received
    how = f"killed by {signal.Signals(-process.returncode).name}" if process.returncode < 0 else f"exit code {process.returncode}"
    raise Ended(f"the audited code ended its process ({how}) before anything was judged")


def _received(link: Connection) -> tuple[int, str, str] | None:
    """The answer, or None of a process that is gone without one."""
    if not link.poll(0):
        return None
    try:
        code, said, error = json.loads(link.recv_bytes())
    except (EOFError, OSError):
        return None
    return code, said, error


if __name__ == "__main__":
    sys.exit(run_command(main))
