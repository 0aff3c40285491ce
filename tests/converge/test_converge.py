"""`accumulation-harness converge`: its table against numbers by hand, and the command on a task of the user's own."""

import re

import numpy as np
import pytest
from scipy import stats

from accumulation_harness.config import ConfigError
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.converge import curve, table
from accumulation_harness.judge.paired import Comparison
from tests.commands import harness

TASK = """
import torch
from torch import nn

class Line:
    def __init__(self):
        self.x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    def model(self, norm): return nn.Linear(3, 1)
    def train(self): return [(row, row.sum()) for row in self.x[:40]]
    def held_out(self): return [(row, row.sum()) for row in self.x[40:]]
    def losses(self, outputs, batch): return (outputs[:, 0] - batch[1]).square()
    def metrics(self, model): return {"weight": model.weight.sum()}
"""


def test_every_training_beside_the_large_batch():
    rng = np.random.default_rng(0)
    full, noise = rng.normal(1, 1, 6), rng.normal(0, 0.1, 6)
    ends = {"full": full, "permuted": full + 1e-9 * noise, "accumulated": full + 1e-9, "small_batch": full + 2 + noise}
    values = {ArmName(name): dict(enumerate(own)) for name, own in ends.items()}
    found = table.beside(values, lambda seeds: 0.5)
    assert [str(one.verdict) for one in found.values()] == ["same", "same", "higher"]
    small = found[ArmName("small_batch")]
    limits = stats.t.interval(0.975, 5, np.mean(2 + noise), stats.sem(2 + noise))
    assert (small.interval.low, small.interval.high) == pytest.approx(limits)
    assert values[ArmName("full")] and small.verdict == Comparison.above


@pytest.mark.parametrize("given", [{"seeds": "1"}, {"seeds": "many"}, {"margin": "0"}, {"margin": "nan"}])
def test_what_is_no_number_of_seeds_or_margin(given):
    with pytest.raises(ConfigError, match="expected"):
        table.Asked.of(given)


def test_a_curve_is_drawn_where_its_loss_is():
    seeds = [{"curve_samples": [0, 10, 20], "curve_probe_loss": [100.0 * k, 10.0 * k, 1.0 * k]} for k in (1, 1.1)]
    other = [{"curve_samples": [0, 10, 20], "curve_probe_loss": [100.0, 100.0, float("nan")]}]
    *rows, _, legend = curve.lines({"L: large": seeds, "s: small": other})
    drawn = [line.partition("|")[2].ljust(curve.WIDTH) for line in rows]
    at = {x: "".join(row[x] for row in drawn).rstrip() for x in (0, 31, curve.WIDTH - 1)}
    assert at[0].strip("░") in ("*", "L░s", "Ls") and at[31].index("s") < at[31].index("L") == (curve.HEIGHT - 1) // 2
    assert "s" not in at[curve.WIDTH - 1] and at[curve.WIDTH - 1][-1] in "L░" and legend.endswith("* several")


@pytest.mark.slow  # a part of continuous integration
def test_the_command(tmp_path):
    (tmp_path / "own.py").write_text(TASK)

    def run(*more, code=0):
        settings = "seeds=2 steps=3 effective_batch=8 accumulation_steps=[2] tracking=disabled optimizer.lr=0.01"
        own = ("workload=custom", "workload.target=own:Line", *settings.split())
        return harness("converge", *own, *more, cwd=tmp_path, code=code)

    first = run()
    assert "2 trials done" in first.stdout and re.search(
        r"^2 seeds of 5 trainings of 3 steps .*: about 0:\d\d, 0:\d\d a seed$", first.stderr, re.M
    )
    rows = {line.split("  ")[0]: line for line in first.stdout.splitlines()}
    assert " same " in rows["accumulated, N = 2"] and "small batch, N = 2" in rows and "0 to 24 samples" in first.stdout
    again = run("metric=weight", "seeds=3")
    assert "1 trial done, 2 finished already" in again.stdout and "\nweight on the held-out" in again.stdout
    refused = run("metric=accuracy", code=2)
    assert refused.stderr.splitlines()[-1] == "metric=accuracy: expected one of loss, weight"
