"""The full batch's BatchNorm gradient from micro-batches, against torch's own layer over the whole window."""

import copy

import pytest
import torch

from accumulation_harness.config import Model, Norm, TrialConfig, WorkloadConfig
from accumulation_harness.recipes.two_pass import reduction_passes, statistics_passes, with_window_norms
from accumulation_harness.referee.gradients import flatten, relative_distance
from accumulation_harness.referee.oracle import running_statistics, snapshot
from accumulation_harness.workloads.build import make_workload

EXACT = 1e-12  # float64: L0's gate, over several layers and 23 samples
IDS = torch.arange(3, 26)
SIZES = [4, 8, 11]
MODELS = [
    (Model.conv, 8, 2),
    (Model.mlp, 8, 2),
    pytest.param(Model.resnet18, 1, 20, marks=pytest.mark.slow),
]  # width and number of BatchNorm layers; shortcuts too


def trained(model, width):
    """A model with weights, scales and running statistics that are not the initial ones."""
    config = TrialConfig(norm=Norm.batch, workload=WorkloadConfig(model=model, width=width))
    workload = make_workload(config, device=torch.device("cpu"), dtype=torch.float64)
    torch.manual_seed(1)
    net = workload.make_model().double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    net(workload.batch(torch.arange(40, 60)).inputs)
    return workload, net


def gradient(net, workload, parts):
    """Accumulated over the parts, each divided by the window's size."""
    total = sum(map(len, parts))
    losses = (workload.losses(net(part.inputs), part).sum() / total for part in parts)
    return torch.stack([flatten(torch.autograd.grad(loss, list(net.parameters()))) for loss in losses]).sum(0)


@pytest.mark.parametrize("model, width, num_layers", MODELS)
def test_the_accumulated_gradient_is_the_full_batchs(model, width, num_layers):
    workload, net = trained(model, width)
    window = workload.batch(IDS)
    parts = [window.rows(rows) for rows in torch.arange(len(IDS)).split(SIZES)]
    whole, apart, own = (copy.deepcopy(net) for _ in range(3))
    exact, chunked = gradient(whole, workload, [window]), gradient(apart, workload, parts)
    layers = with_window_norms(own)
    assert len(layers) == num_layers

    def loss_of(k):
        return workload.losses(own(parts[k].inputs), parts[k]).sum() / len(window)

    order = statistics_passes(layers, loss_of, len(parts))
    assert sorted(map(id, order)) == sorted(map(id, layers))
    constants = gradient(own, workload, parts)
    reduction_passes(order, loss_of, len(parts))
    assert relative_distance(gradient(own, workload, parts), exact) < EXACT
    assert relative_distance(constants, exact) > 0.1, "without the gradient through the statistics it is another one"
    assert relative_distance(chunked, exact) > 0.1
    for name, value in whole.state_dict().items():
        assert torch.allclose(own.state_dict()[name], value, rtol=EXACT, atol=EXACT), name
    assert relative_distance(running_statistics(snapshot(apart)), running_statistics(snapshot(whole))) > 1e-3
    evaluated, expected = own.eval()(window.inputs), whole.eval()(window.inputs)
    assert relative_distance(evaluated.detach(), expected.detach()) < EXACT
