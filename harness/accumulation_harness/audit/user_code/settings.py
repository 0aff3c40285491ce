"""How somebody's code is told the two numbers: words of its command line, variables of the environment, values in its files.

In all of them, `{batch_size}` stands for the samples of a micro-batch, `{accumulation_steps}` for their number, and
`{total_batch}` for the samples of an optimizer step.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from accumulation_harness.audit.user_code.target import NOTEBOOK, python_of

PLACEHOLDER = re.compile(r"\{(batch_size|accumulation_steps|total_batch)\}")
SECTION = re.compile(r"^\s*\[+\s*([^\]]+?)\s*\]+\s*(?:#.*)?$")
ASSIGNED = re.compile(r"""^(\s*)["']?([\w.-]+)["']?\s*[=:]\s*""")
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
    first, _, second = text.partition(separator)
    if not first or not second:
        raise ValueError(f"expected {form}, got {text}")
    return first, second


def numbers_of(batch_size: int, accumulation_steps: int) -> dict[str, int]:
    """What the placeholders stand for in a run.

    Args:
        batch_size: b, rows of a micro-batch.
        accumulation_steps: N, micro-batches of a step.

    Returns:
        Placeholder -> number; `total_batch` is N * b.
    """
    total = batch_size * accumulation_steps
    return {"batch_size": batch_size, "accumulation_steps": accumulation_steps, "total_batch": total}


def filled(text: str, numbers: Mapping[str, int]) -> str:
    """Put numbers in the place of their names in braces. Other braces stay: those of JSON, of Hydra's interpolations.

    >>> filled("run.{batch_size}.${x}", {"batch_size": 4})
    'run.4.${x}'

    Args:
        text: A setting of the user's.
        numbers: Name -> number.

    Returns:
        The text with the numbers.
    """
    return PLACEHOLDER.sub(lambda found: str(numbers[found[1]]), text)


def edited(path: Path, source: str, key: str, value: str) -> str:
    r"""Put another value into a settings file.

    >>> edited(Path("a.yaml"), "train:\n  batch: 8  # rows\n", "train.batch", "4")
    'train:\n  batch: 4  # rows\n'

    Args:
        path: The file, whose suffix says its format.
        source: Its text.
        key: The dotted name of the value.
        value: The new value.

    Returns:
        The new text.

    Raises:
        ValueError: It holds no such key.
    """
    span = next((span for name, span in places(path, source) if name == key and span[0] < span[1]), None)
    if span is None:
        raise ValueError(f"expected {key} with its value on a line of {path.name}, found none")
    if path.suffix == ".json" and not _is_json(value):
        value = json.dumps(value)
    return source[: span[0]] + value + source[span[1] :]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def source_of(path: Path, name: str = "") -> str:
    """The text of a file; of a notebook, that of its cells as Python.

    Args:
        path: A Python file or a notebook.
        name: What a notebook's cells are read up to, all if empty.

    Returns:
        Python source.
    """
    return python_of(path.read_text(), name) if path.suffix == NOTEBOOK else path.read_text()


def values_in_python(source: str) -> Iterator[tuple[str, ast.expr]]:
    """Find dotted names with the expressions that give them a value.

    >>> [(name, ast.unparse(value)) for name, value in values_in_python("def f(n=8): b, c = 1, dict(k=2)")]
    [('f.n', '8'), ('f.b', '1'), ('f.c', 'dict(k=2)'), ('f.c.k', '2'), ('f.dict.k', '2')]

    Args:
        source: Python.

    Yields:
        Name and expression, in the order of the source.
    """
    yield from _values(ast.parse(source), "")


def _values(node: ast.AST, within: str) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        within += f"{node.name}."
    for place, value in _given(node):
        name = place if isinstance(place, str) else getattr(place, "id", getattr(place, "attr", ""))
        if value is not None and name:
            yield within + name, value
            yield from ((f"{within}{name}.{inner}", item) for inner, item in _items(value))
    for child in ast.iter_child_nodes(node):
        yield from _values(child, within)


def _given(node: ast.AST) -> Iterator[tuple[ast.expr | str, ast.expr | None]]:
    """What a node itself gives a value, and the value: parameters their defaults, targets and keywords theirs."""
    match node:
        case ast.FunctionDef(args=given) | ast.AsyncFunctionDef(args=given):
            names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            values = [*given.defaults, *given.kw_defaults]
            yield from zip(names[len(names) - len(values) :], values, strict=True)
        case ast.Assign(targets=targets, value=ast.Tuple(elts=values)):
            for target in targets:
                yield from zip(target.elts, values, strict=False) if isinstance(target, ast.Tuple) else [(target, node.value)]
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=value):
            yield target, value
        case ast.Call(func=called, keywords=keywords):
            name = ast.unparse(called).rpartition(".")[2]
            yield from ((f"{name}.{keyword.arg}", keyword.value) for keyword in keywords if keyword.arg)


def _items(value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Of a dictionary, also of one that a call is given, or of a call by keywords."""
    given = [value, *(value.args if isinstance(value, ast.Call) else ())]
    pairs = [pair for one in given if isinstance(one, ast.Dict) for pair in zip(one.keys, one.values, strict=True)]
    named = [(key.value, item) for key, item in pairs if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    named += [(keyword.arg, keyword.value) for keyword in value.keywords if keyword.arg] if isinstance(value, ast.Call) else []
    for name, item in named:
        yield name, item
        yield from ((f"{name}.{inner}", one) for inner, one in _items(item))


def places(path: Path, source: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Dotted keys, each with where its value begins and ends: what Python assigns or hands on, JSON, YAML, TOML and INI.

    Args:
        path: Decides the format by its ending.
        source: The text of the file.

    Yields:
        Key, and (begin, end) of its value in the text.
    """
    if path.suffix not in (".py", ".json", NOTEBOOK):
        yield from _in_lines(path, source)
        return
    head = "(\n" if path.suffix == ".json" else ""  # JSON is an expression of Python's, wherever it begins
    text = f"{head}{source})" if head else source
    lines = text.split("\n")
    starts = [*accumulate((len(line) + 1 for line in lines), initial=-len(head))]  # in the source
    for name, value in _items(ast.parse(text, mode="eval").body) if head else values_in_python(text):
        ends = (value.lineno, value.col_offset), (value.end_lineno or 0, value.end_col_offset or 0)
        begin, end = (starts[row - 1] + len(lines[row - 1].encode()[:column].decode()) for row, column in ends)
        yield name, (begin, end)


def _in_lines(path: Path, source: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Of YAML by its indentation, of TOML and INI by their sections."""
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
            value = re.sub(r"\s+#.*$", "", line[found.end() :].rstrip("\n")).rstrip()
            at = begin + found.end()
            yield ".".join([*(name for _, name in above), found[2]]), (at, at + len(value))
            if path.suffix in (".yaml", ".yml"):
                above.append((len(found[1]), found[2]))
        begin += len(line)
