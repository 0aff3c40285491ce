"""torch._dynamo, imported when something is compiled: the first optimizer's step imports it, which takes as long as torch itself.

A step asks two things of it, a break of the graph and functions that are not to be compiled, and both mean nothing as long as
nothing is compiled. So a module stands in its place that answers these two, and imports the real one for whatever else is asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


def postpone() -> None:
    """Put the stand-in in its place, unless it is imported already."""
    import torch

    if NAME not in sys.modules and (spec := importlib.util.find_spec(NAME)) is not None:
        stand_in = _StandIn(NAME)
        stand_in.__spec__, stand_in.__file__ = spec, spec.origin  # which `inspect` asks of all modules
        sys.modules[NAME] = torch._dynamo = stand_in
        sys.meta_path.insert(0, _Loaded())


class _StandIn(ModuleType):
    """As the real one while nothing is compiled."""

    def graph_break(self, msg: str = "") -> None:
        """Nothing: there is no graph."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Callable[..., Any]:
        """`fn` itself, until the real one is imported; without it, what decorates a function."""
        if fn is None:
            return partial(self.disable, recursive=recursive, **options)
        disabled: list[Callable[..., Any]] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if sys.modules[NAME] is self:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(sys.modules[NAME].disable(fn, recursive, **options))
            return disabled[0](*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked, `__path__` by an import of one of its modules among it."""
        import torch

        if sys.modules.get(NAME) is self:
            del sys.modules[NAME], torch._dynamo
        return getattr(importlib.import_module(NAME), name)


class _Loaded(MetaPathFinder, Loader):
    """Finds a module of torch._dynamo that was imported while its parent was: as the import that asked for it did not know."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of one that is loaded."""
        return ModuleSpec(fullname, self) if fullname.startswith(f"{NAME}.") and fullname in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The one that there is."""
        module = sys.modules[spec.name]
        self._before = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it was."""
        vars(module)["__spec__"] = self._before  # its own __setattr__ may refuse
