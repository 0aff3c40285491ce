"""Tensors in files: the same values, the same objects, and a trial whose numbers are the same to the bit."""

import os
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from accumulation_harness.measure import offload
from accumulation_harness.measure.offload import LEAST_BYTES, FileOffload, Offload
from accumulation_harness.measure.trial import run_trial
from tests.trials import setting_of, trial

CONFIG = (
    "workload.model=mlp workload.width=2 norm=batch effective_batch=10 accumulation_steps=[2] steps=3 algebra_steps=3 "
    "probe_every=2 ema_decay=0.9 optimizer.name=adamw optimizer.lr=1e-3 optimizer.weight_decay=0.1"
)


def resident():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_parameter_stays_the_same_object_and_is_trained_in_its_file():
    own, model = FileOffload(), nn.Linear(700, 300)
    start, parameter = model.weight.detach().clone(), model.weight
    own.settle(model.parameters())
    before = parameter.data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 700)).sum().backward()
    optimizer.step()
    own.settle(model.parameters())
    assert model.weight is parameter and parameter.data_ptr() == before
    assert torch.equal(parameter, start - 1)


def test_pages_are_given_back_and_no_file_is_left(tmp_path):
    own = FileOffload(tmp_path)
    tensor = own.put(torch.zeros(16_000_000))
    assert not list(tmp_path.iterdir())
    idle = resident()
    tensor.fill_(1.0)
    assert resident() - idle > 50e6
    own.settle([tensor])
    assert resident() - idle < 10e6
    assert float(tensor.sum()) == 16e6


def test_the_numbers_of_a_trial_are_the_same_to_the_bit(monkeypatch):
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)

    def numbers(arms):
        rows = []
        result = run_trial(trial(CONFIG, arms), lambda step, own: rows.append(own))
        return repr((result.arms, rows))

    assert numbers("arms=one_by_one") == numbers("arms=together")


def test_what_is_taken_is_as_asked_for_or_by_the_room_there_is(monkeypatch):
    def taken(arms):
        return type(setting_of(trial(CONFIG, f"arms={arms}")).offload)

    assert (taken("together"), taken("one_by_one"), taken("auto")) == (Offload, FileOffload, Offload)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    assert taken("auto") is FileOffload and taken("together") is Offload


def test_what_memory_has_room_for_stays_in_it(monkeypatch):
    own, tensor = FileOffload(room=1000), torch.zeros(LEAST_BYTES)
    for available in (1001, 999):
        monkeypatch.setattr("psutil.virtual_memory", lambda available=available: SimpleNamespace(available=available))
        assert (own.put(tensor) is tensor) == (available > 1000)
