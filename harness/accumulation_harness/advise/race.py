"""Trainings that race to where the configured one ends: which batch and learning rate come there in the fewest seconds.

What the noise scale predicts is where the search begins. It goes on to twice and half the batch, and twice and half the rate, as
long as one of them is faster; a training that is behind the best so far is stopped. No more than 24 are trained.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from accumulation_harness.advise import rows
from accumulation_harness.advise.measured import Measured, measure
from accumulation_harness.config import ConfigError, OptimizerConfig, ScheduleConfig, TrialConfig
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.training import evaluations
from accumulation_harness.measure.trial import num_threads
from accumulation_harness.recipes.determinism import choose_device, deterministic, threads
from accumulation_harness.recipes.micro_batch import Even, windows
from accumulation_harness.recipes.recipe import Recipe, take_step

SEEDS = 2  # of which each training has one from each; their mean counts
POINTS, SMOOTH = 40, 3  # looks at the loss until the configured training ends; of so many the mean counts
PROBE = 500  # training samples whose loss it is
CLEARLY = 0.97  # times the best so far: below it a training is faster
MOST = 24  # trainings


@dataclass(frozen=True)
class Entry:
    """A batch, and its learning rate over that of the rule."""

    batch: int
    by: float = 1.0

    def neighbours(self) -> Iterator[Entry]:
        """Twice and half the rate, twice and half the batch; then smaller steps of the rate, whose best may be near its end."""
        yield from (Entry(self.batch, self.by * factor) for factor in (2, 0.5))
        yield from (Entry(batch, self.by) for batch in (2 * self.batch, self.batch // 2) if batch)
        yield from (Entry(self.batch, self.by * factor) for factor in (2**0.5, 0.5**0.5))


class Race:
    """The trainings so far, by batch and rate."""

    def __init__(self, setting: Setting, seen: Measured) -> None:
        own = setting.config
        self.config = config = dataclasses.replace(own, schedule=ScheduleConfig(warmup_steps=own.schedule.warmup_steps))
        self.seen = seen
        others = [Setting(dataclasses.replace(config, seed=own.seed + i), setting.device) for i in range(1, SEEDS)]
        self.settings = [setting.under(config), *others]
        self.base = Entry(config.effective_batch)
        self.steps: dict[Entry, float] = {}  # to the target; infinite where it was stopped

    def seconds(self, entry: Entry) -> float:
        """To the target, at what its step takes when nothing else runs."""
        return self.steps[entry] * self._step_seconds(entry)

    def run(self, start: Entry) -> Entry:
        """The fastest that the search comes to from the configured batch and from `start`."""
        courses = [list(self._losses(setting, self.base, self.config.steps)) for setting in self.settings]
        if not all(course[-1][1] < course[0][1] for course in courses):
            raise ConfigError(
                "optimizer.lr", self.config.optimizer.lr, f"a rate at which the loss falls in {self.config.steps} steps"
            )
        self.targets = [course[-1][1] for course in courses]
        reached = [next(step for step, loss in course if loss <= course[-1][1]) for course in courses]
        self.steps[self.base] = sum(reached) / SEEDS
        best = self._faster([start], self.base)
        while len(self.steps) < MOST and (found := self._faster([*best.neighbours()], best)) != best:
            best = found
        return best

    def _faster(self, entries: Sequence[Entry], best: Entry) -> Entry:
        for entry in entries:
            is_possible = entry.batch <= self.seen.population // 2 and rows.splits(self.seen, entry.batch)
            if is_possible and entry not in self.steps:
                self.steps[entry] = self._steps(entry, CLEARLY * self.seconds(best))
                best = entry if self.seconds(entry) < CLEARLY * self.seconds(best) else best
        return best

    def optimizer(self, entry: Entry) -> OptimizerConfig:
        """With the rate and the half-life of that batch."""
        ruled = rows.rescaled(self.config.optimizer, self.base.batch, entry.batch, rows.noise(self.seen))
        return dataclasses.replace(ruled, lr=ruled.lr * entry.by)

    def _steps(self, entry: Entry, most_seconds: float) -> float:
        """Of the mean training; infinite where it does not come to the target in time."""
        most = math.floor(min(most_seconds / self._step_seconds(entry), 10 * self.config.steps))
        found = [
            next((step for step, loss in self._losses(setting, entry, SEEDS * most) if loss <= target), math.inf)
            for setting, target in zip(self.settings, self.targets, strict=True)
        ]
        return sum(found) / len(found)

    def _losses(self, setting: Setting, entry: Entry, steps: int) -> Iterator[tuple[int, float]]:
        """Steps taken, and the smoothed loss on the same training samples, from the one before the first step on; NaN ends it."""
        size, num = rows.splits(self.seen, entry.batch)[0]
        every = max(1, round(self.config.steps / POINTS * self.base.batch / entry.batch))
        arm = setting.arm(Recipe(accumulation_steps=num, split=Even(size.b)), optimizer=self.optimizer(entry), steps=10**9)
        ids = torch.arange(arm.workload.num_samples)[:: max(1, arm.workload.num_samples // PROBE)]
        whole = arm.workload.prepared(arm.workload.batch(ids))
        probe = [whole.rows(slice(at, at + self.seen.sizes[-1].b)) for at in range(0, len(ids), self.seen.sizes[-1].b)]
        losses = [evaluations(arm, probe)["loss"]]
        yield 0, losses[0]
        stream = windows(setting.exact.num_samples, entry.batch, setting.config.seed, setting.config.data.last_window)
        for t, ids in enumerate(islice(stream, steps), start=1):
            with setting.randomness(t):
                take_step(arm, arm.workload.batch(ids))
            if t % every == 0 or t == steps:
                losses.append(evaluations(arm, probe)["loss"])
                yield t, sum(losses[-SMOOTH:]) / len(losses[-SMOOTH:])
                if not math.isfinite(losses[-1]):
                    return

    def _step_seconds(self, entry: Entry) -> float:
        return self.seen.step_seconds(*rows.splits(self.seen, entry.batch)[0])


def advised(config: TrialConfig, budget: int | None) -> tuple[list[rows.Advice], Measured]:
    """`rows.advice` of what is measured, its first row by the race."""
    device = choose_device(config.device)
    with deterministic(config.precision, device):
        setting = Setting(config, device)
        with threads(num_threads(setting, torch.get_num_threads())):
            seen = measure(setting, budget)
            found = rows.advice(config, seen)
            race = Race(setting, seen)
            best = race.run(Entry(found[0].batch))
    size, num = rows.splits(seen, best.batch)[0]
    fastest = dataclasses.replace(
        found[0],
        size=size,
        num=num,
        optimizer=race.optimizer(best),
        step_seconds=seen.step_seconds(size, num),
        times=race.seconds(best) / race.seconds(race.base),
        samples=race.steps[best] * best.batch / (race.steps[race.base] * race.base.batch),
        raced=len(race.steps),
    )
    return [fastest, *found[1:]], seen
