"""`accumulation-harness remedy [CAUSE]`: what to change for a cause, with a patch where it is a matter of lines."""

from __future__ import annotations

import argparse
import re
import textwrap
from importlib.resources import files

from accumulation_harness.judge.cause import MEANINGS, Cause

PATCH = r"^## {cause}\n(?:(?!## ).*\n)*?```diff\n((?:.*\n)*?)```$"


def patch(cause: Cause) -> str:
    """Return a loop with the fault as a patch that takes it out; empty where it is no matter of lines.

    Args:
        cause: The cause.

    Returns:
        Lines of a unified diff, without file names and line numbers.
    """
    text = files("accumulation_harness").joinpath("remedies.md").read_text(encoding="utf-8")
    found = re.search(PATCH.format(cause=cause), text, re.M)
    return found[1] if found else ""


def main() -> None:
    """Print one cause, or a line for each."""
    parser = argparse.ArgumentParser(prog="accumulation-harness remedy", description="What to change for a cause.")
    parser.add_argument(
        "cause", nargs="?", choices=[*Cause], metavar="CAUSE", help="a name of the list that is printed without one"
    )
    asked: str | None = parser.parse_args().cause
    if asked is None:
        print("\n".join(f"{cause}: {MEANINGS[cause].sentence}" for cause in Cause))
        return
    cause = Cause(asked)
    print(f"{cause}: {MEANINGS[cause].sentence}\n\n{textwrap.fill(MEANINGS[cause].remedy, 100)}")
    if lines := patch(cause):
        print(f"\n{lines}", end="")


if __name__ == "__main__":
    main()
