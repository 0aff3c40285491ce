"""What a command names of somebody's code: a script, a module, a notebook, or a function or method in one of them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

from accumulation_harness.config.targets import module_file

EXPECTED = "SCRIPT.py, FILE.py:FUNCTION, package.module:FUNCTION or NOTEBOOK.ipynb"
NOTEBOOK = ".ipynb"
NO_PYTHON = re.compile(r"^(\s*)(?:[%!?].*|[\w.]+\?+)$", re.M)  # a line of a cell that the notebook's own interpreter reads
OF_SHELL = re.compile(r"^(\s*[\w.]+\s*=\s*)[%!].*$", re.M)
OF_PYTHON = ("%%time", "%%capture", "%%prun")  # how cells begin that are Python all the same
HEAD = "from unittest.mock import MagicMock; display = get_ipython = MagicMock()\n"


@dataclass(frozen=True)
class Target:
    """`where` is a file or a dotted module; `name` a function or `Class.method` in it, or empty: the whole of it is run."""

    where: str
    name: str

    @classmethod
    def of(cls, text: str) -> Target:
        """The target of a text. Raises ValueError for what can be none."""
        place, colon, name = text.rpartition(":")
        target = cls(place, name) if colon else cls(name, "")
        dotted = target.where.replace("/", "").split(".")
        if not (target.is_file or all(part.isidentifier() for part in target.where.split("."))) or not all(dotted):
            raise ValueError(f"expected {EXPECTED}, got {text}")
        if colon and not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"expected {EXPECTED}, got {text}")
        return target

    @property
    def is_file(self) -> bool:
        """Whether it is named by its path."""
        return self.where.endswith((".py", NOTEBOOK))

    def file(self) -> Path:
        """The absolute path of the source, found without importing anything. Raises ValueError where there is none."""
        if self.is_file:
            path = Path(self.where).expanduser().absolute()
            if not path.is_file():
                raise ValueError(f"expected a file, got {self.where}, which is not there")
            return path
        if (source := module_file(self.where, ".py", "/__main__.py", "/__init__.py")) is not None:
            return source.absolute()
        raise ValueError(f"expected {EXPECTED}; there is no module {self.where} in this folder or in an installed package")


def module_of(file: Path) -> tuple[Path, str]:
    """The folder from which a file is imported, and its dotted name: of a package where it is in one, or imports relatively.

    Args:
        file: A Python file.

    Returns:
        Folder for the path of imports, and name.
    """
    root, parts = file.parent, [file.stem]
    if not (root / "__init__.py").is_file() and _imports_relatively(file):
        root, parts = root.parent, [root.name, *parts]
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        root, parts = root.parent, [root.name, *parts]
    return root, ".".join(parts)


def _imports_relatively(file: Path) -> bool:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


def python_of(notebook: str, name: str = "") -> str:
    """The code of a notebook's cells, without what only a notebook understands; up to the cell that defines `name`.

    Args:
        notebook: The JSON of a notebook.
        name: What is to be defined, everything if empty.

    Returns:
        Python source.
    """
    kept, head = [HEAD], name.partition(".")[0]
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or (source.startswith("%%") and not source.startswith(OF_PYTHON)):
            continue
        kept.append(OF_SHELL.sub(r"\1[]", NO_PYTHON.sub(r"\1pass", source)))
        if head and re.search(rf"^(def {head}\(|class {head}\b)", source, re.M):
            break
    return "\n\n".join(kept) + "\n"
