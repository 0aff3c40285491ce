"""Which elements of a large model are kept, what is seen of all the others, and where they are stored whole."""

import gc
import math

import numpy as np
import pytest
import torch

from accumulation_harness.audit.observe.sample import (
    SUMMED,
    Store,
    all_finite,
    sample_of,
    signed_sums,
    size_of,
)
from accumulation_harness.audit.observe.tensors import vector

SIZES = (1, 30, 500, 4096, 300_000, 90_000)
TENSORS = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in SIZES]


def with_gradients(*gradients):
    parameters = [torch.zeros(n, requires_grad=True) for n in SIZES[: len(gradients)]]
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    return parameters


def test_norms_are_estimated():
    sample = sample_of(TENSORS)
    ratio = np.linalg.norm(sample.take(TENSORS)) / size_of(TENSORS)
    assert ratio == pytest.approx(math.sqrt(sample.size / sum(SIZES)), rel=0.02)
    assert size_of([None, *TENSORS]) == pytest.approx(np.linalg.norm(vector(TENSORS)), rel=1e-12)


def test_one_element_of_all_shows_in_the_sums():
    sums = signed_sums(with_gradients(*TENSORS))
    assert len(sums) == sum(-(-n // SUMMED) for n in SIZES)
    assert np.linalg.norm(sums) == pytest.approx(size_of(TENSORS), rel=0.1)
    for place in (0, 123_456, 299_999):
        other = [tensor.clone() for tensor in TENSORS]
        other[4][place] += 2.0
        apart = signed_sums(with_gradients(*other)) - sums
        assert np.linalg.norm(apart) == pytest.approx(2.0, rel=1e-5) and np.count_nonzero(apart) == 1
    nothing = signed_sums(with_gradients(None, *TENSORS[1:]))
    assert nothing[0] == 0 and (nothing[1:] == sums[1:]).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_one_element_of_all_that_is_not_finite_is_seen(broken):
    other = TENSORS[4].clone()
    assert all_finite([None, other])
    other[77_777] = broken
    assert not all_finite([other])
    assert all_finite([torch.full((4,), 60_000.0, dtype=torch.float16)])  # their sum is not


def test_sets_are_stored_in_their_own_formats_and_put_back():
    store, sets = (
        Store(),
        [[t + k for t in (TENSORS[3], TENSORS[1].bfloat16(), torch.zeros(0), TENSORS[2].reshape(50, 10).T)] for k in range(3)],
    )
    kept = [store.add(tensors) for tensors in sets]
    for tensors, each in [*zip(sets, kept, strict=True)][::-1]:
        found = [torch.zeros_like(t) for t in tensors]
        each.put(found)
        assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    wider = [t.double() for t in sets[0]]
    kept[1].put(wider)
    assert all(torch.equal(a, b.double()) for a, b in zip(wider, sets[1], strict=True))
    file = store.file
    del store, each
    gc.collect()
    assert not file.closed
    kept.clear()
    gc.collect()
    assert file.closed
