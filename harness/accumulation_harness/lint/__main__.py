#!/usr/bin/env python3
"""`accumulation-lint PATHS`: what source text tells about gradient accumulation, without running it and without torch.

A script as well as a module: this file runs from a clone of the repository, where nothing is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if sys.version_info < (3, 10):  # noqa: UP036 (a script is run by the `python3` that is there)
    sys.exit("accumulation-lint: expected Python 3.10 or newer, got " + sys.version.split()[0])
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from accumulation_harness.judge import sarif
from accumulation_harness.lint import rules, trainers
from accumulation_harness.lint.fix import mended, patch, write
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.source import Source
from accumulation_harness.system.github import annotation

CLEAN, HITS, UNREAD = 0, 1, 2
RULES = (rules.hits, trainers.hits)
LEFT_OUT = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


def found(source: Source) -> list[Hit]:
    """Return the hits of a module in the order of its lines, without those that a comment silences.

    Those of a test are notes: it may step once to have a state, or do on purpose what is wrong.

    Args:
        source: A module.

    Returns:
        The hits.
    """
    told = {hit for rule in RULES for hit in rule(source) if not source.silenced(hit)} if source.is_worth_reading else ()
    return sorted(replace(hit, sure=hit.sure and not source.is_test) for hit in told)


def files(path: Path) -> Iterator[Path | OSError]:
    """Yield a file, or the Python files and notebooks below a folder and the errors of folders that cannot be read.

    Folders of caches, builds and environments are left out.

    Args:
        path: A file or a folder.

    Yields:
        Paths, and what could not be read.
    """
    if path.is_dir():
        errors: list[OSError] = []
        for folder, inside, names in os.walk(path, onerror=errors.append):
            inside[:] = sorted(name for name in inside if name not in LEFT_OUT and not name.startswith("."))
            yield from (Path(folder, name) for name in sorted(names) if name.endswith((".py", ".ipynb")))
        yield from errors
    else:
        yield path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print hits, or patches. Return 0 where there is no hit, 1 where there is one, 2 where a path could not be read.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        The exit code.
    """
    called = Path(sys.argv[0]).name  # the short name is for hooks
    name = "accumulation-lint" if called.startswith("accumulation-lint") else "accumulation-harness lint"
    parser = argparse.ArgumentParser(prog=name, description="Static checks for gradient-accumulation bugs; nothing is run.")
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="a Python file, a notebook, or a folder of them")
    parser.add_argument(
        "--format",
        choices=("text", "github", "sarif"),
        default="text",
        help="lines for people and editors, GitHub's annotations, or SARIF",
    )
    parser.add_argument("--fix", action="store_true", help="print a patch of what is certain, and the hits that it leaves")
    parser.add_argument("--write", action="store_true", help="with --fix: change the files")
    given = parser.parse_args(arguments)
    if given.write and not given.fix:
        parser.error("--write: expected --fix before it")
    if given.fix and given.format == "sarif":
        parser.error("--fix: expected --format text or github, got sarif")
    code = CLEAN
    told: list[dict[str, Any]] = []
    for path in (file for one in given.paths for file in files(one)):
        try:
            if isinstance(path, OSError):
                raise path
            source = Source.read(path)
            hits = found(source)
            code = max(code, HITS if any(hit.sure for hit in hits) and not given.write else CLEAN)
            if given.fix and not (source.cells or source.is_test):
                new = mended(source.text, found)
                print("".join(patch(path, source.text, new)), end="")
                if given.write:
                    write(path, source.text, new)
                hits = found(Source(new))
            code = max(code, HITS if any(hit.sure for hit in hits) else CLEAN)
        except Exception as error:  # whatever the parser, a codec or a rule makes of it: the other files are read
            grammar = f" (read as Python {sys.version_info[0]}.{sys.version_info[1]})" if isinstance(error, SyntaxError) else ""
            where = path.filename if isinstance(path, OSError) else path
            print(f"{where}: expected a Python file, got {type(error).__name__}: {error}{grammar}", file=sys.stderr)
            code = UNREAD
            continue
        told += [{"path": path, "place": source.place(hit.line), "hit": hit} for hit in hits]
        while given.format != "sarif" and told:
            print(line(**told.pop(0), format=given.format))
    if given.format == "sarif":
        print(sarif.text("accumulation-lint", [_result(**one) for one in told]))
    return code


def line(path: Path, place: str, hit: Hit, format: str) -> str:
    """Return a hit as a line of a format.

    Args:
        path: The file.
        place: Line, or cell and line.
        hit: What was found.
        format: Name of a format.

    Returns:
        One line.
    """
    if format == "text":
        return f"{path}:{place}:{hit.column}: {hit.told()}"
    level = "error" if hit.sure else "notice"
    return annotation(level, hit.told(), file=path, line=hit.line, col=hit.column, title=hit.cause)


def _result(path: Path, place: str, hit: Hit) -> dict[str, Any]:
    """Return a hit as code scanning takes it."""
    region = {"startLine": hit.line, "startColumn": hit.column, "endLine": hit.last_line}
    return {
        "ruleId": hit.cause,
        "level": "error" if hit.sure else "note",
        "message": {"text": hit.told()},
        "locations": [sarif.place(path.absolute(), Path.cwd(), **region)],
    }


if __name__ == "__main__":
    sys.exit(main())
