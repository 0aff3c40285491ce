"""The sweep by hand and ours train the same grid."""

from __future__ import annotations

import pytest

from harness.bench import script_sweep
from harness.config import ConfigError


def test_the_grid_by_hand_is_the_one_that_was_asked_for() -> None:
    assert script_sweep.cells(script_sweep.changed([])) == 48
    grid = script_sweep.changed(["norm=none,group", "steps=7", "seed=0,1,2"])
    assert (script_sweep.cells(grid), grid["steps"]) == (2 * 2 * 2 * 4 * 3, "7")
    with pytest.raises(ConfigError, match="lr"):
        script_sweep.changed(["lr=1"])


@pytest.mark.slow
def test_the_sweep_by_hand_and_ours_on_a_small_grid() -> None:
    small = ["norm=none", "optimizer=sgd", "precision=float32", "accumulation_steps=2,4", "steps=3"]
    *sides, ratio = script_sweep.measurements(1, small)
    assert len(sides) == 2 and all("2 cells x 3 steps" in one.name and one.wall.median > 0 for one in sides)
    assert ratio.target is None and ratio.wall.median == pytest.approx(sides[0].wall.median / sides[1].wall.median)
