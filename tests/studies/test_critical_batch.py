"""Branches of a training: the smallest batch's is the training itself, and the others are not."""

import dataclasses

import torch

from accumulation_harness.experiments.critical_batch import critical_batch
from accumulation_harness.measure.lock_step import Setting
from tests.studies.by_hand import trial

CONFIG = trial(
    "study=critical_batch effective_batch=32 accumulation_steps=[1,2,4] steps=8 workload.model=mlp workload.width=1",
    "data.last_window=drop optimizer.name=adam optimizer.lr=0.01",
)


def test_the_smallest_batch_s_branch_is_the_training_going_on():
    rows = critical_batch.measurements(Setting(CONFIG, torch.device("cpu")), lambda t, own: None)
    found = {(row["point"], row["batch"]): row for row in rows}
    assert len(found) == len(rows) == 4 * 3
    assert [found[point, 8]["samples"] for point in range(4)] == [0, 32, 96, 224]
    assert found[0, 8]["validation_loss"] == found[1, 8]["start_loss"]
    assert found[3, 8]["validation_loss"] == found[3, 8]["trunk_end"]
    for point in range(4):
        assert len({found[point, batch]["start_loss"] for batch in (8, 16, 32)}) == 1
        assert len({found[point, batch]["validation_loss"] for batch in (8, 16, 32)}) == 3


def test_a_seed_that_chooses_a_rate_trains_the_trunk_alone(monkeypatch):
    """To the last bit as beside branches."""
    setting = Setting(dataclasses.replace(CONFIG, seed=100), torch.device("cpu"))
    (alone,) = critical_batch.measurements(setting, lambda t, own: None)
    monkeypatch.setattr(critical_batch, "TUNING_SEEDS", 101)
    branches = critical_batch.measurements(setting, lambda t, own: None)
    assert alone == {"arm": "trunk", "accumulation_steps": 4, "trunk_end": branches[0]["trunk_end"]}
    assert {row["arm"] for row in branches} == {"branch"}
