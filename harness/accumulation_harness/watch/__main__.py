"""`accumulation-harness watch compare A.json B.json`: two reports, compared; exit code 0, or 2 for a file that is none."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from accumulation_harness.system.processes import run_command
from accumulation_harness.watch.compare import compared


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; the exit code."""
    parser = argparse.ArgumentParser(prog="accumulation-harness watch", description="Reports of watched training runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="two reports beside each other", description="Two reports beside each other.")
    compare.add_argument("reports", nargs=2, type=Path, metavar="REPORT.json")
    given = parser.parse_args(arguments)
    try:
        print(compared(*given.reports), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
