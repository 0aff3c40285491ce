"""Small stores to read from: `tests/stored_trials.py`."""

from tests.stored_trials import grid, make_trial, results

__all__ = ["grid", "make_trial", "results"]
