"""Tensors in files: the same values, the same objects, and a trial whose numbers are the same to the bit."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accumulation_harness.config import Arms, Norm, OptimizerConfig, OptimizerName, TrialConfig
from accumulation_harness.measure import shelf
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.shelf import FileShelf, Shelf
from accumulation_harness.trial import run_trial
from tests.toy import CPU

CONFIG = TrialConfig(
    norm=Norm.batch,
    effective_batch=10,
    accumulation_steps=(2,),
    steps=5,
    algebra_steps=5,
    probe_every=2,
    ema_decay=0.9,
    optimizer=OptimizerConfig(name=OptimizerName.adamw, lr=1e-3, weight_decay=0.1),
)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_tensor_on_the_shelf_has_its_values(dtype: torch.dtype) -> None:
    tensor = torch.arange(100_003).to(dtype).reshape(1, -1)
    put = FileShelf().put(tensor)
    assert put is not tensor and put.data_ptr() != tensor.data_ptr()
    assert torch.equal(put, tensor)


def test_a_parameter_stays_the_same_object_and_is_trained_in_its_file() -> None:
    own, model = FileShelf(), nn.Linear(700, 300)
    start, parameter = model.weight.detach().clone(), model.weight
    own.settle(model.parameters())
    before = parameter.data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 700)).sum().backward()
    optimizer.step()
    own.settle(model.parameters())
    assert model.weight is parameter and parameter.data_ptr() == before
    assert torch.equal(parameter, start - 1)


def test_pages_are_given_back_and_no_file_is_left(tmp_path: Path) -> None:
    own = FileShelf(tmp_path)
    tensor = own.put(torch.zeros(16_000_000))
    assert not list(tmp_path.iterdir())
    idle = resident()
    tensor.fill_(1.0)
    assert resident() - idle > 50e6
    own.settle([tensor])
    assert resident() - idle < 10e6
    assert float(tensor.sum()) == 16e6


def test_an_address_that_is_used_again_is_no_file() -> None:
    """Giving back the pages of memory that is not a file's would empty it."""
    own = FileShelf()
    for _ in range(20):
        own.put(torch.ones(80_000))
        plain = torch.ones(80_000)
        own._give_back(plain)
        assert bool((plain == 1).all())


def test_the_numbers_of_a_trial_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "LEAST_BYTES", 0)

    def numbers(arms: Arms) -> tuple[list[dict[str, Any]], list[Any]]:
        rows: list[Any] = []
        result = run_trial(dataclasses.replace(CONFIG, arms=arms), lambda step, own: rows.append(own))
        return result.arms, rows

    assert repr(numbers(Arms.one_by_one)) == repr(numbers(Arms.together))


def test_what_is_taken_is_as_asked_for_or_by_the_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(arms: Arms) -> type[Shelf]:
        return type(Setting(dataclasses.replace(CONFIG, arms=arms), CPU).shelf)

    assert (taken(Arms.together), taken(Arms.one_by_one), taken(Arms.auto)) == (Shelf, FileShelf, Shelf)
    monkeypatch.setattr("accumulation_harness.measure.shelf.available_bytes", lambda: 1000)
    assert taken(Arms.auto) is FileShelf and taken(Arms.together) is Shelf
