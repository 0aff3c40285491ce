"""Averaged copies of weights, found among the objects of the program by their shapes and nearness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from accumulation_harness.audit.evidence import Copy
from accumulation_harness.audit.observe import shadows
from accumulation_harness.audit.observe.sample import sample_of
from accumulation_harness.audit.observe.shadows import NEAR, Shadow, nearest

GENERATOR = torch.Generator().manual_seed(11)
SHAPES = ((5, 3), (5,), (2, 5))
PARAMETERS = [torch.randn(shape, generator=GENERATOR, dtype=torch.float64) for shape in SHAPES]


def at(distance: float, parameters: Sequence[Tensor] = PARAMETERS) -> list[Tensor]:
    return [p * (1 + distance) for p in parameters]


def found(kept: object) -> list[Shadow]:
    return [s for s in shadows.find(PARAMETERS, []) if any(t is k for t in s.tensors for k in _tensors(kept))]


def _tensors(kept: object) -> list[Tensor]:
    return list(kept.values()) if isinstance(kept, dict) else list(kept)  # type: ignore[call-overload]


@pytest.mark.parametrize("container", [list, tuple, lambda tensors: dict(enumerate(tensors))])
def test_a_container_of_near_tensors_is_a_shadow(container: object) -> None:
    kept = container(at(0.99 * NEAR))  # type: ignore[operator]
    (shadow,) = found(kept)
    assert (shadow.start, shadow.size) == (0, sum(p.numel() for p in PARAMETERS))
    np.testing.assert_array_equal(shadow.copied().values, np.concatenate([t.numpy().ravel() for t in _tensors(kept)]))
    far = container(at(1.01 * NEAR))  # type: ignore[operator]
    assert not found(far)


def test_a_part_of_the_parameters_is_a_shadow_from_its_first_element_on() -> None:
    part = at(0.1, PARAMETERS[1:])
    (shadow,) = found(part)
    assert (shadow.start, shadow.size) == (15, 15)
    scales = at(0.1, PARAMETERS[1:2])  # alike everywhere
    assert not found(scales)


def test_parameters_themselves_are_no_shadow() -> None:
    kept = [*PARAMETERS]
    assert not found(kept)


def test_the_nearest_of_the_same_parameters_is_taken() -> None:
    sample = sample_of(PARAMETERS)
    near, far = Shadow(0, at(0.1), sample), Shadow(0, at(0.3), sample)
    part = Shadow(15, at(0.0, PARAMETERS[1:]), sample.part(1, 3))
    wanted = Copy(0, np.concatenate([p.numpy().ravel() for p in PARAMETERS]))
    assert nearest([far, near, part], wanted) is near and nearest([part], wanted) is None
