"""Functions of other people's modules, replaced for a while: now where they are imported, else as soon as they are."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from accumulation_harness.observe.patches import Patches, Place, Wrap


@contextmanager
def replaced(wraps: Mapping[str, Mapping[str, Wrap]]) -> Iterator[None]:
    """Replace functions of modules inside the context, also of modules that are imported later.

    Args:
        wraps: Module -> function, or Class.method, in it -> what is called in its place; what a module lacks is left out.
    """
    patches = Patches()

    def replace(*modules: ModuleType) -> None:
        places: dict[Place, Wrap] = {}
        for module in modules:
            for path, wrap in wraps[module.__name__].items():
                *outer, name = path.split(".")
                owner: Any = module
                for part in outer:
                    owner = getattr(owner, part, None)
                if callable(getattr(owner, name, None)):
                    places[owner, name] = wrap
        patches.replace(places, everywhere=False)

    replace(*(sys.modules[name] for name in wraps.keys() & sys.modules.keys()))
    finder = _Watching(wraps.keys(), replace)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        patches.leave()


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
