"""(b) The same sweep by hand (harness/bench/sweep_by_hand.py) and by the harness: same grid, same steps, all cores for both.

The harness also trains a permuted full batch and a null band, and measures L0 (over ALGEBRA_STEPS windows) and L1; the script's
cells share nothing. It runs with PyTorch's own number of threads and with one, and the faster of the two in a first round counts.
On a GPU the harness captures its micro-steps (`execution=cuda_graph`); the script is eager there too.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.bench.cost import Cost, alternate, of_command, ratios, seconds
from harness.bench.measurement import Measurement
from harness.bounds import BOUNDS
from harness.config import ConfigError, Device
from harness.recipes.determinism import choose_device

PART = "by_hand"
TARGET = 2.5
ROUNDS = 5
SCRIPT = "harness.bench.sweep_by_hand"  # by its name: run as a file it would find this folder's `profile` before Python's
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
NAMED = ("norm", "optimizer", "precision")  # axes whose values are names
ALGEBRA_STEPS = 10


def measurements(rounds: int = ROUNDS, overrides: Sequence[str] = ()) -> Iterator[Measurement]:
    """Seconds of both sweeps, and their ratio.

    On the grid with a target, or on another: `overrides` give axes of GRID other values, as `norm=none` or `steps=50`.
    """
    grid, count = changed(overrides), itertools.count()
    with tempfile.TemporaryDirectory() as folder:

        def side(threads: int | None) -> Cost:
            results = Path(folder, f"{next(count)}")
            return harness_sweep(grid, results) if threads is None else script_sweep(grid, results, threads=threads)

        first = {threads: side(threads) for threads in (0, 1)}
        faster = min(first, key=lambda threads: first[threads].wall)
        costs = alternate({"by hand": lambda: side(faster), "harness": lambda: side(None)}, rounds)
    told = f"{cells(grid)} cells x {grid['steps']} steps"
    script = "by hand, " + ("one thread" if faster == 1 else "PyTorch's threads")
    for name, label in (("by hand", script), ("harness", "harness")):
        wall, cpu = seconds(costs[name])
        yield Measurement(part=PART, name=f"{label}: {told}", unit="s", wall=wall, cpu=cpu)
    wall, cpu = ratios(costs["by hand"], costs["harness"])
    target = None if overrides else TARGET
    yield Measurement(part=PART, name=f"harness times faster: {told}", unit="x", wall=wall, cpu=cpu, target=target, at_least=True)


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


def harness_sweep(grid: Mapping[str, str], folder: Path) -> Cost:
    """What the harness costs on the grid; every N is an arm of the same trial."""
    axes = [f"{axis}={f'[{values}]' if axis == NUMS else values}" for axis, values in grid.items()]
    captured = ["execution=cuda_graph"] if choose_device(Device.auto).type == "cuda" else []
    settings = [f"algebra_steps={ALGEBRA_STEPS}", *captured, f"results={folder}"]
    return of_command([sys.executable, "-m", "harness", "-m", *axes, *settings])
