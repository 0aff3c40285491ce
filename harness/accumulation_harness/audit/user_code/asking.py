"""What is asked back where it is not said how a script is told the two numbers, with the places in it that look like them."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from accumulation_harness.audit.user_code.settings import places, source_of
from accumulation_harness.audit.user_code.target import NOTEBOOK, Target

FILES = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf")
MOST_FILES = 50  # of a folder with settings
NAMES = {  # how names are spelled that mean: micro-batches, samples of an optimizer step, of a micro-batch
    "{accumulation_steps}": re.compile(
        r"accum|(^|_)(ga|gas|acc)$|acc_(steps|iter)|update_freq|n(um)?_(chunks|micro(_?batches)?$)", re.I
    ),
    "{total_batch}": re.compile(r"(total|global|effective).?batch(?!es)|batch.?total", re.I),
    "{batch_size}": re.compile(r"batch(?!es)|(^|_)(bsz?|micro)$|(?-i:^B$)", re.I),
}
NO_NAMES = re.compile(r"eval|val|test|num_?batch|batch_?(idx|index|first|norm)|tokens", re.I)
MICRO = re.compile(r"micro|per_device|per_gpu", re.I)
FLAG = re.compile(r"""["'](--?[\w-]{2,})["']""")
NUMBER = re.compile(r"[\d_]*[1-9][\d_]*(\s*\*\s*[\d_]+)*")  # a whole one, or a product of such
OF_LIBRARIES = {  # what parses a command line -> its options that mean the two numbers
    "HfArgumentParser": ("--per_device_train_batch_size ", "--gradient_accumulation_steps "),
    "TrlParser": ("--per_device_train_batch_size ", "--gradient_accumulation_steps "),
    "LightningCLI": ("--trainer.accumulate_grad_batches ",),
}
VARIABLE = re.compile(r"""(?:environ(?:\.get)?|getenv)[(\[]\s*["'](\w+)["']""")


class Way(NamedTuple):
    """How one of the numbers may be told."""

    name: str
    option: str  # that sets it
    before: str  # its value
    after: str = ""


def asking(target: Target, source: Path, rest: Sequence[str] = ()) -> str:
    """What is missing, in a line, with the options that would say it; `rest`: what else the command line of the script has.

    Args:
        target: What is to be audited.
        source: Its file.
        rest: Further words of its command line.

    Returns:
        One line.
    """
    told = _in_tokens(_told(_names(source, rest)), source)
    what = f"{target.where} is a script" if not target.name else f"{target.name} takes no (batch_size, accumulation_steps)"
    if len(told) < 2 and (line := _with_numbers(source, [name for name in NAMES if name not in told])):
        return f"expected numbers that have a name, to be set from outside: {what}, and {line}"
    if not told:
        usual = {"{batch_size}": "--batch-size ", "{accumulation_steps}": "--accumulation-steps "}
        told = {placeholder: Way("", "--set", option) for placeholder, option in usual.items()}
    return (
        f"expected to be told how the script gets the two numbers, as {_options(told)} (or --set, --set-env, --set-file): {what}"
    )


def advised(source: Path, rest: Sequence[str] = ()) -> str:
    """The options that tell a script the two numbers, as far as its text shows; empty where it shows less than both.

    Args:
        source: The script.
        rest: Further words of its command line.

    Returns:
        Options of `audit`, or an empty text.
    """
    told = _in_tokens(_told(_names(source, rest)), source)
    return _options(told) if len(told) > 1 else ""


def _options(told: Mapping[str, Way]) -> str:
    words: dict[str, list[str]] = {}
    for placeholder in ("{batch_size}", "{total_batch}", "{accumulation_steps}"):
        if placeholder in told:
            way = told[placeholder]
            words.setdefault(way.option, []).append(way.before + placeholder + way.after)
    options = [f"--set '{' '.join(words.pop('--set'))}'"] if "--set" in words else []
    return " ".join([*options, *(f"{option} '{text}'" for option, texts in words.items() for text in texts)])


def _told(ways: Iterator[Way]) -> dict[str, Way]:
    """The first way for each of the numbers; where no name counts micro-batches, the samples of a step say how many there are."""
    found: dict[str, list[Way]] = {}
    for way in ways:
        meant = next((p for p, spelled in NAMES.items() if spelled.search(way.name) and not NO_NAMES.search(way.name)), "")
        found.setdefault(meant, []).append(way)
    sizes = sorted(found.get("{batch_size}", []), key=lambda way: not MICRO.search(way.name))
    told = {"{batch_size}": sizes[0]} if sizes else {}
    if "{accumulation_steps}" in found:
        told["{accumulation_steps}"] = found["{accumulation_steps}"][0]
    totals = found.get("{total_batch}", []) + [
        way for way in sizes[1:] if MICRO.search(sizes[0].name) and not MICRO.search(way.name)
    ]
    return told | ({"{total_batch}": totals[0]} if totals and len(told) < 2 else {})


def _in_tokens(told: dict[str, Way], source: Path) -> dict[str, Way]:
    """Where the text divides the whole batch by a micro-batch's rows and by more (`total // (B * T)`), it counts that more."""
    try:
        text = source_of(source)
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError):
        return told
    values = {key: text[begin:end] for key, (begin, end) in places(source, text) if NUMBER.fullmatch(text[begin:end])}
    for node in nodes if {"{total_batch}", "{batch_size}"} <= told.keys() else ():
        match node:
            case ast.BinOp(left=ast.Name(id=total), op=ast.FloorDiv(), right=right) if total == told["{total_batch}"].name:
                names = [one.id for one in ast.walk(right) if isinstance(one, ast.Name)]
                if told["{batch_size}"].name in names:
                    factors = [f"*{values[name]}" for name in names if name in values and name != told["{batch_size}"].name]
                    return {**told, "{total_batch}": told["{total_batch}"]._replace(after="".join(factors))}
    return told


def texts_of(source: Path, rest: Sequence[str]) -> dict[Path, str]:
    """A script, what it imports from its folder, and files with settings that these or its command line name.

    Args:
        source: The script.
        rest: Further words of its command line.

    Returns:
        File -> its text.
    """
    files, texts = [source], dict[Path, str]()
    files[:0] = [file for word in rest for file in _settings(Path.cwd() / word)]
    for file in files:
        if file in texts or not file.is_file():
            continue
        text = texts[file] = source_of(file)
        if file.suffix in (".py", NOTEBOOK):
            files += [
                file.parent / f"{name.replace('.', '/')}.py" for name in re.findall(r"^\s*(?:from|import)\s+\.?(\w+)", text, re.M)
            ]
            named = re.findall(r"""["']([\w./-]*\w[\w./-]*)["']""", text)
            files += [found for name in named for folder in (source.parent, Path.cwd()) for found in _settings(folder / name)]
    return texts


def _names(source: Path, rest: Sequence[str]) -> Iterator[Way]:
    """Names in all of these, and what sets each."""
    texts = texts_of(source, rest)
    for text in texts.values():
        known = (option for parser, options in OF_LIBRARIES.items() if f"{parser}(" in text for option in options)
        yield from (Way(option.strip(" -").rpartition(".")[2], "--set", option) for option in known)
        yield from (Way(flag.lstrip("-").replace("-", "_"), "--set", f"{flag} ") for flag in FLAG.findall(text))
        yield from (Way(name, "--set-env", f"{name}=") for name in VARIABLE.findall(text))
    for file, text in texts.items():
        for key in _keys(file, text):
            yield Way(key.removesuffix(".default").rpartition(".")[2], "--set-file", f"{os.path.relpath(file)}:{key}=")


def _settings(path: Path) -> list[Path]:
    """The file, or the files of a folder."""
    inside = islice(chain(path.glob("*"), path.glob("*/*")), MOST_FILES) if path.is_dir() else [path]
    return sorted(file for file in inside if file.suffix in FILES)


def _keys(file: Path, text: str) -> Iterator[str]:
    """Whose value is a whole number."""
    return (key for key, (begin, end) in places(file, text) if NUMBER.fullmatch(text[begin:end]))


def _with_numbers(source: Path, missing: list[str]) -> str:
    """The line that counts micro-batches, or cuts batches, by a bare number."""
    try:
        text = source_of(source)
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError):
        return ""
    others = [n.test for n in nodes if isinstance(n, ast.If) and not any(map(_steps, ast.walk(n)))]
    silent = {inner for test in others for inner in ast.walk(test)}
    asked = [n for n in nodes if isinstance(n, (ast.Compare, ast.UnaryOp)) and n not in silent]
    tests = [n.left if isinstance(n, ast.Compare) else n.operand for n in asked]
    counted = [n for n in tests if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) and _is_number(n.right)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "attr", "") in ("split", "chunk")]
    cut = [call for call in calls if any(map(_is_number, call.args))]
    found = counted[:1] if "{accumulation_steps}" in missing else cut[:1]
    if not found:
        return ""
    line = text.splitlines()[found[0].lineno - 1].strip()
    name = "ACCUMULATION_STEPS" if found is not cut and counted[:1] == found else "BATCH_SIZE"
    return f"{source.name}:{found[0].lineno} holds a bare number, `{line}`: write {name} = ... at its top, and {name} there"


def _steps(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("step", "zero_grad")


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value > 1
