"""The sweep by hand and ours train the same grid."""

from __future__ import annotations

import pytest

from accumulation_harness.bench import script_sweep
from accumulation_harness.config import ConfigError


def test_the_grid_by_hand_is_the_one_that_was_asked_for() -> None:
    assert script_sweep.cells(script_sweep.changed([])) == 48
    grid = script_sweep.changed(["norm=none,group", "steps=7", "seed=0,1,2"])
    assert (script_sweep.cells(grid), grid["steps"]) == (2 * 2 * 2 * 4 * 3, "7")
    with pytest.raises(ConfigError, match="lr"):
        script_sweep.changed(["lr=1"])


@pytest.mark.slow
def test_the_sweep_by_hand_and_ours_on_a_small_grid() -> None:
    small = ["norm=none", "optimizer=sgd", "precision=float32", "accumulation_steps=2,4", "steps=3"]
    script, spread, ours, processor_time, clock = script_sweep.measurements(1, small)
    for one in (script, spread, ours):
        assert "2 cells x 3 steps" in one.name and one.wall.median > 0 and one.cpu is not None
    assert script.cpu is not None and ours.cpu is not None and processor_time.target is clock.target is None
    assert processor_time.wall.median == pytest.approx(ours.cpu.median / script.cpu.median)
    assert clock.wall.median == pytest.approx(ours.wall.median / spread.wall.median)
