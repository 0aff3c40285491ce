"""`accumulation-harness plan trial memory=24GB [settings]`: what a trial takes, before it is trained, and what fits."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import psutil
import torch

from accumulation_harness.config import Arms, ConfigError, TrialConfig
from accumulation_harness.measure import rehearsal
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.studies import candidates
from accumulation_harness.measure.trial import check_splits, num_threads
from accumulation_harness.recipes.determinism import choose_device, deterministic, threads

IN_FILES = 96  # bytes for each parameter, measured (docs/performance.md): an arm, what it is compared with, and pages of files
LOOKED_AT = 4  # samples on which a task is tried beforehand
FREE = 0.2  # of the memory: temporaries inside operations, and what the allocator keeps, are not counted


@dataclass(frozen=True)
class Needed:
    """Bytes of a trial."""

    arms: float  # and all that is kept for each parameter
    window: float  # kept for the backward of the full batch
    process: float  # before a trial

    @property
    def total(self) -> float:
        """Of all."""
        return self.arms + self.window + self.process


class TrialPlan:
    """Of one trial, for one device."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.config = setting, setting.config
        self.in_files = self.config.arms == Arms.one_by_one

    @cached_property
    def counted(self) -> rehearsal.Counted:
        """The stand-in's trial, with the arms of this one."""
        return rehearsal.rehearse(self.setting)

    @cached_property
    def process(self) -> float:
        """Bytes of Python and what the stand-in's trial has had it load."""
        _ = self.counted
        gc.collect()
        return float(psutil.Process().memory_info().rss) if self.setting.device.type == "cpu" else 0.0

    @cached_property
    def of_window(self) -> float:
        """Bytes that the full batch keeps."""
        return rehearsal.bytes_of_window(self.setting)

    def needed(self, counted: rehearsal.Counted | None = None, *, batch: int | None = None, in_files: bool = False) -> Needed:
        """Bytes; also as counted with other arms, with windows of `batch`, or with the arms in files."""
        each = IN_FILES if in_files or self.in_files else (counted or self.counted).per_parameter
        share = 1.0 if batch is None else batch / self.config.effective_batch
        return Needed(each * self.setting.num_parameters, share * self.of_window, self.process)

    def overhead(self) -> float:
        """Seconds of the trial with a stand-in of hardly any parameters."""
        return rehearsal.rehearse(self.setting, width=1).seconds

    def alternatives(self, room: float) -> Iterator[str]:
        """Settings with which it fits, the least change first, and what they take."""
        numbers, size = sorted(self.config.accumulation_steps), self.config.effective_batch
        for num in range(len(numbers) - 1, 0, -1):
            fewer = rehearsal.rehearse(self.setting, numbers=numbers[:num])
            if (total := self.needed(fewer).total) <= room:
                yield f"accumulation_steps=[{','.join(map(str, numbers[:num]))}] ({_bytes(total)})"
                break
        step = math.lcm(*numbers)
        fits = [batch for batch in range(step, size, step) if self.needed(batch=batch).total <= room]
        if fits:
            yield f"effective_batch={fits[-1]} ({_bytes(self.needed(batch=fits[-1]).total)})"
        if self.setting.device.type == "cpu" and (total := self.needed(in_files=True).total) <= room:
            yield f"arms=one_by_one ({_bytes(total)}; two to four times as long)"


def explain(config: TrialConfig, budget: int) -> list[str]:
    """What a trial takes of `budget` bytes, by its parts, and how long.

    Args:
        config: The trial.
        budget: Bytes of memory.

    Returns:
        Lines for a terminal.

    Raises:
        ConfigError: It does not fit; the message says what would.
    """
    device = choose_device(config.device)
    with deterministic(config.precision, device):
        few = dataclasses.replace(config, effective_batch=min(LOOKED_AT, config.effective_batch))
        setting = Setting(few, device).under(config)
        check_splits(setting, candidates(config))
        available = torch.get_num_threads()
        with threads(1):  # the stand-in is small, and many threads make it slower
            plan = TrialPlan(setting)
            needed, millions = plan.needed(), setting.num_parameters / 1e6
            if needed.total > (1 - FREE) * budget:
                fits = (
                    ", or ".join(plan.alternatives((1 - FREE) * budget)) or "nothing of fewer N, smaller windows or arms in files"
                )
                told = f"a trial of {millions:.3g} million parameters takes {_bytes(needed.total)}; what fits: {fits}"
                raise ConfigError("memory", _bytes(budget), f"{_bytes(needed.total / (1 - FREE))} or more: {told}")
            overhead = plan.overhead()
        with threads(num_threads(setting, available)):
            seconds = rehearsal.seconds(setting, plan.counted, overhead)
    where = "in files, one at a time in memory" if plan.in_files else "together in memory"
    each = f"{needed.arms / setting.num_parameters:.0f} bytes a parameter"
    return [
        f"a trial of {millions:.3g} million parameters takes {_bytes(needed.total)} of {_bytes(budget)} on {device}, "
        f"{FREE:.0%} of which stay free",
        f"  {_bytes(needed.arms)} its {plan.counted.trained} arms, {where}: {each}",
        f"  {_bytes(needed.window)} what the backward of {config.effective_batch} samples keeps",
        f"  {_bytes(needed.process)} Python and its libraries",
        f"about {_duration(seconds)}, estimated from passes and operations on parameters that were timed here",
    ]


def _bytes(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e8 else f"{number / 1e6:.3g} MB"


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds / 60:.2g} min" if seconds < 6000 else f"{seconds / 3600:.2g} h"
