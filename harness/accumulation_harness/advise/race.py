"""Trainings that race to where the configured one ends: which batch and learning rate come there in the fewest seconds.

What the noise scale predicts is where the search begins. It goes on to twice and half the batch, and twice and half the rate, as
long as one of them is faster; a training that is behind the best so far is stopped. No more than 24 are trained, and the fastest
three once more on four further seeds, and rates beside the best of them: the race has chosen the luckiest. Those that cannot be
told from the best are named.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from accumulation_harness.advise import rows
from accumulation_harness.advise.measured import Measured, measure
from accumulation_harness.config import ConfigError, OptimizerConfig, ScheduleConfig, TrialConfig
from accumulation_harness.judge.statistics import mean_interval
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.training import evaluations
from accumulation_harness.measure.trial import num_threads
from accumulation_harness.recipes.determinism import choose_device, deterministic, threads
from accumulation_harness.recipes.micro_batch import Even, windows
from accumulation_harness.recipes.recipe import Recipe, take_step

SEEDS = 2  # of which each training has one from each; their mean counts
FINALS, FINALISTS = 4, 3  # further seeds, over which the fastest are compared once more, and how many of them
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
        yield from self.near()

    def near(self) -> Iterator[Entry]:
        """The smaller steps of the rate, all rates being powers of the square root of 2."""
        at = round(2 * math.log2(self.by))
        yield from (Entry(self.batch, 2 ** (k / 2)) for k in (at + 1, at - 1))


class Race:
    """The trainings so far, by batch and rate."""

    def __init__(self, setting: Setting, seen: Measured, seeds: Sequence[int] = range(SEEDS)) -> None:
        own = setting.config
        self.config = config = dataclasses.replace(own, schedule=ScheduleConfig(warmup_steps=own.schedule.warmup_steps))
        self.seen = seen
        self.settings = [
            Setting(dataclasses.replace(config, seed=own.seed + i), setting.device) if i else setting.under(config) for i in seeds
        ]
        self.base = Entry(config.effective_batch)
        self.steps: dict[Entry, float] = {}  # to the target; infinite where it was stopped

    def seconds(self, entry: Entry) -> float:
        """To the target, at what its step takes when nothing else runs."""
        return self.steps[entry] * self.step_seconds(entry)

    def run(self, start: Entry) -> Entry:
        """The fastest that the search comes to from the configured batch and from `start`."""
        self.begin()
        best = self._faster([start], self.base)
        while len(self.steps) < MOST and (found := self._faster([*best.neighbours()], best)) != best:
            best = found
        return best

    def begin(self) -> None:
        """Train as configured, which sets the target."""
        courses = [list(self._losses(setting, self.base, self.config.steps)) for setting in self.settings]
        if not all(course[-1][1] < course[0][1] for course in courses):
            raise ConfigError(
                "optimizer.lr", self.config.optimizer.lr, f"a rate at which the loss falls in {self.config.steps} steps"
            )
        self.targets = [course[-1][1] for course in courses]
        reached = [next(step for step, loss in course if loss <= course[-1][1]) for course in courses]
        self.steps[self.base] = sum(reached) / len(reached)

    def _faster(self, entries: Sequence[Entry], best: Entry) -> Entry:
        for entry in entries:
            is_possible = entry.batch <= self.seen.population // 2 and rows.splits(self.seen, entry.batch)
            if is_possible and entry not in self.steps:
                self.steps[entry] = self.steps_of(entry, CLEARLY * self.seconds(best))
                best = entry if self.seconds(entry) < CLEARLY * self.seconds(best) else best
        return best

    def optimizer(self, entry: Entry) -> OptimizerConfig:
        """With the rate and the half-life of that batch."""
        ruled = rows.rescaled(self.config.optimizer, self.base.batch, entry.batch, rows.noise(self.seen))
        return dataclasses.replace(ruled, lr=ruled.lr * entry.by)

    def steps_of(self, entry: Entry, most_seconds: float) -> float:
        """Of the mean training; infinite where one does not come to the target in time."""
        found = self.steps_by_seed(entry, most_seconds)
        return sum(found) / len(found)

    def steps_by_seed(self, entry: Entry, most_seconds: float) -> list[float]:
        """Of each training, of which none takes longer than all may together."""
        most = math.floor(min(most_seconds / self.step_seconds(entry), 10 * self.config.steps))
        return [
            next((step for step, loss in self._losses(setting, entry, len(self.settings) * most) if loss <= target), math.inf)
            for setting, target in zip(self.settings, self.targets, strict=True)
        ]

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

    def step_seconds(self, entry: Entry) -> float:
        """Of its fastest split."""
        return self.seen.step_seconds(*rows.splits(self.seen, entry.batch)[0])


def final(setting: Setting, race: Race) -> tuple[Race, Entry, dict[Entry, tuple[float, float]]]:
    """Compare the fastest trainings of a race over further seeds.

    Args:
        setting: The setting of the configured training.
        race: A race that has been run.

    Returns:
        The race over further seeds, the fastest, and those that cannot be told from it: their seconds over its, as the 95%
        interval of paired seeds.
    """
    again = Race(setting, race.seen, range(SEEDS, SEEDS + FINALS))
    fastest = sorted((entry for entry in race.steps if math.isfinite(race.steps[entry])), key=race.seconds)[:FINALISTS]
    try:
        again.begin()
    except ConfigError:  # there it does not learn in so many steps: nothing is known of any
        return race, fastest[0], dict.fromkeys(fastest[1:], (0.0, math.inf))
    limit = 4 * max(map(race.seconds, fastest))
    seconds: dict[Entry, NDArray[np.float64]] = {}
    best, wanted = fastest[0], fastest
    while wanted:  # two seeds may have left out a rate beside the best
        for entry in wanted:
            steps = again.steps_by_seed(entry, limit)
            again.steps[entry], seconds[entry] = sum(steps) / len(steps), np.log(np.array(steps) * race.step_seconds(entry))
        best = min(seconds, key=lambda entry: float(seconds[entry].mean()))
        wanted = [entry for entry in best.near() if entry not in seconds]
    ended = [entry for entry in seconds if entry != best and np.isfinite(seconds[entry]).all()]
    apart = {entry: mean_interval((seconds[entry] - seconds[best]).tolist()) for entry in ended}
    return again, best, {entry: (math.exp(gap.low), math.exp(gap.high)) for entry, gap in apart.items() if gap.low <= 0}


def advised(config: TrialConfig, budget: int | None) -> tuple[list[rows.Advice], Measured]:
    """`rows.advice` of what is measured, its first row by the race.

    Args:
        config: The task.
        budget: Bytes of memory, or None.

    Returns:
        The rows, and what they rest on.
    """
    device = choose_device(config.device)
    with deterministic(config.precision, device):
        setting = Setting(config, device)
        with threads(num_threads(setting, torch.get_num_threads())):
            seen = measure(setting, budget)
            found = rows.advice(config, seen)
            race = Race(setting, seen)
            race.run(Entry(found[0].batch))
            held, best, alike = final(setting, race)
    size, num = rows.splits(seen, best.batch)[0]
    fastest = dataclasses.replace(
        found[0],
        size=size,
        num=num,
        optimizer=race.optimizer(best),
        step_seconds=seen.step_seconds(size, num),
        times=held.seconds(best) / held.seconds(held.base),
        samples=held.steps[best] * best.batch / (held.steps[held.base] * held.base.batch),
        raced=len(race.steps),
        alike=tuple(
            f"b = {rows.splits(seen, one.batch)[0][0].b}, N = {rows.splits(seen, one.batch)[0][1]} at rate "
            f"{race.optimizer(one).lr:.3g} (seconds x {low:.2f} to {high:.2f})"
            for one, (low, high) in alike.items()
        ),
    )
    return [fastest, *found[1:]], seen
