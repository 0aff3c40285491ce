"""Bytes of a step against what a linear layer and its loss keep, counted by hand."""

import json
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from accumulation_harness.measure import memory
from tests.trials import arms, setting_of, trial

NUMBERS = 100_000  # of a tensor, so that what the allocator rounds up to does not count


def chain():
    """Three tensors of float32 at a time, the last without ten numbers, and views of one of them."""
    x = torch.zeros(NUMBERS)
    y = x * 2
    z = y.view(-1, 10)[1:] + 1
    del x, y
    w = z * 3
    del z, w


def perceptron():
    torch.manual_seed(0)
    x, weights = torch.randn(64, 1000), torch.randn(1000, 1000, requires_grad=True)
    (x @ weights).relu().square().sum().backward()


def of_profiler(call, folder):
    """The largest sum of what the allocator gave and took back, as torch's profiler tells it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    seen.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    given = [one for one in events if one.get("name") == "[memory]"]
    return max(accumulate(one["args"]["Bytes"] for one in sorted(given, key=lambda one: one["ts"])))


@pytest.mark.parametrize("call", [chain, perceptron])
def test_what_lives_is_what_the_allocator_has_given(call, tmp_path):
    with memory.Live() as live:
        call()
    assert live.most == pytest.approx(of_profiler(call, tmp_path), rel=0.03), "temporaries inside an operation are not counted"


def test_a_trial_of_a_large_model_keeps_what_its_arms_need_to_train(monkeypatch):
    """Four arms and what they share: of 100 million parameters 24 GB, 6 GB an arm, which trains 2.4 GB."""
    monkeypatch.setattr("accumulation_harness.measure.lock_step.LARGE", 0)
    monkeypatch.setattr("accumulation_harness.measure.algebra.REMEMBERED_BYTES", 0)
    config = trial(
        "workload.model=mlp workload.width=32 optimizer.name=adamw optimizer.lr=1e-3 effective_batch=8",
        "accumulation_steps=[2,4] steps=2 algebra_steps=2 nulls=1",
    )
    with memory.Live() as live:
        judged = arms(config)
    assert {row["verdict"] for row in judged} == {"equivalent"}
    assert live.most <= 4 * 60 * sum(p.numel() for p in setting_of(config).initial.parameters())
