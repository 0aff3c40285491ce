"""The full batch's BatchNorm gradient from micro-batches, against torch's own layer over the whole window."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from accumulation_harness.config import Model, Norm, TrialConfig, WorkloadConfig
from accumulation_harness.recipes.two_pass import moments, pooled, reduction_passes, statistics_passes, with_window_norms
from accumulation_harness.referee.gradients import flatten, relative_distance
from accumulation_harness.referee.oracle import running_statistics, snapshot
from accumulation_harness.workloads import Batch, Workload
from accumulation_harness.workloads.build import make_workload

EXACT = 1e-12  # float64: L0's gate, over several layers and 23 samples
IDS = torch.arange(3, 26)
SIZES = [4, 8, 11]
MODELS = [(Model.conv, 8, 2), (Model.mlp, 8, 2), (Model.resnet18, 1, 20)]  # width and number of BatchNorm layers; shortcuts too


def trained(model: Model, width: int) -> tuple[Workload, nn.Module]:
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


def gradient(net: nn.Module, workload: Workload, parts: list[Batch]) -> Tensor:
    """Accumulated over the parts, each divided by the window's size."""
    total = sum(map(len, parts))
    losses = (workload.losses(net(part.inputs), part).sum() / total for part in parts)
    return torch.stack([flatten(torch.autograd.grad(loss, list(net.parameters()))) for loss in losses]).sum(0)


@pytest.mark.parametrize("model, width, num_layers", MODELS)
def test_the_accumulated_gradient_is_the_full_batchs(model: Model, width: int, num_layers: int) -> None:
    workload, net = trained(model, width)
    window = workload.batch(IDS)
    parts = [window.rows(rows) for rows in torch.arange(len(IDS)).split(SIZES)]
    whole, apart, own = (copy.deepcopy(net) for _ in range(3))
    exact, chunked = gradient(whole, workload, [window]), gradient(apart, workload, parts)
    layers = with_window_norms(own)
    assert len(layers) == num_layers

    def loss_of(k: int) -> Tensor:
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


def test_a_second_window_forgets_the_first() -> None:
    workload, net = trained(Model.conv, 8)
    own = copy.deepcopy(net)
    layers = with_window_norms(own)
    for start in (0, 30):
        parts = [workload.batch(ids) for ids in torch.arange(start, start + 23).split(SIZES)]

        def loss_of(k: int, parts: list[Batch] = parts) -> Tensor:
            return workload.losses(own(parts[k].inputs), parts[k]).sum() / 23

        reduction_passes(statistics_passes(layers, loss_of, len(parts)), loss_of, len(parts))
        exact = gradient(net, workload, [workload.batch(torch.arange(start, start + 23))])
        assert relative_distance(gradient(own, workload, parts), exact) < EXACT


def chunks(x: Tensor) -> Iterator[Tensor]:
    yield from x.split([3, 1, 7])


@pytest.mark.parametrize("shape", [(11, 5), (11, 5, 2, 3)])
def test_pooled_moments_are_those_of_everything(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 3
    together = pooled([moments(chunk) for chunk in chunks(x)])
    values = x.transpose(0, 1).reshape(5, -1).numpy()
    assert together.count == values.shape[1]
    for found, expected in ((together.mean, values.mean(1)), (together.variance, values.var(1)),
                            (together.unbiased, values.var(1, ddof=1))):  # fmt: skip
        np.testing.assert_allclose(found.numpy(), expected, rtol=EXACT)
    mean_of_variances = torch.stack([moments(chunk).variance for chunk in chunks(x)]).mean(0)
    assert (mean_of_variances / together.variance - 1).abs().max() > 0.05, "the variance between micro-batches belongs to it"
