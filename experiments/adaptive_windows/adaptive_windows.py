"""Windows whose number of micro-batches changes from one to the next, as a trainer does that adapts to the free memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accumulation_harness.config import Precision
from accumulation_harness.experiments.shared.measuring import (
    Normalise,
    OnStep,
    Recipe,
    Row,
    Setting,
    Watch,
    flatten,
    full_batch,
    relative_distance,
    snapshot,
    take_step,
    window_total,
)
from accumulation_harness.judge.signature import worst
from accumulation_harness.recipes.micro_batch import Even

STREAM = 18  # of the draws of N, apart from a trial's other draws


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Train once for each way to adapt N; all see the same samples in the same order.

    `constant_batch`: N·b = B at every window. `constant_divisor`: the same, and mean losses are divided by the largest N.
    `varying_batch`: b stays and N changes, so that B does; `varying_batch_scaled_rate`: with a learning rate in proportion to
    it.

    Args:
        setting: The trial.
        on_step: Not called.

    Returns:
        A row for each. `distance`: of the weights at the end to the full batch's, relative to how far those moved;
        `gradient_error`: the largest relative distance to the referee's mean over the arm's own window.
    """
    config = setting.config
    steady = list(setting.windows())
    generator = setting.generator(STREAM)
    places = torch.randint(len(config.accumulation_steps), (4 * config.steps,), generator=generator)
    nums = [config.accumulation_steps[i] for i in places.tolist()]
    largest = max(config.accumulation_steps)
    smallest_batch = config.effective_batch // largest

    varying = _cut_windows(torch.cat(steady), [num * smallest_batch * 2 for num in nums])
    whole = [config.effective_batch // num for num in nums]
    reference, _ = _train(setting, steady, None, window_total)
    arms = {
        "constant_batch": _train(setting, steady, whole, window_total),
        "constant_divisor": _train(setting, steady, whole, lambda terms, _: [n * largest for n in terms]),
        "varying_batch": _train(setting, varying, [smallest_batch] * len(varying), window_total),
        "varying_batch_scaled_rate": _train(setting, varying, [smallest_batch] * len(varying), window_total, scaled=True),
    }
    start = flatten(setting.initial.parameters()).to(setting.device)
    way = reference - start
    return [
        {
            "arm": name,
            "samples": sum(map(len, steady)),
            "distinct_n": len(set(nums[: config.steps])),
            "distance": relative_distance(reached - start, way),
            "gradient_error": error,
        }
        for name, (reached, error) in arms.items()
    ]


def _cut_windows(ids: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The same samples in windows of these sizes; the last takes what is left."""
    cut, start = [], 0
    for size in sizes:
        if start < len(ids):
            cut.append(ids[start : start + size])
            start += size
    return cut


def _train(
    setting: Setting, stream: Sequence[Tensor], sizes: Sequence[int] | None, normalise: Normalise, *, scaled: bool = False
) -> tuple[Tensor, float]:
    """Weights at the end, and the largest gradient error; `sizes`: of each window's micro-batches, None for the full batch."""
    config = setting.config
    arm = setting.arm(full_batch(config), precision=Precision.float64, steps=len(stream))
    watch, referee, error = Watch(arm), setting.referee(), 0.0
    rate = config.optimizer.lr
    for t, ids in enumerate(stream):
        window = setting.exact.batch(ids)
        if sizes is not None:
            arm.recipe = Recipe(accumulation_steps=-(-len(ids) // sizes[t]), split=Even(sizes[t]), normalise=normalise)
        if scaled:
            arm.optimizer.param_groups[0]["lr"] = rate * len(ids) / config.effective_batch
        right = referee.gradient(snapshot(arm.model), window)
        take_step(arm, window)
        assert watch.gradient is not None
        error = worst(error, relative_distance(watch.gradient, right))
    return flatten(arm.model.parameters()), error
