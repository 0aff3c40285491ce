"""A small store in which every experiment has trials, made once in a process."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from accumulation_harness.results.record import StoredTrial
from accumulation_harness.results.store import Store
from tests.chaos.campaign import ask, prepared
from tests.stored_trials import store_trial

JUDGED = ("equivalence", "fault_matrix", "sensitivity", "batchnorm", "groupnorm", "precision", "accounting",
          "normalisation_of_loss", "order_of_operations")  # fmt: skip
FAULTS = {"no_division": True, "skip_last_micro_batch": True, "scale@1e-3": True}
# A trial of every study of every experiment that measures something; those that judge arms are written by hand.
MEASURED = """
import sys
from accumulation_harness.sweep import run
from accumulation_harness.sweep import experiment

def few(configs):
    studies = {(one.experiment, one.study): one for one in configs if one.study != "verdicts"}
    return run_many(list(studies.values()))

run_many, experiment.run_many = experiment.run_many, few
sys.argv[1:1] = ["+experiment=all", "hydra.sweeper.size=quick"]
sys.exit(run.main())
"""
SHORT = ("steps=16", "algebra_steps=10", "permutations=30", "tracking=disabled", "workers=2")


@prepared
def whole_store() -> Path:
    """The store; to be read only."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-store-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    results = folder / "results"
    ask([sys.executable, "-c", MEASURED, f"results={results}", *SHORT], folder=folder, seconds=900, codes=(0,))
    for name in JUDGED:
        for norm in ("none", "batch"):
            for seed in range(2):
                faults = FAULTS if name in ("fault_matrix", "sensitivity") else None
                store_trial(results, experiment=name, norm=norm, seed=seed, faults=faults, losses=LOSSES if faults else None)
    return results


LOSSES = {name: [1.0 + step / 10 for step in range(12)] for name in FAULTS}


@prepared
def trials() -> tuple[StoredTrial, ...]:
    """Every trial of the store."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tuple(Store(whole_store()).trials())
