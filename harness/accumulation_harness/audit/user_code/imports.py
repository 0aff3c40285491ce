"""Functions of other people's modules, replaced for a while: now where they are imported, else as soon as they are."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]  # of a function, what takes its place


@contextmanager
def replaced(wraps: Mapping[str, Mapping[str, Wrap]]) -> Iterator[None]:
    """`wraps`: module -> function, or Class.method, in it -> what is made of it. Those that a module lacks are left out."""
    undo: list[tuple[Any, str, Any]] = []

    def replace(module: ModuleType) -> None:
        for path, wrap in wraps[module.__name__].items():
            *outer, name = path.split(".")
            owner: Any = module
            for part in outer:
                owner = getattr(owner, part, None)
            original = getattr(owner, name, None)
            if callable(original):
                undo.append((owner, name, original))
                setattr(owner, name, wrap(original))

    for name in wraps.keys() & sys.modules.keys():
        replace(sys.modules[name])
    finder = _Watching(wraps.keys(), replace)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)


class _Watching(importlib.abc.MetaPathFinder):
    """Calls `loaded` with each of the named modules, once it has been imported."""

    def __init__(self, names: Sequence[str] | Any, loaded: Callable[[ModuleType], None]) -> None:
        self.names, self.loaded = frozenset(names), loaded

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The spec that others find, with a loader that tells when it is done."""
        if name not in self.names:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            execute, loaded = spec.loader.exec_module, self.loaded

            def exec_module(module: ModuleType) -> None:
                execute(module)
                loaded(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
