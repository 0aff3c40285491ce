"""What is asked back where it is not said how a script is told the two numbers, with the places in it that look like them."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accumulation_harness.audit.user_code.settings import places, source_of
from accumulation_harness.audit.user_code.target import NOTEBOOK, Target

FILES = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf")
NAMES = {  # how names are spelled that mean: micro-batches, samples of a micro-batch, of an optimizer step
    "{accumulation_steps}": re.compile(r"accum|^ga$|^gas$|_ga$|update_freq|n(um)?_(chunks|micro_?batches)", re.I),
    "{total_batch}": re.compile(r"(total|global|effective|^train).?batch(?!es)|batch.?total", re.I),
    "{batch_size}": re.compile(r"batch(?!es)|(^|_)bsz?$", re.I),
}
NO_NAMES = re.compile(r"eval|val|test|num_?batch|batch_?(idx|index|first|norm)|tokens", re.I)
FLAG = re.compile(r"""["']--?([\w-]+)["']""")
VARIABLE = re.compile(r"""(?:environ(?:\.get)?|getenv)[(\[]\s*["'](\w+)["']""")


def asking(target: Target, source: Path) -> str:
    """What is missing, in a line, with the options that would say it."""
    told = dict(_first_of_each(_names(source)))
    micro = "{batch_size}" in told
    if micro and "{accumulation_steps}" in told:
        told.pop("{total_batch}", None)
    what = f"{target.where} is a script" if not target.name else f"{target.name} takes no (batch_size, accumulation_steps)"
    if len(told) < 2 and (line := _with_numbers(source, [name for name in NAMES if name not in told])):
        return f"expected numbers that have a name, to be set from outside: {what}, and {line}"
    if not told:
        told = {"{batch_size}": ("--set", "--batch-size "), "{accumulation_steps}": ("--set", "--accumulation-steps ")}
    words: dict[str, list[str]] = {}
    for placeholder in ("{batch_size}", "{total_batch}", "{accumulation_steps}"):
        if placeholder in told:
            option, before = told[placeholder]
            words.setdefault(option, []).append(before + placeholder)
    options = [f"--set '{' '.join(words.pop('--set'))}'"] if "--set" in words else []
    options += [f"{option} '{text}'" for option, texts in words.items() for text in texts]
    return f"expected how it is told the two numbers, as {' '.join(options)} (or --set, --set-env, --set-file): {what}"


def _first_of_each(names: Iterator[tuple[str, str, str]]) -> Iterator[tuple[str, tuple[str, str]]]:
    found: set[str] = set()
    for name, option, before in names:
        meant = next((p for p, spelled in NAMES.items() if spelled.search(name) and not NO_NAMES.search(name)), None)
        if meant is not None and meant not in found:
            found.add(meant)
            yield meant, (option, before)


def _names(source: Path) -> Iterator[tuple[str, str, str]]:
    """Names in a script, in what it imports from its folder and in files that these name; the option that sets each."""
    files, seen = [source], set[Path]()
    texts = {}
    for file in files:
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        text = texts[file] = source_of(file)
        if file.suffix in (".py", NOTEBOOK):
            files += [
                file.parent / f"{name.replace('.', '/')}.py" for name in re.findall(r"^\s*(?:from|import)\s+\.?(\w+)", text, re.M)
            ]
            named = re.findall(r"""["']([\w./-]+)["']""", text)
            files += [folder / name for name in named if name.endswith(FILES) for folder in (source.parent, Path.cwd())]
    for text in texts.values():
        yield from ((name.replace("-", "_"), "--set", f"--{name} ") for name in FLAG.findall(text))
        yield from ((name, "--set-env", f"{name}=") for name in VARIABLE.findall(text))
    for file, text in texts.items():
        for key in _keys(file, text):
            yield key.rpartition(".")[2], "--set-file", f"{os.path.relpath(file)}:{key}="


def _keys(file: Path, text: str) -> Iterator[str]:
    """Whose value is a whole number."""
    if file.suffix == ".json":
        yield from _in_json(json.loads(text))
    else:
        yield from (key for key, (begin, end) in places(file, text) if text[begin:end].isdigit())


def _in_json(value: Any) -> Iterator[str]:
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if type(item) is int:
            yield key
        yield from (f"{key}.{inner}" for inner in _in_json(item))


def _with_numbers(source: Path, missing: list[str]) -> str:
    """The line that counts micro-batches, or cuts batches, by a bare number."""
    try:
        text = source_of(source)
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError):
        return ""
    tests = [n.left if isinstance(n, ast.Compare) else n.operand for n in nodes if isinstance(n, (ast.Compare, ast.UnaryOp))]
    counted = [n for n in tests if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) and _is_number(n.right)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "attr", "") in ("split", "chunk")]
    cut = [call for call in calls if any(map(_is_number, call.args))]
    found = counted[:1] if "{accumulation_steps}" in missing else cut[:1]
    if not found:
        return ""
    line = text.splitlines()[found[0].lineno - 1].strip()
    name = "ACCUMULATION_STEPS" if found is not cut and counted[:1] == found else "BATCH_SIZE"
    return f"{source.name}:{found[0].lineno} holds a bare number, `{line}`: write {name} = ... at its top, and {name} there"


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1
