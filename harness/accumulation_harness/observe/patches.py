"""Functions and methods replaced while somebody observes: once, wherever they have been imported, and put back after the last."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import RLock, get_ident
from types import CellType
from typing import Any

from accumulation_harness.system.packages import HAS_TORCH

if HAS_TORCH:
    from torch.compiler import is_compiling
else:  # a function that trains with another library is audited without it

    def is_compiling() -> bool:
        """Nothing is compiled without torch."""
        return False


Wrap = Callable[..., Any]  # (original, *args, **kwargs) -> result
Place = tuple[Any, str]  # owner, name
Namespace = dict[str, Any]
OWN_REFERENCES = 2  # to a wrapper: from its `Patched`, and as an argument of the function that counts
COPIED = ("__name__", "__qualname__", "__doc__", "__module__")  # not `functools.wraps`: it would copy `hooked` and the like

LIBRARIES = tuple(sysconfig.get_paths()[where] for where in ("stdlib", "purelib", "platlib"))

_places: dict[Place, Patched] = {}
_without: dict[frozenset[Any], dict[int, int]] = {}  # functions -> identity and size of a namespace that holds none of them
_lock = RLock()


class Patches:
    """What one observer has replaced; in whatever order observers come and go, each takes only itself away."""

    def __init__(self, *, own_thread: bool = False) -> None:
        """`own_thread`: calls of other threads pass by, until `follow` says that the observed run goes on in one of them."""
        self.thread = get_ident() if own_thread else None
        self._taken: list[Patched] = []
        self._handles: list[Any] = []

    def replace(self, wraps: Mapping[Place, Wrap], namespaces: Iterable[Namespace] = (), *, everywhere: bool = True) -> None:
        """Call `wrap(original, *args, **kwargs)` for each of these functions of modules and methods of classes.

        If `everywhere`, functions are replaced under the names, too, by which other modules and `namespaces` have imported them.
        """
        with _lock:
            new = []
            for place, wrap in wraps.items():
                if place not in _places:
                    _places[place] = Patched(place)
                    new.append(_places[place])
                _places[place].wraps += ((self, wrap),)
                self._taken.append(_places[place])
            _exchange_in_modules(new, list(sys.modules.values()) if everywhere else [owner for owner, _ in wraps])
            _exchange([_places[place] for place in wraps], namespaces)  # where those that came before have not looked either

    def follow(self) -> None:
        """The observed run goes on in this thread."""
        self.thread = get_ident()

    def removing(self, handle: Any) -> None:
        """Remove this hook on `restore` as well, and what PyTorch keeps of a global one (`torch.compile` would warn of it)."""
        self._handles.append(handle)

    def leave(self) -> None:
        """Put back what nobody else observes; hooks stay, since torch may be about to call the next of them."""
        with _lock:
            taken, self._taken = self._taken, []
            for patched in taken:
                patched.wraps = tuple(pair for pair in patched.wraps if pair[0] is not self)
            idle = [patched for patched in dict.fromkeys(taken) if not patched.wraps]
            for patched in idle:
                del _places[patched.place]
                patched.put_back()
            _put_back_elsewhere([patched for patched in idle if sys.getrefcount(patched.wrapper) > OWN_REFERENCES])

    def restore(self) -> None:
        """Put everything back."""
        self.leave()
        while self._handles:
            handle = self._handles.pop()
            with suppress(Exception):  # one that is no longer there
                from torch.nn.modules.module import _global_forward_hooks_with_kwargs

                _global_forward_hooks_with_kwargs.pop(getattr(handle, "id", -1), None)
                handle.remove()


class Patched:
    """One name, what it stood for, and whom a call of it passes through, the last to come first."""

    __slots__ = ("is_own", "original", "place", "spaces", "wrapper", "wraps")

    def __init__(self, place: Place) -> None:
        self.place, (owner, name) = place, place
        self.original, self.is_own = getattr(owner, name), name in vars(owner)  # or of a base class
        self.wraps: tuple[tuple[Patches, Wrap], ...] = ()
        self.wrapper = _wrapper(self)
        self.spaces: list[Namespace] = []  # that hold the wrapper
        self.put()

    def here(self) -> Iterable[tuple[Patches, Wrap]]:
        """Those that observe this thread; one that autograd has started for a device differentiates for any."""
        me = get_ident()
        found = [pair for pair in self.wraps if pair[0].thread in (None, me)]
        if len(found) < len(self.wraps) and not any(thread.ident == me for thread in threading.enumerate()):
            return self.wraps
        return found

    def put(self) -> None:
        """The wrapper, wherever it was before."""
        owner, name = self.place
        if isinstance(owner, type):
            setattr(owner, name, self.wrapper)
        for space in self.spaces:
            _put(space, self.original, self.wrapper)

    def put_back(self) -> None:
        """Wherever the wrapper was put."""
        owner, name = self.place
        if isinstance(owner, type) and vars(owner).get(name) is self.wrapper:
            if self.is_own:
                setattr(owner, name, self.original)
            else:
                delattr(owner, name)
        for space in self.spaces:
            _put(space, self.wrapper, self.original)


@contextmanager
def lifted() -> Iterator[None]:
    """Put the originals in their places for a while, for what reads functions as text.

    Yields:
        Nothing.
    """
    with _lock:
        present = list(_places.values())
        for one in present:
            one.put_back()
        try:
            yield
        finally:
            for one in present:
                if _places.get(one.place) is one:
                    one.put()


def _put_back_elsewhere(patched: Sequence[Patched]) -> None:
    """Where wrappers were stored meanwhile; what cannot be exchanged calls the original from now on."""
    wrappers = [one.wrapper for one in patched]
    for holder in gc.get_referrers(*wrappers) if wrappers else ():
        for one in patched:
            with suppress(Exception):  # an object that is no place for it
                if holder is not wrappers:
                    _put_into(holder, one.wrapper, one.original)


def _exchange_in_modules(patched: Sequence[Patched], owners: Iterable[Any]) -> None:
    """As `_exchange`; modules of libraries that held none of these functions are looked through again when they have grown."""
    functions = frozenset(one.original for one in patched if not isinstance(one.place[0], type))
    known = _without.setdefault(functions, {})
    spaces = [getattr(owner, "__dict__", {}) for owner in (owners if functions else ())]
    fresh = [space for space in spaces if known.get(id(space)) != len(space)]
    _exchange(patched, fresh)
    holding = {id(space) for one in patched for space in one.spaces}
    of_libraries = (space for space in fresh if str(space.get("__file__")).startswith(LIBRARIES))
    known.update({id(space): len(space) for space in of_libraries if id(space) not in holding})


def _exchange(patched: Iterable[Patched], spaces: Iterable[Namespace]) -> None:
    """Wrappers in place of the functions that they wrap."""
    wanted = {id(one.original): one for one in patched if not isinstance(one.place[0], type)}
    for space in spaces if wanted else ():
        if wanted.keys().isdisjoint(map(id, list(space.values()))):  # nearly all of them
            continue
        for value in list(space.values()):
            if (one := wanted.get(id(value))) is not None:
                _put(space, one.original, one.wrapper)
                one.spaces.append(space)


def _put(space: Namespace, old: Any, new: Any) -> None:
    for name, value in list(space.items()):
        if value is old:
            space[name] = new


def _put_into(holder: Any, old: Any, new: Any) -> None:
    """Into a namespace, a list, a closure, a partial function, or an object's attributes."""
    if type(holder) is list:
        holder[:] = [new if value is old else value for value in holder]
    elif type(holder) is CellType and holder.cell_contents is old:
        holder.cell_contents = new
    elif type(holder) is partial and holder.func is old:
        holder.__setstate__((new, holder.args, holder.keywords, holder.__dict__))  # type: ignore[attr-defined]
    else:
        space = holder if type(holder) is dict else holder.__dict__
        if not {"__module__", "__doc__"} <= space.keys():  # a class is not written to behind its back
            _put(space, old, new)


def _wrapper(patched: Patched) -> Callable[..., Any]:
    original = patched.original

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            observers: Iterable[tuple[Patches, Wrap]] = patched.wraps
        else:
            observers = patched.here()
            args, kwargs = tuple(map(_kept, args)), {name: _kept(value) for name, value in kwargs.items()}
        called = original
        for _, wrap in observers:
            called = partial(wrap, called)
        return called(*args, **kwargs)

    for name in COPIED:
        setattr(call, name, getattr(original, name, None))
    call.__wrapped__ = original  # type: ignore[attr-defined]
    if isinstance(original, type):  # whoever asks `isinstance` needs a class
        return type(original.__name__, (original,), {"__new__": lambda _, *args, **kwargs: call(*args, **kwargs)})
    return call


def _kept(argument: Any) -> Any:
    """A generator (of parameters, to be clipped) is read once, for all that look at it; files and loaders are none."""
    kind = type(argument)
    return list(argument) if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools") else argument


def group_stays(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for `init_process_group` and `destroy_process_group`: the group of all ranks stays, others come and go.

    Args:
        original: The function of `torch.distributed` that it replaces.
        args: Its arguments; the first, or `group`, is the process group.
        kwargs: Its keyword arguments.

    Returns:
        What the function returns for a group of its own; None where it would have touched the group of all ranks.
    """
    import torch.distributed as dist

    group = args[0] if args else kwargs.get("group")
    return original(*args, **kwargs) if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD else None
