"""The noise of the gradient, exactly: every sample's own gradient along a training, and what batches of them scatter."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from accumulation_harness.experiments.shared.measuring import (
    ACCUMULATED,
    ArmName,
    Batch,
    OnStep,
    Referee,
    Row,
    Setting,
    State,
    accumulated,
    snapshot,
    take_step,
)

SIZES = tuple(4**k for k in range(1, 6))  # of the batches drawn: 4 to 1,024
CHUNK = 250  # samples whose gradients are taken at once
DRAWS = 3  # a stream of the trial's seed


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Measure gradient noise along a training, which accumulates the first N of the configuration.

    Args:
        setting: The trial.
        on_step: Called with the step's number and its row.

    Returns:
        The `variance` of batches at every probe, every `probe_every` steps and at the end: a row per size and way to draw.
    """
    config = setting.config
    num = config.accumulation_steps[0]
    arm = setting.arm(accumulated(config, num))
    rows = []
    for t, ids in enumerate(setting.windows()):
        if t % config.probe_every == 0:
            rows += _probe(setting, num, snapshot(arm.model), t)
        with setting.randomness(t):
            loss = float(take_step(arm, arm.workload.batch(ids)))
        on_step(t, [{**ArmName(ACCUMULATED, num).columns, "step": t, "loss": loss}])
    return rows + _probe(setting, num, snapshot(arm.model), config.steps)


def _probe(setting: Setting, num: int, state: State, step: int) -> list[Row]:
    """The rows of one probe: the gradients of all training samples at the weights `state`, and how batches of them scatter."""
    referee = setting.referee(dropout=False)
    everything = setting.exact.batch(torch.arange(setting.exact.num_samples))
    each = sample_gradients(referee, state, everything)
    generator, draws = setting.generator(DRAWS, step), setting.config.permutations
    return [
        {"quantity": "variance", "step": step, "accumulation_steps": num, "replacement": replacement, "batch": size,
         "draws": draws, **batch_variance(each, size, draws, generator, replacement=replacement)}
        for replacement in (True, False) for size in SIZES if size < len(each)
    ]  # fmt: skip


def sample_gradients(referee: Referee, state: State, batch: Batch) -> Tensor:
    """Compute the gradient of every sample by `torch.func`.

    g_i = t_i / mean(n), so that the mean of the rows is the batch's gradient; t_i is the gradient of sample i's loss summed
    over its n_i loss terms.

    Args:
        referee: Has the model and the loss.
        state: Parameters and buffers.
        batch: n samples.

    Returns:
        [n, P] float64.
    """
    workload, names = referee.workload, referee.names
    parameters = {name: state[name] for name in names}
    buffers = {name: value for name, value in state.items() if name not in parameters}

    def loss(own: dict[str, Tensor], ids: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        one = Batch(ids=ids.unsqueeze(0), inputs=inputs.unsqueeze(0), targets=targets.unsqueeze(0))
        return workload.losses(functional_call(referee.model, (own, buffers), (one.inputs,)), one).sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0, 0))
    chunks = zip(*(part.split(CHUNK) for part in (batch.ids, batch.inputs, batch.targets)), strict=True)
    found = [per_sample(parameters, *chunk) for chunk in chunks]
    rows = torch.cat([torch.cat([one[name].flatten(1) for name in names], dim=1) for one in found])
    return rows / workload.num_terms(batch).double().mean()


def batch_variance(each: Tensor, size: int, draws: int, generator: torch.Generator, *, replacement: bool) -> Row:
    """Measure mean |g_B - G|^2 over drawn batches, beside what it should be.

    That is tr Sigma / B with replacement, times (D - B) / (D - 1) without, where tr Sigma = mean |g_i - G|^2 over the whole
    population of g_i, whose mean is G (McCandlish et al. 2018, eq. 2.8).

    Args:
        each: [D, P] gradients of the samples.
        size: B.
        draws: How many batches are drawn.
        generator: What draws them.
        replacement: Whether a batch may have a sample twice.

    Returns:
        `variance` and `expected`.
    """
    population, mean = len(each), each.mean(0)
    if replacement:
        ids = torch.randint(population, (draws, size), generator=generator)
    else:
        ids = torch.rand(draws, population, generator=generator).argsort(1)[:, :size]
    counts = torch.zeros(draws, population, dtype=each.dtype).scatter_add_(1, ids, torch.ones(ids.shape, dtype=each.dtype))
    batches = counts.to(each.device) @ each / size
    factor = 1.0 if replacement else (population - size) / (population - 1)
    return {
        "variance": float((batches - mean).square().sum(1).mean()),
        "expected": float((each - mean).square().sum(1).mean()) / size * factor,
    }
