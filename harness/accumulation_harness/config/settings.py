"""Every setting of the command line: its name, default, values and meaning, as the dataclasses of `config.py` declare it.

`accumulation-harness run --help` prints them, and `python -m accumulation_harness.config.settings` writes docs/settings.md.
"""

from __future__ import annotations

import dataclasses
import enum
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from accumulation_harness.config import HarnessConfig
from accumulation_harness.config.declare import Bounds
from accumulation_harness.system.terminal import closest

WIDTH = 110  # columns of the text
KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", types.NoneType: "null"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting."""

    name: str  # dotted
    kind: Any  # of its values
    default: Any
    meaning: str
    bounds: Bounds | None
    also: tuple[str, ...]  # what other programs call it

    @property
    def values(self) -> str:
        """What a value looks like."""
        return self._looks(self.kind)

    def _looks(self, kind: Any) -> str:
        parts, origin = typing.get_args(kind), typing.get_origin(kind)
        if isinstance(kind, types.UnionType):
            return " or ".join(map(self._looks, parts))
        if origin is tuple:
            return f"a list, each {self._looks(parts[0])}"
        if origin is dict:
            return f"+{self.name}.KEY=VALUE"
        if issubclass(kind, enum.Enum):
            return f"one of {', '.join(map(str, kind))}"
        return str(self.bounds) if self.bounds and kind in (int, float) else KINDS[kind]

    @property
    def written(self) -> str:
        """The default, as on the command line."""
        if isinstance(self.default, tuple):
            return f"[{','.join(map(str, self.default))}]"
        return "null" if self.default is None else str(self.default).lower() if self.kind is bool else str(self.default)


@cache
def settings() -> dict[str, Setting]:
    """List all settings by name, in the order of the dataclasses. A field without a declaration is no setting.

    Returns:
        Name -> setting.
    """
    return {setting.name: setting for setting in _of(HarnessConfig())}


def _of(config: Any, prefix: str = "") -> Iterator[Setting]:
    kinds = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, default, kind = prefix + field.name, getattr(config, field.name), kinds[field.name]
        if dataclasses.is_dataclass(default):
            yield from _of(default, f"{name}.")
        elif field.metadata:
            told: dict[str, Any] = {"meaning": "", **field.metadata}
            told["meaning"] = told["meaning"] or kind.__doc__.rstrip(".")
            yield Setting(name=name, kind=kind, default=default, **told)


def expected(name: str) -> str | None:
    """What a value of the setting looks like; None for a name that is no setting.

    Args:
        name: Dotted name of a setting, or of a group of them.

    Returns:
        A phrase for an error message, or None.
    """
    if name in settings():
        return settings()[name].values
    inner = [one.removeprefix(f"{name}.") for one in settings() if one.startswith(f"{name}.")]
    return f"its settings: {', '.join(inner)}" if inner else None


def meant(name: str) -> str:
    """Guess which setting a wrong name may have meant: one with that last part, or one spelt nearly so.

    Args:
        name: A name that is no setting.

    Returns:
        The end of an error message; empty where nothing is near.
    """
    last = name.rpartition(".")[2]
    called = {alias: one.name for one in settings().values() for alias in (one.name.rpartition(".")[2], *one.also)}
    groups = {one.partition(".")[0] for one in settings()}
    known = {**called, **{one: one for one in (*groups, *settings())}}
    for asked in (name, last):
        if close := closest(asked, known, cutoff=0.75):
            return f"a known setting; did you mean {close}?"
    return "a setting: accumulation-harness run --help lists them"


def text() -> str:
    """Describe all settings for a terminal: a line for each, and its meaning below where the line is full.

    Returns:
        Lines, at most as wide as a terminal.
    """
    width = max(len(f"{one.name}={one.written}") for one in settings().values()) + 2
    lines = []
    for one in settings().values():
        first, *rest = textwrap.wrap(f"{one.meaning}; {one.values}", WIDTH - width, break_long_words=False)
        lines += [f"{f'{one.name}={one.written}':{width}}{first}", *(" " * width + line for line in rest)]
    return "\n".join(lines)


def markdown() -> str:
    """Make the page docs/settings.md.

    Returns:
        The page.
    """
    return "\n".join(
        [
            "# Settings",
            "",
            "`accumulation-harness run name=value` sets one; `run -m name=a,b,c` makes a trial of each value. `converge`,",
            "`advise` and `plan trial` take the same settings, and `accumulation-harness run --help` prints this list.",
            "",
            "| setting | default | values | meaning |",
            "|---|---|---|---|",
            *(f"| `{one.name}` | `{one.written}` | {one.values} | {one.meaning} |" for one in settings().values()),
            "",
        ]
    )


if __name__ == "__main__":
    print(markdown(), end="")
