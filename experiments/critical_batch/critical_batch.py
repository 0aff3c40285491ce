"""Branches of one training at growing batches: how large a batch costs nothing, early and late (arXiv:2505.23971).

A training at the smallest batch, B over the largest N, is copied at four points. Every copy goes on at a batch B / N of its own
over the same samples in the same order; the copy at the smallest batch is the training itself, going on. A seed that chooses a
learning rate makes no branches: the rate is chosen by where the training itself ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from accumulation_harness.config import TUNING_SEEDS
from accumulation_harness.experiments.batch_order.batch_order import continue_from
from accumulation_harness.experiments.convergence.learning_curves import Samples, arm_at, evaluation
from accumulation_harness.experiments.shared.measuring import Arm, OnStep, Row, Setting, take_step

PARTS = 8  # a branch is an eighth of the training
STARTS = (0, 1, 3, 7)  # in branches: at the beginning, and then ever later


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per point and N: validation loss in nats per loss term where the branch begins and ends, and where the trunk ends.

    A single row of the trunk where the seed is one that chooses a learning rate.
    """
    config, chosen = setting.config, Samples.drawn(setting)
    stream, length = list(chosen.windows(setting)), config.steps // PARTS
    numbers = sorted({1, *config.accumulation_steps}, reverse=True)
    trunk, rows = arm_at(setting, numbers[0]), []
    starts = STARTS if config.seed < TUNING_SEEDS else ()
    validation = trunk.workload.batch(chosen.validation)
    for t in range(length * PARTS):
        if t % length == 0 and t // length in starts:
            begun = evaluation(trunk, validation)
            for num in numbers:
                branch = arm_at(setting, num)
                continue_from(branch, trunk)
                for later in range(t, t + length):
                    advance(setting, branch, stream, later)
                rows.append({
                    "arm": "branch", "accumulation_steps": num, "batch": config.effective_batch // num,
                    "point": STARTS.index(t // length), "samples": sum(map(len, stream[:t])),
                    "start_loss": begun,
                    "validation_loss": evaluation(branch, validation),
                })  # fmt: skip
        loss = advance(setting, trunk, stream, t)
        on_step(t, [{"arm": "trunk", "accumulation_steps": numbers[0], "step": t, "replicate": 0, "loss": loss}])
    end = evaluation(trunk, validation)
    return [{**row, "trunk_end": end} for row in rows or [{"arm": "trunk", "accumulation_steps": numbers[0]}]]


def advance(setting: Setting, arm: Arm, stream: Sequence[Tensor], t: int) -> float:
    """Train on the samples of window `t`, with that window's random draws; the mean loss."""
    with setting.randomness(t):
        return float(take_step(arm, arm.workload.batch(stream[t])))
