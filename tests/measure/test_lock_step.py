"""Lock-step: what comparing costs in memory, and that a probe sees each arm where it stands."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from harness.bench.memory import live_bytes
from harness.config import Model, OptimizerConfig, OptimizerName, TrialConfig, WorkloadConfig
from harness.measure.lock_step import REFERENCE, LockStep, Setting
from harness.recipes.micro_batch import Even
from harness.recipes.recipe import Recipe, step
from harness.referee.gradients import flatten, relative_distance
from harness.referee.oracle import snapshot

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


@pytest.mark.parametrize("keep", [False, True])
def test_comparing_keeps_two_copies_of_the_parameters_however_many_arms(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SGD, so that arms carry no state of their own; `keep=True` is what must differ."""
    monkeypatch.setattr("harness.referee.gradients.BLOCK", 1000)  # as if the model were large
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
