"""Training that goes on from a trained model, beside the loop everyone writes."""

import pytest

from tests.studies.by_hand import Loop
from tests.trials import measured, trial

CONFIG = trial(
    "study=fine_tuning norm=batch precision=float64 effective_batch=24 accumulation_steps=[3,6] steps=5 optimizer.lr=0.05 seed=4"
)
SAME = 1e-9  # relative, after ten float64 steps


def test_each_arm_goes_on_as_by_hand_and_frozen_statistics_make_accumulation_the_full_batch():
    losses = {(row["arm"], row["accumulation_steps"]): row["held_out_loss"] for row in measured(CONFIG)}
    assert {*losses} == {(arm, num) for arm in ("accumulated", "frozen_statistics") for num in (3, 6)} | {
        (arm, 1) for arm in ("trained", "full", "frozen_full_batch")
    }
    for (arm, num), loss in losses.items():
        loop = Loop(CONFIG)
        loop.train()
        if arm != "trained":
            loop.train(num, is_frozen="frozen" in arm)
        assert loss == pytest.approx(loop.held_out()[0], rel=SAME)
    for num in CONFIG.accumulation_steps:
        assert losses["frozen_statistics", num] == pytest.approx(losses["frozen_full_batch", 1], rel=SAME)
        assert losses["accumulated", num] != pytest.approx(losses["full", 1], rel=1e-4)
    assert len({losses[arm, 1] for arm in ("trained", "full", "frozen_full_batch")}) == 3
