import pytest

from tests.trials import measured, trial

CONFIG = "study=resumption effective_batch=24 accumulation_steps=[4] steps=5 seed=1 schedule.name=cosine"


@pytest.mark.parametrize(("optimizer", "precision"), [("sgd", "float32"), ("adam", "float16")])
def test_gradients_of_the_window_are_all_that_a_checkpoint_lacks(optimizer, precision):
    rows = {row["arm"]: row for row in measured(trial(CONFIG, f"optimizer.name={optimizer} precision={precision}"))}
    assert {name: row["identical"] for name, row in rows.items()} == {
        "at_boundary": True, "in_window": False, "in_window_with_gradients": True, "in_window_replayed": True
    }  # fmt: skip
    assert rows["in_window"]["distance"] > 1e-4
    assert all(rows[name]["distance"] == 0 for name in rows if name != "in_window")
