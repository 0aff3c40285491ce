"""Arrays of any library: nests of them by path, and their numbers in float64; torch is asked where it is there."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from accumulation_harness.audit.evidence import FLOAT32, SHORT, Vector
from accumulation_harness.system.packages import HAS_TORCH

NUMBERS = re.compile(r"(\d+)")  # in a path
BFLOAT16 = 2.0 ** -SHORT[0]  # unit roundoff


def members(tree: Any) -> Iterator[tuple[str, Any]] | None:
    """The members of a node of a nest by name.

    Args:
        tree: The node.

    Returns:
        Name and member of each; None of a leaf.
    """
    if isinstance(tree, Mapping):
        return ((str(name), member) for name, member in tree.items())
    if isinstance(tree, (list, tuple)):
        return ((str(place), member) for place, member in enumerate(tree))
    if is_dataclass(tree) and not hasattr(tree, "__array__"):
        return ((one.name, getattr(tree, one.name)) for one in fields(tree))
    return None


def leaves(tree: Any) -> dict[str, Any]:
    """The arrays of nested mappings, sequences and dataclasses, `layers.0.bias`; what is None is left out.

    Args:
        tree: The nest.

    Returns:
        Path -> array, in the order of paths, numbers in them by size.
    """
    return dict(sorted(_leaves(tree, ""), key=_by_numbers))


def _by_numbers(one: tuple[str, Any]) -> list[int | str]:
    """`dense_9` comes before `dense_10`: libraries count on from one run to the next."""
    return [int(part) if place % 2 else part for place, part in enumerate(NUMBERS.split(one[0]))]


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    inside = members(tree)
    if inside is not None:
        for name, member in inside:
            yield from _leaves(member, f"{path}.{name}" if path else name)
    elif tree is not None and not isinstance(tree, (str, bytes)) and not callable(tree):
        yield path, tree


def rebuilt(tree: Any, made: Mapping[str, Any], path: str = "") -> Any:
    """The tree with other leaves, by their paths.

    Args:
        tree: A nest of arrays.
        made: Path -> the leaf to be put there.
        path: Of the nest in a larger one.

    Returns:
        A nest of the same kinds; leaves of no path of `made` are as they were.
    """
    inside = members(tree)
    if inside is None:
        return made.get(path, tree)
    parts = {name: rebuilt(member, made, f"{path}.{name}" if path else name) for name, member in inside}
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
    if is_tensor(leaf):
        return _of_tensor(leaf)
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError):  # bfloat16 of a library that gives its numbers by DLPack or in lists
        if HAS_TORCH:
            import torch

            return _of_tensor(torch.utils.dlpack.from_dlpack(leaf))
        return np.asarray(leaf.tolist(), dtype=np.float64).reshape(-1), BFLOAT16
    own = array.reshape(-1)
    pairs = own.view(own.real.dtype) if array.dtype.kind == "c" else own
    return pairs.astype(np.float64), _roundoff(array.dtype)


def like(leaf: Any, values: Vector) -> Any:
    """An array of the leaf's own library, format and shape.

    Args:
        leaf: An array.
        values: [elements] other numbers.

    Returns:
        These numbers, in the format of the leaf.
    """
    if is_tensor(leaf):
        import torch

        return torch.from_numpy(values).reshape(leaf.shape).to(leaf)
    shaped, own = values.reshape(np.shape(leaf)), getattr(leaf, "__array_namespace__", None)
    return np.asarray(shaped, dtype=np.asarray(leaf).dtype) if own is None else own().asarray(shaped, dtype=leaf.dtype)


def is_tensor(leaf: Any) -> bool:
    """Whether it is one of torch, which is not imported for that.

    Args:
        leaf: Any object.

    Returns:
        True for a tensor.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(leaf, torch.Tensor)


def _of_tensor(tensor: Any) -> tuple[Vector, float]:
    from accumulation_harness.audit.observe.tensors import roundoff, vector

    return vector([tensor]), roundoff(tensor.dtype) or FLOAT32


def _roundoff(dtype: np.dtype[Any]) -> float:
    """Unit roundoff; of a format that NumPy has from others, of two bytes, that of bfloat16."""
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps) / 2
    return BFLOAT16 if dtype.kind == "V" and dtype.itemsize == 2 else FLOAT32


COUNTED = (
    "steps",
    "optimizer_steps",
    "global_step",
    "samples",
    "samples_seen",
    "examples",
    "rows",
    "tokens",
    "tokens_seen",
    "num_tokens",
)


def counts_in(value: Any) -> dict[str, float]:
    """What a training function returned, in a mapping, as the number of steps, samples or tokens it has seen.

    Args:
        value: What the training function returned.

    Returns:
        Name -> count, empty for anything else.
    """
    if not isinstance(value, dict):
        return {}
    found = {key: value[key] for key in COUNTED if key in value}
    return {key: float(n) for key, n in found.items() if isinstance(n, (int, float)) or _is_one(n)}


def _is_one(n: Any) -> bool:
    """Whether it is an array of one number."""
    shape = getattr(n, "shape", None)
    return shape is not None and math.prod(shape) == 1


def losses_in(value: Any) -> tuple[float, ...] | None:
    """Losses a training function returned: a sequence of numbers, or a mapping that holds one under `losses` or `loss`.

    Args:
        value: What the training function returned.

    Returns:
        The losses, or None.
    """
    if isinstance(value, dict):
        value = value.get("losses", value.get("loss"))
    try:
        if hasattr(value, "shape"):
            value = read(value)[0].tolist()
        if not isinstance(value, (list, tuple)) or not value:
            return None
        return tuple(float(item) for item in value)
    except (TypeError, ValueError):
        return None
