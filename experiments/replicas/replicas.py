"""Two ranks, right and wrong ways to synchronise them: each window's step against the referee's, and what went over the wire."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.nn.utils import vector_to_parameters

from accumulation_harness.config import ConfigError, Precision
from accumulation_harness.experiments.shared.measuring import (
    OnStep,
    Row,
    Setting,
    State,
    flatten,
    full_batch,
    relative_distance,
    snapshot,
    take_step,
)
from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.rank_diagnosis import RankEvidence, diagnose_ranks
from accumulation_harness.measure.ranks import RIGHT, SCALED, UNSYNCHRONISED, Ranks, Trace, Way, micro_batches, whole_windows
from accumulation_harness.referee.replicas import observe

WORLD = 2
WAYS: dict[str, Way] = {**RIGHT, **SCALED, **UNSYNCHRONISED}


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per N and way to synchronise, in float64.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with `arm`, `accumulation_steps`, `unequal_terms`, the `expected` and the found `cause`, relative errors of
        gradient and weights, distances between ranks, and `reductions` and bytes that went over the wire.

    Raises:
        ConfigError: A share is too small, or the trial is on a GPU.
    """
    config = setting.config
    if setting.device.type != "cpu":
        raise ConfigError("device", config.device, "cpu: the ranks are processes with gloo between them")
    for num in config.accumulation_steps:
        micro_batches(config, WORLD, num)  # raises for a share that is too small, before a process is started
    whole = _on_one_process(setting)
    with Ranks(setting, WORLD) as ranks:
        return [
            _row(setting, name, num, ranks.run(way, num), whole)
            for num in config.accumulation_steps
            for name, way in WAYS.items()
            if num > 1 or "halfway" not in name
        ]


def expected(name: str, unequal: bool) -> Cause | None:
    """The cause that a way to synchronise should be given; None for a right one.

    Args:
        name: Name of a way to synchronise.
        unequal: Whether ranks hold unequal numbers of loss terms.

    Returns:
        The cause, or None.
    """
    if name in RIGHT or (name == "mean_of_local_means" and not unequal):
        return None
    return Cause.replica_scale if name in SCALED else Cause.replicas_not_synchronised


def _windows_seen(setting: Setting, num: int, traces: Sequence[Trace]) -> list[RankEvidence]:
    """The evidence of each window up to the first wrong one: after that, the ranks are not where they should be."""
    referee, cuts = setting.referee(), micro_batches(setting.config, len(traces), num)
    state, seen = snapshot(setting.initial), []
    for t, ids in enumerate(whole_windows(setting)):
        consumed = [torch.from_numpy(trace.gradients[t]) for trace in traces]
        after = [torch.from_numpy(trace.parameters[t]) for trace in traces]
        seen.append(observe(referee, state, setting.exact.batch(ids), cuts, consumed, after))
        if not seen[-1].is_right:
            break
        state = _at(setting, after[0])
    return seen


def _row(setting: Setting, name: str, num: int, traces: Sequence[Trace], whole: torch.Tensor) -> Row:
    seen, start = _windows_seen(setting, num, traces), flatten(setting.initial.parameters())
    last, wire, steps = seen[-1], traces[0].wire, setting.config.steps
    unequal = len(set(last.terms)) > 1
    ends = [torch.from_numpy(trace.parameters[-1]) for trace in traces]
    return {
        "arm": name,
        "accumulation_steps": num,
        "unequal_terms": unequal,
        "expected": expected(name, unequal) or "",
        "cause": diagnose_ranks(last).cause,
        "windows": len(seen),
        "gradient_error": max(one.distance for one in seen),
        "scale": last.scale,
        "rank_distance": max(one.rank_distance for one in seen),
        "ends_apart": max(relative_distance(end - start, ends[0] - start) for end in ends),
        "trajectory_error": max(relative_distance(end - start, whole - start) for end in ends),
        "reductions": wire.gradient_reductions / steps,
        "gradient_bytes": wire.gradient_bytes / steps,
        "count_bytes": wire.count_bytes / steps,
        "num_parameters": start.numel(),
    }


def _on_one_process(setting: Setting) -> torch.Tensor:
    """[P] weights at the end of the full batch's training on one process."""
    arm = setting.arm(full_batch(setting.config), precision=Precision.float64, clip_norm=None)
    for ids in whole_windows(setting):
        take_step(arm, setting.exact.batch(ids))
    return flatten(arm.model.parameters())


def _at(setting: Setting, parameters: torch.Tensor) -> State:
    model = copy.deepcopy(setting.initial).double()
    vector_to_parameters(parameters, model.parameters())
    return snapshot(model)
