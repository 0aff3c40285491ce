"""Which elements of a large model are kept, what is seen of all the others, and where they are stored whole."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from accumulation_harness.audit.observe.sample import (
    FEWEST,
    KEPT,
    SUMMED,
    WHOLE,
    Sample,
    all_finite,
    everything,
    largest,
    looked_at,
    sample_of,
    signed_sums,
    size_of,
)
from accumulation_harness.audit.observe.stored import Store
from accumulation_harness.audit.observe.tensors import vector

SIZES = (1, 30, 500, 4096, 300_000, 90_000)
TENSORS = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in SIZES]


def with_gradients(*gradients: Tensor | None) -> list[Tensor]:
    parameters = [torch.zeros(n, requires_grad=True) for n in SIZES[: len(gradients)]]
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient
    return parameters


def test_small_models_are_kept_whole() -> None:
    small = [torch.arange(WHOLE - 2.0), torch.ones(1, 2)]
    assert sample_of(small).whole and not sample_of([*small, torch.ones(1)]).whole
    np.testing.assert_array_equal(looked_at(small), vector(small))


def test_every_tensor_has_its_share_and_lone_scalars_are_kept() -> None:
    sample = sample_of(TENSORS)
    assert sample.counts[:2] == (1, 30) and min(sample.counts[2:]) >= FEWEST
    assert sample.size == pytest.approx(KEPT, rel=0.01)
    assert sample.counts[4] / sample.counts[5] == pytest.approx(30 / 9, rel=0.01)
    for n, places in zip(SIZES, sample.places, strict=True):
        assert places is None or ((places.diff() > 0).all() and places[0] >= 0 and places[-1] < n)
    with everything():
        assert sample_of(TENSORS).whole
    assert sample_of(TENSORS) is sample


def test_the_elements_taken_are_those_of_the_tensors_in_their_order() -> None:
    sample, shaped = (
        sample_of(TENSORS),
        [*TENSORS[:4], TENSORS[4].reshape(300, 1000), TENSORS[5].reshape(300, 300).T.contiguous().T],
    )
    values = sample.take(shaped)
    np.testing.assert_array_equal(values[31:][: sample.counts[2]], TENSORS[2][sample.places[2]].numpy())
    np.testing.assert_array_equal(values, sample.pick(vector(TENSORS)))
    np.testing.assert_array_equal(values[-sample.part(4, 6).size :], sample.part(4, 6).take(TENSORS[4:]))
    assert not sample.take([None, *TENSORS[1:]])[0] and not sample.pick(np.ones(1))[1:].any()


def test_norms_are_estimated() -> None:
    sample = sample_of(TENSORS)
    ratio = np.linalg.norm(sample.take(TENSORS)) / size_of(TENSORS)
    assert ratio == pytest.approx(math.sqrt(sample.size / sum(SIZES)), rel=0.02)
    assert size_of([None, *TENSORS]) == pytest.approx(np.linalg.norm(vector(TENSORS)), rel=1e-12)


def test_one_element_of_all_shows_in_the_sums() -> None:
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
def test_one_element_of_all_that_is_not_finite_is_seen(broken: float) -> None:
    other = TENSORS[4].clone()
    assert all_finite([None, other]) and largest([None, other]) == float(other.abs().max())
    other[77_777] = broken
    assert not all_finite([other])
    assert all_finite([torch.full((4,), 60_000.0, dtype=torch.float16)])  # their sum is not


def test_sets_are_stored_in_their_own_formats_and_put_back() -> None:
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


def test_an_empty_sample() -> None:
    assert Sample((), ()).take([]).size == 0 and Sample((), ()).whole and not signed_sums([]).size
