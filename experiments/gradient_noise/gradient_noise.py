"""The noise of the gradient, exactly: every sample's own gradient at points along a training, and what batches of them scatter.

The training itself accumulates, so its step rows hold what `measure.noise_scale` makes of the micro-batches alone.
"""

from __future__ import annotations

from statistics import fmean

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from accumulation_harness.config import Precision
from accumulation_harness.experiments.shared.measuring import (
    ACCUMULATED,
    ArmName,
    Batch,
    OnStep,
    Recipe,
    Referee,
    Row,
    Setting,
    State,
    Watch,
    accumulated,
    relative_distance,
    snapshot,
    take_step,
)
from accumulation_harness.measure import noise_scale
from accumulation_harness.measure.rounding import zero_lr

SIZES = tuple(4**k for k in range(1, 6))  # of the batches drawn: 4 to 1,024
CHUNK = 250  # samples whose gradients are taken at once
DRAWS, WINDOWS = 3, 4  # streams of the trial's seed


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Two quantities at every probe: `noise_scale` (|G|^2 and tr Sigma), and `variance` of batches, a row per size.

    The training accumulates the first N of the configuration; a probe is taken every `probe_every` steps, and at the end.
    """
    config = setting.config
    num = config.accumulation_steps[0]
    recipe = accumulated(config, num)
    arm = setting.arm(recipe)
    noise = noise_scale.watch({ACCUMULATED: arm}, every=1)
    rows = []
    for t, ids in enumerate(setting.windows()):
        if t % config.probe_every == 0:
            rows += probe(setting, recipe, snapshot(arm.model), t)
        with setting.randomness(t):
            loss = float(take_step(arm, arm.workload.batch(ids)))
        on_step(t, [{**ArmName(ACCUMULATED, num).columns, "step": t, "loss": loss, **noise_scale.read(noise)[ACCUMULATED]}])
    return rows + probe(setting, recipe, snapshot(arm.model), config.steps)


def probe(setting: Setting, recipe: Recipe, state: State, step: int) -> list[Row]:
    """The rows of one probe: the gradients of all training samples at the weights `state`, and how batches of them scatter."""
    referee = setting.referee(dropout=False)
    everything = setting.exact.batch(torch.arange(setting.exact.num_samples))
    each = sample_gradients(referee, state, everything)
    about = {"step": step, "accumulation_steps": recipe.accumulation_steps}
    scale = {"quantity": "noise_scale", **about, **moments(each), **by_windows(setting, recipe, state, each, step)}
    generator = setting.generator(DRAWS, step)
    sizes = [size for size in SIZES if size < len(each)]
    return [scale] + [
        {"quantity": "variance", **about, "replacement": replacement, "batch": size, "draws": setting.config.permutations,
         **batch_variance(each, size, setting.config.permutations, generator, replacement=replacement)}
        for replacement in (True, False) for size in sizes
    ]  # fmt: skip


def sample_gradients(referee: Referee, state: State, batch: Batch) -> Tensor:
    """[n, P] float64, by `torch.func`: row i is g_i = t_i / mean(n), so that the mean of the rows is the batch's gradient.

    t_i is the gradient of sample i's loss summed over its n_i loss terms.
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


def moments(each: Tensor) -> Row:
    """|G|^2 and tr Sigma = mean |g_i - G|^2 over the rows g_i, the whole population (McCandlish et al. 2018, eq. 2.8)."""
    mean = each.mean(0)
    return {
        "population": len(each),
        "gradient_square": float(mean @ mean),
        "noise_trace": float((each - mean).square().sum(1).mean()),
    }


def batch_variance(each: Tensor, size: int, draws: int, generator: torch.Generator, *, replacement: bool) -> Row:
    """mean |g_B - G|^2 over `draws` batches, and what it should be.

    tr Sigma / B with replacement, times (D - B) / (D - 1) without.
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
        "expected": moments(each)["noise_trace"] / size * factor,
    }


def by_windows(setting: Setting, recipe: Recipe, state: State, each: Tensor, step: int) -> Row:
    """What the loop measures at the weights `state`, on windows drawn with replacement: means of both squared norms.

    `loop_error`: largest relative distance of a window's accumulated gradient to the mean of its samples' rows.
    """
    config = setting.config
    arm = setting.arm(
        recipe, dropout=False, precision=Precision.float64, steps=1, clip_norm=None, optimizer=zero_lr(config.optimizer)
    )
    arm.model.load_state_dict(state)
    watch, noise = Watch(arm), {"loop": noise_scale.NoiseWatch(arm)}
    generator = setting.generator(WINDOWS, step)
    rows, errors = [], []
    for _ in range(config.permutations):
        ids = torch.randint(len(each), (config.effective_batch,), generator=generator)
        take_step(arm, setting.exact.batch(ids))
        rows.append(noise_scale.read(noise)["loop"])
        assert watch.gradient is not None
        errors.append(relative_distance(watch.gradient, each[ids].mean(0)))
    return {
        "windows": config.permutations,
        **{name: fmean(row[name] for row in rows) for name in rows[0]},
        "loop_error": max(errors),
    }
