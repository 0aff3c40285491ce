"""What the runs of an audit do differently, as far as the text of the code tells: nothing is run or imported."""

from __future__ import annotations

import argparse
import ast
import math
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accumulation_harness.audit.command import subject_of
from accumulation_harness.audit.request import SIZES
from accumulation_harness.audit.user_code.asking import asking, texts_of
from accumulation_harness.audit.user_code.settings import PLACEHOLDER, Settings, filled, numbers_of, values_in_python
from accumulation_harness.audit.user_code.target import NOTEBOOK, Target

MOST = 8  # lines of a kind that are listed
WIDTH = 100  # of a line of source
KINDS: Mapping[str, tuple[str, str]] = {  # what is looked for: how it is spelled; what is said where nothing is
    "seeds": (
        r"(manual_seed|set_seed|seed_everything|random\.(seed|key)|default_rng|RandomState|PRNGKey|set_random_seed)\(",
        "none: an audit starts all generators from 0, your own runs do not",
    ),
    "loaders": (r"(DataLoader|Sampler|(?<!random\.)split|randperm|permutation|shuffle|get_batch)\(", "none found"),
    "schedules": (r"(LR|[sS]chedule\w*|get_lr|learning_rate)\(", "none found"),
    "number formats": (
        r"autocast|GradScaler|b?float16|float64|\.(half|double)\(|[bf]p?f?16|mixed_precision|default_dtype",
        "none named: those that the library takes by itself",
    ),
    "layers that see how a batch is cut": (r"(Batch|Instance)Norm|(?i:dropout)\w*[(=]", "none named"),
}
ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {"int": int, "max": max, "min": min, "ceil": math.ceil, "round": round}
Numbers = tuple[Any, ...]  # of one name: at each N


def explained(given: argparse.Namespace) -> str:
    """The answer to `--explain`, in lines.

    Args:
        given: The parsed command line.

    Returns:
        Lines that say how the function would be called.

    Raises:
        ValueError: The target or a setting names nothing.
    """
    target, settings = Target.of(given.train), Settings.of(given.set, given.set_env, given.set_file, given.rest)
    arms = [1, *(n for n in given.accumulation_steps if n != 1)]
    numbers = [numbers_of(given.batch_size // n, n) for n in arms]
    source = target.file()
    if not (target.name or settings.texts):
        raise ValueError(asking(target, source, settings.rest))
    texts = {_seen(file): text for file, text in texts_of(source, settings.rest).items()}
    trees = {name: ast.parse(text, name) for name, text in texts.items() if name.endswith((".py", NOTEBOOK))}
    told = _told(trees, target, settings)
    known = _known(trees, told, numbers)

    def at(values: Sequence[Any]) -> str:
        return ", ".join(f"{value} at N={n}" for n, value in zip(arms, values, strict=True))

    lines = [f"{given.train} at N={', '.join(map(str, arms))}, as far as its text tells: nothing has been run"]
    lines += [f"  N={n}: {_called(given.train, settings, sizes)}" for n, sizes in zip(arms, numbers, strict=True)]
    cut = ", ".join(f"{n} x {given.batch_size // n}" for n in arms)
    lines += [f"  samples per optimizer step: {cut}, where the code reads its numbers as they are meant"]
    for name, values in known.items():
        read = [place for file, tree in trees.items() for place in _read(name, file, tree, texts[file])]
        if read or name in told:
            lines += ["", f"{name}: {at(values) if len(set(values)) > 1 else f'{values[0]} at every N'}"]
            lines += _listed(read, "read nowhere in these files: by a package that it is handed to, or by nobody")
    lines += ["", "In the text of all runs"]
    for kind, (spelled, otherwise) in KINDS.items():
        lines += [f"  {kind}", *_listed([p for file in trees for p in _spelled(spelled, file, texts[file])], otherwise)]
    subject = subject_of(given)
    assert subject is not None
    lines += ["  versions", "    " + ", ".join(f"{name} {version}" for name, version in subject.versions(()).items())]
    return "\n".join(lines) + "\n"


def _seen(file: Path) -> str:
    """From this folder, where it is in it."""
    return os.path.relpath(file) if file.absolute().is_relative_to(Path.cwd()) else str(file)


def _called(target: str, settings: Settings, numbers: Mapping[str, int]) -> str:
    """One run as somebody would start it."""
    environment = [f"{name}={filled(text, numbers)}" for name, text in settings.environment]
    edits = [f"{_seen(edit.file)}:{edit.key}={filled(edit.text, numbers)}" for edit in settings.edits]
    call = shlex.join([target, *settings.arguments(numbers)])
    if not settings.texts:
        call += f"({', '.join(f'{name}={numbers[name]}' for name in SIZES)})"
    return " ".join([*environment, call, *(["with", ", ".join(edits)] if edits else [])])


def _told(trees: Mapping[str, ast.AST], target: Target, settings: Settings) -> dict[str, str]:
    """Names in the code, with the texts that they are given."""
    told = {name: text for name, text in settings.environment}
    told |= {edit.key.rpartition(".")[2]: edit.text for edit in settings.edits}
    for before, word in zip(("", *settings.words), settings.words, strict=False):
        flag, _, text = word.partition("=") if "=" in word else (before, "", word)
        told[_destination(trees, flag)] = text
    functions = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    for function in functions if target.name and not settings.texts else ():
        names = [one.arg for one in (*function.args.args, *function.args.kwonlyargs) if one.arg not in ("self", "cls")]
        if function.name == target.name.rpartition(".")[2] or (function.name == "__init__" and {*SIZES} <= {*names}):
            told |= {name: f"{{{size}}}" for size, name in zip(SIZES, names, strict=False)}
    return {name: text for name, text in told.items() if PLACEHOLDER.search(text)}


def _destination(trees: Mapping[str, ast.AST], flag: str) -> str:
    """The name under which a program finds what an option says: that of its longest spelling."""
    calls = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    spelled = [[a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)] for call in calls]
    longest = max(next((names for names in spelled if flag in names), [flag]), key=len)
    return longest.lstrip("-").replace("-", "_").rpartition(".")[2]


def _known(trees: Mapping[str, ast.AST], told: Mapping[str, str], arms: Sequence[Mapping[str, int]]) -> dict[str, Numbers]:
    """Names whose numbers are known at each N: those that are told, and those that are computed from nothing but them."""
    known = {name: tuple(_literal(filled(text, numbers)) for numbers in arms) for name, text in told.items()}
    given = [pair for tree in trees.values() for pair in values_in_python(ast.unparse(tree))]
    for dotted, value in given * 2:  # a name may be computed from one further down
        name = dotted.rpartition(".")[2]
        if name not in known and any(_name(node) in known for node in ast.walk(value)):
            computed = [_number(value, {other: numbers[k] for other, numbers in known.items()}) for k, _ in enumerate(arms)]
            known |= {name: tuple(computed)} if None not in computed else {}
    return known


def _literal(text: str) -> Any:
    return int(text) if text.isdecimal() else _number(ast.parse(text, mode="eval").body, {}) or text


def _name(node: ast.AST) -> str:
    """Under which name an expression looks something up: `x`, `args.x`, `cfg["x"]`, `getenv("x")`."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))) | ast.Call(args=[ast.Constant(value=str(name)), *_]):
            return name
    return ""


def _number(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """What an expression of known numbers comes to; None for any other."""
    if (name := _name(node)) in known:
        return known[name]
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            values, combine = [_number(left, known), _number(right, known)], ARITHMETIC[type(op)]
        case ast.Call(func=called, args=args) if (function := ast.unparse(called).rpartition(".")[2]) in FUNCTIONS:
            values, combine = [_number(arg, known) for arg in args], FUNCTIONS[function]
        case _:
            return None
    try:
        return combine(*values)
    except (TypeError, ArithmeticError):
        return None


def _read(name: str, file: str, tree: ast.AST, text: str) -> Iterator[str]:
    """Where a name is looked up, with the line."""
    lines = text.splitlines()
    for row in sorted({node.lineno for node in ast.walk(tree) if isinstance(node, ast.expr) and _name(node) == name}):
        yield _place(file, row, lines[row - 1], name)


def _spelled(spelled: str, file: str, text: str) -> Iterator[str]:
    for row, line in enumerate(text.splitlines(), start=1):
        if not re.match(r"\s*(#|import |from |class |def )", line) and (found := re.search(spelled, line)):
            yield _place(file, row, line, found[0])


def _place(file: str, row: int, line: str, name: str) -> str:
    """With as much of the line as there is room for, around the name."""
    line = line.strip()
    begin = max(0, min(line.find(name) - WIDTH // 2, len(line) - WIDTH))
    return f"{file}:{row}  {'...' * (begin > 0)}{line[begin : begin + WIDTH]}{'...' * (len(line) > begin + WIDTH)}"


def _listed(places: Sequence[str], otherwise: str) -> list[str]:
    more = [f"and {len(places) - MOST} more"] if len(places) > MOST else []
    return [f"    {place}" for place in (*places[:MOST], *more)] or [f"    {otherwise}"]
