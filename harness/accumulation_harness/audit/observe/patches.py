"""Functions and methods replaced while a run is watched, wherever they have been imported, and put back afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn.modules.module import _global_forward_hooks_with_kwargs

Wrap = Callable[..., Any]  # (original, *args, **kwargs) -> result
Place = tuple[Any, str]  # owner, name
COPIED = ("__name__", "__qualname__", "__doc__", "__module__")  # not `functools.wraps`: it would copy `hooked` and the like


class Patches:
    """What has been replaced so far; `restore` undoes it in reverse."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def method(self, owner: type, name: str, wrap: Wrap) -> None:
        """Replace `owner.name` by a call of `wrap(original, *args, **kwargs)`."""
        original = getattr(owner, name)
        setattr(owner, name, _wrapper(original, wrap))
        self._undo.append(lambda: setattr(owner, name, original))

    def functions(self, wraps: Mapping[Place, Wrap], namespaces: Iterable[dict[str, Any]]) -> None:
        """Replace functions, also under the names by which other modules and `namespaces` have imported them."""
        wrappers = {}
        for (owner, name), wrap in wraps.items():
            original = getattr(owner, name)
            wrappers[id(original)] = (original, _wrapper(original, wrap))
        known, without = list(namespaces), dict[int, int]()
        _replace(wrappers, known, without)
        backwards = {id(wrapper): (wrapper, original) for original, wrapper in wrappers.values()}
        self._undo.append(lambda: _replace(backwards, known, without))  # also in modules that were imported meanwhile

    def removing(self, handle: Any) -> None:
        """Remove this hook on `restore` as well, and what PyTorch keeps of a global one (`torch.compile` would warn of it)."""
        self._undo += [lambda: _global_forward_hooks_with_kwargs.pop(handle.id, None), handle.remove]

    def restore(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()


def _replace(pairs: Mapping[int, tuple[Any, Any]], namespaces: Iterable[dict[str, Any]], without: dict[int, int]) -> None:
    """In all imported modules and `namespaces`, the second of each pair in place of the first, whose identity is the key.

    `without`: the sizes of namespaces that were found to hold none of them; those that have not grown are not looked at again.
    """
    spaces = {id(vars(module)): vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")}
    spaces |= {id(space): space for space in namespaces}
    for space in spaces.values():
        if without.get(id(space)) == len(space):
            continue
        if pairs.keys().isdisjoint(map(id, list(space.values()))):  # nearly all of them
            without[id(space)] = len(space)
            continue
        for name, value in list(space.items()):
            found = pairs.get(id(value))
            if found is not None and value is found[0]:
                space[name] = found[1]


def _wrapper(original: Callable[..., Any], wrap: Wrap) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrap(original, *args, **kwargs)

    for name in COPIED:
        setattr(call, name, getattr(original, name, None))
    call.__wrapped__ = original  # type: ignore[attr-defined]
    return call
