import math

import numpy as np
import pytest
import torch

from accumulation_harness.referee.gradients import (
    Elements,
    compare,
    decompose,
    distances_to,
    flatten,
    moments,
    moments_of,
    norm,
    relative_distance,
)

ROUNDING = 1e-13  # float64 sums of a few hundred terms

A = torch.linspace(-1, 2, 301, dtype=torch.float64) ** 3
G = torch.cos(torch.arange(301, dtype=torch.float64))


def test_comparison_against_numpy():
    a, g, result = A.numpy(), G.numpy(), compare(A, G)
    assert result.distance == pytest.approx(np.linalg.norm(a - g) / np.linalg.norm(g), rel=ROUNDING)
    assert result.scale == pytest.approx(np.linalg.norm(a) / np.linalg.norm(g), rel=ROUNDING)
    assert result.cosine == pytest.approx(np.dot(a, g) / np.linalg.norm(a) / np.linalg.norm(g), rel=ROUNDING)


def test_gradients_so_small_that_their_squares_underflow_have_a_cosine():
    a, g = torch.tensor([3.0, 0.0]).double() * 1e-100, torch.tensor([3.0, 4.0]).double() * 1e-100
    assert compare(a, g).cosine == pytest.approx(0.6)


def test_nothing_is_equal_to_a_zero_or_broken_reference():
    for reference in (torch.zeros(301, dtype=torch.float64), torch.full((301,), math.nan, dtype=torch.float64)):
        assert math.isnan(compare(A, reference).distance)
    assert relative_distance(A, torch.zeros_like(A)) == math.inf
    assert relative_distance(torch.zeros_like(A), torch.zeros_like(A)) == 0


def test_residual_is_the_share_outside_the_span():
    e = torch.eye(5, dtype=torch.float64)
    assert decompose(3 * e[0] + 4 * e[4], [e[0], e[1]]).residual == pytest.approx(0.8, rel=ROUNDING)


def test_elements_read_in_blocks_are_the_elements(monkeypatch):
    tensors = [torch.randn(3, 4), torch.randn(1), torch.randn(25), torch.randn(2, 2, 2)]
    others = [tensor + torch.randn_like(tensor) for tensor in tensors]
    a, g = flatten(tensors), flatten(others)
    whole = moments_of(Elements(tensors), Elements(others)), norm(Elements(tensors))
    assert torch.equal(whole[0], moments(a, g)[:2]) and float(whole[1]) == pytest.approx(np.linalg.norm(a.numpy()), rel=1e-14)
    monkeypatch.setattr("accumulation_harness.referee.gradients.BLOCK", 10)
    blocks = list(Elements(tensors))
    assert len(blocks) > 3 and max(map(len, blocks)) <= 10
    assert torch.equal(torch.cat(blocks).double(), a) and torch.equal(Elements(tensors).vector(), a)
    assert torch.allclose(moments_of(Elements(tensors), Elements(others)), whole[0], rtol=1e-7, atol=0)
    assert torch.allclose(norm(Elements(tensors)), whole[1], rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("block", [1, 10, 100, 10_000])  # smaller than a tensor, than an arm, than all arms, larger
def test_distances_to_are_those_of_whole_vectors(block, dtype, monkeypatch):
    """Of many elements but for the rounding of each difference; an arm a rounding away is not at zero."""
    monkeypatch.setattr("accumulation_harness.referee.gradients.BLOCK", block)
    shapes = [(3, 4), (1,), (25,), (2, 2, 2)]
    reference = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    arms = [[torch.nn.Parameter(p + size * torch.randn_like(p)) for p in reference] for size in (0, torch.finfo(dtype).eps, 1)]
    before = [p.detach().clone() for arm in arms for p in arm]
    found = distances_to(reference, arms)
    vectors = [np.concatenate([p.detach().double().numpy().ravel() for p in arm]) for arm in (reference, *arms)]
    rounding = ROUNDING if block == 10_000 else ROUNDING + torch.finfo(dtype).eps / 2
    np.testing.assert_allclose(found, [math.dist(vectors[0], own) for own in vectors[1:]], rtol=rounding)
    assert found.dtype == torch.float64 and found[0] == 0 and found[1] > 0
    assert all(torch.equal(a, b) for a, b in zip(before, (p for arm in arms for p in arm), strict=True))
