"""(b) The same sweep by hand (bench/sweep_by_hand.py) and by the harness: same grid, same steps.

The harness has its default settings: it also trains a permuted full batch and a null band, measures L0 and L1, and judges; the
script's cells share nothing. Processor time is compared with the script as one runs it, one cell after the other; time on the
clock with the same script in as many processes as the harness uses (bench/sweep_in_processes.py). The script computes
with PyTorch's own number of threads or with one: the cheaper of the two in a short sweep counts.
On a GPU the harness captures its micro-steps (`execution=cuda_graph`); the script is eager there too.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from accumulation_harness.bench.cost import Cost, alternate, of_command, ratios, seconds
from accumulation_harness.bench.measurement import Measurement
from accumulation_harness.config import ConfigError, Device
from accumulation_harness.recipes.determinism import choose_device
from accumulation_harness.settings import BOUNDS

PART = "by_hand"
TARGET_CPU, TARGET_WALL = 1.35, 1.0
ROUNDS = 2  # of three minutes each
SCRIPT = (
    "accumulation_harness.bench.sweep_by_hand"  # by its name: run as a file it would find this folder's `profile` before Python's
)
NUMS = "accumulation_steps"
GRID: Mapping[str, str] = {  # 48 cells
    "norm": "none,batch,group",
    "optimizer": "sgd,adam",
    "precision": "float32,float16",
    NUMS: "2,4,8,16",
    "steps": "100",
    "effective_batch": "64",
    "seed": "0",
}
FEW_STEPS = "10"  # enough to tell which number of threads is cheaper
NAMED = ("norm", "optimizer", "precision")  # axes whose values are names
IN_PROCESSES = "accumulation_harness.bench.sweep_in_processes"


def measurements(rounds: int = ROUNDS, overrides: Sequence[str] = ()) -> Iterator[Measurement]:
    """Seconds of the three sweeps, and the ratios of ours to the others.

    On the grid with a target, or on another: `overrides` give axes of GRID other values, as `norm=none` or `steps=50`.
    """
    grid, count, workers = changed(overrides), itertools.count(), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as root:

        def folder() -> Path:
            return Path(root, f"{next(count)}")

        short = grid | {"steps": FEW_STEPS}
        first = {threads: script_sweep(short, folder(), threads=threads) for threads in (0, 1)}
        cheaper = min(first, key=lambda threads: first[threads].cpu)
        sides = {
            "by hand, " + ("one thread" if cheaper == 1 else "PyTorch's threads"): lambda: script_sweep(
                grid, folder(), threads=cheaper
            ),
            f"by hand, {workers} processes": lambda: processes_sweep(grid, folder(), workers),
            "harness": lambda: harness_sweep(grid, folder()),
        }
        costs = alternate(sides, rounds)
    told = f"{cells(grid)} cells x {grid['steps']} steps"
    for name, own in costs.items():
        wall, cpu = seconds(own)
        yield Measurement(part=PART, name=f"{name}: {told}", unit="s", wall=wall, cpu=cpu)
    script, spread, ours = costs.values()
    is_usual = not overrides
    processor_time = ratios(ours, script)[1]
    yield Measurement(
        part=PART, name=f"harness over by hand, processor time: {told}", unit="x", wall=processor_time,
        target=TARGET_CPU if is_usual else None,
    )  # fmt: skip
    wall, cpu = ratios(ours, spread)
    yield Measurement(
        part=PART, name=f"harness over by hand in {workers} processes, on the clock: {told}", unit="x", wall=wall, cpu=cpu,
        target=TARGET_WALL if is_usual else None,
    )  # fmt: skip


def changed(overrides: Sequence[str]) -> dict[str, str]:
    """GRID with other values; ConfigError for an axis or a value that the script does not have."""
    grid = dict(GRID)
    for text in overrides:
        axis, _, values = text.partition("=")
        if axis not in grid:
            raise ConfigError(axis, values, f"one of {', '.join(grid)}, which the script by hand has too")
        for value in values.split(","):
            if not _is_known(axis, value):
                expected = GRID[axis] if axis in NAMED else f"{BOUNDS[axis]}"
                raise ConfigError(axis, value, f"{expected}, or several of them separated by commas")
        grid[axis] = values
    return grid


def _is_known(axis: str, value: str) -> bool:
    if axis in NAMED:
        return value in GRID[axis].split(",")
    return value.isdecimal() and len(value) < 20 and BOUNDS[axis].hold(int(value))


def cells(grid: Mapping[str, str]) -> int:
    """How many runs the grid has: the product of the numbers of values of its axes."""
    return math.prod(len(values.split(",")) for values in grid.values())


def script_sweep(grid: Mapping[str, str], folder: Path, *, threads: int) -> Cost:
    """What the script costs on the grid, with `threads` threads (0: as many as PyTorch takes)."""
    folder.mkdir()
    axes = [f"{axis}={values}" for axis, values in grid.items()]
    quiet = [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled"]
    command = [sys.executable, "-m", SCRIPT, "-m", *axes, f"threads={threads}", f"folder={folder}", *quiet]
    return of_command(command, environment={"WANDB_SILENT": "true"})


def processes_sweep(grid: Mapping[str, str], folder: Path, workers: int) -> Cost:
    """What the script costs on the grid in `workers` processes of one thread each."""
    folder.mkdir()
    axes = [f"{axis}={values}" for axis, values in grid.items()]
    command = [sys.executable, "-m", IN_PROCESSES, f"{workers}", *axes, "threads=1", f"folder={folder}"]
    return of_command(command, environment={"WANDB_SILENT": "true"})


def harness_sweep(grid: Mapping[str, str], folder: Path) -> Cost:
    """What the harness costs on the grid; every N is an arm of the same trial."""
    axes = [f"{axis}={f'[{values}]' if axis == NUMS else values}" for axis, values in grid.items()]
    captured = ["execution=cuda_graph"] if choose_device(Device.auto).type == "cuda" else []
    return of_command([sys.executable, "-m", "accumulation_harness", "run", "-m", *axes, *captured, f"results={folder}"])
