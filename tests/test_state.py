"""The state of any objects by path: found whatever it is called, compared without running anything of theirs."""

import copy
from collections import defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from accumulation_harness.system.state import differing, in_place, moved, snapshot


@dataclass
class Memory:
    scale: float = 2.0
    past: deque[Any] = field(default_factory=lambda: deque([torch.ones(2)]))
    table: Any = field(default_factory=lambda: np.zeros((2, 2), dtype=np.float32))


class Slotted:
    __slots__ = ("__private", "value")

    def __init__(self):
        self.value, self.__private = torch.zeros(3), 1

    def change(self):
        self.__private += 1


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.prior, self.calls, self.memory, self.slotted = torch.zeros(2), 0, Memory(), Slotted()
        self.spectrum = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        vars(self[0].weight)["main_grad"] = torch.zeros(4, 3)


def trained(optimizer="Adam", steps=2):
    torch.manual_seed(0)
    model = Model()
    of = getattr(torch.optim, optimizer)([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    run = SimpleNamespace(model=model, optimizer=of, schedule=torch.optim.lr_scheduler.StepLR(of, 10))
    run.ema = AveragedModel(model)
    run.scaler = torch.amp.GradScaler("cpu", enabled=True)
    for _ in range(steps):
        model.zero_grad()
        run.scaler.scale(model(torch.randn(8, 3)).square().mean()).backward()
        run.scaler.step(of)
        run.scaler.update()
        run.schedule.step()
        run.ema.update_parameters(model)
    return run


def state(run, **how):
    return snapshot(vars(run), **how)


CHANGES = {
    "a weight": (lambda r: r.model[0].weight.data.mul_(2), "model.0.weight"),
    "a buffer": (lambda r: r.model[1].running_var.add_(1), "model.1.running_var"),
    "a plain tensor": (lambda r: r.model.prior.add_(1), "model.prior"),
    "half of a complex weight": (lambda r: torch.view_as_real(r.model.spectrum.data)[:, 1].add_(1), "model.spectrum"),
    "a tensor kept on a parameter": (lambda r: r.model[0].weight.main_grad.add_(1), "model.0.weight.main_grad"),
    "a tensor in a deque": (lambda r: r.model.memory.past[0].add_(1), "model.memory.past[0]"),
    "an array": (lambda r: np.add(r.model.memory.table, 1, out=r.model.memory.table), "model.memory.table"),
    "a slot": (lambda r: r.model.slotted.value.add_(1), "model.slotted.value"),
    "a private slot": (lambda r: r.model.slotted.change(), "model.slotted._Slotted__private"),
    "a moment": (
        lambda r: r.optimizer.state[r.model[2].weight]["exp_avg"].mul_(2),
        "optimizer.state[model.2.weight].exp_avg",
    ),
    "a group's setting": (lambda r: r.optimizer.param_groups[1].update(betas=(0.8, 0.999)), "optimizer.param_groups[1].betas"),
    "a schedule": (lambda r: setattr(r.schedule, "last_epoch", 7), "schedule.last_epoch"),
    "an average": (lambda r: r.ema.module[0].bias.data.add_(1), "ema.module.0.bias"),
    "a scale": (lambda r: r.scaler._scale.mul_(2), "scaler._scale"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_moved_is_told_by_its_path(change):
    make, path = CHANGES[change]
    run, twin = trained(), trained()
    before = state(run)
    assert not moved(before, state(run)) and not differing(state(run), state(twin), 0.0), "an equal beside every difference"
    make(run)
    assert moved(before, state(run)).keys() == {path}
    assert differing(state(run, keep=in_place), state(twin, keep=in_place), 1e-6).keys() == {path}


def test_state_that_is_lost_is_there_instead_of_absent():
    run = trained()
    before = state(run)
    run.optimizer.state.clear()
    found = moved(before, state(run))
    assert len(found) == 12 and {str(one).partition(" ")[2] for one in found.values()} == {"is absent instead of there"}


def test_equal_is_equal_with_nan_and_infinities():
    odd = {"t": torch.tensor([float("nan"), float("inf"), 1.0]), "n": float("nan")}
    assert not differing(snapshot({"x": odd}), snapshot({"x": copy.deepcopy(odd)}), 0.0)
    assert differing(snapshot({"x": odd}), snapshot({"x": {**odd, "t": torch.tensor([0.0, float("inf"), 1.0])}}), 0.0)


class Raising(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} was run")


class Proxy:
    """What a lazy import gives: any look at it raises."""

    def __getattribute__(self, name):
        raise RuntimeError(f"{name} was asked for")

    def __iter__(self):
        raise RuntimeError("it was iterated")

    __len__ = __eq__ = __hash__ = __bool__ = __iter__

    @property
    def value(self):
        raise RuntimeError("a property was run")


HOSTILE = {
    "subclass": lambda: torch.zeros(2).as_subclass(Raising),
    "meta": lambda: torch.zeros(2, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "lazy": lambda: nn.LazyLinear(2).weight,
    "proxy": Proxy,
    "class": lambda: Proxy,
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "huge integer": lambda: 10**400,
    "huge integers": lambda: [10**400, 1],
    "freed": lambda: _freed(),
    "a view of nothing": lambda: torch.zeros(0, 3),
    "array of objects": lambda: np.array([object(), None], dtype=object),
    "mapping by identity": lambda: defaultdict(dict, {id(object()): {"a": 1.0}}),
}


def _freed():
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_hostile_is_run_or_raises(kind):
    item = HOSTILE[kind]()
    before = snapshot({"root": {"first": item, "last": 1.0}})
    after = snapshot({"root": {"first": item, "last": 2.0}})
    assert moved(before, after).keys() == {"root.last"}


def test_a_long_container_is_opened_last():
    rows = [(k, torch.zeros(1)) for k in range(3_000)]
    found = snapshot({"rows": rows, "kept": SimpleNamespace(past=[Memory()])}, most=2_000)
    assert "kept.past[0].scale" in found.values and any(path.startswith("rows") for path in found.unread)


def test_sparse_and_conjugate_tensors_are_read():
    sparse, conjugate = torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()
    before = snapshot({"s": sparse, "c": conjugate})
    assert not before.unread and not moved(before, snapshot({"s": sparse.clone(), "c": conjugate.clone()}))
    assert moved(before, snapshot({"s": sparse * 2, "c": conjugate * 2})).keys() == {"s", "c"}
