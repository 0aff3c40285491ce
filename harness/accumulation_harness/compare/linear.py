"""Vectors beside each other. All of it is linear in them: it holds for all elements, for a sample and for random sketches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
DEPENDENT = 1e-3  # of the largest singular value of the parts, below which some of them make up another one


class WeightedSum(NamedTuple):
    """A vector as a sum of parts."""

    weights: tuple[float, ...]
    residual: float  # what the sum leaves, relative to the vector


def proportion(b: Vector, a: Vector) -> tuple[float, float]:
    """The factor f that is best in b = f a, and ||b - f a|| / ||b||."""
    if not a.any() or not b.any():
        return 0.0, 0.0 if not b.any() else 1.0
    factor = float((a * b).sum() / np.square(a).sum())
    return factor, float(np.linalg.norm(b - factor * a) / np.linalg.norm(b))


def weighted_sum(vector: Vector, parts: Sequence[Vector]) -> WeightedSum | None:
    """The weights w that are best in vector = sum_k w_k part_k, by least squares; None where the parts cannot be told apart."""
    columns, target = np.stack([part.ravel() for part in parts], axis=1), vector.ravel()
    norms = np.linalg.norm(columns, axis=0)
    if len(columns) < 2 * columns.shape[1] + 4 or not norms.all() or not target.any():
        return None
    weights, _, rank, singular = np.linalg.lstsq(columns / norms, target, rcond=None)
    if rank < columns.shape[1] or singular[-1] < DEPENDENT * singular[0]:
        return None
    weights = weights / norms
    left = float(np.linalg.norm(columns @ weights - target) / np.linalg.norm(target))
    return WeightedSum(tuple(map(float, weights)), left)
