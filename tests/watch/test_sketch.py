"""Sketches beside the signs written out, and what they hold while they are made."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accumulation_harness.watch import shards, sketch
from accumulation_harness.watch.sketch import WIDTH, Signs, _signs

BILLION = 10**9
LARGE = 10_000_019  # elements, of three groups of blocks; no block divides it


def written_out(signs, tensor):
    """The sketch in float64, from a sign for each element."""
    place, cpu = torch.arange(tensor.numel()), torch.device("cpu")
    block = place // signs.length
    base, inner = _signs(1, sketch.BLOCK, cpu)[0], _signs(WIDTH, sketch.GROUP, cpu)
    outer = torch.cat([torch.ones(1, WIDTH), _signs(-(-signs.blocks // sketch.GROUP), WIDTH, cpu)[1:]])
    own = tensor.double() * base[place % signs.length]
    return (own * inner[:, block % sketch.GROUP] * outer[block // sketch.GROUP].T).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 37, 1000, 4099, 16 * 256, 70_001])
def test_a_sketch_is_that_of_its_signs(size, dtype, monkeypatch):
    monkeypatch.setattr(sketch, "GROUP", 16)
    monkeypatch.setattr(sketch, "WIDENED", 4)
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    signs = Signs(shards.Held(tensor.numel()))
    known, found = written_out(signs, tensor), signs.of(tensor)
    tolerance = 1e-5 * float(tensor.double().norm())
    assert np.allclose(found, known, rtol=0, atol=tolerance)
    assert size == 1 or not np.allclose(found, written_out(signs, tensor.roll(1)), rtol=0, atol=tolerance)


class Held(TorchDispatchMode):
    """The most bytes that were made and not yet freed, of tensors that are made one after the other."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((arguments, options)) if isinstance(t, torch.Tensor)}
        new = [t.untyped_storage() for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *(s.nbytes() for s in new if s._cdata not in given)])
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sketch_makes_less_than_a_thousandth_of_a_billion_weights(dtype):
    tensor = torch.zeros(LARGE, dtype=dtype)
    signs = Signs(shards.Held(tensor.numel()))
    with Held() as held:
        signs.of(tensor)
    assert 0 < 1.5 * held.largest < 0.001 * tensor.element_size() * BILLION
