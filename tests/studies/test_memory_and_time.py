"""What a window of B samples takes over N: activations follow the micro-batch, gradients do not."""

import pytest

from tests.trials import measured, trial


def test_rows_of_the_study():
    rows = measured(trial("study=memory_and_time accumulation_steps=[4] effective_batch=16 steps=2"))
    assert [row["micro_batch"] for row in rows] == [16, 4]
    assert rows[0]["activation_bytes"] == pytest.approx(4 * rows[1]["activation_bytes"], rel=0.02)
    assert rows[0]["gradient_bytes"] == rows[1]["gradient_bytes"]
