import pytest

from tests.trials import measured, trial

EXACT = 1e-12  # relative, float64
HALF = 0.02  # relative, one gradient under float16 autocast
WRONG = ("clip_before_unscale", "scaler_updated_in_window", "step_every_micro_batch", "non_finite_micro_batch")
CONFIG = trial(
    "study=loss_scaling workload.model=mlp workload.width=2 effective_batch=50 accumulation_steps=[4,7] split=ragged",
    f"precision=float16 optimizer.lr=3e-3 faults=[{','.join(WRONG)}]",
)


@pytest.fixture(scope="module")
def rows():
    return measured(CONFIG)


def test_right_arms_skip_once_and_are_exact(rows):
    right = [row for row in rows if row["arm"] in ("full", "accumulated")]
    assert [(row["width"], row["accumulation_steps"]) for row in right] == [
        (w, n) for w in ("float64", "float16") for n in (1, 4, 7)
    ]
    for row in right:
        gate = EXACT if row["width"] == "float64" else HALF
        assert row["error"] <= gate and row["error_after"] <= gate
        assert (row["steps"], row["steps_when_hit"], row["steps_after"]) == (1, 0, 1)
        assert row["scale_factor"] == 0.5 and not row["moved"]
    assert all(row["error"] > EXACT for row in right if row["width"] == "float16"), "float16 was really computed in"


@pytest.mark.parametrize(
    ("arm", "wrong"),
    [
        ("clip_before_unscale", lambda row: row["error"] > 0.9),  # the gradient is clipped 4,096 times too small
        ("scaler_updated_in_window", lambda row: row["error"] > 0.01 and row["scale_factor"] == 1),
        ("step_every_micro_batch", lambda row: row["steps"] == row["accumulation_steps"] and row["moved"]),
        ("non_finite_micro_batch", lambda row: row["steps_when_hit"] == 1 and row["scale_factor"] == 1 and row["moved"]),
    ],
)
def test_wrong_orders_differ(rows, arm, wrong):
    own = [row for row in rows if row["arm"] == arm]
    assert len(own) == 4 and callable(wrong) and all(wrong(row) for row in own)
