"""`accumulation-harness watch show A.json`, `watch compare A.json B.json`: exit code 0, or 2 for a file that is no report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from accumulation_harness.system.processes import run_command
from accumulation_harness.watch.compare import compared, shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, or the comparison; the exit code.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        0, or what the verdicts come to: 1 where one is `different`, 2 where none can be had.
    """
    parser = argparse.ArgumentParser(prog="accumulation-harness watch", description="Reports of watched training runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser(
        "show", help="a report, of a run that may still go on", description="What a watched run says so far."
    )
    show.add_argument("report", type=Path, metavar="REPORT.json")
    compare = commands.add_parser("compare", help="two reports beside each other", description="Two reports beside each other.")
    compare.add_argument("reports", nargs=2, type=Path, metavar="REPORT.json")
    given = parser.parse_args(arguments)
    try:
        print(shown(given.report) if given.command == "show" else compared(*given.reports), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
