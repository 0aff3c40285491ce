"""A training function named as `FILE.py:FUNCTION`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(target: str) -> Callable[..., Any]:
    """The function. Raises ValueError that says what was expected when it cannot be found."""
    path, separator, name = target.rpartition(":")
    if not separator or not path.endswith(".py") or not name:
        raise ValueError(f"expected FILE.py:FUNCTION, got {target}")
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"expected a file, got {path}, which is not there")
    function = getattr(load_module(file), name, None)
    if not callable(function):
        raise ValueError(f"expected a function {name} in {path}, found none")
    result: Callable[..., Any] = function
    return result


def load_module(file: Path) -> Any:
    """The file as a module of its own name; its folder is importable while it is read and afterwards."""
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    name = f"audited_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
