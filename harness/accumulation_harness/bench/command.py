"""`accumulation-harness bench.command REPORT CORES COMMAND...`: run a command, adopt its orphans, write what all of it cost."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # prctl(2), Linux: orphans of our descendants become our children


def main(arguments: Sequence[str]) -> int:
    """Run the command, wait for it and for what outlives it, and write code, seconds and peak bytes to the report."""
    report, cores, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        if int(cores) and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
        try:
            os.execvp(command[0], command)
        finally:
            os._exit(127)
    _, status, usage = os.wait4(child, 0)
    wall = time.perf_counter() - started
    cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss
    while True:  # the forkserver and the W&B service end a moment after their user
        try:
            _, _, usage = os.wait4(-1, 0)
        except ChildProcessError:
            break
        cpu, peak = cpu + usage.ru_utime + usage.ru_stime, max(peak, usage.ru_maxrss)
    found = {"code": os.waitstatus_to_exitcode(status), "wall": wall, "cpu": cpu, "peak": peak * 1024}
    Path(report).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
