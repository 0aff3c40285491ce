"""`accumulation-harness advise`: its rows against a search by hand, what it measures against the step itself, and the command."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch

from accumulation_harness.advise import __main__ as command
from accumulation_harness.advise import measured, race, rows
from accumulation_harness.advise.measured import Measured, Size
from accumulation_harness.config import ConfigError
from accumulation_harness.judge.interval import Interval
from accumulation_harness.judge.statistics import two_batch_sizes
from accumulation_harness.measure import memory
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.recipes.micro_batch import Even
from accumulation_harness.recipes.recipe import Recipe, take_step
from tests.trials import setting_of, trial

SEEN = Measured(
    sizes=tuple(Size(b, 1e-3 + 1e-4 * b, 1000 + 10 * b) for b in (1, 2, 4, 8, 16, 32)),
    update_seconds=5e-3,
    state_bytes=100,
    noise=Interval(40.0, 30.0, 60.0),
    thirds=(30.0, 40.0, 50.0),
    population=10_000,
    couples=(),
    device="cpu",
    budget=10_000,
)
CONFIG = trial("effective_batch=32 optimizer.name=adamw optimizer.lr=0.01")


def test_two_batch_sizes_are_unbiased():
    """Of gradients drawn with a known mean and trace: over many windows the means are |G|^2 and tr Sigma."""
    rng = np.random.default_rng(0)
    mean, spread = np.array([0.3, -0.4, 0.0]), np.array([1.0, 2.0, 0.5])
    each = mean + spread * rng.normal(size=(40_000, 4, 6, 3))  # windows of 4 micro-batches of 6 samples
    small = each.mean(2)
    trace, square = two_batch_sizes((small**2).sum(-1).mean(1), (small.mean(1) ** 2).sum(-1), 4, 24)
    assert trace.mean() == pytest.approx((spread**2).sum(), rel=0.02) and square.mean() == pytest.approx(0.25, rel=0.03)


@pytest.mark.parametrize("noise", [2.0, 40.0, 5000.0])
def test_the_fastest_is_what_a_search_finds(noise):
    """(1 + B_noise / B)(N t + u) over all b and N, where the whole is at most 16 B; memory's least is the smallest b."""
    seen = dataclasses.replace(SEEN, noise=Interval(noise, noise / 2, 2 * noise))
    fastest, least, large = rows.advice(CONFIG, seen)
    seconds = {
        (b, num): (1 + noise / (b * num)) * (num * (1e-3 + 1e-4 * b) + 5e-3)
        for b, num in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)) if b * num <= 512
    }  # fmt: skip
    assert (fastest.size.b, fastest.num) == min(seconds, key=seconds.get)
    assert fastest.times == pytest.approx(min(seconds.values()) / seconds[32, 1]) and fastest.times <= 1
    assert least.size.b in (1, 2) and (large.size.b, large.num, large.times, large.optimizer) == (32, 1, 1.0, CONFIG.optimizer)


def test_rates_are_linear_in_noise_and_stay_without_it():
    sgd, adam = trial("optimizer.lr=0.1").optimizer, CONFIG.optimizer
    assert rows.rescaled(sgd, 32, 8, 1e9).lr == pytest.approx(0.1 / 4, rel=1e-4)
    assert rows.rescaled(adam, 32, 8, 1e9).lr == pytest.approx(0.01 / 2, rel=1e-4)
    assert rows.rescaled(sgd, 32, 8, 1e-9).lr == pytest.approx(0.1)
    small = rows.rescaled(adam, 32, 8, 10)
    assert math.log(0.5, small.beta2) * 8 == pytest.approx(math.log(0.5, adam.beta2) * 32), "the half-life in samples stays"


@pytest.mark.parametrize("changes", [{"noise": Interval(40.0, -5.0, math.inf)}, {"couples": ("a reason",)}])
def test_what_is_not_known_is_not_advised(changes):
    seen = dataclasses.replace(SEEN, **changes)
    found = rows.advice(CONFIG, seen)
    assert (found[0].size, found[0].num) == (found[2].size, found[2].num) and math.isnan(found[0].times)
    told = "\n".join(rows.conclusions(CONFIG, found, seen))
    assert "an interval without an end" in told or "a reason" in told


def test_what_is_measured_is_what_a_step_takes_and_fits():
    config = trial("effective_batch=48 accumulation_steps=[1] steps=12")
    setting = setting_of(config)
    setting.exact.pools_rows = True  # as of lines that are padded to the longest of their micro-batch
    whole = measured.measure(setting, 10**9)
    assert [size.b for size in whole.sizes] == [1, 2, 4, 8, 16, 32, 48, 64, 128, 256, 512] and not whole.couples
    arm = setting.arm(Recipe(accumulation_steps=2, split=Even(32)), steps=2)
    batch = arm.workload.batch(torch.arange(64))
    take_step(arm, batch)
    assert memory.of_step(arm, batch).total == whole.sizes[5].bytes
    budget = int(whole.sizes[5].bytes / (1 - 0.05)) + 1
    setting.exact.mixes_rows = True
    tight = measured.measure(setting, budget)
    assert [size.b for size in tight.sizes] == [1, 2, 4, 8, 16, 32] and tight.couples == ("the model mixes samples",)
    assert all(one.size.bytes <= budget for one in rows.advice(config, tight)) and rows.advice(config, tight)[2].batch == 48


def test_the_noise_is_that_of_micro_batches_that_fit(monkeypatch):
    """Whatever the limit: of 48 samples 8 micro-batches of 6, or those of 4, 2 and 1 that fit."""
    seen, make = [], Setting.arm
    monkeypatch.setattr(
        Setting, "arm", lambda self, recipe, **more: (seen.append(max(recipe.split(48))), make(self, recipe, **more))[1]
    )
    setting = setting_of(trial("effective_batch=48 accumulation_steps=[1] steps=1"))
    for largest in (64, 5, 2, 1):
        measured._noise(setting, largest)
    assert seen == [6, 4, 2, 1]


@pytest.mark.slow  # a part of continuous integration
def test_the_command(capsys):
    assert command.main(["norm=batch", "workload=digits_mlp", "effective_batch=16", "steps=4"]) == 0
    table, _, told = capsys.readouterr().out.partition("\none sample takes")
    assert re.findall(r"^(?:fastest|least|as B = 16)", table, re.M) == ["fastest", "least", "as B = 16"] and "BatchNorm" in told
    assert command.main(["memory=1kB"]) == 2 and "expected at least" in capsys.readouterr().err


def test_a_race_finds_what_a_search_finds(monkeypatch):
    """Where steps to the target are known, with their optimum at four times the rate: all b, N and rates, and the race."""

    def steps(entry):
        return 100 * (1 + 40 / entry.batch) * (1 + math.log2(entry.by / 4) ** 2)

    def in_time(self, entry, most_seconds):
        return steps(entry) if steps(entry) * self.step_seconds(entry) <= most_seconds else math.inf

    base = race.Entry(32)
    monkeypatch.setattr(race.Race, "steps_of", in_time)
    monkeypatch.setattr(race.Race, "_losses", lambda self, *rest: iter([(0, 2.0), (steps(base), 1.0)]))
    own = race.Race(setting_of(trial("steps=4", base=CONFIG)), SEEN)
    best = own.run(base)
    every = [race.Entry(batch, 2.0**k) for batch in (8, 16, 32, 64, 128) for k in range(-2, 6)]
    seconds = {entry: steps(entry) * own.step_seconds(entry) for entry in every}
    assert seconds[best] <= min(seconds.values()) / race.CLEARLY and best.by == 4 and len(own.steps) <= race.MOST + 6


def test_the_configured_training_in_a_race_has_to_learn():
    setting = setting_of(trial("optimizer.name=sgd optimizer.lr=1e4 steps=8", base=CONFIG))
    with pytest.raises(ConfigError, match="the loss falls"):
        race.Race(setting, SEEN).run(race.Entry(16))


@pytest.mark.parametrize(("gap", "names"), [(0.02, True), (0.5, False)])
def test_what_cannot_be_told_from_the_fastest_is_named(gap, names, monkeypatch):
    """Over further seeds one of two takes 2 % or 50 % longer, in seeds that differ by 10 %; then a rate beside them half."""
    base, other, beside, fastest = race.Entry(32), race.Entry(32, 8.0), race.Entry(32, 0.5**0.5), 3.0
    noise = iter(np.random.default_rng(0).normal(scale=0.1, size=100))

    def by_seed(self, entry, most_seconds):
        times = {base: 1, other: 1 + gap, beside: fastest}.get(entry, 3)
        return [100 * times * math.exp(next(noise)) for _ in self.settings]

    monkeypatch.setattr(race.Race, "begin", lambda self: None)
    monkeypatch.setattr(race.Race, "steps_by_seed", by_seed)
    setting = setting_of(trial("steps=4", base=CONFIG))
    own = race.Race(setting, SEEN)
    own.steps = {base: 100.0, other: 99.0, race.Entry(64): math.inf}
    _, best, alike = race.final(setting, own)
    assert names == bool(alike) and (best == base or names)
    assert all(low < 1 < high for low, high in alike.values())
    fastest = 0.5
    held, best, alike = race.final(setting, own)
    assert best == beside and not alike and held.steps[best] < 0.7 * held.steps[base], "a rate that the race has left out"
    monkeypatch.setattr(race.Race, "begin", lambda self: (_ for _ in ()).throw(ConfigError("optimizer.lr", 1, "less")))
    assert race.final(setting, own) == (own, other, {base: (0.0, math.inf)}), "further seeds in which nothing is learnt"
