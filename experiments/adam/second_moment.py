"""Adam's second moment from whole windows, and from every micro-batch (AdamA, arXiv 2305.19982), at weights that stand still.

The mean of squares is larger than the square of the mean by the noise of the micro-batches: with the exact noise scale
B_simple = tr(Sigma) / |G|^2 the sums of the two second moments are as (B_simple / b + 1) / (B_simple / B + 1).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from accumulation_harness.config import LastWindow, Precision
from accumulation_harness.experiments.gradient_noise.gradient_noise import sample_gradients
from accumulation_harness.experiments.shared.measuring import (
    BOUNDARY,
    Arm,
    OnStep,
    Recipe,
    Row,
    Setting,
    accumulated,
    full_batch,
    snapshot,
    step,
    take_step,
)
from accumulation_harness.measure.optimizer_state import optimizer_state

# The squared gradient of one window varies by a third of itself: as many windows leave about 1 %. Adam's beta2 = 0.999 averages
# over 2,000 at most, (1 + beta2) / (1 - beta2).
WINDOWS = 2000
LEAST_EPOCHS = 2  # of windows cut into many micro-batches, which average among themselves


@dataclass(frozen=True)
class Noise:
    """Mean and scatter of single-sample gradients over the training set (McCandlish et al. 2018)."""

    squared_mean: float  # |G|^2
    trace: float  # tr(Sigma), with D - 1
    num_samples: int  # D

    @property
    def scale(self) -> float:
        """B_simple = tr(Sigma) / |G|^2, in samples."""
        return _over(self.trace, self.squared_mean)

    def squared(self, batch: int, *, replaced: bool) -> float:
        """E|g_b|^2 = |G|^2 + tr(Sigma) / b, times 1 - b/D for samples drawn without replacement."""
        rest = 1.0 if replaced else 1 - batch / self.num_samples
        return self.squared_mean + rest * self.trace / batch


def measurements(setting: Setting, on_step: OnStep) -> Iterator[Row]:
    """One row per number of steps trained beforehand (none, a third and all of `steps`) and N."""
    config = setting.config
    trained = setting.arm(full_batch(config), precision=Precision.float64, clip_norm=None)
    stream = setting.windows(last=LastWindow.drop)
    for after in sorted({0, config.steps // 3, config.steps}):
        for ids in itertools.islice(stream, after - trained.windows):
            take_step(trained, setting.exact.batch(ids))
        noise = exact_noise(setting, trained)
        whole = second_moment(setting, trained, full_batch(config))
        for num in config.accumulation_steps:
            batch = config.effective_batch // num
            each = second_moment(setting, trained, square_per_micro_batch(accumulated(config, num)))
            yield {
                "accumulation_steps": num,
                "micro_batch": batch,
                "after_steps": after,
                "noise_scale": noise.scale,
                "ratio": _over(each, whole),
                "predicted": _ratio(noise, batch, config.effective_batch, replaced=True),
                "predicted_without_replacement": _ratio(noise, batch, config.effective_batch, replaced=False),
            }


def _ratio(noise: Noise, batch: int, effective_batch: int, *, replaced: bool) -> float:
    return _over(noise.squared(batch, replaced=replaced), noise.squared(effective_batch, replaced=replaced))


def _over(a: float, b: float) -> float:
    """a / b; NaN where there is no gradient, as of a model whose units are dead."""
    return a / b if b else math.nan


def second_moment(setting: Setting, trained: Arm, recipe: Recipe) -> float:
    """Adam's second moment at the weights of `trained`, bias-corrected and summed over all weights."""
    config = setting.config
    per_epoch = setting.exact.num_samples // config.effective_batch
    num_windows = max(LEAST_EPOCHS * per_epoch, WINDOWS // recipe.accumulation_steps)
    standing = dataclasses.replace(config.optimizer, lr=0.0, weight_decay=0.0)
    arm = setting.arm(recipe, precision=Precision.float64, steps=num_windows, clip_norm=None, optimizer=standing)
    arm.model.load_state_dict(trained.model.state_dict())
    for ids in setting.windows(num_windows, last=LastWindow.drop):
        take_step(arm, setting.exact.batch(ids))
    state = optimizer_state(arm.optimizer, arm.model.parameters())["exp_avg_sq"]
    return float(state.sum()) / (1 - config.optimizer.beta2**num_windows)


def square_per_micro_batch(recipe: Recipe) -> Recipe:
    """The second moment takes in the mean of the micro-batches' squared gradients; everything else stays right."""

    def square(arm: Arm) -> None:
        sums, squares = arm.memory.get("sums"), arm.memory.get("squares")
        now = [p.grad.clone() for p in arm.model.parameters() if p.grad is not None]
        own = now if sums is None else [after - before for after, before in zip(now, sums, strict=True)]
        added = [len(arm.seen) * part.square() for part in own]  # N (g_k / N)^2: over k, the mean of g_k^2
        arm.memory["sums"] = now
        arm.memory["squares"] = added if squares is None else [a + b for a, b in zip(squares, added, strict=True)]

    def replace(arm: Arm) -> None:
        beta2 = arm.optimizer.param_groups[0]["betas"][1]
        for p, mean, squares in zip(arm.model.parameters(), arm.memory.pop("sums"), arm.memory.pop("squares"), strict=True):
            arm.optimizer.state[p]["exp_avg_sq"] += (1 - beta2) * (squares - mean.square())

    stages = [(stage, replace) if stage is step else (stage,) for stage in BOUNDARY]
    return dataclasses.replace(recipe, after_backward=(square,), at_boundary=tuple(itertools.chain(*stages)))


def exact_noise(setting: Setting, arm: Arm) -> Noise:
    """Noise of the training samples' own gradients at the weights of `arm`."""
    everything = setting.exact.batch(torch.arange(setting.exact.num_samples))
    gradients = sample_gradients(setting.referee(dropout=False), snapshot(arm.model), everything)
    mean = gradients.mean(0)
    spread = float((gradients - mean).square().sum()) / (len(gradients) - 1)
    return Noise(float(mean @ mean), spread, len(gradients))
