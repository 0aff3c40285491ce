"""The local variables of the audited code: what they are, and what they lead to in numbers of any library, by path."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import BuiltinFunctionType, BuiltinMethodType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from accumulation_harness.audit.evidence import HELD, Held, Vector
from accumulation_harness.audit.observe import frames
from accumulation_harness.audit.observe.arrays import is_tensor, leaves, members, read
from accumulation_harness.audit.observe.frames import is_a_librarys

OURS = __name__.partition(".")[0] + "."
NOT_THEIRS = (*frames.TORCH, frames.OURS)
MOST_OBJECTS = 2_000  # looked into at each look: the nearest ones
OPAQUE = (str, bytes, type, ModuleType, BuiltinFunctionType)
WEIGHTS = "weights handed over"


class Variables:
    """Looks at what the local variables lead to as windows begin: it runs nothing of theirs but what gives an array's numbers."""

    def __init__(self) -> None:
        self.held = Held()
        self._handed: list[Vector] = []  # with which the window began, some elements of each array
        self._places: list[list[str]] = []  # where the loop holds each of them, as it has shown since
        self._begins = True  # the window, at the next look

    def look(self, weights: Any) -> None:
        """A window begins with these weights."""
        found = _Search()
        found.visit(WEIGHTS, weights)
        found.run()
        self.held.roles |= dict.fromkeys(found.values, "weight")
        self._handed, self._begins = [_few(np.asarray(read(leaf)[0])) for leaf in leaves(weights).values()], True
        found.visit_locals()
        self.held.states.append(found.values)
        self.held.numbers |= found.numbers

    def weights(self) -> Vector | None:
        """[P] Those of the loop's own variables, in the order in which they are handed over; None where they are not found."""
        found = _Search()
        found.visit_locals()
        if self._begins:
            fresh = [[path for path in found.arrays if np.array_equal(found.values[path], own)] for own in self._handed]
            known = self._places or fresh  # the loop may have moved them by now
            self._places = [[p for p in old if p in new] or new or old for old, new in zip(known, fresh, strict=True)]
            self._begins = False
        kept = self._places = [[path for path in those if path in found.arrays] for those in self._places]
        if not all(kept):
            return None
        stay = [[p for p in those if np.array_equal(found.values[p], own)] for those, own in zip(kept, self._handed, strict=True)]
        return np.concatenate([read(found.arrays[(left or those)[0]])[0] for those, left in zip(kept, stay, strict=True)])


class _Search:
    """A walk, breadth first, so that what is near has the short path."""

    def __init__(self) -> None:
        self.values: dict[str, Vector] = {}
        self.arrays: dict[str, Any] = {}  # what they are of
        self.numbers: set[str] = set()  # paths of numbers of Python's
        self._waiting = deque[tuple[str, Any]]()
        self._met: dict[int, Any] = {}  # kept, so that no identity is given again

    def visit_locals(self) -> None:
        """Look into the local variables of the code under way."""
        for name, value in local_variables().items():
            self.visit(name, value)
        self.run()

    def run(self) -> None:
        """Look into what waits."""
        while self._waiting and len(self._met) < MOST_OBJECTS:
            path, item = self._waiting.popleft()
            with suppress(Exception):  # of the objects' own
                for name, member in _inside(item):
                    self.visit(f"{path}.{name}", member)

    def visit(self, path: str, item: Any) -> None:
        """Keep what is a number; look later into what may hold some."""
        if type(item) in (bool, int, float):
            self.numbers.add(path)
            with suppress(OverflowError):
                self.values[path] = np.array([item], dtype=np.float64)
        elif not (item is None or id(item) in self._met or _is_none_of_theirs(item)):
            self._met[id(item)] = item
            if hasattr(type(item), "__array__") or hasattr(type(item), "__dlpack__"):
                with suppress(Exception):  # deleted, traced, of a format that NumPy does not know
                    self.values[path] = _few(np.asarray(item).reshape(-1))
                    self.arrays[path] = item
            else:
                self._waiting.append((path, item))


def _is_none_of_theirs(item: Any) -> bool:
    """Whether nothing of it is looked at here: what holds no numbers, or is ours, or torch's."""
    return isinstance(item, OPAQUE) or is_tensor(item) or type(item).__module__.startswith(OURS)


def _few(array: npt.NDArray[Any]) -> Vector:
    """Some elements of a large array, the same places in all of that size, in float64."""
    if array.dtype.kind in "OSUMm":
        raise TypeError(f"no numbers: {array.dtype}")
    return (array if array.size <= HELD else array[places(array.size)]).astype(np.float64)


def _inside(item: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds by name; a function the variables of its own."""
    named = members(item)
    if named is not None:
        yield from named
    elif isinstance(item, (FunctionType, MethodType, partial)):
        yield from ((name.lstrip("."), one) for name, one in _opened("", item, set()))
    else:
        yield from vars(item).items()


@lru_cache(maxsize=64)
def places(count: int) -> npt.NDArray[np.int64]:
    """Where the elements are that are kept of so many.

    Args:
        count: Elements of a tensor.

    Returns:
        `HELD` places, in their order.
    """
    return np.sort(np.random.default_rng(count).choice(count, HELD, replace=False))


def local_variables() -> dict[str, object]:
    """The local variables of the code under way, those of outer functions first; of methods, their objects.

    Returns:
        Name -> value.
    """
    found: dict[str, object] = {}
    seen = set[int]()
    for frame in reversed(_frames()):
        for name, value in _variables(frame).items():
            for path, one in _opened(name, value, seen):
                taken = path in found and found[path] is not one
                found[f"{frame.f_code.co_name}().{path}" if taken else path] = one
    return found


def _frames() -> list[FrameType]:
    """Those of the audited code, from the innermost one on; in a thread of its own, of all that is no library's."""
    found = [*frames.under_way()]
    theirs = [one for one in found if not one.f_code.co_filename.startswith(NOT_THEIRS)]
    return theirs if found[-1].f_back is not None else [one for one in theirs if not is_a_librarys(one.f_code.co_filename)]


def _variables(frame: FrameType) -> dict[str, object]:
    """Copied, and not kept by the frame: that would make them live longer. A module's own are left where they are."""
    own = frame.f_locals
    found = {**_named(frame.f_code, frame.f_globals), **own}
    found = {name: value for name, value in found.items() if not name.startswith("__")}
    if type(own) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        own.clear()
    return found


def _opened(path: str, value: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    """The value; in place of a method its object, of a function, a class, a generator or a partial call what it holds."""
    held: Mapping[str, object] = {}
    if type(value).__module__.startswith(OURS):  # what a loop hands its arrays to, say: it holds all that was seen
        return
    if isinstance(value, (MethodType, BuiltinMethodType)) and not isinstance(value.__self__, OPAQUE):
        yield from _opened(path, value.__self__, seen)
    elif isinstance(value, partial):
        held = {f"args[{place}]": one for place, one in enumerate((*value.args, *value.keywords.values()))} | {"": value.func}
    elif isinstance(value, FunctionType):
        held = _of_function(value)
    elif isinstance(value, GeneratorType):
        held = value.gi_frame.f_locals if value.gi_frame is not None and not is_a_librarys(value.gi_code.co_filename) else {}
    elif isinstance(value, type):
        own = getattr(sys.modules.get(value.__module__), "__file__", None)
        held = vars(value) if own is not None and not is_a_librarys(own) else {}
    else:
        yield path, value
    if held and id(value) not in seen:
        seen.add(id(value))
        for name, one in held.items():
            if not name.startswith("__"):
                yield from _opened(f"{path}.{name}" if name else path, one, seen)


def _of_function(function: FunctionType) -> dict[str, object]:
    """Its closure, and of one that is not a library's its defaults and what of its module it names."""
    code, found = function.__code__, dict[str, object]()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # not yet assigned
            found[name] = cell.cell_contents
    if is_a_librarys(code.co_filename):
        return {name: one for name, one in found.items() if not isinstance(one, FunctionType)}
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return {
        **_named(code, function.__globals__),
        **dict(zip(names, defaults, strict=True)),
        **(function.__kwdefaults__ or {}),
        **found,
    }


def _named(code: CodeType, known: Mapping[str, object]) -> dict[str, object]:
    """What code names of its module."""
    return {name: known[name] for name in code.co_names if name in known}
