"""(c) The store and the report over many stored trials: one real trial, finished again under other seeds.

The first report is compared with the import of pandas and matplotlib, without which there is none; the second finds that nothing
has changed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accumulation_harness.bench.cost import Cost, Spread, alternate, of_call, of_command, ratios, seconds
from accumulation_harness.bench.measurement import Measurement
from accumulation_harness.config import (
    OUR_OPTIMIZERS,
    Data,
    Model,
    Norm,
    OptimizerConfig,
    Precision,
    TrialConfig,
    WorkloadConfig,
    to_dict,
)
from accumulation_harness.identity import identity
from accumulation_harness.results.store import Store

PART = "stored"
SIZES = (10, 1_000, 10_000)
ROUNDS = 3
FIRST_TARGET, SECOND_SECONDS, REPORT_MEGABYTES = 12.0, 3.0, 1000.0
IMPORTS = (sys.executable, "-c", "import pandas, matplotlib")
SEEDS = 100  # per configuration, where there are that many trials
# Configurations a large sweep would have; the numbers in all of them are those of one real trial.
KINDS = tuple(
    (data, norm, optimizer, precision)
    for data in (Data.digits, Data.text)
    for norm in (Norm.none, Norm.layer)
    for optimizer in OUR_OPTIMIZERS
    for precision in Precision
)


def measurements(rounds: int = ROUNDS, sizes: tuple[int, ...] = SIZES) -> Iterator[Measurement]:
    """Milliseconds to store a trial, seconds of status and report, and the peak of the report, over `sizes` trials."""
    record, rows = real_trial()
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results")
            filling = of_call(lambda results=results, size=size: fill(results, size, record, rows))  # type: ignore[misc]
            per_trial = Spread.of([filling.wall / size * 1e3])
            yield Measurement(
                part=PART, name=f"storing a trial, of {size:,}", unit="ms", wall=per_trial, note="one run, fsync included"
            )
            status = [sys.executable, "-m", "accumulation_harness.status", "--results", str(results)]
            costs = alternate(
                {
                    "status": lambda status=status: of_command(status),  # type: ignore[misc]
                    "import": lambda: of_command(IMPORTS),
                    "first": lambda folder=folder: first_report(Path(folder)),  # type: ignore[misc]
                    "second": lambda folder=folder: of_command(report(Path(folder))),  # type: ignore[misc]
                },
                rounds,
            )
            is_largest = size == max(SIZES)
            sides = {"status": ("status", None), "first": ("first report", None), "second": ("unchanged report", SECOND_SECONDS)}
            for name, (told, bound) in sides.items():
                wall, cpu = seconds(costs[name])
                target = bound if is_largest else None
                yield Measurement(part=PART, name=f"{told} over {size:,} trials", unit="s", wall=wall, cpu=cpu, target=target)
            wall, cpu = ratios(costs["first"], costs["import"])
            target, told = FIRST_TARGET if is_largest else None, "importing pandas and matplotlib"
            yield Measurement(
                part=PART, name=f"first report over {size:,} trials over {told}", unit="x", wall=wall, cpu=cpu, target=target
            )
            peaks = Spread.of([cost.peak / 1e6 for cost in costs["first"]])
            target = REPORT_MEGABYTES if is_largest else None
            yield Measurement(part=PART, name=f"peak of the report over {size:,} trials", unit="MB", wall=peaks, target=target)


def report(folder: Path) -> list[str]:
    """The command that reports the results in `folder`."""
    return [
        sys.executable, "-m", "accumulation_harness", "report", "--results", f"{folder}/results", "--out", f"{folder}/reports",
    ]  # fmt: skip


def first_report(folder: Path) -> Cost:
    """What the report costs where none has been made."""
    shutil.rmtree(folder / "reports", ignore_errors=True)
    return of_command(report(folder))


def real_trial() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record and the step rows of one trial with the default arms, run here."""
    from accumulation_harness import studies

    rows: list[dict[str, Any]] = []
    config = TrialConfig(experiment="equivalence", steps=30)
    return studies.run(config, lambda step, found: rows.extend(found)), rows


def fill(root: Path, size: int, record: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """`size` finished trials, through the store's own writer."""
    store = Store(root)
    for number in range(size):
        config = nth_configuration(number)
        name, plain = identity(config), to_dict(config)
        own = json.loads(json.dumps(record))
        for arm in own["arms"]:
            labels = {"trial": name, "workload": config.workload.label, "norm": str(config.norm), "seed": config.seed}
            arm |= labels | {"optimizer": config.optimizer.label, "precision": str(config.precision)}
        with store.open_trial(config.experiment, name, plain) as writer:
            writer.add(*rows)
            writer.finish(own)


def nth_configuration(number: int) -> TrialConfig:
    """Another configuration for every number: `SEEDS` seeds of each of `KINDS`, then the same with other seeds."""
    kind, seed = divmod(number, SEEDS)
    data, norm, optimizer, precision = KINDS[kind % len(KINDS)]
    model = Model.transformer if data == Data.text else Model.conv
    return TrialConfig(
        experiment="equivalence",
        workload=WorkloadConfig(data=data, model=model),
        norm=norm,
        optimizer=OptimizerConfig(name=optimizer),
        precision=precision,
        seed=1000 * (kind // len(KINDS)) + seed,
    )
