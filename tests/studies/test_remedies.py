import pytest

from tests.studies.by_hand import Loop
from tests.trials import measured, trial

CONFIG = trial(
    "study=remedies norm=batch precision=float64 effective_batch=24 accumulation_steps=[6] steps=5 optimizer.lr=0.05 seed=4"
)
SAME = 1e-9  # relative, after five float64 steps
BOTH = ("held_out_loss", "recalibrated_held_out_loss")


@pytest.fixture(scope="module")
def arms():
    return {row["arm"]: row for row in measured(CONFIG)}


@pytest.mark.parametrize("arm, num", [("full", 1), ("accumulated", 6)])
def test_both_evaluations_are_those_of_the_loop_everyone_writes(arms, arm, num):
    loop = Loop(CONFIG)
    loop.train(num)
    kept, _ = loop.held_out()
    loop.recalibrate()
    again, _ = loop.held_out()
    assert [arms[arm][name] for name in BOTH] == pytest.approx([kept, again], rel=SAME)
    assert abs(kept / again - 1) > 0.01, "after five steps the running statistics still lag"
