"""A program for tests of real processes: the harness with trials that take no time, and misbehave as told.

`TINY_KINDS` names the behaviour of each seed; `TINY_DIR` is where trials leave marks: `journal` has one line per start.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from threading import Thread

from accumulation_harness.config import to_dict
from accumulation_harness.config.identity import identity
from accumulation_harness.results import tracking
from accumulation_harness.results.store import Store
from accumulation_harness.sweep import child, experiment


def tiny_trial(config):
    folder = Path(os.environ["TINY_DIR"])
    kind = os.environ["TINY_KINDS"].split(",")[config.seed]
    with Store(config.results).open_trial(config.experiment, identity(config.trial), to_dict(config.trial)) as writer:
        with open(folder / "journal", "a") as journal:
            journal.write(f"{config.seed} {os.getpid()}\n")
        print(f"output of trial {config.seed}", flush=True)
        behave(kind, folder, writer)
        writer.finish({"arms": [], "environment": {}, "seconds": {}})
    if kind == "die_late":
        os.kill(os.getpid(), signal.SIGKILL)


def behave(kind, folder, writer):
    match kind:
        case "ok":
            writer.add({"loss": 1.0})
        case "rows":  # forty, that only its name decides
            generator = random.Random(writer.folder.name)
            for step in range(40):
                writer.add({"step": step, "loss": generator.random()})
                time.sleep(0.001)
        case "wait":  # until the test says so
            wait_until((folder / "go").exists)
        case "raise":
            raise RuntimeError("no such luck")
        case "thread":  # that outlives the error, as those of data loaders do
            Thread(target=time.sleep, args=(60,)).start()
            raise RuntimeError("no such luck")
        case "exit":
            sys.exit(0)
        case "leave":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "shout":  # more than any pipe holds
            sys.stdout.write("x" * 1_000_000)
            raise RuntimeError("y" * 1_000_000)
        case "hang":
            time.sleep(600)
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)


def wait_until(ready, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


if __name__ == "__main__":
    from accumulation_harness.sweep.run import main

    experiment.run_one = tiny_trial
    child.PRELOAD = tuple(filter(None, os.environ.get("TINY_PRELOAD", "").split(",")))
    experiment.GRACE_SECONDS = child.LINGER_SECONDS = tracking.LOG_SECONDS = 0.5
    experiment.RETRY_SECONDS = 0.2
    sys.exit(main())
