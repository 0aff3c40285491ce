"""What is not a `torch.optim` optimizer: the shape in which others are read, and what the function itself hands over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accumulation_harness.audit.evidence import FLOAT32, Backward, Step, Track, Vector, norms_by
from accumulation_harness.audit.observe.sample import Sample, sample_of
from accumulation_harness.audit.observe.tensors import dense, roundoff

HANDED = "arrays handed over"
NARROW = (torch.bfloat16, torch.float16)


class Foreign:
    """What the audit reads of an optimizer, in the shape of `torch.optim.Optimizer`."""

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self.name = f"{type(optimizer).__module__.partition('.')[0]} {type(optimizer).__name__}"
        self.optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 1.0, "weight_decay": 0.0}]
        self.state: Mapping[Tensor, dict[str, Any]] = {}


class Handed:
    """Makes a `Track` of trees of arrays that the function hands over."""

    def __init__(self) -> None:
        self.track = Track(name=HANDED, tensors=())
        self._weights: Vector | None = None  # the last ones
        self._gradient: Vector | None = None  # of the step under way
        self._contributions: list[Vector] = []
        self._sample: Sample | None = None
        self._roundoffs: tuple[float, ...] = ()

    @property
    def ends_a_step(self) -> bool:
        """Whether weights that come now are those after a step; the first ones are those before training."""
        return self._weights is not None

    def take(self, weights: Any = None, gradient: Any = None, contribution: Any = None) -> None:
        """Copy what is given: see `audit`. Raises ValueError where that is nothing, or has other names or sizes than before."""
        given = {"weights": weights, "gradient": gradient, "contribution": contribution}
        if all(tree is None for tree in given.values()):
            raise ValueError("hand: expected weights, gradient or contribution, got none of them")
        vectors = {what: self._vector(what, tree) for what, tree in given.items() if tree is not None}
        if "contribution" in vectors:
            self._contributions.append(vectors["contribution"])
        self._gradient = vectors.get("gradient", self._gradient)
        if "weights" in vectors:
            if self._weights is not None:
                self._end_step(self._weights, vectors["weights"])
            self._weights = vectors["weights"]

    def _vector(self, what: str, tree: Any) -> Vector:
        arrays = dict(sorted(leaves(tree)))
        tensors = tuple((name, array.size) for name, array in arrays.items())
        if not tensors:
            raise ValueError(f"{what}: expected named arrays, got none")
        if self._sample is None:
            self._sample = sample_of([torch.from_numpy(np.zeros(size)) for _, size in tensors])
            self._roundoffs = tuple(_roundoff(array.dtype) for array in arrays.values())
            self.track.tensors = tensors
        if tensors != self.track.tensors:
            raise ValueError(f"{what}: expected the same named arrays each time, {self.track.tensors[:8]}, got {tensors[:8]}")
        return self._sample.pick(np.concatenate([array.astype(np.float64).reshape(-1) for array in arrays.values()]))

    def _end_step(self, before: Vector, after: Vector) -> None:
        """Where no gradient was handed over the update, with its sign turned, stands for it."""
        assert self._sample is not None
        parts, self._contributions = self._contributions, []
        if parts and self._gradient is None:
            raise ValueError("hand: expected the gradient that the optimizer takes, beside contributions and before the weights")
        total = np.sum(parts, axis=0) if parts else None
        gradient, self._gradient = before - after if self._gradient is None else self._gradient, None
        spreads = norms_by([size for _, size in self.track.tensors], np.sum(np.abs(parts), axis=0)) if parts else None
        self.track.steps.append(
            Step(
                tensors=self.track.tensors,
                kept=() if self._sample.whole else self._sample.counts,
                total=total,
                spreads=(0.0,) * len(self.track.tensors) if spreads is None else tuple(spreads.tolist()),
                roundoffs=self._roundoffs,
                gradient=gradient,
                before=before,
                after=after,
                backwards=tuple(Backward(start="manual", contribution=p, finite=bool(np.isfinite(p).all())) for p in parts),
            )
        )


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The arrays of nested mappings and sequences with their paths, `layers.0.bias`; what is None is left out."""
    if isinstance(tree, Mapping):
        for name, member in tree.items():
            yield from leaves(member, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, (list, tuple)):
        for place, member in enumerate(tree):
            yield from leaves(member, f"{path}.{place}" if path else str(place))
    elif isinstance(tree, Tensor):
        yield path, dense(tree).cpu().float().numpy() if tree.dtype in NARROW else dense(tree).cpu().numpy()
    elif tree is not None:
        yield path, np.asarray(tree)


def _roundoff(dtype: np.dtype[Any]) -> float:
    """Unit roundoff; of a format that NumPy has from others, of two bytes, that of bfloat16."""
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps) / 2
    return roundoff(torch.bfloat16) if dtype.kind == "V" and dtype.itemsize == 2 else FLOAT32
