"""The accumulation loop as tutorials write it, run over a loader for whole epochs: what becomes of the last micro-batches.

    for i, batch in enumerate(loader):
        (loss(batch) / N).backward()
        if (i + 1) % N == 0:
            optimizer.step()
            optimizer.zero_grad()

Counted are optimizer steps and samples; each step's gradient is held against the float64 referee's mean over the samples that its
own epoch has read since the last step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from accumulation_harness.config import LastWindow, Precision
from accumulation_harness.experiments.shared.measuring import (
    OnStep,
    Row,
    Setting,
    flatten,
    full_batch,
    relative_distance,
    snapshot,
)
from accumulation_harness.judge.signature import worst

EPOCHS = 2  # the first leaves something behind, the second finds it


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What the loop does where an epoch ends in the middle of a window."""

    clears: bool = False  # `zero_grad` before each epoch
    steps: bool = False  # `or i + 1 == len(loader)`
    divides_by_window: bool = False  # by the loss terms of the window instead of mean loss / N


LOOPS: Mapping[str, Loop] = {
    "as_written": Loop(),
    "cleared": Loop(clears=True),
    "stepped": Loop(steps=True),
    "complete": Loop(steps=True, divides_by_window=True),
}


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per loop and N, in float64.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with `arm`, `accumulation_steps`, numbers of steps, windows and samples, and the relative `gradient_error`.
    """
    return [
        {"arm": name, "accumulation_steps": num, **_train_epochs(setting, loop, num)}
        for num in setting.config.accumulation_steps
        for name, loop in LOOPS.items()
    ]


def _train_epochs(setting: Setting, loop: Loop, num: int) -> Row:
    """Train `EPOCHS` epochs over micro-batches of b = B / num samples.

    Args:
        setting: The trial.
        loop: The loop over a micro-batch.
        num: N.

    Returns:
        One row. `leaked_samples`: whose gradients went from one epoch into the next; `unused_samples`: whose gradients no
        step consumed.
    """
    data, size = setting.exact, setting.config.effective_batch // num
    arm = setting.arm(full_batch(setting.config), precision=Precision.float64, steps=1)
    referee = setting.referee()
    per_epoch = -(-data.num_samples // size)
    loader = setting.windows(EPOCHS * per_epoch, size=size, last=LastWindow.keep)
    steps = leaked = unused = pending = 0  # pending: samples whose gradients are in the buffer
    error = 0.0
    for _ in range(EPOCHS):
        epoch = [next(loader) for _ in range(per_epoch)]
        if loop.clears:
            arm.optimizer.zero_grad()
            unused, pending = unused + pending, 0
        carried = pending
        for i, ids in enumerate(epoch):
            batch, first = data.batch(ids), i - i % num
            window = torch.cat(epoch[first : first + num])
            terms = data.num_terms(data.batch(window)).sum() if loop.divides_by_window else data.num_terms(batch).sum() * num
            (data.losses(data.forward(arm.model, batch), batch).sum() / terms).backward()
            pending += len(ids)
            if (i + 1) % num == 0 or (loop.steps and i + 1 == per_epoch):
                right = referee.gradient(snapshot(arm.model), data.batch(window))
                got = flatten(p.grad for p in arm.model.parameters() if p.grad is not None)
                error = worst(error, relative_distance(got, right))
                arm.optimizer.step()
                arm.optimizer.zero_grad()
                steps, leaked, carried, pending = steps + 1, leaked + carried, 0, 0
    return {
        "tail_samples": data.num_samples % (size * num),
        "steps": steps,
        "windows": EPOCHS * -(-per_epoch // num),
        "leaked_samples": leaked,
        "unused_samples": unused + pending,
        "gradient_error": error,
    }
