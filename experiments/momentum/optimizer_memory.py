"""With which weight past micro-batches are in an optimizer's state: one for all of a window, or less for each older one?

The weights of the model stay where they are (learning rate 0), so that every micro-batch's gradient is known beforehand; the
state is then taken apart into them by least squares. Momentum's buffers are linear in the gradients, Adam's second moment in the
squares of what each step consumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from accumulation_harness.config import LastWindow, OptimizerConfig, Precision
from accumulation_harness.experiments.momentum.optimizer_states import SMALL, SMALL_MEMORY, same_memory, small_batch
from accumulation_harness.experiments.shared.measuring import (
    ACCUMULATED,
    OnStep,
    Recipe,
    Row,
    Setting,
    accumulated,
    decompose,
    snapshot,
    take_step,
)
from accumulation_harness.measure.optimizer_state import optimizer_state

SQUARED = "exp_avg_sq"


def measurements(setting: Setting, on_step: OnStep) -> Iterator[Row]:
    """One row per arm, entry of the state, and micro-batch; the trial takes `steps` full windows.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Yields:
        Rows with `arm`, `accumulation_steps`, `entry` (of the state), `window` and `position` of the micro-batch, its
        `age` and `weight`, and the relative `residual` of the fit.
    """
    for num in setting.config.accumulation_steps:
        right = accumulated(setting.config, num)
        own = setting.config.optimizer
        yield from _memory(setting, ACCUMULATED, right, own)
        yield from _memory(setting, SMALL, small_batch(right), own)
        yield from _memory(setting, SMALL_MEMORY, small_batch(right), same_memory(own, num))


def _memory(setting: Setting, name: str, recipe: Recipe, optimizer: OptimizerConfig) -> Iterator[Row]:
    """Rows with the `weight` of every micro-batch in the state, over that of the newest, and its `age`: samples after it.

    Of a window's gradient each micro-batch has its share (its loss terms over the window's), so equal weights mean that nothing
    but the number of terms counts; a small step consumes the micro-batch's own mean.

    Yields:
        A row for each micro-batch and entry of the state.
    """
    arm = setting.arm(recipe, precision=Precision.float64, clip_norm=None, optimizer=dataclasses.replace(optimizer, lr=0.0))
    referee, start = setting.referee(), snapshot(arm.model)
    consumed: list[list[Tensor]] = []  # what the micro-batches of each window put into a step
    sizes: list[int] = []
    for ids in setting.windows(last=LastWindow.drop):
        window, own = setting.exact.batch(ids), recipe.split(len(ids))
        take_step(arm, window)
        parts = referee.parts(start, window, own)
        consumed.append([*(parts.shares if name == ACCUMULATED else parts.parts)])
        sizes += own
    num = len(consumed[0])
    for entry, state in optimizer_state(arm.optimizer, arm.model.parameters()).items():
        columns = [part for window in consumed for part in window]
        if entry == SQUARED:  # a window's step squares the sum of its micro-batches
            together = [torch.stack(window).sum(0) for window in consumed] if name == ACCUMULATED else columns
            columns = [part.square() for part in together]
        found = decompose(state, columns)
        weight = torch.tensor(found.weights, dtype=torch.float64).repeat_interleave(len(sizes) // len(columns))
        for k, seen in enumerate(accumulate(sizes)):
            yield {
                "arm": name,
                "accumulation_steps": recipe.accumulation_steps,
                "entry": entry,
                "window": k // num,
                "position": k % num,
                "age": sum(sizes) - seen,
                "weight": float(weight[k] / weight[-1]),
                "residual": found.residual,
            }
