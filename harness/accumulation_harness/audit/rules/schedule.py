"""Learning rates that are not the reference's: schedules that advance with the micro-batches, or are laid out for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from accumulation_harness.audit.compare.facts import RunFacts
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.rules.finding import finding
from accumulation_harness.judge.cause import Cause

SAME_LR = 1e-9  # relative; learning rates are computed, not measured
STRETCHED = 0.03  # of the range of the rates, within which a schedule laid out for more steps reproduces them
STRETCHED_MOVEMENT = 0.2  # and of how far the rates have moved
FEWEST_RATES = 3  # below which any two schedules are stretched ones of each other


def schedule(run: RunFacts) -> list[Finding]:
    """At most one finding; empty where the learning rates of all aligned steps are the reference's."""
    pairs = zip(run.mine.lrs, run.reference.lrs, strict=False)
    first = next((i for i, (mine, theirs) in enumerate(pairs) if not same_rates(mine, theirs)), None)
    if first is None:
        return []
    evidence: dict[str, Any] = {
        "laid_out_for_steps": run.mine.horizon,
        "reference_laid_out_for_steps": run.reference.horizon,
        "learning_rates": [lrs[0] for lrs in run.mine.lrs if lrs],
        "reference_learning_rates": [lrs[0] for lrs in run.reference.lrs if lrs],
        "schedule_calls_per_step": list(run.mine.schedule_calls),
    }
    calls, usual = max(run.mine.schedule_calls, default=0), max(run.reference.schedule_calls, default=0)
    cause = Cause.schedule_per_micro_batch
    if calls > usual or run.lr_moves_inside or _runs_ahead(run):
        rate, wanted = _first(run.mine.lrs, first), _first(run.reference.lrs, first)
        message = f"the learning-rate schedule advances per micro-batch: {rate:.4g} instead of {wanted:.4g}"
    elif _stretched(run) or _too_long(run):
        message = "the learning-rate schedule is laid out for micro-batches, and advances once per optimizer step: it lags behind"
    else:
        cause = Cause.unexplained
        evidence["what"] = "gradient"
        message = "the learning rates differ, and not as if the schedule counted micro-batches"
    return [finding(run, first, cause, "schedule", evidence, message)]


def same_rates(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two steps have the same learning rates, group by group."""
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME_LR, abs_tol=1e-300) or (math.isnan(a) and math.isnan(b))


def _runs_ahead(run: RunFacts) -> bool:
    """The candidate's rate at step t is the reference's at N t + offset, for one offset, at two steps at least."""
    n, wanted = run.accumulation_steps, run.reference.lrs
    for offset in range(n):
        pairs = [(mine, wanted[t * n + offset]) for t, mine in enumerate(run.mine.lrs) if t * n + offset < len(wanted)]
        if len(pairs) >= 2 and all(same_rates(mine, theirs) for mine, theirs in pairs):
            return True
    return False


def _too_long(run: RunFacts) -> bool:
    """The schedule is laid out for as many times the reference's steps as there are micro-batches, give or take a window."""
    wanted = [ratio * run.reference.horizon for ratio in _micro_batches_per_step(run)]
    return any(steps > 0 and abs(run.mine.horizon - steps) <= run.accumulation_steps for steps in wanted)


def _micro_batches_per_step(run: RunFacts) -> list[float]:
    """N, and how many there are in the mean, which short windows make fewer; those of 1 left out."""
    mean = sum(run.mine.backwards) / max(1, sum(run.reference.backwards))
    return [ratio for ratio in (run.accumulation_steps, mean) if ratio > 1]


def _stretched(run: RunFacts) -> bool:
    """The candidate's rate at step t is the reference's at t / r, with r the number of backwards per optimizer step."""
    mine, theirs = [lrs[0] for lrs in run.mine.lrs if lrs], [lrs[0] for lrs in run.reference.lrs if lrs]
    reach = max(theirs, default=0.0) - min(theirs, default=0.0)
    if min(len(mine), len(theirs)) < FEWEST_RATES or not reach:
        return False
    moved = max(abs(a - mine[0]) for a in mine)
    allowed = min(STRETCHED * reach, STRETCHED_MOVEMENT * moved)
    for ratio in _micro_batches_per_step(run):
        wanted = [_between(theirs, t / ratio) for t in range(len(mine))]
        if wanted and moved and all(abs(a - b) <= allowed for a, b in zip(mine, wanted, strict=True)):
            return True
    return False


def _between(values: Sequence[float], place: float) -> float:
    """Linear interpolation; the last value beyond the end."""
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - int(place)) * (values[high] - values[low])


def _first(lrs: Sequence[Sequence[float]], index: int) -> float:
    return lrs[index][0] if lrs[index] else math.nan
