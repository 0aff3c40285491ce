"""The referee against per-sample gradients by `torch.func`, against numpy, and against the layers it replaces."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from accumulation_harness.config import Norm, TrialConfig, WorkloadConfig
from accumulation_harness.referee.gradients import flatten, relative_distance
from accumulation_harness.referee.oracle import GhostBatchNorm, Inside, Referee, clipped, running_statistics, snapshot
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.layers import replace_layers
from tests import reference

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


def test_ghost_batch_norm_against_numpy():
    x = torch.randn(23, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    layer = GhostBatchNorm(nn.BatchNorm1d(6, dtype=torch.float64), SIZES)
    y, mean, variance = reference.batch_norm_chunks(x.numpy(), SIZES, 1e-5, 0.1)
    assert np.abs(layer(x).detach().numpy() - y).max() < EXACT
    assert np.abs(layer.running_mean.numpy() - mean).max() < EXACT
    assert np.abs(layer.running_var.numpy() - variance).max() < EXACT
    assert int(layer.num_batches_tracked) == 3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_one_ghost_chunk_is_torchs_batch_norm(momentum):
    x = torch.randn(9, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ghost, plain = (nn.BatchNorm2d(4, momentum=momentum, dtype=torch.float64) for _ in range(2))
    replaced = GhostBatchNorm(ghost, [9])
    for _ in range(2):
        assert (replaced(x) - plain(x)).abs().max() < EXACT
    assert running_statistics(replaced.state_dict()).sub(running_statistics(plain.state_dict())).abs().max() < EXACT
    assert (GhostBatchNorm(ghost, [4, 5])(x) - plain(x)).abs().max() > 0.01


def test_ghost_gradients_are_accumulated_gradients_and_not_the_full_batchs():
    judge = referee(Norm.batch)
    window, state = judge.workload.batch(IDS), snapshot(judge.model)
    written_out = copy.deepcopy(judge.model)
    replace_layers(written_out, nn.BatchNorm2d, lambda layer: GhostBatchNorm(layer, SIZES))
    _, ghost, after = judge.within(state, window, SIZES, Inside(statistics=True))
    loss = nn.functional.cross_entropy(written_out(window.inputs), window.targets)
    assert relative_distance(ghost, flatten(torch.autograd.grad(loss, list(written_out.parameters())))) < EXACT
    assert relative_distance(running_statistics(after), running_statistics(snapshot(written_out))) < EXACT
    assert relative_distance(ghost, judge.gradient(state, window)) > 1e-2


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


@pytest.mark.parametrize("max_norm", [None, 0.1, 100.0])
def test_clipping_by_norm_is_torchs(max_norm):
    vector = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    parameter = nn.Parameter(torch.zeros(40, dtype=torch.float64))
    parameter.grad = vector.clone()
    if max_norm is not None:
        nn.utils.clip_grad_norm_([parameter], max_norm)
    assert (clipped(vector, max_norm) - parameter.grad).abs().max() < EXACT


def test_text_terms_are_tokens():
    config = TrialConfig(workload=WorkloadConfig(data="text", model="transformer"), norm=Norm.layer)  # type: ignore[arg-type]
    workload = make_workload(config, device=torch.device("cpu"), dtype=torch.float64)
    torch.manual_seed(1)
    judge = Referee(workload, workload.make_model().double())
    window = workload.batch(IDS)
    parts = judge.parts(snapshot(judge.model), window, SIZES)
    assert len(set(parts.terms)) == 3 and sum(parts.terms) == int((window.targets >= 0).sum())
    assert relative_distance(parts.gradient, judge.gradient(snapshot(judge.model), window)) < EXACT
