"""`python -m tests.chaos.at_once sweep|status|report ARGUMENTS...`: a command that has imported all it needs, and waits.

It makes a file in the folder READY, and begins when the file GO is there: so commands begin in the same millisecond. The trials
of a sweep take what they store from the one trial of the store REPLAYED, and write a line each into JOURNAL.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

from accumulation_harness.config import HarnessConfig, to_dict
from accumulation_harness.config.identity import identity
from accumulation_harness.results.store import Store
from accumulation_harness.sweep import child, experiment
from accumulation_harness.system.processes import run_command

MODULES = {
    "sweep": "accumulation_harness.sweep.run",
    "status": "accumulation_harness.sweep.status",
    "report": "accumulation_harness.analysis.report",
}
OWN = ("sha256", "format", "experiment", "trial", "config", "steps", "steps_sha256")  # what each record says of itself


def replay(config: HarnessConfig) -> None:
    source = Store(os.environ["REPLAYED"])
    [trial] = source.trials()
    name = identity(config.trial)
    with Store(config.results).open_trial(config.experiment, name, to_dict(config.trial)) as writer:
        writer.add(*source.steps(trial).to_dict("records"))
        with open(os.environ["JOURNAL"], "a") as journal:
            journal.write(f"{name}\n")
        time.sleep(0.05 * (config.seed % 3))
        arms = [{**arm, "trial": name, "seed": config.seed} for arm in trial.arms]
        writer.finish({key: value for key, value in trial.record.items() if key not in OWN} | {"arms": arms})


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    main = importlib.import_module(MODULES[kind]).main
    experiment.run_one = replay
    experiment.RETRY_SECONDS = 0.2
    child.PRELOAD = ()
    sys.argv[1:] = arguments
    (Path(os.environ["READY"]) / str(os.getpid())).touch()
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.0005)
    sys.exit(run_command(main))
