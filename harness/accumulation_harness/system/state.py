"""What objects hold in numbers (weights, buffers, optimizer state, counters), by path; and what differs between two such states.

It is found whatever it is called: in attributes, mappings and sequences, as deep as they go. Nothing of the objects' own is run,
no property, no method of theirs and no operation of a tensor subclass, so that looking leaves no trace and meets no exception.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PLAIN = (
    Tensor,
    nn.Parameter,
)  # by type alone: to ask an object for its class would wake lazy proxies, and fail on dead weak ones
CONTAINERS = list, tuple, dict, deque
LONG = 1_000  # members of a container that is opened last
MOST_OBJECTS = 100_000  # that are looked into: an attribute may lead to everything there is
OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.device, torch.dtype)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MRO, _DICT = (type.__dict__[name].__get__ for name in ("__mro__", "__dict__"))
SHARED = "efdbhilq"  # formats of arrays whose memory a tensor can share
OF_MODULES = ("_parameters", "_buffers", "_modules")  # whose members go by their own names

Value = Tensor | bool | int | float | complex  # a tensor is strided and real, on its own device


@dataclass(frozen=True)
class Snapshot:
    """The numbers that some objects held at one moment."""

    values: Mapping[str, Value]  # by path: `model.layers.0.weight`, `optimizer.state[model.layers.0.weight].exp_avg`
    unread: tuple[str, ...]  # paths of tensors whose numbers cannot be had: subclasses, meta, quantised; and what is too far
    paths: Mapping[int, str] = field(default_factory=dict)  # of the objects that were met, by identity, while they live
    leaves: Mapping[str, Tensor] = field(default_factory=dict)  # by path, those that may take gradients
    generators: tuple[Any, ...] = ()  # of random numbers, that were met


@dataclass(frozen=True)
class Difference:
    """One path of two states; None where a state has nothing there."""

    path: str
    own: Value | None
    other: Value | None
    error: float  # ||own - other|| / ||other||; infinite where shapes differ or only one is there

    def __str__(self) -> str:
        """`schedule.last_epoch is 16 instead of 4`, or how far a tensor is off."""
        if self.own is None or self.other is None:
            said = ("absent", "there") if self.own is None else ("there", "absent")
        elif any(isinstance(value, Tensor) and value.numel() != 1 for value in (self.own, self.other)):
            return f"{self.path} is off by {self.error:.1e}"
        else:
            values = (value.item() if isinstance(value, Tensor) else value for value in (self.own, self.other))
            own, other = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
            said = own, other + (f", off by {self.error:.1e}" if own == other else "")
        return f"{self.path} is {said[0]} instead of {said[1]}"


def copied(tensor: Tensor) -> Tensor:
    """The tensor's numbers in memory of their own.

    Args:
        tensor: Any tensor.

    Returns:
        A detached copy of the same shape and format.
    """
    return tensor.detach().clone()


def in_place(tensor: Tensor) -> Tensor:
    """Keep a tensor's numbers where they are, without a copy: for a state that is compared before it moves on.

    Args:
        tensor: Any tensor.

    Returns:
        The same storage, outside of the graph.
    """
    return tensor.detach()


@torch.no_grad()
def snapshot(roots: Mapping[str, object], keep: Callable[[Tensor], Tensor] = copied, most: int = MOST_OBJECTS) -> Snapshot:
    """Collect all tensors, arrays and numbers that are reached from `roots`, each under the first path that leads to it.

    Gradients are no state. An optimizer's state goes by the paths of its parameters, which a model before it names.

    Args:
        roots: By the name that paths begin with.
        keep: What is kept of a plain strided tensor.
        most: How many objects are looked into, the nearest ones.

    Returns:
        Path -> value, the paths that could not be read, and the random generators that were met.
    """
    found = _Search(keep, most)
    with torch._C.DisableTorchFunction():  # a mode of somebody's is not asked either
        for name, root in roots.items():
            found.visit(name, root)
        found.run()
    return Snapshot(found.values, tuple(found.unread), found.paths, found.leaves, tuple(found.generators))


def moved(before: Snapshot, after: Snapshot) -> dict[str, Difference]:
    """Compare a state with itself, bit by bit.

    Args:
        before: The state then.
        after: The state now.

    Returns:
        Path -> difference of each value that is not what it was.
    """
    return differing(after, before, 0.0)


@torch.no_grad()
def differing(own: Snapshot, other: Snapshot, tolerance: float) -> dict[str, Difference]:
    """Compare two states, value by value.

    Args:
        own: The state in question.
        other: What it should be.
        tolerance: The relative distance ||a - b|| / ||b|| up to which two values are the same; 0 for to the bit.

    Returns:
        Path -> difference of each value beyond it, also of those that only one of the two has. Values that could not be read
        are left out.
    """
    found, unread = {}, {*own.unread, *other.unread}
    for path in {**other.values, **own.values}:
        if path not in unread:
            a, b = own.values.get(path), other.values.get(path)
            error = _relative_error(a, b)
            if not error <= tolerance:
                found[path] = Difference(path, a, b, error)
    return found


def _relative_error(own: Value | None, other: Value | None) -> float:
    """||own - other|| / ||other||, 0 for equal ones, NaN and infinities included; infinite for what cannot be compared."""
    if own is None or other is None:
        return math.inf
    if not (isinstance(own, Tensor) or isinstance(other, Tensor)):
        if own == other or (own != own and other != other):
            return 0.0
        with suppress(OverflowError, ZeroDivisionError):
            return float(abs(own - other) / abs(other))
        return math.inf
    a, b = (value if isinstance(value, Tensor) else torch.tensor(value) for value in (own, other))
    if a.shape != b.shape or a.device != b.device or complex in (type(own), type(other)):
        return math.inf
    if a.dtype == b.dtype and torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    length = float(torch.linalg.vector_norm(b.masked_fill(same & ~b.isfinite(), 0.0)))
    distance = float(torch.linalg.vector_norm((a - b).masked_fill(same, 0.0)))
    return 0.0 if distance == 0 else distance / length if length else math.inf


def standing(generator: Any) -> Any:
    """Read the state of a random generator.

    Args:
        generator: An instance of one of `GENERATORS`: torch's, NumPy's or Python's.

    Returns:
        What `put_back` takes; None of `random.SystemRandom`, which has no state.
    """
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def put_back(generator: Any, state: Any) -> None:
    """Restore the state of a random generator.

    Args:
        generator: The generator, which is changed.
        state: What `standing` gave of it; None leaves it alone.
    """
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif state is not None:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def transforming() -> bool:
    """Whether a transform of `torch.func` (grad, vmap) is under way: tensors then have no storage to look at.

    Returns:
        True inside `grad`, `vmap` and the like.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def readable(item: Any) -> bool:
    """Whether any object of the process is a plain tensor whose numbers are in memory.

    Of all others (a compiler's fake tensors, subclasses, sharded, sparse, nested and meta tensors, those of a transform that
    has ended) nothing is known: operations may raise on them, and a read of memory that was given back ends the process.

    Args:
        item: Any object.

    Returns:
        True if reading its numbers is safe.
    """
    try:
        if type(item) not in PLAIN or item.layout != torch.strided or item.is_meta or item.is_nested or item.is_quantized:
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(item) or torch._is_functional_tensor(item):
            return False
        last = item.storage_offset() + sum((n - 1) * step for n, step in zip(item.shape, item.stride(), strict=True))
        return not item.numel() or item.untyped_storage().nbytes() >= (last + 1) * item.element_size()
    except Exception:
        return False


@dataclass
class _Search:
    """A walk from the roots, breadth first, so that what is near has the short path."""

    keep: Callable[[Tensor], Tensor]
    most: int
    values: dict[str, Value] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    waiting: deque[tuple[str, Any]] = field(default_factory=deque)
    paths: dict[int, str] = field(default_factory=dict)  # of what was met, by identity
    leaves: dict[str, Tensor] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)  # so that no identity is given again

    def run(self) -> None:
        long = deque[tuple[str, Any]]()  # what holds a data set's rows, say: opened last, for it may take all that is left
        while (self.waiting or long) and len(self.held) < self.most:
            is_last = not self.waiting
            path, item = (self.waiting or long).popleft()
            if not is_last and any(issubclass(type(item), base) and base.__len__(item) > LONG for base in CONTAINERS):
                long.append((path, item))
                continue
            for name, member in _members(path, item, self.paths):
                self.visit(name, member)
        self.unread += [f"{path}..." for path, _ in (*self.waiting, *long)]
        self.waiting.clear()

    def visit(self, path: str, item: Any) -> None:
        """Keep what is a number; look later into what may hold some."""
        kind = type(item)
        if kind in (bool, int, float, complex):
            self.values[path] = item
        elif issubclass(kind, np.generic):
            self._array(path, np.asarray(item))
        elif issubclass(kind, (int, float)):
            self.values[path] = int.__int__(item) if issubclass(kind, int) else float.__float__(item)
        elif kind in (list, tuple) and item and all(type(one) in (bool, int, float) for one in item):
            with suppress(OverflowError):
                self._array(path, np.array(item, dtype=np.float64))
        elif issubclass(kind, GENERATORS):
            self.generators.append(item)
        elif item is None or issubclass(kind, (str, bytes, *OPAQUE)) or id(item) in self.paths:
            return
        else:
            self.paths[id(item)] = path
            self.held.append(item)
            if issubclass(kind, Tensor):
                self._tensor(path, item)
            elif kind is np.ndarray:
                self._array(path, item)
            elif issubclass(kind, nn.Module):  # its parameters have their own names, wherever else they are held
                for members in map(_attributes(item).get, ("_parameters", "_modules")):
                    for name, member in dict.items(members) if isinstance(members, dict) else ():
                        self.visit(f"{path}.{name}", member)
            elif issubclass(kind, Optimizer):  # its state goes by its parameters
                for k, group in enumerate(_attributes(item).get("param_groups", ())):
                    for j, parameter in enumerate(group["params"]):
                        self.visit(f"{path}.param_groups[{k}].params[{j}]", parameter)
            self.waiting.append((path, item))

    def _tensor(self, path: str, tensor: Tensor) -> None:
        if type(tensor) in PLAIN and tensor.layout != torch.strided and not tensor.is_meta:
            try:
                tensor = tensor.detach().to_dense()
            except Exception:  # a layout without a dense form
                self.unread.append(path)
                return
        if not readable(tensor):
            self.unread.append(path)
            return
        if tensor.requires_grad and tensor.is_leaf:
            self.leaves[path] = tensor
        own = tensor.detach()
        if own.is_complex():
            own = torch.view_as_real(own.resolve_conj())
        self.values[path] = self.keep(own.resolve_neg())

    def _array(self, path: str, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.kind == "c":
            array = array.view(array.real.dtype).reshape(*array.shape, 2) if array.ndim else np.array([array.real, array.imag])
        if array.dtype.kind in "biuf":
            shared = array.dtype.char in SHARED and array.dtype.isnative and array.flags.writeable and array.flags.c_contiguous
            self.values[path] = self.keep(torch.from_numpy(array if shared else np.array(array, dtype=np.float64)))


def _members(path: str, item: Any, paths: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """What an object holds, with the path of each."""
    kind = type(item)
    if issubclass(kind, dict):
        for k, (key, value) in enumerate(list(dict.items(item))):
            yield f"{path}{_key(k, key, paths)}", value
    elif issubclass(kind, (list, tuple, deque)):
        for k, value in enumerate(_sequence(item)):
            yield f"{path}[{k}]", value
    own = _attributes(item)
    for name, value in own.items():
        if type(name) is not str or "_hooks" in name or (issubclass(kind, Tensor) and name in ("grad", "_grad")):
            continue
        if issubclass(kind, nn.Module) and name in OF_MODULES and type(value) is dict:
            yield from ((f"{path}.{key}", member) for key, member in value.items())
        else:
            yield f"{path}.{name}", value


def _sequence(item: Any) -> Sequence[Any]:
    base = next(base for base in (list, tuple, deque) if issubclass(type(item), base))
    return list(base.__iter__(item))


def _key(place: int, key: object, paths: Mapping[int, str]) -> str:
    """Of a mapping: `.name` for a name, `[path]` for what was met before, as parameters are, else a number."""
    if type(key) is str:
        return f".{key}" if key.isidentifier() else f"[{key}]"
    if type(key) is int and key not in paths:
        return f"[{key}]"
    known = paths.get(key) if type(key) is int else paths.get(id(key))  # a scaler's mappings go by the identity of an optimizer
    return f"[{known}]" if known is not None else f"[{place}]"


def _attributes(item: Any) -> dict[Any, Any]:
    """The attributes that an object itself has, those of slots included, without asking it or its class."""
    found: dict[Any, Any] = {}
    for base in _MRO(type(item)):
        own = _DICT(base)
        descriptor = own.get("__dict__")
        if type(descriptor) in (GetSetDescriptorType, MemberDescriptorType) and not found:  # that of a SimpleNamespace, say
            attributes = descriptor.__get__(item)
            found |= dict.copy(attributes) if issubclass(type(attributes), dict) else {}
        for slot in own.values() if "__slots__" in own else ():
            if type(slot) is MemberDescriptorType:
                with suppress(AttributeError):  # not set
                    found.setdefault(slot.__name__, slot.__get__(item))
    return found
