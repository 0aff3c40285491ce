"""Muon for weight matrices beside Adam for all else, and its orthogonalisation taken per micro-batch.

Muon (Jordan et al. 2024) steps by O(B), B the momentum of the gradients and O five Newton-Schulz iterations, which bring all
singular values near 1. O is not linear: the mean of O(g_k) is not O of the mean.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from accumulation_harness.config import ConfigError
from accumulation_harness.recipes.recipe import BOUNDARY, Arm, Recipe, step

TARGET = f"{__name__}:MuonAndAdam"  # for `optimizer=custom optimizer.target=...`


class MuonAndAdam(Optimizer):
    """`torch.optim.Muon` for the weight matrices and `torch.optim.AdamW` for all other parameters, as one optimizer."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        adam_lr: float = 0.003,
        weight_decay: float = 0.0,
    ) -> None:
        everything = [p for group in groups for p in group["params"]]
        matrices, others = ([p for p in everything if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
        self.muon = torch.optim.Muon(matrices, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.adam = torch.optim.AdamW(others, lr=adam_lr, weight_decay=weight_decay) if others else None
        super().__init__(everything, {"lr": lr})
        self.param_groups = [*self.muon.param_groups, *([] if self.adam is None else self.adam.param_groups)]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both."""
        self.muon.step()
        if self.adam is not None:
            self.adam.step()


def held(arm: Arm) -> torch.optim.Muon:
    """The arm's Muon. Raises `ConfigError` where it has none."""
    if isinstance(arm.optimizer, MuonAndAdam):
        return arm.optimizer.muon
    raise ConfigError("optimizer.target", type(arm.optimizer).__name__, f"{TARGET}: there is no Muon to look at")


def matrices(arm: Arm) -> list[nn.Parameter]:
    """The weights that Muon steps."""
    return [p for group in held(arm).param_groups for p in group["params"]]


def orthogonalised_per_micro_batch(recipe: Recipe) -> Recipe:
    """The matrices move by the mean of O over the micro-batches' own gradients; momentum and all other weights stay right.

    What a trainer does that orthogonalises as gradients come in (DeepSpeed#8443).
    """

    def keep(arm: Arm) -> None:
        arm.memory.setdefault("sums", []).append([_gradient(p).clone() for p in matrices(arm)])

    def step_each(arm: Arm) -> None:
        muon, sums, parameters = held(arm), arm.memory.pop("sums"), matrices(arm)
        weights = [p.detach().clone() for p in parameters]
        start = [muon.state[p].get("momentum_buffer", torch.zeros_like(p)) for p in parameters]
        moved, buffers, before = ([torch.zeros_like(p) for p in parameters] for _ in range(3))
        for after in sums:
            for p, buffer, a, b in zip(parameters, start, after, before, strict=True):
                muon.state[p]["momentum_buffer"] = buffer.clone()
                p.grad = len(sums) * (a - b)  # of the micro-batch's mean loss
            muon.step()
            for p, value, change, buffer in zip(parameters, weights, moved, buffers, strict=True):
                change += (p.detach() - value) / len(sums)
                buffer += muon.state[p]["momentum_buffer"] / len(sums)
                p.data.copy_(value)
            before = after
        for p in parameters:
            p.grad = None  # which Muon leaves alone
        step(arm)
        for p, value, change, buffer, total in zip(parameters, weights, moved, buffers, sums[-1], strict=True):
            muon.state[p]["momentum_buffer"], p.grad = buffer, total
            p.data.copy_(value + change)

    stages = [(step_each,) if stage is step else (stage,) for stage in BOUNDARY]
    return dataclasses.replace(recipe, after_backward=(keep,), at_boundary=tuple(itertools.chain(*stages)))


def _gradient(p: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad
