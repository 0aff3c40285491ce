"""Vectors beside each other. All of it is linear in them: it holds for all elements, for a sample and for random sketches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
ROUNDOFF = float(np.finfo(np.float64).eps)  # of a weight, whatever is left
DEPENDENT = 1e-6  # of the largest singular value of the parts, below which they make up each other
CERTAIN = 10.0  # roundings of a weight, which are what is left of the vector times the condition
TOLD_APART = 1e3  # condition of the parts, up to which each has a weight of its own even where all is known to four digits


class WeightedSum(NamedTuple):
    """The least-squares fit of a vector by a weighted sum of parts; the defaults mean that nothing is known."""

    weights: tuple[float, ...] = ()  # of each part
    residual: float = math.inf  # what the sum leaves, relative to the vector
    condition: float = math.inf  # of the parts at unit length; the weights mean nothing where it is huge
    sizes: tuple[float, ...] = ()  # norms of the parts
    free: int = 0  # directions that say nothing, since parts cancel there

    @property
    def rounding(self) -> float:
        """By how much rounding may move a weight."""
        return CERTAIN * max(self.residual, ROUNDOFF) * self.condition

    @property
    def told_apart(self) -> bool:
        """Whether no part is nearly made up of others: each has one weight, and no other."""
        return not self.free and self.condition <= TOLD_APART


def dot(a: Vector, b: Vector) -> float:
    """Compute <a, b> on one core: threads of a BLAS, which `@` calls, wait for each other by spinning.

    Args:
        a: [P] a vector.
        b: [P] a vector.

    Returns:
        The sum of their products; on a busy machine thousands of times faster than `a @ b` for vectors of 10,000 elements on.
    """
    return float(np.einsum("i,i", a.ravel(), b.ravel()))


def norm(a: Vector) -> float:
    """Compute ||a||, the Euclidean length.

    Args:
        a: [P] a vector, or a matrix.

    Returns:
        sqrt(<a, a>).
    """
    return math.sqrt(dot(a, a))


def distance(a: Vector, b: Vector) -> float:
    """Compute the relative distance ||a - b|| / ||b||.

    Args:
        a: [P] a vector.
        b: [P] the reference. NaN in the same places is equal.

    Returns:
        The distance; infinite if the shapes differ, or if only b is zero.
    """
    if a.shape != b.shape:
        return math.inf
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    size, apart = norm(b), norm(a - b)
    return apart / size if size else 0.0 if apart == 0 else math.inf


def cosine(a: Vector, b: Vector) -> float:
    """Compute <a, b> / (||a|| ||b||).

    Args:
        a: [P] a vector.
        b: [P] a vector.

    Returns:
        The cosine of their angle; NaN if one of them is zero.
    """
    sizes = norm(a) * norm(b)
    return dot(a, b) / sizes if sizes else math.nan


def proportion(b: Vector, a: Vector) -> tuple[float, float]:
    """Compute the best factor f in b = f a, and what it leaves.

    Args:
        b: [P] a vector.
        a: [P] a vector.

    Returns:
        f = <a, b> / <a, a>, and ||b - f a|| / ||b||.
    """
    if not a.any() or not b.any():
        return 0.0, 0.0 if not b.any() else 1.0
    factor = dot(a, b) / dot(a, a)
    return factor, norm(b - factor * a) / norm(b)


def off_line(a: Vector, direction: Vector) -> float:
    """Compute how far a vector is off the ray along a direction, ||a - f d|| / ||a|| with the best f.

    Args:
        a: [P] a vector.
        direction: [P] the direction d.

    Returns:
        The relative distance; infinite if f <= 0, and for vectors of one element.
    """
    factor, off = proportion(a, direction) if a.size > 1 else (0.0, math.inf)
    return off if factor > 0 else math.inf


def weighted_sum(vector: Vector, parts: Sequence[Vector]) -> WeightedSum:
    """Find the weights w_k in vector = sum_k w_k part_k by least squares.

    If parts are linearly dependent, the solution nearest to w_k = 1 is taken.

    Args:
        vector: [P] the sum.
        parts: K vectors [P].

    Returns:
        The fit; an unknown one if the vector is zero or not finite, or if P < 2 K.
    """
    columns, target = np.stack([part.ravel() for part in parts], axis=1), vector.ravel()
    norms, size = np.linalg.norm(columns, axis=0), norm(target)
    if 2 * len(parts) > target.size or not size or not np.isfinite(size) or not np.isfinite(norms).all():
        return WeightedSum()
    lengths = np.where(norms > 0, norms, 1.0)
    small = np.asarray(np.linalg.qr(np.column_stack([columns / lengths, target - columns.sum(axis=1)]), mode="r"))
    directions, rest = small[:, :-1], small[:, -1]
    u, singular, v = np.linalg.svd(directions, full_matrices=False)
    told = singular > DEPENDENT * singular[0]
    solved = v[told].T @ (u[:, told].T / singular[told][:, None])
    moved = solved @ rest
    moved += solved @ (rest - directions @ moved)  # refined once: what rounding leaves goes by the condition
    left, free = norm(rest - directions @ moved) / size, int(np.count_nonzero(~told))
    condition = float(singular[0] / singular[told][-1]) if norms.all() else math.inf
    return WeightedSum(tuple((1 + moved / lengths).tolist()), left, condition, tuple(norms.tolist()), free)
