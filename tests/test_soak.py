"""A part of the campaign `python -m tests.soak`."""

import pytest

from tests.soak import campaign


@pytest.mark.slow
def test_a_sweep_that_is_killed_and_resumed_is_the_undisturbed_one():
    answer = campaign(trials=12, kills=3, seed=1)
    assert answer is not None, "the campaign cannot start"
    assert not answer[1], answer
