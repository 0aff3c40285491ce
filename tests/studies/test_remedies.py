import pytest

from accumulation_harness.recipes.remedies import REMEDIES
from tests.studies.by_hand import Loop, measured, trial

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


def test_every_remedy_is_an_arm(arms):
    assert set(arms) == {"full", "accumulated", "permuted", *REMEDIES}
    assert {arms[name]["micro_batch"] for name in REMEDIES} == {4}
    for name, like in (("two_pass_statistics", "full"), ("ghost_full_batch", "accumulated")):
        assert [arms[name][loss] for loss in BOTH] == pytest.approx([arms[like][loss] for loss in BOTH], rel=SAME)
    full, plain = arms["full"], arms["accumulated"]
    for name in ("corrected_momentum", "window_statistics"):
        assert arms[name][BOTH[1]] == pytest.approx(plain[BOTH[1]], rel=SAME)
        assert abs(arms[name][BOTH[0]] / plain[BOTH[0]] - 1) > 0.01
    assert abs(plain[BOTH[0]] / full[BOTH[0]] - 1) > 1e-3
