"""Processes that tests start, and what is left of them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT}/harness", "OMP_NUM_THREADS": "1"}


def python(*words, code=0, cwd=ROOT, **variables):
    """A run of Python, which ends with that exit code; with any where `code` is None."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=os.environ | ENVIRONMENT | variables, capture_output=True, text=True
    )
    assert code in (None, done.returncode), done.stdout + done.stderr
    return done


def harness(*words, **how):
    """A command of the package."""
    return python("-m", "accumulation_harness", *words, **how)


def eventually(ready, seconds=20.0):
    """Whether it is so, at last."""
    deadline = time.monotonic() + seconds
    while not (found := ready()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def is_alive(process):
    """Whether a process runs; its number."""
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE
