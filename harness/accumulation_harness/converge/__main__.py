"""`accumulation-harness converge seeds=5 [margin=0.01] [metric=accuracy] [any setting of a trial]`: does it train alike?"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from accumulation_harness.config import TUNING_SEEDS, ConfigError, HarnessConfig
from accumulation_harness.config.compose import compose_trial
from accumulation_harness.converge import beforehand, table
from accumulation_harness.sweep import experiment, run
from accumulation_harness.sweep.child import Cell, Failure, forkserver_at_work
from accumulation_harness.sweep.progress import clock
from accumulation_harness.system.files import keep_others_out
from accumulation_harness.system.processes import answered, run_command

STUDY = "learning_curves"
USAGE = """\
usage: accumulation-harness converge [seeds=5] [margin=from the control] [metric=loss] [any setting of a trial, as workload=text]
Trains the large batch, its accumulation at each N, the large batch with its rows shuffled, and small batches on the same samples,
for every seed; the same command resumes. Exit codes: 0 done, 1 a training failed, 2 bad input, 130 or 143 stopped by a signal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and print what the trainings say of each other; the exit code as `run` has it.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        0 where every training ended, 1 where one failed, 2 for bad input.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(USAGE)
        return 0
    keep_others_out()
    try:
        own = {name: [text.removeprefix(f"{name}=") for text in given if text.startswith(f"{name}=")] for name in table.OWN}
        asked = table.Asked.of({name: values[-1] for name, values in own.items() if values})
        config = compose_trial([text for text in given if text.partition("=")[0] not in own])
        with forkserver_at_work(start=True):
            announced, concluded = partial(_announce, config), partial(_conclude, asked)
            experiment.run_many(trials(config, asked.seeds), conclude=concluded, announce=announced).raise_failures()
    except (Exception, KeyboardInterrupt) as error:
        return run.report(error)
    return 0


def trials(config: HarnessConfig, seeds: int) -> list[HarnessConfig]:
    """One for each seed from the configured one on.

    Args:
        config: The trial that is asked for.
        seeds: How many.

    Returns:
        Configurations that differ in the seed alone.

    Raises:
        ConfigError: There are fewer seeds left below those that tune.
    """
    name = config.name or "converge"
    if config.seed + seeds > TUNING_SEEDS:
        raise ConfigError("seeds", seeds, f"at most {TUNING_SEEDS - config.seed} from seed={config.seed} on")
    alike = dataclasses.replace(config, experiment=name, study=STUDY)
    return [dataclasses.replace(alike, seed=config.seed + i) for i in range(seeds)]


def _announce(config: HarnessConfig, seeds: int, at_once: int) -> str:
    """What will be trained, and how long that takes; a task whose first steps fail is told by its trial."""
    number = 2 + len(config.accumulation_steps) + 2 * sum(num > 1 for num in config.accumulation_steps)
    told = f"{seeds} seeds of {number} trainings of {config.steps} steps of {config.effective_batch} samples"
    with suppress(Exception):
        each = answered(beforehand.seconds, trials(config, 1)[0].trial, method="forkserver")
        told += f": about {clock(1 + each * math.ceil(seeds / at_once))}, {clock(1 + each)} a seed"
    return told


def _conclude(asked: table.Asked, cells: Sequence[Cell], failures: Sequence[Failure]) -> None:
    """Print what the finished ones say."""
    for line in table.lines([cell.folder for cell in cells if cell.is_finished()], asked):
        print(line)


if __name__ == "__main__":
    sys.exit(run_command(main))
