"""The arms of a trial as bare loops: the loop everyone writes, once per arm, with nothing compared and nothing logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.recipes import precision
from accumulation_harness.recipes.recipe import Recipe


def bare_arms(setting: Setting, recipes: Mapping[str, Recipe], stream: Sequence[Tensor]) -> dict[str, float]:
    """Every arm in turn over the windows `stream`; the loss of the last window by label."""
    return {label: bare_loop(setting, recipe, stream) for label, recipe in recipes.items()}


def bare_loop(setting: Setting, recipe: Recipe, stream: Sequence[Tensor]) -> float:
    """Train one arm; the last window's loss, which is the same to the bit as that of `recipe.take_step`."""
    config, device = setting.config, setting.device
    arm = setting.arm(recipe, steps=len(stream))  # its model and optimizer; nothing else of it is used
    workload, model, optimizer, scaler = arm.workload, arm.model, arm.optimizer, arm.scaler
    loss_of_window = torch.zeros(())
    for step, ids in enumerate(stream):
        window = workload.batch(ids)
        if recipe.arrange is not None:
            window = recipe.arrange(window, step)
        total, start, losses = workload.num_terms(window).sum(), 0, []
        for size in recipe.split(len(window)):
            micro_batch = window.rows(slice(start, start + size))
            start += size
            with precision.autocast(config.precision, device):
                loss = workload.losses(model(micro_batch.inputs), micro_batch).sum() / total
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        arm.schedule.step()
        optimizer.zero_grad(set_to_none=True)
        loss_of_window = torch.stack(losses).double().sum()
    return float(loss_of_window)
