"""The rounding of the sum over a window's micro-batches, with the sum kept in float32, bfloat16 or float16.

Errors are distances to the float64 referee at the initial weights, over permutations of one window (`measure.rounding`).
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from accumulation_harness.experiments.shared.measuring import (
    REFERENCE,
    Arm,
    ArmName,
    OnStep,
    Recipe,
    Row,
    Setting,
    accumulated,
    full_batch,
    snapshot,
)
from accumulation_harness.measure import rounding

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPREAD = math.sqrt((1 - 2.0**-2) / (2 * math.log(2)) / 12)  # rms of an error uniform in one ulp, its mantissa log-uniform
MOST_ONES = 4096  # beyond 2048, where float16 stops; float32 would stop at 2**24


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """Measure the rounding of accumulators of several formats.

    Args:
        setting: The trial.
        on_step: Not called.

    Returns:
        Rows `error`, one for each accumulator and N: L1 beside the full batch's own error and what independent roundings
        would give; and rows `ones`, one for each accumulator: where a sum of ones stops growing.
    """
    config = setting.config
    right = {num: accumulated(config, num) for num in config.accumulation_steps}
    ids = next(setting.windows())
    kinds = [ArmName(name, num) for name in FORMATS for num in right]
    recipes = {str(kind): summed_in(right[kind.accumulation_steps], FORMATS[kind.name], config.loss_scale) for kind in kinds}
    found = rounding.measure(setting, {REFERENCE: full_batch(config), **recipes}, ids, early={})  # errors are drawn, not gated
    sums = {num: _partial_sums(setting, ids, recipe) for num, recipe in right.items()}
    rows = []
    for kind in kinds:
        name, num, one = kind.name, kind.accumulation_steps, found[str(kind)]
        rows.append({
            "quantity": "error", "accumulator": name, "accumulation_steps": num,
            "micro_batch": max(right[num].split(len(ids))),
            "ratio": one.ratio, "low": one.low, "high": one.high,
            "full_error": one.full_error, "arm_error": one.arm_error,
            "predicted_error": independent_roundings(sums[num], FORMATS[name]),
        })  # fmt: skip
    return rows + [{"quantity": "ones", "accumulator": name, "stops_at": stops_at(dtype)} for name, dtype in FORMATS.items()]


def summed_in(recipe: Recipe, dtype: torch.dtype, loss_scale: float) -> Recipe:
    """Round the sum to a format after every backward; nothing changes in float32, which it has anyway.

    In float16 the sum is scaled first, as a loss scaler would have it, so that rounding is seen and not underflow.

    Args:
        recipe: A right recipe.
        dtype: The format.
        loss_scale: Of float16.

    Returns:
        The recipe that rounds.
    """
    if dtype == torch.float32:
        return recipe
    scale = loss_scale if dtype == torch.float16 else 1.0

    def round_the_sum(arm: Arm) -> None:
        for p in arm.model.parameters():
            if p.grad is not None:
                held = arm.scaler.get_scale() if arm.scaler.is_enabled() else 1.0  # already in it
                p.grad.copy_((p.grad * (scale / held)).to(dtype).to(p.dtype) * (held / scale))

    return dataclasses.replace(recipe, after_backward=(round_the_sum,))


def _partial_sums(setting: Setting, ids: Tensor, recipe: Recipe) -> Tensor:
    """[N, P] float64: row k is the exact sum of the window's first k + 1 micro-batches."""
    referee = setting.referee(dropout=False)
    parts = referee.parts(snapshot(referee.model), setting.exact.batch(ids), recipe.split(len(ids)))
    return torch.stack(parts.shares).cumsum(0)


def independent_roundings(sums: Tensor, dtype: torch.dtype) -> float:
    """Predict the relative rms error of a running sum if each partial sum is rounded once, independently.

    eps * SPREAD * sqrt(sum |s_k|^2) / |s_N|. True while what is added is larger than an ulp of the sum; beyond, additions are
    lost, all to the same side (swamping).

    Args:
        sums: [N, P] the partial sums s_k.
        dtype: The format in which they are rounded.

    Returns:
        The error of the last sum.
    """
    return float(torch.finfo(dtype).eps * SPREAD * sums.norm() / sums[-1].norm())


def stops_at(dtype: torch.dtype) -> int:
    """Where 1 + 1 + 1 + ... stops growing in `dtype`, or MOST_ONES where it does not before.

    Args:
        dtype: A floating format.

    Returns:
        The sum.
    """
    total, one = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
    for _ in range(MOST_ONES):
        if torch.equal(total + one, total):
            break
        total = total + one
    return int(total)
