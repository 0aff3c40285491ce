import pytest

from accumulation_harness.config import OPTIMIZERS, State
from tests.trials import measured, trial

COPIES = {str(name): [*State].index(one.state) for name, one in OPTIMIZERS.items()}  # none, a buffer, two moments


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("optimizer", COPIES)
def test_bytes_are_the_parameters_times_their_copies(optimizer, precision):
    settings = f"study=model_bytes effective_batch=24 accumulation_steps=[3,24] optimizer.name={optimizer} precision={precision}"
    *rows, cast = measured(trial(settings))
    assert [(row["accumulation_steps"], row["micro_batch"]) for row in rows] == [(1, 24), (3, 8), (24, 1)]
    wide = 8 if precision == "float64" else 4  # autocast keeps float32 weights, gradients and state
    for row in rows:
        own = wide * row["num_parameters"]
        assert (row["parameter_bytes"], row["gradient_bytes"], row["state_bytes"]) == (own, own, COPIES[optimizer] * own)
    assert len({row["num_parameters"] for row in rows}) == 1 and rows[0]["num_parameters"] > 1000
    halves = 2 * cast["num_parameters"]
    assert (cast["kept_in"], cast["parameter_bytes"], cast["gradient_bytes"]) == ("bfloat16", halves, halves)
    assert cast["state_bytes"] == COPIES[optimizer] * halves
