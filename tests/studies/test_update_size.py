import pytest

from accumulation_harness.config import LastWindow
from tests.studies.by_hand import Loop
from tests.trials import measured, trial

CONFIG = "study=update_size effective_batch=120 accumulation_steps=[2,12] steps=2 seed=5 optimizer.lr=0.03"


def first(*changes):
    rows = measured(trial(CONFIG, *changes))
    assert {row["micro_batch"] for row in rows} == {10}
    return {(row["arm"], row["accumulation_steps"]): row["first_update"] for row in rows}


def test_sgd_moves_by_lr_times_the_gradient_of_the_window():
    loop, found = Loop(trial(CONFIG)), first()
    for num in (1, 2, 12):
        norm = 0.03 * float(loop.gradient(next(loop.windows(10 * num, LastWindow.drop))).norm())
        assert found["accumulated", num] == pytest.approx(norm, rel=1e-11)
        assert found["loss_not_divided", num] == pytest.approx(num * norm, rel=1e-11)


def test_adam_and_clipping_hide_the_factor():
    for change, tolerance in (("optimizer.name=adam", 1e-2), ("clip_norm=1e-3", 1e-4)):
        found = first(change)
        assert found["loss_not_divided", 12] == pytest.approx(found["accumulated", 12], rel=tolerance)
