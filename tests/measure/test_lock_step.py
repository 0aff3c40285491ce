"""The setting's windows, arms and draws; what comparing costs in memory, and that a probe sees each arm where it stands."""

from __future__ import annotations

import dataclasses
import gc
import math
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from accumulation_harness.config import (
    DataConfig,
    LastWindow,
    Model,
    OptimizerConfig,
    OptimizerName,
    Precision,
    ScheduleConfig,
    ScheduleName,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.judge.counters import Counter
from accumulation_harness.measure.lock_step import REFERENCE, LockStep, LossScale, Setting
from accumulation_harness.recipes.micro_batch import Even, windows
from accumulation_harness.recipes.recipe import Arm, Recipe, step, take_step, unscale, update_scale
from accumulation_harness.referee.gradients import flatten, relative_distance
from accumulation_harness.referee.oracle import snapshot

CPU = torch.device("cpu")
CONFIG = TrialConfig(workload=WorkloadConfig(model=Model.mlp, width=32), effective_batch=8, accumulation_steps=(2,))


def lock_of(setting: Setting, num_arms: int, **recipe: object) -> LockStep:
    labels = [REFERENCE, *(f"arm/{i}" for i in range(num_arms - 1))]
    recipes = {
        label: Recipe(accumulation_steps=1 + (label != REFERENCE), split=Even(8 if label == REFERENCE else 4), **recipe)  # type: ignore[arg-type]
        for label in labels
    }
    return LockStep(setting.arms(recipes, steps=9), setting.config.seed)


def stream(setting: Setting, num: int) -> list[Tensor]:
    return list(setting.windows(num))


def test_windows_are_the_trials_unless_told(toy_setting) -> None:
    """24 samples in windows of 10: the epoch's remainder of 4 is kept or dropped, and the order is that of the seed."""
    config = dataclasses.replace(CONFIG, effective_batch=10, steps=4, seed=3)
    setting = toy_setting(config)
    expected = list(islice(windows(24, 10, 3, LastWindow.keep), 4))
    assert [ids.tolist() for ids in setting.windows()] == [ids.tolist() for ids in expected]
    assert [len(ids) for ids in setting.windows(5, last=LastWindow.drop)] == [10] * 5
    assert [len(ids) for ids in setting.windows(3, size=9)] == [9, 9, 6] and not list(setting.windows(0))
    dropping = toy_setting(dataclasses.replace(config, data=DataConfig(last_window=LastWindow.drop)))
    assert [len(ids) for ids in dropping.windows()] == [10] * 4
    assert [len(ids) for ids in dropping.windows(3, last=LastWindow.keep)] == [10, 10, 4]


def test_an_arm_is_as_configured_but_for_its_changes(toy_setting) -> None:
    """In float64 without clipping, say; the scaler and the moving average stay the trial's, and so does the setting."""
    config = dataclasses.replace(
        CONFIG,
        precision=Precision.float16,
        clip_norm=0.5,
        ema_decay=0.9,
        steps=4,
        schedule=ScheduleConfig(name=ScheduleName.cosine),
    )
    setting = toy_setting(config)
    recipe = Recipe(accumulation_steps=2, split=Even(4))
    plain = setting.arm(recipe)
    adam = OptimizerConfig(name=OptimizerName.adam)
    changed = setting.arm(recipe, precision=Precision.float64, clip_norm=None, optimizer=adam, steps=8)
    assert (plain.precision, plain.clip_norm, type(plain.optimizer).__name__) == (Precision.float16, 0.5, "SGD")
    assert (changed.precision, changed.clip_norm, type(changed.optimizer).__name__) == (Precision.float64, None, "Adam")
    rates = []
    for arm in (plain, changed):
        assert arm.scaler.get_scale() == config.loss_scale == 2.0**12 and arm.ema is not None
        for ids in setting.windows(4):
            take_step(arm, arm.workload.batch(ids))
        rates.append(arm.schedule.get_last_lr()[0] / arm.schedule.base_lrs[0])
    assert rates == pytest.approx([0, 0.5]), "cosine schedules of 4 and of 8 steps, after 4"
    fresh = setting.arms({"one": recipe, "two": recipe}, precision=Precision.float64)
    starts = [flatten(arm.model.parameters()) for arm in fresh.values()]
    assert list(fresh) == ["one", "two"] and all(torch.equal(start, flatten(setting.initial.parameters())) for start in starts)
    assert setting.config == config


def test_draws_have_streams_of_their_own(toy_setting) -> None:
    setting = toy_setting(CONFIG)

    def draw(*stream: int) -> float:
        with setting.randomness(*stream):
            return float(torch.rand(()))

    before = torch.get_rng_state()
    drawn = {stream: draw(*stream) for stream in ((), (0,), (1,), (0, 1), (1, 0))}
    assert len(set(drawn.values())) == len(drawn) and all(draw(*stream) == value for stream, value in drawn.items())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.rand(3, generator=setting.generator(1)), torch.rand(3, generator=setting.generator(1)))
    assert not torch.equal(torch.rand(3, generator=setting.generator(1)), torch.rand(3, generator=setting.generator(2)))


def live_bytes() -> int:
    """Bytes of all tensors that exist, each storage once."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]  # isinstance wakes lazy modules
    found += [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}.values())


@pytest.mark.parametrize("keep", [False, True])
def test_comparing_keeps_two_copies_of_the_parameters_however_many_arms(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SGD, so that arms carry no state of their own; `keep=True` is what must differ."""
    monkeypatch.setattr("accumulation_harness.referee.gradients.BLOCK", 1000)  # as if the model were large
    setting = Setting(CONFIG, CPU)
    size = sum(p.numel() for p in setting.initial.parameters()) * 4
    grown: dict[int, float] = {}
    for num_arms in (3, 9):
        lock, first = lock_of(setting, num_arms), stream(setting, 1)[0]
        del lock.began  # it is one of the two, and made before the count begins
        before, seen = live_bytes(), []

        def look(label: str, seen: list[int] = seen) -> None:
            seen.append(live_bytes())

        lock.began = [p.detach().clone() for p in lock.watches[REFERENCE].parameters]
        lock.step(first, gradients="kept" if keep else "compared", exact=look)
        grown[num_arms] = (max(*seen, live_bytes()) - before) / size
    if keep:
        assert grown[9] > grown[3] + 4
    else:
        assert max(grown.values()) < 2.2


def test_a_gradient_is_compared_as_the_optimizer_consumed_it() -> None:
    """Nothing is kept, yet the distances are those of the gradients, also where a recipe steps twice in a window."""
    setting = Setting(CONFIG, CPU)
    for stages in ({}, {"after_backward": (step,)}):
        kept, dropped = lock_of(setting, 2, **stages), lock_of(setting, 2, **stages)
        for ids in stream(setting, 3):
            own = kept.step(ids)
            reference, arm = (kept.watches[label].gradient for label in (REFERENCE, "arm/0"))
            other = dropped.step(ids, gradients="compared")
            assert [record.loss for record in own.values()] == [record.loss for record in other.values()]
            assert reference is not None and arm is not None
            assert other["arm/0"].gradient.distance == pytest.approx(relative_distance(arm, reference), rel=1e-12)
        assert dropped.watches["arm/0"].gradient is None


def test_a_probe_is_asked_before_the_arm_moves() -> None:
    adam = OptimizerConfig(name=OptimizerName.adam, lr=0.01)
    setting = Setting(dataclasses.replace(CONFIG, optimizer=adam), CPU)
    lock, referee = lock_of(setting, 3), setting.referee()
    for ids in stream(setting, 2):
        at: dict[str, Tensor] = {}

        def exact(label: str, ids: Tensor = ids, at: dict[str, Tensor] = at) -> Tensor | None:
            at[label] = flatten(lock.arms[label].model.parameters())
            return referee.gradient(snapshot(lock.arms[label].model), setting.exact.batch(ids)) if label != "arm/1" else None

        before = {label: flatten(arm.model.parameters()) for label, arm in lock.arms.items()}
        records = lock.step(ids, gradients="compared", exact=exact)
        assert all(torch.equal(at[label], before[label]) for label in before)
        assert 0 < records["arm/0"].gradient_error < 1e-5  # float32 against float64
        assert records["arm/1"].gradient_error != records["arm/1"].gradient_error


@pytest.mark.parametrize("optimizer", [OptimizerName.sgd, OptimizerName.adam])
@pytest.mark.parametrize("scaled", [(), (1,), (0, 2), (0, 1, 2, 3)], ids=str)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_float16_overflows_in_one_arm_alone_is_no_difference_of_the_loop(
    toy_setting, optimizer: OptimizerName, scaled: tuple[int, ...]
) -> None:
    """The arm meets an infinite gradient in the windows `scaled`; the same windows left out by the loop are a difference."""
    config = dataclasses.replace(CONFIG, precision=Precision.float16, optimizer=OptimizerConfig(name=optimizer, lr=0.01))
    setting = toy_setting(config)
    right = Recipe(accumulation_steps=2, split=Even(4))

    def overflow(arm: Arm) -> None:
        if arm.windows in scaled:
            for p in arm.model.parameters():
                assert p.grad is not None
                p.grad[0] = math.inf

    def left_out(arm: Arm) -> None:
        for stage in right.at_boundary:
            if stage not in (unscale, step, update_scale) or arm.windows not in scaled:
                stage(arm)

    lost = dataclasses.replace(right, after_backward=(overflow,))
    skips = dataclasses.replace(right, at_boundary=(left_out,))
    lock = LockStep(setting.arms({REFERENCE: right, "overflowed": lost, "left out": skips}), config.seed)
    for ids in setting.windows(4):
        lock.step(ids)
    assert lock.loss_scales["overflowed"].overflows == list(scaled)
    assert lock.arms["overflowed"].scaler.get_scale() == config.loss_scale / 2 ** len(scaled)
    assert not lock.differing_counters("overflowed")
    assert not lock.loss_scales["left out"].overflows
    assert (Counter.optimizer_steps in lock.differing_counters("left out")) == bool(scaled)


def test_a_scale_that_the_loop_changes_is_a_difference(toy_setting) -> None:
    setting = toy_setting(dataclasses.replace(CONFIG, precision=Precision.float16))
    right = Recipe(accumulation_steps=2, split=Even(4))
    wrong = dataclasses.replace(
        right, at_boundary=(*right.at_boundary, lambda arm: arm.scaler.update(arm.scaler.get_scale() / 2))
    )
    lock = LockStep(setting.arms({REFERENCE: right, "wrong": wrong}), 0)
    for ids in setting.windows(3):
        lock.step(ids)
    assert lock.differing_counters("wrong")[Counter.loss_scale] == (512.0, 4096.0)


def test_growth_is_the_scalers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows in a row that step grow it: an overflow between them starts the count again."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    own, parameter = LossScale(scaler), torch.nn.Parameter(torch.ones(1))
    optimizer, scales = torch.optim.SGD([parameter], lr=0.0), []
    for t, gradient in enumerate([1.0, 1.0, 1.0, math.inf, 1.0, 1.0]):
        scaler.scale((parameter * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        own.end_window(t, stepped=math.isfinite(gradient))
        scales.append(scaler.get_scale())
        assert own.without_overflows == 64.0
    assert scales == [64.0, 128.0, 128.0, 64.0, 64.0, 128.0] and own.overflows == [3]
