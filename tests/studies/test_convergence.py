import pytest

from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.measure import studies
from tests.studies.by_hand import Loop
from tests.trials import measured, trial

# 33 steps of 47: an epoch of 1,500 ends in a short window of 43, which 4 micro-batches of 12 cut unevenly.
CONFIG = (
    "study=convergence workload.model=mlp effective_batch=48 accumulation_steps=[4] steps=33 precision=float64 norm=group seed=3 "
    "optimizer.name=momentum optimizer.lr=0.05"
)
SAME = 1e-10  # relative, of losses after 33 float64 steps whose gradients agree to 1e-15


def test_arms_end_where_the_loop_everyone_writes_ends():
    steps = []
    record = studies.run(trial(CONFIG), lambda step, rows: steps.append(rows))
    assert record["arms"] == [] and record["seconds"]["convergence"] > 0
    loop = Loop(trial(CONFIG))
    losses, (held_out, accuracy) = loop.train(), loop.held_out()
    arms = {str(ArmName(row["arm"], row["accumulation_steps"])): row for row in record["measurements"]}
    assert set(arms) == {"full-1", "accumulated-4", "permuted-1"}
    for name, arm in arms.items():
        own = [row["loss"] for rows in steps for row in rows if str(ArmName(row["arm"], row["accumulation_steps"])) == name]
        assert own == pytest.approx(losses, rel=SAME)
        assert arm["held_out_loss"] == pytest.approx(held_out, rel=SAME) and arm["held_out_accuracy"] == accuracy
        assert arm["samples"] == steps[-1][0]["samples"] == 1500 + 48 and "recalibrated_held_out_loss" not in arm
    assert [row["samples"] for row in steps[31]] == [1500] * 3, "the 32nd window is the epoch's remainder of 12"


@pytest.mark.parametrize("model, of_a_sample", [("conv", 16), ("mlp", 1)])
def test_batch_norm_and_faults_end_elsewhere(model, of_a_sample):
    """Values per channel are those of the layer that has the fewest: 4 x 4 pixels; one of a sample for each unit."""
    changes = f"norm=batch workload.model={model} steps=3 faults=[loss_not_divided]"
    arms = {row["arm"]: row for row in measured(trial(CONFIG, changes))}
    full, own, wrong = (arms[name]["held_out_loss"] for name in ("full", "accumulated", "loss_not_divided"))
    assert arms["permuted"]["held_out_loss"] == pytest.approx(full, rel=SAME)
    assert own != pytest.approx(full, rel=1e-4) and wrong != pytest.approx(own, rel=1e-4)
    assert all(arm["values_per_channel"] == of_a_sample * arm["micro_batch"] for arm in arms.values())
    assert arms["accumulated"]["micro_batch"] == 12
