"""(b) The same sweep by hand (benchmarks/sweep_by_hand.py) and by the harness: same grid, same steps, all cores for both.

The harness also trains a permuted full batch and a null band, and measures L0 (over ALGEBRA_STEPS windows) and L1; the script's
cells share nothing.
It runs with PyTorch's own number of threads and with one, and the faster of the two counts. On a GPU the harness captures its
micro-steps (`execution=cuda_graph`); the script is eager there too.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.bench.cost import Cost, alternate, of_command, ratios, seconds
from harness.bench.measure import Measure
from harness.config import Device
from harness.determinism import choose_device

PART = "by_hand"
TARGET = 2.5
ROUNDS = 5
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sweep_by_hand.py"
AXES = {"norm": "none,group", "optimizer": "sgd", "precision": "float32,float16"}  # x N = 2, 4, 8, 16: 16 cells
LARGE = {"norm": "none,batch,group", "optimizer": "sgd,adam", "precision": "float32,float16"}  # 48 cells
NUMS = (2, 4, 8, 16)
STEPS, LARGE_STEPS = 48, 100
ALGEBRA_STEPS = 10


def measure(rounds: int = ROUNDS, *, large: bool = False) -> Iterator[Measure]:
    if not SCRIPT.exists():
        print(f"by_hand: {SCRIPT} is not there: it is part of the source tree, not of the package", file=sys.stderr)
        return
    axes, steps = (LARGE, LARGE_STEPS) if large else (AXES, STEPS)
    count = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            "threads": lambda: by_hand(axes, steps, Path(folder, f"{next(count)}"), threads=0),
            "one thread": lambda: by_hand(axes, steps, Path(folder, f"{next(count)}"), threads=1),
            "harness": lambda: by_harness(axes, steps, Path(folder, f"{next(count)}")),
        }
        costs = alternate(sides, rounds)
    cells = len(NUMS)
    for values in axes.values():
        cells *= len(values.split(","))
    grid = f"{cells} cells x {steps} steps"
    for name, label in (("threads", "by hand, PyTorch's threads"), ("one thread", "by hand, one thread"), ("harness", "harness")):
        wall, cpu = seconds(costs[name])
        yield Measure(part=PART, name=f"{label}: {grid}", unit="s", wall=wall, cpu=cpu)
    best = min(("threads", "one thread"), key=lambda name: seconds(costs[name])[0].median)
    wall, cpu = ratios(costs[best], costs["harness"])
    name = f"harness times faster than by hand ({best}): {grid}"
    yield Measure(part=PART, name=name, unit="x", wall=wall, cpu=cpu, target=TARGET, at_least=True)


def by_hand(axes: dict[str, str], steps: int, folder: Path, *, threads: int) -> Cost:
    folder.mkdir()
    nums = ",".join(map(str, NUMS))
    grid = [f"{axis}={values}" for axis, values in axes.items()]
    quiet = [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled"]
    settings = [f"accumulation_steps={nums}", f"steps={steps}", f"threads={threads}", f"folder={folder}"]
    return of_command([sys.executable, str(SCRIPT), "-m", *grid, *settings, *quiet], environment={"WANDB_SILENT": "true"})


def by_harness(axes: dict[str, str], steps: int, folder: Path) -> Cost:
    grid = [f"{axis}={values}" for axis, values in axes.items()]
    captured = ["execution=cuda_graph"] if choose_device(Device.auto).type == "cuda" else []
    settings = [f"accumulation_steps=[{','.join(map(str, NUMS))}]", f"steps={steps}", f"algebra_steps={ALGEBRA_STEPS}", *captured]
    return of_command([sys.executable, "-m", "harness", "-m", *grid, *settings, f"results={folder}"])
