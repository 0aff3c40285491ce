import dataclasses
import itertools

import pytest
import torch

from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.recipes.micro_batch import windows
from accumulation_harness.workloads.contrastive import losses
from tests.small_corpus import config, corpus
from tests.trials import measured, setting_of

__all__ = ["corpus"]


@pytest.fixture(scope="module")
def trial(corpus):
    return config(corpus, "study=retrieval methods=[grad_cache,dual_bank@12,momentum_bank@12] steps=8 probe_every=4")


@pytest.fixture(scope="module")
def rows(trial):
    return {row["arm"]: row for row in measured(trial)}


def by_hand(trial, size):
    """Recall at 1 and reciprocal rank after training on batches of `size`, an optimizer step each."""
    setting = setting_of(trial)
    model, data = setting.initial, setting.workloads[torch.float32]
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.optimizer.lr)
    for ids in itertools.islice(windows(48, 12, trial.seed, trial.data.last_window), trial.steps):
        for part in ids.split(size):
            optimizer.zero_grad()
            losses(model(data.batch(part).inputs), trial.workload.contrast).mean().backward()
            optimizer.step()
    with torch.no_grad():
        out = model.eval()(data.held_out.inputs)
    table = (out.queries @ out.passages.T).tolist()
    place = [1 + sum(other > row[i] for other in row) for i, row in enumerate(table)]
    return sum(p == 1 for p in place) / len(place), sum(1 / p for p in place) / len(place)


@pytest.mark.parametrize(("arm", "size"), [("full", 12), ("grad_cache", 12), ("small", 3)])
def test_recall_is_that_of_a_loop_by_hand(arm, size, trial, rows):
    found = rows[arm]["recall_1"], rows[arm]["reciprocal_rank"]
    assert found == pytest.approx(by_hand(trial, size), abs=1e-4)
    other = by_hand(trial, 3 if size == 12 else 12)
    assert found[1] != pytest.approx(other[1], abs=1e-4), "the size of a batch matters"


@pytest.mark.parametrize("arm", ["full-1", "momentum_bank@12-4"])
def test_a_method_alone_is_trained_as_beside_the_others(arm, trial, rows):
    [alone] = measured(dataclasses.replace(trial, trained_arm=arm))
    beside = rows[ArmName.parse(arm).name]
    assert repr({**alone, "seconds": 0}) == repr({**beside, "seconds": 0})  # repr: NaN is NaN


def test_bytes_are_of_what_each_method_keeps(rows):
    plain, full, cached = (rows[arm] for arm in ("accumulated", "full", "grad_cache"))
    assert plain["activation_bytes"] < 0.4 * full["activation_bytes"] and plain["held_bytes"] == full["held_bytes"] == 0
    assert cached["held_bytes"] == 12 * 2 * 64 * 4 + 4, "gradients of 12 pairs of representations, and of the temperature"
    assert rows["dual_bank@12"]["held_bytes"] == 12 * 2 * 64 * 4 + 4, "12 pairs of representations, and a temperature"
    static = full["total_bytes"] - full["activation_bytes"]
    parameters = (static + 8) // 4  # weights, gradients, two moments (not the temperature's)
    assert rows["momentum_bank@12"]["held_bytes"] == rows["dual_bank@12"]["held_bytes"] + parameters
    assert {arm: row["forwards"] for arm, row in rows.items()} == {
        "full": 1.0, "accumulated": 1.0, "permuted": 1.0, "small": 1.0,
        "dual_bank@12": 1.0, "grad_cache": 2.0, "momentum_bank@12": 2.0
    }  # fmt: skip
