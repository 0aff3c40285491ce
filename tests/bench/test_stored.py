"""Trials for the store's measurements: one real record, finished again under other configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accumulation_harness.bench.stored import KINDS, SEEDS, fill, nth_configuration
from accumulation_harness.identity import identity
from accumulation_harness.results.store import Store
from accumulation_harness.validation import validate


def test_every_trial_has_its_own_configuration_and_each_can_be_run() -> None:
    numbers = [*range(3), *range(SEEDS, len(KINDS) * SEEDS, SEEDS), len(KINDS) * SEEDS]
    configs = [nth_configuration(number) for number in numbers]
    assert len({identity(config) for config in configs}) == len(numbers)
    for config in configs:
        validate(config)


def test_records_are_finished_under_their_own_labels(tmp_path: Path) -> None:
    record: dict[str, Any] = {"arms": [{"arm": "accumulated", "seed": -1, "trial": ""}], "environment": {}, "seconds": {}}
    fill(tmp_path, 3, record, [{"step": 0, "arm": "full", "accumulation_steps": 1, "loss": 1.0}])
    arms = [stored.record["arms"][0] for stored in Store(tmp_path).trials()]
    assert sorted(arm["seed"] for arm in arms) == [0, 1, 2] and len({arm["trial"] for arm in arms}) == 3
    assert record["arms"][0]["seed"] == -1, "the record itself is left alone"
