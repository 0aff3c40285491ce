"""Advice from a watched run: the noise that it shows, and what other numbers of micro-batches would cost."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from accumulation_harness.advise import __main__ as command
from accumulation_harness.advise.watched import Run
from accumulation_harness.watch import watch
from accumulation_harness.watch.costs import Costs, two_sizes


@pytest.mark.parametrize("signal", [0.25, 0.0])
def test_the_noise_of_a_run_is_a_ratio_of_means_whose_interval_holds_the_truth(signal):
    rng, costs = np.random.default_rng(0), Costs()
    mean, spread = np.array([[math.sqrt(signal)], [0.0], [0.0]]), np.array([[1.0], [2.0], [0.5]])
    for _ in range(3000):
        costs.add(*two_sizes([(mean + spread * rng.normal(size=(3, 1))) / 4 for _ in range(4)]))
    found = costs.metrics()
    if signal:
        assert found["run/noise_scale_low"] < (spread**2).sum() / signal < found["run/noise_scale_high"]
        assert found["run/noise_scale_low"] < found["run/noise_scale"] < found["run/noise_scale_high"] < 60
    else:
        assert "run/noise_scale_high" not in found


def test_seconds_are_those_of_the_formula_and_even_where_it_says():
    run, noise, t, u = Run(4, (6.0, 5.0, 7.0), 1.0, 64.0), 6.0, 0.2, 0.2  # 4 t + u = 1
    expected = (1 + noise / 2) * (2 * t + u) / ((1 + noise / 4) * (4 * t + u))
    assert run.times(2, noise, u) == pytest.approx(expected) and run.samples(2, noise) == pytest.approx(8 / 10)
    assert run.times(2, noise, run.even_at(2, noise)) == pytest.approx(1)


@pytest.mark.parametrize("windows", [40, 4])
def test_a_report_of_a_run_is_advised(windows, tmp_path, capsys):
    torch.manual_seed(0)
    model, teacher = torch.nn.Linear(20, 5), torch.nn.Linear(20, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer) as seen:
        for _ in range(windows):
            for _ in range(4):
                x = torch.randn(8, 20)
                (F.cross_entropy(model(x), teacher(x).argmax(1)) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
    seen.report(tmp_path / "run.json")
    assert command.main([str(tmp_path / "run.json")]) == 0
    shown = capsys.readouterr().out
    assert ("as it is  4" in shown) == (windows == 40) and ("cannot tell: the noise scale" in shown) == (windows == 4)
    (tmp_path / "no.json").write_text("{}")
    assert command.main([str(tmp_path / "no.json")]) == 2
