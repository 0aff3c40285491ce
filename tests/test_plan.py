"""The planner: what it chooses fits when it is run, and the next larger does not fit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from harness import memory, plan
from harness.config import ConfigError, TrialConfig
from harness.lock_step import Setting
from harness.micro_batch import Even
from harness.recipe import Recipe


def test_the_largest_divisor_that_fits() -> None:
    """M = 100 + 10 b, 5 % free: 950 of 1000 bytes hold b = 85, and 64 is the largest divisor of 512 below."""
    chosen = plan.choose(512, 1000, 100, 10)
    assert (chosen.micro_batch, chosen.accumulation_steps, chosen.total) == (64, 8, 740)
    assert plan.choose(512, 10**6, 100, 10).accumulation_steps == 1
    assert plan.choose(7, 150, 100, 10).micro_batch == 1
    with pytest.raises(ConfigError, match="at least 116 bytes"):
        plan.choose(512, 110, 100, 10)


@pytest.mark.parametrize("text", ["", "many", "24XB", "-1GB"])
def test_a_budget_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="memory"):
        plan.parse_bytes(text)


def test_the_plan_holds_for_the_step_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured at 8 and 16 samples, predicted for 96: what a step with the planned b takes is what was predicted."""
    config = TrialConfig(effective_batch=192, accumulation_steps=(1,))
    static, per_sample = plan.measure(config)
    chosen = plan.choose(192, 400_000, static, per_sample)
    assert (chosen.micro_batch, chosen.accumulation_steps) == (96, 2)
    setting = Setting(config, torch.device("cpu"))
    taken = {}
    for size in (96, 192):
        arm = setting.arm(Recipe(accumulation_steps=192 // size, split=Even(size)), config.precision, total_steps=1)
        taken[size] = memory.of_step(arm, arm.workload.batch(torch.arange(192))).total
    assert taken[96] == pytest.approx(chosen.total, rel=1e-3)
    assert taken[96] <= 400_000 < taken[192]
    assert plan.main(["memory=400kB", "effective_batch=192"]) == 0
    assert capsys.readouterr().out.startswith("b = 96, N = 2:")


# A process of its own, which may take 300 MiB more than it has once torch is there.
LIMITED = """
import resource, sys, torch
from harness import plan
torch.set_num_threads(1)
config = plan._compose(["effective_batch=960", "workload.width=16", "precision=float32"])
assert plan.fits(config, 8)  # whatever torch makes once
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print("\\n".join(plan.by_trying(config)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and measured as on Linux")
def test_b_is_found_by_trying() -> None:
    """A window of 960 samples keeps 63 MB for each of its first two activations: all fits without a limit, under one a part."""
    found = {}
    for mebibytes in (100_000, 150):
        done = subprocess.run([sys.executable, "-c", LIMITED, str(mebibytes)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found[mebibytes] = done.stdout.splitlines()
    assert found[100_000] == ["b = 960, N = 1: 2 steps of 960 samples taken on this machine"]
    *tried, chosen = found[150]
    assert tried[0] == "b = 960: out of memory" and tried == [f"b = {960 // 2**k}: out of memory" for k in range(len(tried))]
    b = 960 // 2 ** len(tried)
    assert chosen == f"b = {b}, N = {960 // b}: 2 steps of 960 samples taken on this machine" and b > 8


def test_what_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([]) == 2
    assert plan.main(["memory=1kB", "effective_batch=64"]) == 2
    assert plan.main(["memory=1GB", "effective_batch=many"]) == 2
    shown = capsys.readouterr().err
    assert "usage" in shown and "at least" in shown and "effective_batch" in shown
