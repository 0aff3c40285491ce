"""Weights in the state against powers of beta."""

import pytest

from accumulation_harness.experiments.momentum import optimizer_memory
from tests.trials import trial

BETAS = {"momentum_buffer": 0.8, "exp_avg": 0.7, "exp_avg_sq": 0.9}


def rows_of(toy_setting, name):
    """3 windows of 8 (2 micro-batches of 4 samples with 10 loss terms or so each): 6 gradients of 18 numbers."""
    betas = "optimizer.momentum=0.8 optimizer.beta1=0.7 optimizer.beta2=0.9"
    config = trial(
        f"optimizer.name={name} optimizer.lr=5.0 {betas} precision=float64 effective_batch=8 accumulation_steps=[2] steps=3"
    )
    return list(optimizer_memory.measurements(toy_setting(config), lambda step, rows: None))


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam"])
def test_weights_are_powers_of_beta(toy_setting, name):
    rows = rows_of(toy_setting, name)
    exponents = {  # by arm: of the window's beta, for each micro-batch from the oldest to the newest
        "accumulated": [2, 2, 1, 1, 0, 0],
        "small_steps": [5, 4, 3, 2, 1, 0],
        "small_steps_memory": [2.5, 2, 1.5, 1, 0.5, 0],
    }
    entries = {row["entry"] for row in rows}
    assert entries == ({"exp_avg", "exp_avg_sq"} if name == "adam" else {"momentum_buffer"})
    for arm, powers in exponents.items():
        for entry in entries:
            own = [row for row in rows if (row["arm"], row["entry"]) == (arm, entry)]
            assert [row["weight"] for row in own] == pytest.approx([BETAS[entry] ** power for power in powers], rel=1e-9)
            assert [row["age"] for row in own] == [20, 16, 12, 8, 4, 0]
            assert max(row["residual"] for row in own) < 1e-12


def test_a_stateless_optimizer_remembers_nothing(toy_setting):
    assert rows_of(toy_setting, "sgd") == []
