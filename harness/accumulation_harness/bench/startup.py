"""(d) How long the command line takes to answer, and one tiny trial from the shell beside the import of torch alone."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator

from accumulation_harness.bench.cost import alternate, of_command, ratios, seconds
from accumulation_harness.bench.measurement import Measurement

PART = "startup"
ROUNDS = 5
TRIAL_TARGET = 2.5  # times the import of torch
# As small as a trial may be: one step of a small perceptron.
TINY = (
    "workload=digits_mlp", "workload.width=1", "effective_batch=4", "accumulation_steps=[2]", "steps=1", "algebra_steps=1",
)  # fmt: skip


def measurements(rounds: int = ROUNDS) -> Iterator[Measurement]:
    """Seconds of `--help`, of a tiny trial, and of importing torch alone."""
    harness, count = [sys.executable, "-m", "accumulation_harness", "run"], itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        costs = alternate(
            {
                "help": lambda: of_command([*harness, "--help"]),
                "tiny": lambda: of_command([*harness, *TINY, f"results={folder}/{next(count)}"]),
                "torch": lambda: of_command([sys.executable, "-c", "import torch"]),
            },
            rounds,
        )
    for side, name, target in (
        ("help", "--help", 1.0),
        ("tiny", "one tiny trial", None),
        ("torch", "python -c 'import torch'", None),
    ):
        wall, cpu = seconds(costs[side])
        yield Measurement(part=PART, name=name, unit="s", wall=wall, cpu=cpu, target=target)
    wall, cpu = ratios(costs["tiny"], costs["torch"])
    name = "one tiny trial over python -c 'import torch'"
    yield Measurement(part=PART, name=name, unit="x", wall=wall, cpu=cpu, target=TRIAL_TARGET)
