"""Small stores to read from: `tests/stored_trials.py`, and real trials with their offline W&B runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.stored_trials import grid, make_trial, results

__all__ = ["grid", "make_trial", "mirrored", "results"]


@pytest.fixture(scope="session")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two real trials, of 5 judged arms each (two of them with a planted error)."""
    results = tmp_path_factory.mktemp("mirrored")
    tiny = ["steps=3", "algebra_steps=2", "probe_every=2", "accumulation_steps=[2,8]", "workers=2", f"results={results}"]
    command = [sys.executable, "-m", "accumulation_harness", "run", "-m", "norm=none,batch", "faults=[scale@1e-3]", *tiny]
    subprocess.run(command, capture_output=True, check=True, cwd=Path(__file__).parents[2])
    return results
