import dataclasses

import pytest

from accumulation_harness.config import OptimizerConfig, OptimizerName, Precision, ScheduleConfig, ScheduleName, TrialConfig
from tests.studies.by_hand import measured

CONFIG = TrialConfig(
    study="resumption", effective_batch=24, accumulation_steps=(4,), steps=5, seed=1,
    schedule=ScheduleConfig(name=ScheduleName.cosine),
)  # fmt: skip


@pytest.mark.parametrize("precision", [Precision.float32, Precision.float16])
@pytest.mark.parametrize("optimizer", [OptimizerName.sgd, OptimizerName.adam])
def test_gradients_of_the_window_are_all_that_a_checkpoint_lacks(optimizer, precision):
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(name=optimizer), precision=precision)
    rows = {row["arm"]: row for row in measured(config)}
    assert {name: row["identical"] for name, row in rows.items()} == {
        "at_boundary": True, "in_window": False, "in_window_with_gradients": True, "in_window_replayed": True
    }  # fmt: skip
    assert rows["in_window"]["distance"] > 1e-4
    assert all(rows[name]["distance"] == 0 for name in rows if name != "in_window")
