"""What advice rests on, measured on the task itself: seconds and bytes over b, and the noise scale along a training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from accumulation_harness.config import ConfigError
from accumulation_harness.judge.interval import Interval
from accumulation_harness.judge.statistics import ratio_of_means, two_batch_sizes
from accumulation_harness.measure import memory, noise_scale, plan
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.recipes.micro_batch import Even
from accumulation_harness.recipes.recipe import Arm, Recipe, take_step
from accumulation_harness.system import accelerator

ROUNDS = 9  # in which every b takes a step; the fastest counts, whatever else the machine does
LONGEST = 5.0  # seconds of a step, beyond which no larger b is tried
LARGEST = 16  # times the configured batch
PARTS = 8  # micro-batches of the training whose noise is measured, where so few fit


@dataclass(frozen=True)
class Size:
    """A micro-batch of b samples: seconds of its forward and backward, and bytes of a step that accumulates it."""

    b: int
    seconds: float
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Plain values: they come from a process of their own."""

    sizes: tuple[Size, ...]
    update_seconds: float  # of the optimizer's step
    state_bytes: int  # of the optimizer
    noise: Interval  # B_simple = tr(Sigma) / |G|^2 over the training, in samples
    thirds: tuple[float, ...]  # the same of each third
    population: int  # training samples
    couples: tuple[str, ...]  # why a micro-batch computes something else than its samples alone; empty: nothing seen
    device: str
    budget: int  # bytes

    def step_seconds(self, size: Size, num: int) -> float:
        """Of N micro-batches and an update."""
        return num * size.seconds + self.update_seconds


def measure(setting: Setting, budget: int | None) -> Measured:
    """Measure bytes, seconds and gradient noise, on sizes of which an estimate fits the budget.

    Args:
        setting: The trial.
        budget: Bytes; None: what is free.

    Returns:
        What was measured.

    Raises:
        ConfigError: Not even one sample fits.
    """
    config, workload = setting.config, setting.exact
    budget = plan.free_bytes(setting.device) if budget is None else budget
    static, per_sample, step = plan.fit_memory(config)
    plan.choose(config.effective_batch, budget, static, per_sample, step)  # refuses what cannot fit
    least = max(workload.smallest_micro_batch, 2 if setting.has_batch_norm else 1)
    most = min(workload.num_samples // 2, LARGEST * config.effective_batch)
    candidates = sorted({config.effective_batch, *(least * 2**k for k in range(20))})
    fits = [b for b in candidates if least <= b <= most and plan.Plan(b, 1, static, per_sample, step).total <= plan.room(budget)]
    sizes, update, state = _sizes(setting, fits or [least], budget)
    traces, squares = _noise(setting, sizes[-1].b)
    third = max(1, len(traces) // 3)
    couples = {
        "the statistics of BatchNorm are a micro-batch's": setting.has_batch_norm,
        "the loss takes terms from the other samples": workload.coupling is not None,
        "the model mixes samples": workload.mixes_rows,
    }
    return Measured(
        sizes=sizes,
        update_seconds=update,
        state_bytes=state,
        noise=ratio_of_means(traces, squares),
        thirds=tuple(
            ratio_of_means(traces[i : i + third], squares[i : i + third]).estimate for i in (0, third, len(traces) - third)
        ),
        population=workload.num_samples,
        couples=tuple(what for what, is_so in couples.items() if is_so),
        device=str(setting.device),
        budget=budget,
    )


def _sizes(setting: Setting, candidates: Sequence[int], budget: int) -> tuple[tuple[Size, ...], float, int]:
    """Each b whose step takes no more than the budget, the seconds of an update, and the bytes of the optimizer's state."""
    taken, found, clock = {}, {}, Clock(setting.device)
    for b in candidates:
        ids = torch.arange(2 * b) % setting.exact.num_samples
        arm = setting.arm(Recipe(accumulation_steps=2, split=Even(b)), steps=10**6)
        take_step(arm, arm.workload.batch(ids))
        bytes_ = memory.of_step(arm, arm.workload.batch(ids))
        if bytes_.total > plan.room(budget):
            break
        taken[b], found[b] = bytes_, (clock.watch(setting.arm(Recipe(accumulation_steps=1, split=Even(b)), steps=10**6)), ids[:b])
        if clock.step(*found[b])[0] > LONGEST:
            break
    times = {b: [clock.step(*one)] for b, one in found.items()}
    for _ in range(ROUNDS):
        for b, one in found.items():
            times[b].append(clock.step(*one))
    update = min(seconds[1] for own in times.values() for seconds in own)
    sizes = tuple(Size(b, min(one[0] - one[1] for one in times[b]), taken[b].total) for b in found)
    return sizes, update, max(one.state for one in taken.values())


class Clock:
    """Seconds of a step, and of its update alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = 0.0

    def watch(self, arm: Arm) -> Arm:
        """The arm, with its update timed."""
        arm.recipe = dataclasses.replace(arm.recipe, at_boundary=(self._begin, *arm.recipe.at_boundary))
        return arm

    def step(self, arm: Arm, ids: torch.Tensor) -> tuple[float, float]:
        """Seconds of one step on these samples, which are there already, and of its update."""
        batch = arm.workload.batch(ids)
        started = accelerator.clock(self.device)
        take_step(arm, batch)
        ended = accelerator.clock(self.device)
        return ended - started, ended - self.began

    def _begin(self, arm: Arm) -> None:
        self.began = accelerator.clock(self.device)


def _noise(setting: Setting, largest: int) -> tuple[list[float], list[float]]:
    """Unbiased estimates of tr(Sigma) and |G|^2 in every window of the configured training, in micro-batches that fit."""
    size = setting.config.effective_batch
    if size < 2:
        raise ConfigError("effective_batch", size, "2 or more: noise is seen between micro-batches")
    numbers = [num for num in range(2, size + 1) if size % num == 0 and size // num <= largest]
    num = max([num for num in numbers if num <= PARTS], default=numbers[0])
    arm = setting.arm(Recipe(accumulation_steps=num, split=Even(size // num)))
    watch = noise_scale.watch({"": arm}, every=1)
    traces, squares = [], []
    for t, ids in enumerate(setting.windows()):
        with setting.randomness(t):
            take_step(arm, arm.workload.batch(ids))
        row = noise_scale.read(watch)[""]
        if row["micro_batches"] > 1:
            trace, square = two_batch_sizes(**row, population=setting.exact.num_samples)
            traces.append(trace)
            squares.append(square)
    return traces, squares
