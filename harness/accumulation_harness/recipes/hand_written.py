"""Loops written by hand, judged as any recipe is: one function `loop(arm, window) -> loss` that takes one optimizer step.

    def loop(arm: Arm, window: Batch) -> Tensor:
        arm.optimizer.zero_grad()
        for rows in torch.arange(len(window)).chunk(4):
            part = window.rows(rows)
            loss = arm.workload.losses(arm.model(part.inputs), part).sum() / arm.workload.num_terms(window).sum()
            loss.backward()
        arm.optimizer.step()
        ...

What the workload computes over the window (`prepared`) and its penalty (`auxiliary`) are the loop's to use, where it has them.
The arm brings model, optimizer, schedule, scaler, `clip_norm`, `ema` and `workload`; `arm.memory` keeps what a loop wants to keep
from window to window (one loop drives many arms, so it must not keep it itself). What the loop did with the samples is seen at
the model's inputs, in forwards that record gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from accumulation_harness.recipes.micro_batch import SplitPlan
from accumulation_harness.recipes.recipe import Arm, Recipe
from accumulation_harness.workloads import Batch, Workload

Loop = Callable[[Arm, Batch], Tensor]
FOREIGN = -1  # the id of a row that is not in the window
NO_SAMPLE = -2  # and not in the training set either
CHUNK = 1024  # training samples that are compared at once


def hand_written(loop: Loop, *, accumulation_steps: int, split: SplitPlan) -> Recipe:
    """The recipe of a hand-written loop; N and the split are what it is meant to do, not what it does.

    The loss that it returns is the one that is reported. It may count `arm.samples`; where it does not, that is done for it.
    """

    def take(arm: Arm, window: Batch) -> Tensor:
        taken: dict[int, Tensor] = {}
        counted, forwards = arm.samples, count()

        def see(_model: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            if outputs.requires_grad:
                number, ids = next(forwards), sample_ids(inputs[0], window)
                if bool((ids == FOREIGN).any()) and not _is_training_sample(inputs[0][ids == FOREIGN][:1], arm.workload):
                    ids = torch.where(ids == FOREIGN, NO_SAMPLE, ids)
                outputs.register_hook(partial(_note_backward, taken, number, ids))

        handle = arm.model.register_forward_hook(see)
        try:
            loss = loop(arm, window)
        finally:
            handle.remove()
        arm.seen = [taken[number] for number in sorted(taken)] or [torch.empty(0, dtype=torch.long)]
        if arm.samples == counted:
            arm.samples += len(window)
        arm.windows += 1
        arm.loss_resolution = _resolution(loss) * len(arm.seen)
        return torch.as_tensor(loss, dtype=torch.float64, device=arm.device).detach()

    return Recipe(accumulation_steps=accumulation_steps, split=split, loop=take)


def _note_backward(taken: dict[int, Tensor], number: int, ids: Tensor, _gradient: Tensor) -> None:
    """Note that a backward has reached the outputs of forward `number`, which saw the samples `ids`."""
    taken[number] = ids


def _resolution(loss: object) -> float:
    """Relative resolution of the format a loss is returned in: `torch.tensor(total)` is float32, a number has float64's."""
    narrow = isinstance(loss, Tensor) and loss.is_floating_point() and loss.dtype != torch.float64
    return torch.finfo(loss.dtype).eps if isinstance(loss, Tensor) and narrow else 0.0


def _is_training_sample(row: Tensor, workload: Workload) -> bool:
    """Whether `row` ([1, ...]) is some training sample's; looked for only where a row is not the window's."""
    chunks = torch.arange(workload.num_samples).split(CHUNK)
    return any(bool((sample_ids(row, workload.batch(ids)) != FOREIGN).all()) for ids in chunks)


def sample_ids(inputs: Tensor, window: Batch) -> Tensor:
    """[n] ids of the rows of `inputs` that are rows of the window; -1 for the others.

    Rows may have been trimmed in their second dimension (padding). Of equal rows the first is taken.
    """
    if inputs.dim() != window.inputs.dim() or not len(inputs) or inputs.shape[2:] != window.inputs.shape[2:]:
        return torch.full((len(inputs),), FOREIGN)
    length = min(inputs.shape[1], window.inputs.shape[1])
    mine, known = (
        own.detach()[:, :length].flatten(1).to(inputs.dtype).contiguous().view(torch.uint8).cpu().numpy()
        for own in (inputs, window.inputs)
    )
    ids = {row.tobytes(): sample for row, sample in zip(known[::-1], window.ids.flip(0).tolist(), strict=True)}
    return torch.tensor([ids.get(row.tobytes(), FOREIGN) for row in mine])
