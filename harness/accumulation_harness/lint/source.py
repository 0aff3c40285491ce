"""One file: its text, its syntax tree, and the lines on which its author wants no word."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from functools import cached_property
from pathlib import Path

from accumulation_harness.lint import words
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.scope import Function, Scope, scopes
from accumulation_harness.lint.window import Window, windows

COMMENT = re.compile(r"#\s*accumulation-lint:\s*ignore\s*(?:\[([^\]]*)\])?")


class Source:
    """The text of a module. Raises SyntaxError or ValueError for what is no Python."""

    def __init__(self, text: str) -> None:
        self.text = text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in other people's strings
            self.tree = ast.parse(text)

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read a file in the encoding that it declares. Raises OSError, SyntaxError or ValueError."""
        with tokenize.open(path) as file:
            return cls(file.read())

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """The module and its functions; none where nothing is differentiated."""
        if "backward" not in self.text:
            return ()
        return tuple(scopes(self.tree))

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The loops that accumulate."""
        return tuple(window for scope in self.scopes for window in windows(scope))

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """The functions and methods of the module by their names."""
        found: dict[str, list[Function]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(node.name.lower(), []).append(node)
        return found

    @cached_property
    def made(self) -> dict[str, list[ast.Call]]:
        """The calls whose result is given to a name (`criterion`, `self.criterion`), by its last identifier."""
        found: dict[str, list[ast.Call]] = {}
        for node in words.inside(self.tree, ast.Assign):
            if isinstance(node.value, ast.Call):
                for target in node.targets:
                    found.setdefault(words.last(target), []).append(node.value)
        return found

    @cached_property
    def names(self) -> set[str]:
        """All that the module calls by a name: variables, attributes, keywords, and what it imports."""
        found = set()
        for node in ast.walk(self.tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    found.add(name)
                case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
                    found.update(name.split("."))
        return found

    def mentions(self, *names: str) -> bool:
        """Whether one of the names is used; what only comments and strings say does not count."""
        return not self.names.isdisjoint(names)

    def silenced(self, hit: Hit) -> bool:
        """Whether a comment `# accumulation-lint: ignore`, or `ignore[CAUSE, CAUSE]`, stands on a line of the hit."""
        return any(not causes or hit.cause in causes for line, causes in self._ignored if hit.line <= line <= hit.last_line)

    @cached_property
    def _ignored(self) -> list[tuple[int, frozenset[str]]]:
        found = []
        if "accumulation-lint" in self.text:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type == tokenize.COMMENT and (match := COMMENT.search(token.string)):
                    causes = frozenset(filter(None, re.split(r"[\s,]+", match[1] or "")))
                    found.append((token.start[0], causes))
        return found
