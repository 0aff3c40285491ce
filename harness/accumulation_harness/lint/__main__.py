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


def found(source: Source) -> list[Hit]:
    """Return the hits of a module in the order of its lines, without those that a comment silences."""
    return sorted({hit for rule in RULES for hit in rule(source) if not source.silenced(hit)})


def files(path: Path) -> Iterator[Path]:
    """Yield a file, or the Python files below a folder; folders of caches, builds and environments are left out."""
    if path.is_dir():
        for folder, inside, names in os.walk(path):
            inside[:] = sorted(name for name in inside if name not in LEFT_OUT and not name.startswith("."))
            yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
    else:
        yield path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per hit. Return 0 where there is none, 1 where there is one, 2 where a path could not be read."""
    called = Path(sys.argv[0]).name  # the short name is for hooks
    name = "accumulation-lint" if called.startswith("accumulation-lint") else "accumulation-harness lint"
    parser = argparse.ArgumentParser(prog=name, description="What source text tells of accumulation, without running it.")
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="a Python file, or a folder of them")
    code = CLEAN
    for path in (file for given in parser.parse_args(arguments).paths for file in files(given)):
        try:
            if path.suffix == ".ipynb":  # JSON of a notebook can be read as Python, in which nothing is trained
                raise ValueError("a notebook, of which cells are not read; audit runs them")
            hits = found(Source.read(path))
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            print(f"{path}: expected a Python file, got {type(error).__name__}: {error}", file=sys.stderr)
            code = UNREAD
            continue
        for hit in hits:
            print(f"{path}:{hit.line}:{hit.column}: {hit.told()}")
        code = max(code, HITS if hits else CLEAN)
    return code


if __name__ == "__main__":
    sys.exit(main())
