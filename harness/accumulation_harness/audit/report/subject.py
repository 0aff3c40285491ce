"""What was audited: where the function stands, how the audit was called, and the versions of what ran."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import platform
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from accumulation_harness.audit.user_code.target import Target
from accumulation_harness.system.packages import version

TOOL = "accumulation-harness"


def seen_from(file: Path, folder: Path) -> str:
    """The path relative to a folder that it is in, with forward slashes; absolute otherwise.

    Args:
        file: An absolute path.
        folder: An absolute path.

    Returns:
        A path with forward slashes.
    """
    return (file.relative_to(folder) if file.is_relative_to(folder) else file).as_posix()


@dataclass(frozen=True)
class Place:
    """A function in a file."""

    file: Path  # absolute
    function: str

    @classmethod
    def of(cls, target: str) -> Place:
        """The place that a target names, there or not; `function` is empty for a script."""
        try:
            named = Target.of(target)
            return cls(named.file(), named.name)
        except ValueError:
            path, _, function = target.rpartition(":")
            return cls(Path(path or function).absolute(), function)

    @property
    def source(self) -> str:
        """Of the whole file; empty when it cannot be read."""
        try:
            return self.file.read_text()
        except (OSError, ValueError):
            return ""

    @property
    def tree(self) -> ast.AST:
        """Of the source; of an empty file when it is no Python."""
        try:
            return ast.parse(self.source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ast.Module([], [])

    @property
    def definition(self) -> ast.FunctionDef | None:
        """The last `def` of that name; None when there is none."""
        name = self.function.rpartition(".")[2]
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef) and node.name == name]
        return max(nodes, key=lambda node: node.lineno, default=None)

    @property
    def line(self) -> int:
        """Of the definition; 1 when there is none."""
        return self.definition.lineno if self.definition is not None else 1

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters, as far as the definition shows."""
        if self.definition is None:
            return frozenset()
        given = self.definition.args
        return frozenset(item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs))

    def seen_from(self, folder: Path) -> str:
        """The path relative to a folder that it is in, with forward slashes; absolute otherwise."""
        return seen_from(self.file, folder)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the command was asked to audit."""

    train: Place
    reference: Place | None = None
    batch_size: int
    accumulation_steps: tuple[int, ...]
    processes: int = 1
    launched: bool = False  # another program starts the processes
    replicas: int | None = None  # of these, those that take rows of their own; None for all
    settings: tuple[str, ...] = ()  # words of the command that say how a script is told the two numbers
    folder: Path  # in which the command was called

    @property
    def name(self) -> str:
        """FILE.py:FUNCTION, as seen from the folder."""
        return self.shown(self.train)

    def shown(self, place: Place) -> str:
        """FILE.py:FUNCTION of a place, or SCRIPT.py."""
        return f"{place.seen_from(self.folder)}:{place.function}".removesuffix(":")

    @property
    def root(self) -> Path:
        """Of the sources: the checkout of a job of GitHub Actions when the file is in it, otherwise the folder."""
        checkout = os.environ.get("GITHUB_WORKSPACE")
        return Path(checkout) if checkout and self.train.file.is_relative_to(checkout) else self.folder

    @property
    def command(self) -> str:
        """The command line, for a shell."""
        torchrun = ["torchrun", "--nproc-per-node", str(self.processes), "-m", "accumulation_harness.audit"]
        words = [*(torchrun if self.launched else [TOOL, "audit"]), self.name, "--batch-size", str(self.batch_size)]
        words += ["--accumulation-steps", ",".join(str(n) for n in self.accumulation_steps)]
        words += ["--reference", self.shown(self.reference)] if self.reference else []
        if self.launched:
            words += ["--launched", *(["--replicas", str(self.replicas)] if self.replicas else [])]
        elif self.processes > 1:
            words += ["--processes", str(self.processes)]
        return shlex.join([*words, *self.settings])

    def versions(self, callers: Collection[str]) -> dict[str, str]:
        """Of the packages that called the backward, those that the audited file imports, Python, the platform and this tool."""
        installed = {name: version(name) for name in _distributions({*callers, *_imported(self.train), "torch"}) if name != TOOL}
        return {
            **{name: version for name, version in installed.items() if version},
            "Python": platform.python_version(),
            "platform": platform.platform(),
            TOOL: version(TOOL) or "not installed: a source tree",
        }


def _imported(place: Place) -> set[str]:
    """Packages that the file imports by name."""
    modules = set()
    for node in ast.walk(place.tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    return modules


def _distributions(modules: Collection[str]) -> list[str]:
    """As they were installed."""
    known = importlib.metadata.packages_distributions()
    return sorted({name for module in modules for name in known.get(module, ())})
