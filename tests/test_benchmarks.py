"""The benchmarks run, and give a ratio a row; what they say on a busy machine is not looked at."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_row_is_a_ratio():
    command = [sys.executable, ROOT / "benchmarks/run.py", "startup", "report", "--rounds", "1", "--trials", "12"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/harness"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = [line.split("|")[2:4] for line in done.stdout.splitlines() if line.endswith("| 1 |")]
    assert len(rows) == 4 and all(float(cell.split()[0]) > 0 for row in rows for cell in row)
