"""Observers that come and go in any order, in several threads, and what is stored or compiled meanwhile."""

import copy
import io
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler

from accumulation_harness.observe.patches import Patches

PLACES = ((functional, "cross_entropy"), (torch.autograd, "backward"), (LRScheduler, "step"), (SGD, "zero_grad"))


def noting(calls, name):
    def wrap(original, *args, **kwargs):
        calls.append(name)
        return original(*args, **kwargs)

    return wrap


def observer(calls, name, **options):
    patches = Patches(**options)
    patches.replace({place: noting(calls, name) for place in PLACES})
    return patches


def names():
    found = [getattr(owner, name) for owner, name in PLACES]
    return [*found, nn.functional.cross_entropy, "zero_grad" in vars(SGD)]


def loss():
    return functional.cross_entropy(torch.randn(2, 3), torch.arange(2))


@pytest.fixture(autouse=True)
def put_back():
    before = names()
    yield
    assert names() == before


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.criterion, self.several = functional.cross_entropy, [functional.cross_entropy]
        self.summed = partial(functional.cross_entropy, reduction="sum")


def test_what_is_stored_meanwhile_is_the_original_afterwards_and_needs_nothing_of_ours():
    calls = []
    original = functional.cross_entropy
    patches = observer(calls, "seen")
    model, other, same = Held(), SimpleNamespace(loss=functional.cross_entropy), {functional.cross_entropy: 1}
    meanwhile = io.BytesIO()
    torch.save(model, meanwhile)
    copied = copy.deepcopy(model)
    patches.restore()
    calls.clear()
    for held in (model, copied):
        assert held.criterion is original is held.several[0] and held.summed.func is original
    assert other.loss is original
    next(iter(same))(torch.randn(2, 3), torch.arange(2))  # a key cannot be exchanged, and calls the original
    assert not calls
    assert b"accumulation_harness" not in pickle.dumps(functional.cross_entropy)
    afterwards = io.BytesIO()
    torch.save(model, afterwards)
    for stored in (meanwhile, afterwards):
        assert b"accumulation_harness" not in stored.getvalue()


def test_a_name_that_somebody_else_has_replaced_meanwhile_is_left_to_them():
    calls = []
    patches = observer(calls, "seen")
    original, ours = functional.cross_entropy.__wrapped__, functional.cross_entropy
    functional.cross_entropy = theirs = lambda *args: ours(*args)
    loss()
    assert calls == ["seen"]
    patches.restore()
    assert functional.cross_entropy is theirs
    loss()
    functional.cross_entropy = original
    assert calls == ["seen"]


def test_generators_among_the_arguments_are_read_once():
    seen = []

    def wrap(original, parameters, *args):
        seen.extend(parameters)
        return original(parameters, *args)

    one, other = Patches(), Patches()
    for patches in (one, other):
        patches.replace({(nn.utils, "clip_grad_norm_"): wrap})
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1 and len(seen) == 4
    one.restore()
    other.restore()
    assert model.weight.grad.norm() <= 0.1


def test_compiled_code_calls_through_in_one_graph():
    patches = observer([], "seen")
    compiled = torch.compile(lambda z: functional.cross_entropy(z, torch.arange(2)), backend="eager", fullgraph=True)
    z = torch.randn(2, 3)
    assert torch.equal(compiled(z), functional.cross_entropy(z, torch.arange(2)))
    patches.restore()
    assert torch.equal(compiled(z), functional.cross_entropy(z, torch.arange(2)))
