"""L0 of a task that does not compute in float64: in float32, beside the shuffled full batch, for what differs clearly.

Right code and the referee part by rounding here, and a ReLU may flip. So an error below the gate (`judge.gates.coarse_gate`)
counts as none, one above it as a difference only where a cause reproduces it, or in every window. What is left unseen is not
judged: no arm is equivalent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce

from torch import Tensor

from accumulation_harness.config import Precision
from accumulation_harness.judge.gates import coarse_gate
from accumulation_harness.judge.signature import Signature, worst
from accumulation_harness.judge.verdict import Algebra, Rounding
from accumulation_harness.measure.lock_step import LockStep, Setting
from accumulation_harness.measure.probe import Probe
from accumulation_harness.recipes.recipe import Recipe

NO_ROUNDING = Rounding(
    ratio=math.nan, low=math.nan, high=math.nan, full_error=math.nan, arm_error=math.nan, rank_p=math.nan, permutations=0,
    scale=math.nan, cosine=math.nan, residual=math.nan, weights=(), condition=math.nan, skipped=0,
)  # fmt: skip


def measure(
    setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor], floor_arm: str
) -> dict[str, tuple[Algebra, Signature]]:
    """Each arm over `windows` (sample ids), all probed, in float32 without dropout; `floor_arm`: the shuffled full batch."""
    config = setting.config
    changed = setting.arms(recipes, dropout=False, precision=Precision.float32, steps=len(windows), clip_norm=config.clip_norm)
    lock = LockStep(changed, config.seed, shelf=setting.shelf)
    probe = Probe(setting, lock, setting.referee(dropout=False))
    seen: dict[str, list[Signature]] = {label: [] for label in recipes}
    for t, ids in enumerate(windows):
        probe.remember()
        probe.before()
        records = lock.step(ids)
        for label, own in seen.items():
            own.append(probe.after(label, ids, t, records[label].loss))
    floor = worst(*(one.gradient_error for one in seen[floor_arm]))
    return {label: _result(setting, own, floor, lock.clipped_share(label)) for label, own in seen.items()}


def _result(setting: Setting, windows: Sequence[Signature], floor: float, clipped_share: float) -> tuple[Algebra, Signature]:
    signature = reduce(Signature.merged, (one.above(coarse_gate(floor)) for one in windows))
    algebra = Algebra(
        gradient_error=worst(*(one.gradient_error for one in windows)),
        state_error=math.nan,
        trajectory_error=math.nan,
        loss_error=worst(*(one.loss_error for one in windows)),
        steps=len(windows),
        floor=floor,
        clipping_active=clipped_share > 0,
        clipped_share=clipped_share,
        short_windows=0,
        unequal_terms=signature.unequal_terms,
        not_float64=setting.not_float64,
    )
    return algebra, signature
