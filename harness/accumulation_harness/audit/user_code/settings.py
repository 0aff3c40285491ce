"""How somebody's code is told the two numbers: words of its command line, variables of the environment, values in its files.

In all of them, `{batch_size}` stands for the samples of a micro-batch, `{accumulation_steps}` for their number, and
`{total_batch}` for the samples of an optimizer step.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from accumulation_harness.audit.user_code.target import NOTEBOOK, python_of

PLACEHOLDER = re.compile(r"\{(batch_size|accumulation_steps|total_batch)\}")
SECTION = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+\s*(?:#.*)?$")
ASSIGNED = re.compile(r"""^(\s*)["']?([\w.-]+)["']?\s*=\s*""")
MAPPED = re.compile(r"""^(\s*(?:-\s+)?)["']?([\w.-]+)["']?\s*:(?:\s+|$)""")


@dataclass(frozen=True)
class Edit:
    """A value in a file: `key` is dotted, `text` holds placeholders."""

    file: Path  # absolute
    key: str
    text: str


@dataclass(frozen=True)
class Settings:
    """What a run is told, with placeholders; `rest` are words of the command line that stay as they are."""

    words: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    edits: tuple[Edit, ...] = ()
    rest: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str], environment: Sequence[str], files: Sequence[str], rest: Sequence[str]) -> Settings:
        """From the options of a command. Raises ValueError for what cannot be meant."""
        pairs = [tuple(_split(word, "=", "NAME={batch_size}")) for text in environment for word in shlex.split(text)]
        edits = []
        for text in files:
            place, value = _split(text, "=", "FILE.yaml:KEY={batch_size}")
            file, key = _split(place, ":", "FILE.yaml:KEY={batch_size}")
            if not (path := Path(file).absolute()).is_file():
                raise ValueError(f"expected a file, got {file}, which is not there")
            edits.append(Edit(path, key, value))
        made = cls(tuple(w for text in words for w in shlex.split(text)), tuple(pairs), tuple(edits), tuple(rest))  # type: ignore[arg-type]
        used = set(PLACEHOLDER.findall(" ".join(made.texts)))
        if made.texts and len(used) < 2:
            raise ValueError(
                "expected two of {batch_size} (of a micro-batch), {accumulation_steps} and {total_batch} in --set, --set-env or "
                f"--set-file, got {' '.join(made.texts)}"
            )
        return made

    @property
    def texts(self) -> list[str]:
        """All that may hold placeholders; empty where a run is told nothing."""
        return [*self.words, *(text for _, text in self.environment), *(edit.text for edit in self.edits)]

    def arguments(self, numbers: Mapping[str, int]) -> list[str]:
        """The command line without the name of the script: what is set comes last, where it counts."""
        return [*self.rest, *(filled(word, numbers) for word in self.words)]


def _split(text: str, separator: str, form: str) -> tuple[str, str]:
    first, found, second = text.partition(separator)
    if not found or not first or not second:
        raise ValueError(f"expected {form}, got {text}")
    return first, second


def filled(text: str, numbers: Mapping[str, int]) -> str:
    """Other braces stay: those of JSON, of Hydra's interpolations.

    >>> filled("run.{batch_size}.${x}", {"batch_size": 4})
    'run.4.${x}'
    """
    return PLACEHOLDER.sub(lambda found: str(numbers[found[1]]), text)


def edited(path: Path, source: str, key: str, value: str) -> str:
    r"""The text of a file with another value. Raises ValueError where it holds no such key.

    >>> edited(Path("a.yaml"), "train:\n  batch: 8  # rows\n", "train.batch", "4")
    'train:\n  batch: 4  # rows\n'
    """
    if path.suffix == ".json":
        return _edited_json(path, source, key, value)
    span = _span_in_python(source, key) if path.suffix in (".py", NOTEBOOK) else _span_in_lines(path, source, key)
    if span is None:
        raise ValueError(f"expected {key} with its value on a line of {path.name}, found none")
    return source[: span[0]] + value + source[span[1] :]


def source_of(path: Path, name: str = "") -> str:
    """The text of a file; of a notebook, that of its cells as Python."""
    return python_of(path.read_text(), name) if path.suffix == NOTEBOOK else path.read_text()


def _edited_json(path: Path, source: str, key: str, value: str) -> str:
    whole = json.loads(source)
    *outer, last = key.split(".")
    inner = whole
    for part in outer:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or last not in inner:
        raise ValueError(f"expected {key} in {path.name}, found none")
    try:
        inner[last] = json.loads(value)
    except ValueError:
        inner[last] = value
    return json.dumps(whole, indent=2)


def _span_in_python(source: str, key: str) -> tuple[int, int] | None:
    """Of the value that is first assigned to a name, or to one in a class (`Config.batch_size`)."""
    *classes, last = key.split(".")
    body = ast.parse(source).body
    for name in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        value = getattr(node, "value", None)
        if value is not None and any(isinstance(target, ast.Name) and target.id == last for target in targets):
            begin, end = (value.lineno, value.col_offset), (value.end_lineno, value.end_col_offset)
            first, last_one = (starts[row - 1] + len(lines[row - 1].encode()[:bytes_].decode()) for row, bytes_ in (begin, end))
            return first, last_one
    return None


def _span_in_lines(path: Path, source: str, key: str) -> tuple[int, int] | None:
    """Of a value in YAML, by its indentation, or in TOML and INI, by its section."""
    begin, above = 0, list[tuple[int, str]]()
    for line in source.splitlines(keepends=True):
        if path.suffix in (".yaml", ".yml"):
            found = MAPPED.match(line)
            if found is not None:
                above = [(indent, name) for indent, name in above if indent < len(found[1])]
        elif (section := SECTION.match(line)) is not None:
            above, found = [(0, section[1])], None
        else:
            found = ASSIGNED.match(line)
        if found is not None:
            if ".".join([*(name for _, name in above), found[2]]) == key:
                value = re.sub(r"\s+#.*$", "", line[found.end() :].rstrip("\n"))
                return (begin + found.end(), begin + found.end() + len(value.rstrip())) if value.strip() else None
            if path.suffix in (".yaml", ".yml"):
                above.append((len(found[1]), found[2]))
        begin += len(line)
    return None
