"""What a trial takes before anything is trained: the same trial of a small perceptron, scaled to the task's own model.

For each parameter a trial keeps so many bytes, and moves so many, whatever the model is; and it takes each window so many times.
All three are counted while the same trial (its arms, optimizer, steps, faults) runs on the stand-in. To them come what one window
keeps for its backward, extrapolated from two small ones, and the seconds that the task takes for it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from accumulation_harness.config import (
    Arms,
    Data,
    DataConfig,
    Execution,
    Model,
    Norm,
    Precision,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.measure import memory
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.studies import candidates
from accumulation_harness.measure.training import HELD_OUT_BATCH
from accumulation_harness.measure.trial import Clock, Levels
from accumulation_harness.recipes import precision
from accumulation_harness.results.measurements import Measurements
from accumulation_harness.system import accelerator, pytree
from accumulation_harness.workloads import Batch, Workload
from accumulation_harness.workloads.layers import copied, in_format

WIDTH = 24  # of the stand-in, whose activations then take little beside its parameters
STEPS = 11  # of the training that are rehearsed: two windows are probed
LEARNS = 1e-3  # a rate at which the stand-in does not run away
TIMED = 3  # times that a pass is taken; the fastest counts
NUMBERS = 2**22  # whose sum is timed: more than caches hold


@dataclass(frozen=True)
class Pass:
    """A forward of a share of a window, and its backward where it has one."""

    share: float
    exact: bool  # in `exact_dtype`; else in the precision under test
    backward: bool


@dataclass(frozen=True)
class Counted:
    """Of the same trial with the stand-in."""

    parameters: int  # of the stand-in
    most: float  # bytes that lived at a time
    moved: float  # bytes that operations have read and written
    passes: Mapping[Pass, float]
    trained: int  # arms, controls included
    seconds: float

    @property
    def per_parameter(self) -> float:
        """Bytes."""
        return self.most / self.parameters


class Traffic(memory.Live):
    """Counts as well what operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view:
            self.moved += sum(leaf.nbytes for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor))
        return made


def rehearse(setting: Setting, *, width: int | None = None, numbers: Sequence[int] = ()) -> Counted:
    """Run the trial of `setting` on the stand-in, its arms together in memory, and count.

    Args:
        setting: The setting of the trial.
        width: Of the stand-in, of which memory is then not counted.
        numbers: Its accumulation steps, if not those of the trial.

    Returns:
        What was counted; of a training longer than STEPS what its last steps took stands for the rest.
    """
    given = dataclasses.replace(setting.config, accumulation_steps=tuple(numbers) or setting.config.accumulation_steps)
    config = _with_stand_in(given, setting, width or WIDTH)
    own = Setting(config, setting.device)
    own.num_parameters, own.not_float64 = setting.num_parameters, setting.not_float64
    seen, passes, began = Traffic(), Counter[Pass](), list[tuple[float, int, Counter[Pass]]]()
    for dtype, workload in own.workloads.items():
        forward = partial(_noted, workload.forward, passes, config.effective_batch, dtype == own.exact_dtype)
        workload.forward = forward  # type: ignore[method-assign]

    def note(*_: object) -> None:
        began.append((time.perf_counter(), seen.moved, passes.copy()))

    note()
    with seen if width is None else nullcontext():
        Levels(own, candidates(config), note, Measurements(), Clock()).result(())
    note()
    (at, moved, taken), (later, more, most) = began[1], began[-2]
    rest = (given.steps - config.steps) / max(1, config.steps - 1)
    return Counted(
        parameters=sum(p.numel() for p in own.initial.parameters()),
        most=seen.most,
        moved=seen.moved + rest * (more - moved),
        passes={one: num + rest * (most[one] - taken[one]) for one, num in passes.items()},
        trained=len(candidates(config)) + config.nulls + 2,
        seconds=began[-1][0] - began[0][0] + rest * (later - at),
    )


def _with_stand_in(config: TrialConfig, setting: Setting, width: int) -> TrialConfig:
    """The trial with a perceptron that draws and normalises where the model does, in windows as small as its N allow."""
    dropout = 0.5 if setting.draws else 0.0
    return dataclasses.replace(
        config,
        workload=WorkloadConfig(data=Data.digits, model=Model.mlp, width=width, dropout=dropout),
        data=DataConfig(),
        norm=Norm.batch if setting.has_batch_norm else Norm.none,
        optimizer=dataclasses.replace(config.optimizer, lr=min(config.optimizer.lr, LEARNS)),
        execution=Execution.eager,
        arms=Arms.together,
        effective_batch=2 * math.lcm(*config.accumulation_steps),
        steps=min(config.steps, STEPS),
    )


def _noted(forward: Callable[..., Any], passes: Counter[Pass], size: int, exact: bool, model: nn.Module, batch: Batch) -> Any:
    if model.training:
        passes[Pass(len(batch) / size, exact, torch.is_grad_enabled())] += 1
    return forward(model, batch)


def bytes_of_window(setting: Setting) -> float:
    """Measure what the backward of a window keeps, and the results of operations, in `exact_dtype`, from two small sizes.

    Args:
        setting: The trial.

    Returns:
        Bytes beside weights, gradients and data.
    """
    [ids] = setting.windows(1)
    workload, model = setting.exact, in_format(copied(setting.initial), setting.device, setting.exact_dtype)
    window, least = workload.batch(ids), workload.smallest_micro_batch
    sizes = (least, 2 * least)
    static, each = memory.fit(sizes, [_most(workload, model, workload.prepared(window.rows(slice(b)))) for b in sizes])
    return static + each * len(window)


def _most(workload: Workload, model: nn.Module, window: Batch) -> int:
    """Bytes beside weights, gradients and data."""
    own = [*model.parameters(), *model.buffers()]
    with memory.Live([*own, *pytree.tensors((window.inputs, window.targets))]) as live:
        before = live.most
        workload.losses(workload.forward(model, window), window).sum().backward()
    gradients = memory.num_bytes(memory.gradients_of(model.parameters()))
    model.zero_grad()
    return int(max(0, live.most - before - gradients))


def seconds(setting: Setting, counted: Counted, overhead: float) -> float:
    """Estimate the time of a trial: its passes, its operations on parameters, and the rest.

    Args:
        setting: The setting of the trial, of which one window has to fit into memory.
        counted: From the stand-in.
        overhead: Seconds of the trial with a stand-in of hardly any parameters.

    Returns:
        Seconds on this machine.
    """
    a, b = torch.zeros(2, NUMBERS, dtype=torch.float64, device=setting.device)
    total: float = overhead
    total += counted.moved * setting.num_parameters / counted.parameters / (3 * a.nbytes) * _fastest(setting, lambda: a.add_(b))
    window = next(setting.windows(1))
    held_out = sum(len(batch) for batch in setting.exact.held_out_batches(HELD_OUT_BATCH)) / len(window)
    for one, num in [*counted.passes.items(), (Pass(held_out, exact=False, backward=False), counted.trained)]:
        total += num * max(1.0, one.share) * _fastest(setting, _taken(setting, one, window))
    return float(total)


def _taken(setting: Setting, one: Pass, window: Tensor) -> Callable[[], object]:
    """A pass of the task itself, on at most the window."""
    config, least = setting.config, setting.exact.smallest_micro_batch
    dtype = setting.exact_dtype if one.exact else precision.parameter_dtype(config.precision)
    workload, model = setting.workloads[dtype], in_format(copied(setting.initial), setting.device, dtype)
    batch = workload.prepared(workload.batch(window[: max(least, round(min(1.0, one.share) * len(window)))]))
    under = setting.config.precision if not one.exact else Precision.float64

    def take() -> None:
        with torch.set_grad_enabled(one.backward), precision.autocast(under, setting.device):
            losses = workload.losses(workload.forward(model, batch), batch)
        if one.backward:
            losses.sum().backward()
            model.zero_grad()

    return take


def _fastest(setting: Setting, call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls, after one that warms up."""
    found = []
    for _ in range(1 + TIMED):
        started = accelerator.clock(setting.device)
        call()
        found.append(accelerator.clock(setting.device) - started)
    return min(found[1:])
