"""Where training ends: every arm trained on the same windows from the same weights, and nothing measured on the way but the loss.

L4 of docs/equivalence.md alone: it costs the bare training, so that many seeds and learning rates can be afforded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accumulation_harness.config.arm_name import ACCUMULATED, FULL
from accumulation_harness.measure import noise_scale
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.training import OnStep, Row, outcome
from accumulation_harness.measure.trial import Candidate, full_batch, with_faults
from accumulation_harness.recipes import catalogue
from accumulation_harness.recipes.recipe import Arm, evaluated, take_step
from accumulation_harness.recipes.remedies import batch_norms, calibrate


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per arm: the full batch, every N, the permuted full batch (the null), and the faults that are asked for.

    All train together for the configured steps; a row has the `outcome` at the end, per loss term and in nats, and under
    BatchNorm (`recalibrated_*`) the same weights with the training set's statistics, and `values_per_channel`.
    """
    config = setting.config
    wrong = {name: catalogue.named(name, config.precision) for name in catalogue.names(config)}
    ends = train(setting, [Candidate(FULL, full_batch(config)), *with_faults(config, wrong)], on_step)
    sizes = [max(end.candidate.recipe.split(config.effective_batch)) for end in ends]
    values = {size: values_per_channel(setting, size) for size in set(sizes)} if setting.has_batch_norm else {}
    return [
        {
            **end.candidate.name.columns,
            "micro_batch": size,
            "samples": end.samples,
            **vars(outcome(end.arm, end.losses)),
            **({**recalibrated(setting, end.arm), "values_per_channel": values[size]} if values else {}),
        }
        for end, size in zip(ends, sizes, strict=True)
    ]


def values_per_channel(setting: Setting, micro_batch: int) -> int:
    """b H W: how many values of a channel a micro-batch of b samples has, in the BatchNorm layer that has the fewest."""
    arm = setting.arm(full_batch(setting.config))
    seen: list[int] = []
    for layer in batch_norms(arm.model):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel() // inputs[0].shape[1]))
    with evaluated(arm), torch.no_grad():
        arm.workload.forward(arm.model, arm.workload.batch(torch.arange(micro_batch)))
    return min(seen)


def recalibrated(setting: Setting, arm: Arm) -> Row:
    """Held-out loss and accuracy of an arm's weights with running statistics of the training set (precise BatchNorm)."""
    plain = setting.arm(full_batch(setting.config))
    plain.model.load_state_dict(arm.model.state_dict())
    calibrate(plain, torch.arange(plain.workload.num_samples))
    again = vars(outcome(plain, [math.nan]))
    return {f"recalibrated_{name}": value for name, value in again.items() if name.startswith("held_out")}


@dataclass(frozen=True)
class End:
    """An arm after its training, with the losses of its optimizer steps."""

    candidate: Candidate
    arm: Arm
    losses: list[float]
    samples: int  # of all its windows


def train(setting: Setting, chosen: Sequence[Candidate], on_step: OnStep) -> list[End]:
    """Train the arms side by side for the configured steps: same weights, same windows, same draws."""
    config = setting.config
    arms = [setting.arm(candidate.recipe) for candidate in chosen]
    accumulated = {c.label: arm for c, arm in zip(chosen, arms, strict=True) if c.arm == ACCUMULATED}
    noise = noise_scale.watch(accumulated, config.probe_every)
    losses: list[list[float]] = [[] for _ in chosen]
    num_samples = 0
    for t, ids in enumerate(setting.windows()):
        window = arms[0].workload.batch(ids)
        num_samples += len(ids)
        for arm, own in zip(arms, losses, strict=True):
            with setting.randomness(t):
                own.append(float(take_step(arm, window)))
        squares = noise_scale.read(noise)
        on_step(t, [
            {**candidate.name.columns, "step": t, "samples": num_samples, "loss": own[-1], **squares.get(candidate.label, {})}
            for candidate, own in zip(chosen, losses, strict=True)
        ])  # fmt: skip
    return [End(*parts, num_samples) for parts in zip(chosen, arms, losses, strict=True)]
