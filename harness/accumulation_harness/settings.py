"""Every setting of the command line: its name, default, choices and meaning, read from the dataclasses and their comments.

`accumulation-harness run --help` prints them, and `python -m accumulation_harness.settings` writes docs/settings.md.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import io
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from accumulation_harness.bounds import BOUNDS
from accumulation_harness.config import HarnessConfig, to_dict

HIDDEN = ("experiment", "workload.source", "optimizer.source")  # chosen in another way, or filled in before a trial is named
WIDTH = 110  # columns of the text


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting."""

    name: str  # dotted
    default: str
    choices: str  # the values it takes
    meaning: str


@cache
def settings() -> tuple[Setting, ...]:
    """All of them, in the order of the dataclasses."""
    return tuple(setting for setting in _of(HarnessConfig, "", to_dict(HarnessConfig())) if setting.name not in HIDDEN)


def _of(kind: Any, prefix: str, defaults: dict[str, Any]) -> Iterator[Setting]:
    hints = typing.get_type_hints(kind)
    classes = [base for base in reversed(kind.__mro__) if base is not object]
    meanings = {name: text for base in classes for name, text in _comments(base).items()}
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield from _of(hint, f"{name}.", defaults[field.name])
            continue
        comment = meanings.get(field.name) or (hint.__doc__ if isinstance(hint, enum.EnumMeta) else "") or ""
        yield Setting(
            name=name, default=_written(defaults[field.name]), choices=_choices(name, hint), meaning=comment.rstrip(".")
        )


def _written(value: Any) -> str:
    """As on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else "{}" if value == {} else str(value)


def _choices(name: str, hint: Any) -> str:
    """What a value looks like."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    can_be_absent = " or null" if types.NoneType in parts else ""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(str(member) for member in hint)
    if hint is bool:
        return "true, false"
    if name in BOUNDS:
        listed = "a list, each " if typing.get_origin(hint) is tuple else ""
        return listed + str(BOUNDS[name]).partition(" (")[0] + can_be_absent
    if typing.get_origin(hint) is dict:
        return f"+{name}.KEY=VALUE"
    return ("a list of names" if typing.get_origin(hint) is tuple else "text") + can_be_absent


@cache
def _comments(kind: type) -> dict[str, str]:
    """The comment of each field: at the end of its line, or above it. Of a value of several lines, the comment at its end."""
    source = textwrap.dedent(inspect.getsource(kind))
    found: dict[str, str] = {}
    above: list[str] = []
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.removeprefix("#").strip()
        if token.type == tokenize.NAME and re.match(rf"    {re.escape(token.string)}: ", token.line):
            name = name if token.start[1] > 4 else token.string
            if above and token.start[1] == 4:
                found[name], above = " ".join(above), []
        elif token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            above.append(text)
        elif token.type == tokenize.COMMENT and name:
            found[name] = text
    return found


def text() -> str:
    """For a terminal: a line for each setting, and its meaning below where the line is full."""
    width = max(len(f"{setting.name}={setting.default}") for setting in settings()) + 2
    lines = []
    for setting in settings():
        told = "; ".join(filter(None, [setting.meaning, setting.choices]))
        first, *rest = textwrap.wrap(told, WIDTH - width, break_long_words=False) or [""]
        lines += [f"{setting.name + '=' + setting.default:{width}}{first}", *(" " * width + line for line in rest)]
    return "\n".join(lines)


def markdown() -> str:
    """docs/settings.md."""
    rows = [f"| `{s.name}` | `{s.default}` | {s.choices} | {s.meaning} |" for s in settings()]
    head = [
        "# Settings",
        "",
        "Each is written `name=value` on the command line, and sweeps over `name=a,b,c` after `-m`. This page is made from the",
        "dataclasses of `config.py` by `python -m accumulation_harness.settings`; "
        "`accumulation-harness run --help` prints the same.",
        "",
        "| setting | default | values | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
