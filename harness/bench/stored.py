"""(c) The store and the report over many stored trials: one real trial, finished again under other seeds."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.bench.cost import Spread, of_call, of_command, seconds
from harness.bench.measurement import Measurement
from harness.config import (
    OUR_OPTIMIZERS,
    Data,
    Model,
    Norm,
    OptimizerConfig,
    Precision,
    TrialConfig,
    WorkloadConfig,
    identity,
    to_dict,
)
from harness.results.store import Store

PART = "stored"
SIZES = (10, 1_000, 10_000)
ROUNDS = 5
REPORT_SECONDS, REPORT_MEGABYTES = 15.0, 1000.0
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
            status = [sys.executable, "-m", "harness.status", "--results", str(results)]
            report = [sys.executable, "-m", "harness.commands", "report", "--results", str(results), "--out", f"{folder}/reports"]
            for name, command, bound in (("status", status, None), ("report", report, REPORT_SECONDS)):
                costs = [of_command(command) for _ in range(rounds)]
                wall, cpu = seconds(costs)
                target = bound if size == max(SIZES) else None
                yield Measurement(part=PART, name=f"{name} over {size:,} trials", unit="s", wall=wall, cpu=cpu, target=target)
            peaks = Spread.of([cost.peak / 1e6 for cost in costs])
            target = REPORT_MEGABYTES if size == max(SIZES) else None
            yield Measurement(part=PART, name=f"peak of the report over {size:,} trials", unit="MB", wall=peaks, target=target)


def real_trial() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record and the step rows of one trial with the default arms, run here."""
    from harness import studies

    rows: list[dict[str, Any]] = []
    config = TrialConfig(experiment="equivalence", steps=30, algebra_steps=20)
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
