"""`accumulation-harness advise [memory=24GB] [any setting of a trial]`, or of a watched run: which b, N, rate, at which price?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from accumulation_harness.advise import rows
from accumulation_harness.advise.race import advised
from accumulation_harness.advise.watched import advised as advised_of_watch
from accumulation_harness.config import TrialConfig
from accumulation_harness.measure.plan import parse_bytes, print_about
from accumulation_harness.system.processes import answered, run_command
from accumulation_harness.system.terminal import in_columns

USAGE = """\
usage: accumulation-harness advise [memory=what is free] [any setting of a trial, as workload=text norm=layer]
       accumulation-harness advise REPORT.json, of a watched run
effective_batch and optimizer.lr are those of the training as it is; steps= are those of a short training for its noise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print three rows and what they rest on, or what is wrong with the arguments; the exit code is 0, 1 or 2.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        0 for an answer, 1 where the task failed, 2 for bad input.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(USAGE)
        return 0
    if len(given) == 1 and given[0].endswith(".json"):
        return _of_a_watch(Path(given[0]))
    budgets = [text.removeprefix("memory=") for text in given if text.startswith("memory=")]

    def told(config: TrialConfig) -> list[str]:
        found, seen = answered(advised, config, parse_bytes(budgets[-1]) if budgets else None)
        return [*in_columns(rows.table(found, seen)), *rows.conclusions(config, found, seen)]

    return print_about([text for text in given if not text.startswith("memory=")], told)


def _of_a_watch(path: Path) -> int:
    try:
        for line in advised_of_watch(path):
            print(line)
    except (ValueError, KeyError, TypeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
