"""The planner: what it chooses fits when it is run, and the next larger does not fit."""

import pytest
import torch

from accumulation_harness.config import ConfigError
from accumulation_harness.measure import memory, plan
from accumulation_harness.measure.trial import accumulated
from tests.trials import setting_of, trial


def test_the_largest_divisor_that_fits():
    """M = 100 + 10 b, 5 % free: 950 of 1000 bytes hold b = 85, and 64 is the largest divisor of 512 below."""
    chosen = plan.choose(512, 1000, 100, 10)
    assert (chosen.micro_batch, chosen.accumulation_steps, chosen.total) == (64, 8, 740)
    assert plan.choose(512, 10**6, 100, 10).accumulation_steps == 1
    assert plan.choose(7, 150, 100, 10).micro_batch == 1
    with pytest.raises(ConfigError, match="at least 116 bytes"):
        plan.choose(512, 110, 100, 10)


@pytest.mark.parametrize("text", ["", "many", "24XB", "-1GB"])
def test_a_budget_that_is_none(text):
    with pytest.raises(ConfigError, match="memory"):
        plan.parse_bytes(text)


@pytest.mark.slow
def test_the_plan_holds_for_the_step_itself(capsys):
    """Measured at 8 and 16 samples, predicted for 96: what a step with the planned b takes is what was predicted."""
    config = trial("effective_batch=192 accumulation_steps=[1]")
    static, per_sample, step = plan.fit_memory(config)
    chosen = plan.choose(192, 400_000, static, per_sample, step)
    assert (chosen.micro_batch, chosen.accumulation_steps) == (96, 2)
    taken = {}
    for num in (2, 1):
        arm = setting_of(config).arm(accumulated(config, num), steps=1)
        taken[192 // num] = memory.of_step(arm, arm.workload.batch(torch.arange(192))).total
    assert taken[96] == pytest.approx(chosen.total, rel=1e-3)
    assert taken[96] <= 400_000 < taken[192]
    assert plan.main(["memory=400kB", "effective_batch=192"]) == 0
    assert capsys.readouterr().out.startswith("b = 96, N = 2:")


def test_no_more_is_taken_to_plan_than_there_is(monkeypatch):
    """Where 16 samples do not fit, 2 or 4 or 8 are measured, and say the same."""
    config = trial("effective_batch=192 accumulation_steps=[1]")
    static, per_sample, step = plan.fit_memory(config)
    taken, of_step = [], memory.of_step

    def watched(arm, window):
        taken.append(max(arm.recipe.split(len(window))))
        return of_step(arm, window)

    monkeypatch.setattr(memory, "of_step", watched)
    for fits in (1, 4, 16):
        taken.clear()
        free = (static + per_sample * fits + 1) / (1 - plan.MARGIN)
        monkeypatch.setattr(plan, "free_bytes", lambda device, free=free: free)
        assert plan.fit_memory(config) == pytest.approx((static, per_sample, step), rel=1e-3)
        assert max(taken) == max(2, fits)


def test_a_model_that_ends_its_process_is_told(tmp_path, capsys):
    (tmp_path / "gone.py").write_text("import os\nos._exit(0)\n")
    assert plan.main(["memory=1GB", "workload=custom", f"workload.target={tmp_path}/gone.py:Task"]) == 1
    assert capsys.readouterr().err == "Task: expected a model that can be tried; its process ended with exit code 0\n"


def test_what_cannot_be_planned(capsys):
    assert plan.main([]) == 2
    assert plan.main(["memory=1kB", "effective_batch=64"]) == 2
    assert plan.main(["memory=1GB", "effective_batch=many"]) == 2
    shown = capsys.readouterr().err
    assert "usage" in shown and "at least" in shown and "effective_batch" in shown
