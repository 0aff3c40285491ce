"""Averaged copies of the weights, or of a part of them (EMA, target networks), found in a running program by their shapes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from accumulation_harness.audit.evidence import Copy, Step
from accumulation_harness.audit.observe.alive import PLAIN, alive, readable
from accumulation_harness.audit.observe.sample import Sample, Store, looked_at, sample_of
from accumulation_harness.audit.observe.tensors import put

OURS = 2  # references to what a shadow alone holds, while they are counted
NEAR = 0.5  # an average of weights stays within this relative distance of them; lists of gradients or batches do not


@dataclass(frozen=True)
class Shadow:
    """Tensors that follow the parameters from element `start` of their vector on."""

    start: int
    found: list[Tensor]
    sample: Sample  # the elements that are kept, as those of the parameters are
    kept: Any = None  # what they were found in: a container, which a loop may give new ones, or one vector
    places: tuple[int, ...] = ()  # in the container

    @property
    def size(self) -> int:
        """Number of elements kept."""
        return self.sample.size

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are in the container now."""
        if not self.places:
            return self.found
        floating = _tensors(self.kept, len(self.found))
        now = [floating[place] for place in self.places if place < len(floating)]
        return now if [t.shape for t in now] == [t.shape for t in self.found] else self.found

    @property
    def is_let_go(self) -> bool:
        """Whether nobody else holds what they were found in."""
        return self.kept is not None and sys.getrefcount(self.kept) <= OURS

    def copied(self) -> Copy:
        """Its values now."""
        return Copy(self.start, self.sample.take(self.tensors))


class Averages:
    """Looks at the copies between events, and writes what it sees into the optimizer's `steps`."""

    def __init__(self, steps: list[Step], store: Store | None = None) -> None:
        """`store`: where copies are kept whole, if other runs follow this one."""
        self.steps, self.store = steps, store
        self.shadows: Sequence[Shadow] = ()
        self.checksums: tuple[float, ...] = ()  # of the copies, as they were last seen
        self.num_searches = 0
        self._moving: set[int] = set()  # places of the copies that have changed
        self._since = 0  # step of the last search

    def search(self, find: Callable[[], Sequence[Shadow]]) -> None:
        """Watch what is found now in place of what was found before, which a loop may have let go of for new ones."""
        known = [_memory(shadow) for shadow in self.shadows]
        moving, again = {known[place] for place in self._moving}, self.num_searches > 0
        if again:
            self._drop_standing()
        self.shadows = ()
        self.shadows = find()
        self.num_searches, self._since = self.num_searches + 1, max(0, len(self.steps) - 1)
        self.checksums = tuple(float(shadow.copied().values.sum()) for shadow in self.shadows)
        self._moving = {k for k, shadow in enumerate(self.shadows) if _memory(shadow) in moving}
        renewed = {k for k, shadow in enumerate(self.shadows) if again and _memory(shadow) not in known}
        if renewed:
            self._moved(renewed)

    def _moved(self, places: set[int]) -> None:
        self._moving |= places
        if self.steps:
            self.steps[-1] = replace(self.steps[-1], shadow_updates=self.steps[-1].shadow_updates + 1)

    def _drop_standing(self) -> None:
        """Copies that have not changed since they were found are somebody's, but no averages."""
        for t in range(self._since, len(self.steps)):
            averages = tuple(copy for place, copy in enumerate(self.steps[t].shadows) if place in self._moving)
            self.steps[t] = replace(self.steps[t], shadows=averages)

    def see(self, *, window_begun: bool) -> None:
        """`window_begun`: a backward of the window under way has been seen."""
        if not self.shadows:
            return
        copies = tuple(shadow.copied() for shadow in self.shadows)
        sums = tuple(float(copy.values.sum()) for copy in copies)
        if self.steps and not window_begun and not self.steps[-1].shadows:
            self.steps[-1] = replace(self.steps[-1], shadows=tuple(map(self._whole, self.shadows, copies)))
        if self.checksums and sums != self.checksums:
            self._moved({place for place, (a, b) in enumerate(zip(sums, self.checksums, strict=True)) if a != b})
        self.checksums = sums

    def _whole(self, shadow: Shadow, copy: Copy) -> Copy:
        if self.store is None or shadow.sample.whole:
            return copy
        return replace(copy, whole=self.store.add(shadow.tensors))

    def finish(self) -> None:
        """The function has returned."""
        if self._moving:
            self._drop_standing()

    def put(self, wanted: Sequence[Copy]) -> None:
        """Write these values into the copies nearest to them."""
        for copy in wanted:
            shadow = nearest(self.shadows, copy)
            if shadow is not None and copy.whole is not None:
                copy.whole.put(shadow.tensors)
            elif shadow is not None and shadow.sample.whole:
                put(shadow.tensors, copy.values)


def _memory(shadow: Shadow) -> frozenset[int]:
    """Where its tensors are."""
    return frozenset(map(_storage, shadow.found))


def find(parameters: Sequence[Tensor], excluded: Iterable[Tensor]) -> list[Shadow]:
    """Containers (modules, dicts, lists) of tensors shaped like `parameters` or a run of them, near them, and none of them."""
    if any(hasattr(p, "full_tensor") for p in parameters):
        return []  # reading a sharded tensor is a collective, and every rank finds objects in an order of its own
    taken = {_storage(tensor) for tensor in [*parameters, *excluded]}
    found: dict[frozenset[int], Shadow] = {}
    for item in _containers(sum(p.numel() for p in parameters)):
        try:
            tensors = _cut(item, parameters) if type(item) in PLAIN else _tensors(item, len(parameters))
            if not tensors or any(_storage(tensor) in taken for tensor in tensors):
                continue
            shadow = _match(tensors, parameters, item)
        except Exception:  # somebody's container or module that cannot be read as such
            continue
        if shadow is not None:
            found.setdefault(_memory(shadow), shadow)
    whole = [shadow for key, shadow in found.items() if not any(key < other for other in found)]  # not the layers of one
    return sorted(whole, key=lambda shadow: (shadow.start, shadow.size))


def _containers(size: int) -> Iterator[Any]:
    """All modules, lists, tuples and dicts that begin with a tensor, and vectors of so many elements.

    They are a few of a million objects, found in little time.

    By their type alone: to ask an object for its class would wake lazy proxies, and fail on dead weak ones.
    """
    modules = _subclasses(nn.Module)
    for item in alive():
        kind = type(item)
        if kind is dict:
            if item and type(next(iter(item.values()), None)) in PLAIN:
                yield item
        elif kind is tuple or kind is list:
            if item and type(item[0]) in PLAIN:
                yield item
        elif kind in PLAIN:
            if readable(item) and item.ndim == 1 and item.numel() == size and item.is_floating_point():
                yield item
        elif kind in modules:
            yield item


def _subclasses(kind: type) -> set[type]:
    """The class and all that are made from it."""
    made: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_subclasses, made))


def nearest(shadows: Sequence[Shadow], wanted: Copy) -> Shadow | None:
    """The shadow of the same parameters that is nearest in value."""
    same = [shadow for shadow in shadows if (shadow.start, shadow.size) == (wanted.start, wanted.values.size)]
    return min(same, key=lambda shadow: float(np.linalg.norm(shadow.copied().values - wanted.values)), default=None)


def _storage(tensor: Tensor) -> int:
    """Identity of the memory; tensors without memory of their own (sparse, wrapped) stand for themselves."""
    return tensor.untyped_storage().data_ptr() if readable(tensor) else id(tensor)


def _cut(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """All parameters in one vector, as views of it."""
    parts = vector.detach().split([p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def _tensors(item: Any, count: int) -> list[Tensor]:
    """The floating tensors of a container of nothing but tensors."""
    if type(item) in (list, tuple, dict):
        values = item.values() if type(item) is dict else item
        if not 0 < len(item) <= 4 * count + 8:
            return []
    else:
        values = list(item.parameters()) if "_parameters" in vars(item) else []
    return (
        [value for value in values if readable(value) and value.is_floating_point()]
        if all(type(value) in PLAIN for value in values)
        else []
    )


def _match(tensors: list[Tensor], parameters: Sequence[Tensor], kept: Any) -> Shadow | None:
    """The nearest run of parameters with these shapes, if it is near; all of them where others in between are buffers."""
    shapes, sample = [p.shape for p in parameters], sample_of(parameters)
    edges = [0, *itertools.accumulate(sample.counts)]
    runs: list[tuple[int, tuple[int, ...]]] = []
    if len(tensors) >= len(shapes):
        matched: list[int] = []
        for place, tensor in enumerate(tensors):
            if len(matched) < len(shapes) and tensor.shape == shapes[len(matched)]:
                matched.append(place)
        runs = [(0, tuple(matched))] if len(matched) == len(shapes) else []
    elif any(tensor.ndim > 1 for tensor in tensors):  # not the scale and shift of a norm, which are alike everywhere
        starts = range(len(shapes) - len(tensors) + 1)
        fitting = [i for i in starts if all(t.shape == s for t, s in zip(tensors, shapes[i:], strict=False))]
        runs = [(i, tuple(range(len(tensors)))) for i in fitting]
    apart = [(_apart([tensors[k] for k in places], parameters[i : i + len(places)]), i, places) for i, places in runs]
    near, i, places = min(apart, key=lambda each: each[0], default=(NEAR, 0, ()))
    if not near < NEAR:
        return None
    part = sample.part(i, i + len(places))
    return Shadow(edges[i], [tensors[k] for k in places], part, kept, () if type(kept) in PLAIN else places)


def _apart(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> float:
    mine, theirs = looked_at(tensors), looked_at(parameters)
    size = float(np.linalg.norm(theirs))
    return float(np.linalg.norm(mine - theirs)) / size if size else np.inf
