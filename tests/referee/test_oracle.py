"""The referee against per-sample gradients by `torch.func`, against numpy, and against the layers it replaces."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from accumulation_harness.config import Norm, TrialConfig
from accumulation_harness.referee.gradients import flatten, relative_distance
from accumulation_harness.referee.oracle import Inside, Referee, snapshot
from accumulation_harness.workloads.build import make_workload

EXACT = 1e-13  # float64, two different orders of summation over a few thousand terms
IDS = torch.arange(3, 26)
SIZES = [4, 8, 11]


def referee(norm):
    workload = make_workload(TrialConfig(norm=norm), device=torch.device("cpu"), dtype=torch.float64)
    torch.manual_seed(1)
    return Referee(workload, workload.make_model().double())


@pytest.mark.parametrize("norm", [Norm.none, Norm.group, Norm.layer])
def test_the_gradient_is_the_mean_of_per_sample_gradients(norm):
    judge = referee(norm)
    window, parameters = judge.workload.batch(IDS), dict(judge.model.named_parameters())

    def loss(values, x, y):
        return nn.functional.cross_entropy(functional_call(judge.model, values, (x[None],)), y[None])

    each = vmap(grad(loss), (None, 0, 0))(parameters, window.inputs, window.targets)
    expected = flatten(each[name].mean(0) for name in parameters)
    assert relative_distance(judge.gradient(snapshot(judge.model), window), expected) < EXACT


@pytest.mark.parametrize("norm", [Norm.none, Norm.batch, Norm.group, Norm.layer])
def test_the_parts_add_up_to_the_gradient(norm):
    judge = referee(norm)
    window, state = judge.workload.batch(IDS), snapshot(judge.model)
    parts = judge.parts(state, window, SIZES)
    assert parts.terms == (4, 8, 11)
    assert relative_distance(parts.gradient, judge.gradient(state, window)) < EXACT
    plain_mean = torch.stack(parts.parts).mean(0)
    assert relative_distance(plain_mean, parts.gradient) > 1e-3, "unequal parts must not be averaged plainly"
    few = judge.share(state, window, SIZES, [0, 2])
    assert relative_distance(few, parts.shares[0] + parts.shares[2]) < EXACT < relative_distance(few, parts.gradient)


def test_parts_by_rows_are_the_parts(monkeypatch):
    """In pieces of as many parameters as two gradients have together, whatever the number of parts."""
    judge = referee(Norm.layer)
    window, state, sizes = judge.workload.batch(IDS), snapshot(judge.model), [3] * 7 + [2]
    parts = judge.parts(state, window, sizes).parts
    for least in (0, 2**22):
        monkeypatch.setattr("accumulation_harness.referee.oracle.LEAST_AT_ONCE", least)
        rows = list(judge.parts_by_rows(state, window, sizes))
        largest = max(p.numel() for p in judge.model.parameters())
        assert all(len(own[0]) <= max(2 * len(parts[0]) // len(sizes), largest) for _, own in rows) or least
        assert (len(rows) == 1) == bool(least) and [place.start for place, _ in rows][1:] == [place.stop for place, _ in rows][
            :-1
        ]
        for k, part in enumerate(parts):
            assert relative_distance(torch.cat([own[k] for _, own in rows]), part) < EXACT


def test_refereeing_leaves_the_state_alone():
    judge = referee(Norm.batch)
    state, window = snapshot(judge.model), judge.workload.batch(IDS)
    before = {name: value.clone() for name, value in state.items()}
    judge.gradient(state, window)
    judge.within(state, window, SIZES, Inside(statistics=True))
    assert all(torch.equal(state[name], value) and not state[name].requires_grad for name, value in before.items())
    again = judge.gradient(state, window)
    judge.gradient({name: 2 * value for name, value in state.items()}, window)
    assert torch.equal(judge.gradient(state, window), again)  # nothing of other weights is left in the referee's own model
