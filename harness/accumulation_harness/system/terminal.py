"""What all commands have in common: refusals in one line, of their arguments and by their surroundings."""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

BAD_INPUT = 2  # exit code, as argparse has it
MOST_CHARACTERS = 800  # of a refusal
ALSO = {  # what values are called elsewhere, where the spelling does not tell
    "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "single": "float32", "fp64": "float64",
    "double": "float64", "bn": "batch", "gn": "group", "ln": "layer", "off": "disabled", "gpu": "cuda",
}  # fmt: skip
CHOICES = re.compile(r"(\S+?)'?:? (?:expected one of |\(choose from )('?[\w+@-]+'?(?:, (?!with )'?[\w+@-]+'?)*)")


def one_line(text: object) -> str:
    r"""Put a text on one line. A long one loses its middle.

    >>> one_line("bad value:\n   x")
    'bad value: x'

    Args:
        text: Anything that `str` takes.

    Returns:
        At most about `MOST_CHARACTERS` characters, without line breaks.
    """
    line = " ".join(str(text).split())
    half = MOST_CHARACTERS // 2
    return line if len(line) <= MOST_CHARACTERS else f"{line[:half]} ... {line[-half:]}"


def parser(command: str, doc: str | None) -> argparse.ArgumentParser:
    """Make the argument parser of a subcommand from its module's docstring.

    Args:
        command: Its name behind `accumulation-harness`.
        doc: A docstring that begins with "`accumulation-harness COMMAND ...`: what it does".

    Returns:
        A parser that has a description and no arguments yet.
    """
    what = " ".join((doc or "").partition("`: ")[2].split())
    return argparse.ArgumentParser(prog=f"accumulation-harness {command}", description=what[:1].upper() + what[1:])


def closest(asked: str, names: Mapping[str, str] | Iterable[str], cutoff: float = 0.6) -> str | None:
    """Find the choice that was probably meant.

    >>> closest("groupnorm", ["none", "batch", "group"]), closest("fp16", ["float32", "float16"]), closest("x", ["sgd"])
    ('group', 'float16', None)

    Args:
        asked: What was typed.
        names: The choices; or every accepted spelling -> the choice that it stands for.
        cutoff: How similar two spellings must be, from 0 to 1 (`difflib.get_close_matches`).

    Returns:
        The choice; None where nothing is spelt alike.
    """
    known = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
    known = {**{name: choice for name, choice in ALSO.items() if choice in known}, **known}
    lowered = {name.lower(): choice for name, choice in reversed(known.items())}
    close = [asked] if asked in known else difflib.get_close_matches(asked.lower(), lowered, n=1, cutoff=cutoff)
    return {**lowered, **known}[close[0]] if close else None


def suggesting(refusal: str) -> str:
    """Add to an error message that lists the choices the one that may have been meant.

    >>> suggesting("optimizer=adam_w: expected one of adam, adamw, sgd")
    'optimizer=adam_w: expected one of adam, adamw, sgd; did you mean adamw?'

    Args:
        refusal: "FIELD=VALUE: expected one of A, B, C", or any other message.

    Returns:
        The message with "; did you mean A?" behind the list; unchanged where it has no list, or nothing is spelt alike.
    """
    found = CHOICES.search(refusal)
    if not found:
        return refusal
    meant = closest(found[1].rpartition("=")[2].strip("'"), re.findall(r"[\w+@-]+", found[2]))
    if not meant:
        return refusal
    behind = re.compile(r"\)| \(|$").search(refusal, found.end())
    end = behind.start() if behind else len(refusal)
    return f"{refusal[:end]}; did you mean {meant}?{refusal[end:]}"


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out a table as lines, each column as wide as its widest cell.

    >>> in_columns([("a", "verdict"), ("long", "x")])
    ['a     verdict', 'long  x']

    Args:
        rows: Cells, row by row; all rows have the same length.

    Returns:
        A line for each row, with two blanks between columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def reporting_errors(main: Callable[[], int]) -> int:
    """Run a command; what it prints is written as far as it can be, and stops nothing.

    A reader who has gone (`| head`) changes nothing. Output that cannot be written otherwise (a full disk) is reported, and
    so is anything else that the surroundings refuse: files, memory.

    Args:
        main: The work. It returns an exit code.

    Returns:
        The exit code of `main`; `BAD_INPUT` where something was refused.

    Raises:
        OSError: A file was refused; only with HYDRA_FULL_ERROR=1, which shows tracebacks, as are the others.
        ImportError: A package is missing.
        MemoryError: There is not enough memory.
        RecursionError: Something is nested too deeply.
    """
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    _hold_standard_descriptors()
    out, err = _Outlet(1, "w", closefd=False), _Outlet(2, "w", closefd=False)
    former, encoding = (sys.stdout, sys.stderr), getattr(sys.stderr, "encoding", "utf-8")
    sys.stdout, sys.stderr = out.text(encoding), err.text(encoding)
    argparse.ArgumentParser.error = _refuse  # type: ignore[method-assign]
    try:
        code = main()
    except (OSError, MemoryError, ImportError, RecursionError) as error:
        if wants_traceback:
            raise
        print(one_line(f"{type(error).__name__}: {error}"), file=sys.stderr)
        code = BAD_INPUT
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = former
    if out.refused is not None and out.refused.errno != errno.EPIPE:
        with suppress(OSError):
            os.write(2, f"standard output: expected a file that can be written ({out.refused.strerror})\n".encode())
        code = code or BAD_INPUT
    return code


def _refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
    """As argparse does, Hydra's too, but in one line: `--help` has the usage."""
    print(one_line(suggesting(message)), file=sys.stderr)
    raise SystemExit(BAD_INPUT)


def _hold_standard_descriptors() -> None:
    """Open what was closed before we started: else the next file that is opened gets what libraries print."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


class _Outlet(io.FileIO):
    """A standard stream that takes everything, and remembers what the system first refused to write."""

    refused: OSError | None = None

    def write(self, content: Any) -> int:
        """What cannot be written counts as written."""
        try:
            return super().write(content)
        except OSError as error:
            self.refused = self.refused or error
            return len(content)

    def text(self, encoding: str) -> io.TextIOWrapper:
        """With escapes for what the encoding has not."""
        return io.TextIOWrapper(
            io.BufferedWriter(self), encoding=encoding, errors="backslashreplace", line_buffering=self.name == 2 or self.isatty()
        )
