#!/usr/bin/env python3
"""`accumulation-lint PATHS`: what source text tells about gradient accumulation, without running it and without torch.

A script as well as a module: a pre-commit hook of `language: script` runs this file from a clone of the repository, where
nothing is installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 (a hook takes the `python3` that is there)
    sys.exit("accumulation-lint: expected Python 3.10 or newer, got " + sys.version.split()[0])
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from accumulation_harness.lint import rules, trainers
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.source import Source

CLEAN, HITS, UNREAD = 0, 1, 2
RULES = (rules.hits, trainers.hits)
LEFT_OUT = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
FORMATS = {
    "text": "{path}:{place}:{column}: {told}",
    "github": "::{level} file={path},line={line},col={column},title={cause}::{told}",
}


def found(source: Source) -> list[Hit]:
    """Return the hits of a module in the order of its lines, without those that a comment silences."""
    told = {hit for rule in RULES for hit in rule(source) if not source.silenced(hit)} if source.is_worth_reading else ()
    return sorted(told)


def files(path: Path) -> Iterator[Path | OSError]:
    """Yield a file, or the Python files and notebooks below a folder and the errors of folders that cannot be read.

    Folders of caches, builds and environments are left out.
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
    """Print one line per hit. Return 0 where there is none, 1 where there is one, 2 where a path could not be read."""
    called = Path(sys.argv[0]).name  # the short name is for hooks
    name = "accumulation-lint" if called.startswith("accumulation-lint") else "accumulation-harness lint"
    parser = argparse.ArgumentParser(prog=name, description="What source text tells of accumulation, without running it.")
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="a Python file, a notebook, or a folder of them")
    parser.add_argument(
        "--format", choices=FORMATS, default="text", help="lines for people and editors, or annotations of GitHub"
    )
    given = parser.parse_args(arguments)
    code = CLEAN
    for path in (file for one in given.paths for file in files(one)):
        try:
            if isinstance(path, OSError):
                raise path
            source = Source.read(path)
            hits = found(source)
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            grammar = f" (read as Python {sys.version_info[0]}.{sys.version_info[1]})" if isinstance(error, SyntaxError) else ""
            where = path.filename if isinstance(path, OSError) else path
            print(f"{where}: expected a Python file, got {type(error).__name__}: {error}{grammar}", file=sys.stderr)
            code = UNREAD
            continue
        for hit in hits:
            known = {
                "place": source.place(hit.line),
                "line": hit.line,
                "column": hit.column,
                "level": "error" if hit.sure else "notice",
                "cause": hit.cause,
                "told": hit.told(),
            }
            print(FORMATS[given.format].format(path=path, **known))
        code = max(code, HITS if any(hit.sure for hit in hits) else CLEAN)
    return code


if __name__ == "__main__":
    sys.exit(main())
