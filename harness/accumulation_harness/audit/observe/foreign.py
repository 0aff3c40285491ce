"""What is not a `torch.optim` optimizer: the shape in which others are read, and what the function itself hands over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumulation_harness.audit.evidence import FLOAT32, WATCH, Backward, Intervention, Step, Track, Vector, norms_by, rounded_to
from accumulation_harness.audit.observe.sample import Sample, sample_of
from accumulation_harness.audit.observe.tensors import dense, roundoff

HANDED = "arrays handed over"


class Foreign:
    """What the audit reads of an optimizer, in the shape of `torch.optim.Optimizer`."""

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self.name = f"{type(optimizer).__module__.partition('.')[0]} {type(optimizer).__name__}"
        self.optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 1.0, "weight_decay": 0.0}]
        self.state: Mapping[Tensor, dict[str, Any]] = {}


class Handed:
    """Makes a `Track` of trees of arrays that the function hands over."""

    def __init__(self, what: Intervention = WATCH) -> None:
        self.track = Track(name=HANDED, tensors=())
        self.arithmetic = 0.0  # unit roundoff that the numbers themselves show
        self.what = what
        self._weights: Vector | None = None  # the last ones
        self._gradient: Vector | None = None  # of the step under way
        self._contributions: list[Vector] = []
        self._sample: Sample | None = None
        self._roundoffs: tuple[float, ...] = ()

    @property
    def ends_a_step(self) -> bool:
        """Whether weights that come now are those after a step; the first ones are those before training."""
        return self._weights is not None

    def take(self, weights: Any = None, gradient: Any = None, contribution: Any = None) -> Any:
        """Copy what is given, as `audit` explains.

        Args:
            weights: Named arrays after a step, or before the first.
            gradient: Named arrays of the gradient that the optimizer takes.
            contribution: Named arrays of what a micro-batch gave.

        Returns:
            The weights to go on with, which are these or a rounding away; None where none were given.

        Raises:
            ValueError: Nothing is given, or what has other names or sizes than before.
        """
        given = {"weights": weights, "gradient": gradient, "contribution": contribution}
        if all(tree is None for tree in given.values()):
            raise ValueError("hand: expected weights, gradient or contribution, got none of them")
        vectors = {what: self._vector(what, tree) for what, tree in given.items() if tree is not None}
        if "contribution" in vectors:
            self._contributions.append(vectors["contribution"])
        self._gradient = vectors.get("gradient", self._gradient)
        if "weights" not in vectors:
            return None
        if self._weights is not None:
            self._end_step(self._weights, vectors["weights"])
        moved = self._moved(weights) if self.what.perturb else weights
        self._weights = vectors["weights"] if moved is weights else self._vector("weights", moved)
        return moved

    def _moved(self, weights: Any) -> Any:
        """By a rounding of each number."""
        random = np.random.default_rng(len(self.track.steps))
        made = {}
        for path, leaf in sorted(_leaves(weights), key=itemgetter(0)):
            values, u = read(leaf)
            apart = self.what.perturb * max(u, self.what.arithmetic)
            made[path] = _like(leaf, values * (1 + apart * random.choice((-1.0, 1.0), size=values.size)))
        return _rebuilt(weights, made)

    def _vector(self, what: str, tree: Any) -> Vector:
        arrays = {path: read(leaf) for path, leaf in sorted(_leaves(tree), key=itemgetter(0))}
        tensors = tuple((name, values.size) for name, (values, _) in arrays.items())
        if not tensors:
            raise ValueError(f"{what}: expected named arrays, got none")
        if self._sample is None:
            self._sample = sample_of([torch.from_numpy(np.zeros(size)) for _, size in tensors])
            self._roundoffs = tuple(u for _, u in arrays.values())
            self.track.tensors = tensors
        if tensors != self.track.tensors:
            raise ValueError(f"{what}: expected the same named arrays each time, {self.track.tensors[:8]}, got {tensors[:8]}")
        return self._sample.pick(np.concatenate([values for values, _ in arrays.values()]))

    def _end_step(self, before: Vector, after: Vector) -> None:
        """Where no gradient was handed over the update, with its sign turned, stands for it."""
        assert self._sample is not None
        parts, self._contributions = self._contributions, []
        if parts and self._gradient is None:
            raise ValueError("hand: expected the gradient that the optimizer takes, beside contributions and before the weights")
        total = np.sum(parts, axis=0) if parts else None
        shown = parts[0] if parts else self._gradient
        found = 0.0 if shown is None else rounded_to(self._sample.counts, shown)
        self.arithmetic = max(self.arithmetic, *self._roundoffs, found)
        gradient, self._gradient = before - after if self._gradient is None else self._gradient, None
        spreads = norms_by(self._sample.counts, np.sum(np.abs(parts), axis=0)) if parts else None
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


def _members(tree: Any) -> Iterator[tuple[str, Any]] | None:
    """The members of a node by name; None of a leaf."""
    if isinstance(tree, Mapping):
        return ((str(name), member) for name, member in tree.items())
    if isinstance(tree, (list, tuple)):
        return ((str(place), member) for place, member in enumerate(tree))
    if is_dataclass(tree) and not hasattr(tree, "__array__"):
        return ((one.name, getattr(tree, one.name)) for one in fields(tree))
    return None


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays of nested mappings, sequences and dataclasses with their paths, `layers.0.bias`; what is None is left out."""
    inside = _members(tree)
    if inside is not None:
        for name, member in inside:
            yield from _leaves(member, f"{path}.{name}" if path else name)
    elif tree is not None and not isinstance(tree, (str, bytes)) and not callable(tree):
        yield path, tree


def _rebuilt(tree: Any, made: Mapping[str, Any], path: str = "") -> Any:
    """The tree with other leaves, by their paths."""
    inside = _members(tree)
    if inside is None:
        return made.get(path, tree)
    parts = {name: _rebuilt(member, made, f"{path}.{name}" if path else name) for name, member in inside}
    if isinstance(tree, Mapping):
        kind: Any = type(tree)
        return kind(zip(tree, parts.values(), strict=True))
    if isinstance(tree, (list, tuple)):
        return type(tree)(*parts.values()) if hasattr(tree, "_fields") else type(tree)(parts.values())
    return replace(tree, **parts)


def read(leaf: Any) -> tuple[Vector, float]:
    """The numbers of an array in float64, and the unit roundoff of its format; by DLPack where NumPy does not know the format.

    Args:
        leaf: An array of any framework.

    Returns:
        [elements] float64, and eps / 2 of its format.
    """
    tensor = leaf
    if not isinstance(leaf, Tensor):
        try:
            array = np.asarray(leaf)
        except (TypeError, ValueError):
            tensor = torch.utils.dlpack.from_dlpack(leaf)
        else:
            if array.dtype.kind != "c":
                return array.astype(np.float64).reshape(-1), _roundoff(array.dtype)
            tensor = torch.from_numpy(array.copy())
    return dense(tensor).reshape(-1).to("cpu", torch.float64).numpy().copy(), roundoff(tensor.dtype) or FLOAT32


def _like(leaf: Any, values: Vector) -> Any:
    """An array of the leaf's own library, format and shape."""
    if isinstance(leaf, Tensor):
        return torch.from_numpy(values).reshape(leaf.shape).to(leaf)
    shaped, own = values.reshape(np.shape(leaf)), getattr(leaf, "__array_namespace__", None)
    return np.asarray(shaped, dtype=np.asarray(leaf).dtype) if own is None else own().asarray(shaped, dtype=leaf.dtype)


def _roundoff(dtype: np.dtype[Any]) -> float:
    """Unit roundoff; of a format that NumPy has from others, of two bytes, that of bfloat16."""
    if dtype.kind == "f":
        return float(np.finfo(dtype).eps) / 2
    return roundoff(torch.bfloat16) if dtype.kind == "V" and dtype.itemsize == 2 else FLOAT32
