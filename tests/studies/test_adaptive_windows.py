import pytest

from tests.trials import measured, trial


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_changing_n_is_the_full_batch_only_at_constant_b(optimizer):
    config = trial(
        f"study=adaptive_windows workload.model=mlp effective_batch=60 accumulation_steps=[1,2,5,15] steps=8 seed=3 "
        f"optimizer.name={optimizer} optimizer.lr=0.02"
    )
    rows = {row["arm"]: row for row in measured(config)}
    assert {row["samples"] for row in rows.values()} == {480} and rows["constant_batch"]["distinct_n"] > 1
    assert rows["constant_batch"]["distance"] <= 1e-9 and rows["constant_batch"]["gradient_error"] <= 1e-12
    assert rows["constant_divisor"]["gradient_error"] == pytest.approx(14 / 15, abs=1e-9), "N = 1 divided by 15"
    for name in ("varying_batch", "varying_batch_scaled_rate"):
        assert rows[name]["gradient_error"] <= 1e-12, "right gradients of other windows"
        assert rows[name]["distance"] > 1e-3
