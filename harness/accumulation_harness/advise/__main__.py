"""`accumulation-harness advise [memory=24GB] [any setting of a trial]`: which b, N and learning rate, and at which price?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from accumulation_harness.advise import rows
from accumulation_harness.advise.race import advised
from accumulation_harness.config import ConfigError
from accumulation_harness.config.compose import BadInput, compose_trial
from accumulation_harness.measure.plan import parse_bytes
from accumulation_harness.system.processes import NoAnswer, answered, run_command
from accumulation_harness.system.terminal import in_columns, one_line

USAGE = """\
usage: accumulation-harness advise [memory=what is free] [any setting of a trial, as workload=text norm=layer]
effective_batch and optimizer.lr are those of the training as it is; steps= are those of a short training for its noise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print three rows and what they rest on, or what is wrong with the arguments; the exit code is 0, 1 or 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(USAGE)
        return 0
    try:
        budgets = [text.removeprefix("memory=") for text in given if text.startswith("memory=")]
        settings = [text for text in given if not text.startswith("memory=")]
        config = compose_trial([*settings, "accumulation_steps=[1]"]).trial  # N is what is asked
        found, seen = answered(advised, config, parse_bytes(budgets[-1]) if budgets else None)
    except (BadInput, ConfigError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except NoAnswer as error:
        print(f"{config.workload.label}: expected a model that can be tried; {error}", file=sys.stderr)
        return 1
    for line in (*in_columns(rows.table(found, seen)), *rows.told(config, found, seen)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
