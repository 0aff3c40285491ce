"""Any part of the trials, arms, measurements and files of a store in which every experiment ran: there is always a report."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

from accumulation_harness.results.record import write_record
from tests.chaos.reports import reported
from tests.chaos.whole_store import trials

FILES = ("trial.json", "steps.parquet", "config.json")
MISSING = "could not be made from the results that are there"


def attack(rng: Random, folder: Path) -> str:
    """Keep a part of the store, and make its report."""
    copy_part(rng, folder / "results")
    said = reported(folder / "results", folder / "reports")
    if said.code == 1:
        return "nothing finished, told in a line"
    return "a report that says what is missing" if MISSING in said.page else "a report"


def copy_part(rng: Random, results: Path) -> None:
    """Some experiments, of each some trials, of some of these not all files, arms and measurements."""
    experiments = sorted({trial.experiment for trial in trials()})
    chosen = rng.sample(experiments, rng.choice((1, 1, 2, 3, len(experiments))))
    kept, gaps, cuts = rng.choice((0.3, 0.6, 1.0)), rng.choice((0.0, 0.0, 0.2)), rng.choice((0.0, 0.0, 0.5))
    for trial in trials():
        if trial.experiment not in chosen or rng.random() > kept:
            continue
        target = results / trial.experiment / trial.trial
        target.mkdir(parents=True)
        for name in FILES:
            if rng.random() >= gaps:
                os.link(trial.folder / name, target / name)
        if rng.random() < cuts and (target / "trial.json").exists():
            (target / "trial.json").unlink()
            write_record(target, cut(rng, trial.record))


def cut(rng: Random, record: dict[str, Any]) -> dict[str, Any]:
    """The record of a trial without some of its arms and measurements."""
    share = rng.random()
    some = {name: [one for one in record[name] if rng.random() < share] for name in ("arms", "measurements") if name in record}
    return {name: value for name, value in record.items() if name != "sha256"} | some
