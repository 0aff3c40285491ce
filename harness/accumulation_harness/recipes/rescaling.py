"""What a larger batch's hyperparameters have to be for the same memory, decay and warm-up in samples.

A small batch of b samples a step becomes one of k b. Over the same samples there are 1/k of the steps, so that everything that
counts in steps is another thing in samples unless it is rescaled. The learning rate's sqrt(k) is a rule of thumb for Adam
(arXiv:2205.10287); the others are algebra.
"""

from __future__ import annotations

import dataclasses

from accumulation_harness.config import TrialConfig
from accumulation_harness.system.enums import StrEnum


class Rescaling(StrEnum):
    """A hyperparameter that is rescaled when the batch grows by k; `copied` and `all` are none and all of them."""

    copied = "copied"
    rate = "rate"  # lr sqrt(k)
    beta2 = "beta2"  # beta2^k: the half-life in samples stays
    weight_decay = "weight_decay"  # lambda k, or what keeps lr lambda per sample where the rate is rescaled too
    warmup = "warmup"  # the same samples, not the same steps
    ema = "ema"  # decay^k: the averaged weights remember as many samples
    all = "all"


SINGLE = (Rescaling.rate, Rescaling.beta2, Rescaling.weight_decay, Rescaling.warmup, Rescaling.ema)


def rescaled(config: TrialConfig, what: Rescaling, k: int) -> TrialConfig:
    """The setting of a batch k times as large as the one that `config`'s hyperparameters are for.

    With w warm-up steps the rate rises as (t + 1) / (w + 1); w' = (w + 1) / k - 1 gives the rate of the last of the k small steps
    that a large step stands for, and k has to divide w + 1.
    """
    parts = SINGLE if what == Rescaling.all else (what,)
    optimizer, schedule, ema = config.optimizer, config.schedule, config.ema_decay
    if Rescaling.rate in parts:
        optimizer = dataclasses.replace(optimizer, lr=optimizer.lr * k**0.5)
    if Rescaling.beta2 in parts:
        optimizer = dataclasses.replace(optimizer, beta2=optimizer.beta2**k)
    if Rescaling.weight_decay in parts:  # a step decays by lr lambda, so a larger rate has done part of it
        per_sample = config.optimizer.lr * config.optimizer.weight_decay * k
        optimizer = dataclasses.replace(optimizer, weight_decay=per_sample / optimizer.lr)
    if Rescaling.warmup in parts and schedule.warmup_steps:
        assert (schedule.warmup_steps + 1) % k == 0, f"{k} does not divide {schedule.warmup_steps} + 1"
        schedule = dataclasses.replace(schedule, warmup_steps=(schedule.warmup_steps + 1) // k - 1)
    if Rescaling.ema in parts and ema is not None:
        ema = ema**k
    return dataclasses.replace(config, optimizer=optimizer, schedule=schedule, ema_decay=ema)
