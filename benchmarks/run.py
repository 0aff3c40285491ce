"""`make bench`: what the harness costs beside the least that does the same, each side in turn, on an idle machine.

Every row is a ratio: the median over the rounds, with the smallest and the largest, of processor time (of all processes that a
command starts) and of time on the clock.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accumulation_harness.config import Data, Model, Norm, Precision, TrialConfig, WorkloadConfig, to_dict
from accumulation_harness.config.identity import identity
from accumulation_harness.measure import studies
from accumulation_harness.measure.lock_step import REFERENCE, Setting
from accumulation_harness.measure.training import outcome, train
from accumulation_harness.measure.trial import null_recipes, reference, standard_candidates
from accumulation_harness.recipes.determinism import deterministic, start_randomness
from accumulation_harness.recipes.recipe import Recipe, take_step
from accumulation_harness.results.store import Store
from accumulation_harness.system.source import commit
from accumulation_harness.watch import watch

Cost = tuple[float, float]  # seconds of processor time, and on the clock
Side = Callable[[], Cost]
HERE = Path(__file__).parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HARNESS = (sys.executable, "-m", "accumulation_harness")
TOY = "def train(batch_size, accumulation_steps):\n" + "\n".join(f"    {line}" for line in """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in torch.randn(3, 16, 4):
    for part in rows.split(batch_size):
        (model(part).square().mean() / accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad()
""".strip().splitlines())  # fmt: skip


def command(*arguments: object) -> Cost:
    """What a command costs, with what outlives it: the W&B service ends a moment after its user."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(one) for one in arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    with suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def timed(act: Callable[[], object]) -> Cost:
    """What a call costs in this process."""
    started = time.process_time(), time.perf_counter()
    act()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.process_time() - started[0], time.perf_counter() - started[1]


def row(name: str, ours: Side, theirs: Side, rounds: int) -> str:
    """A line of the table: `ours` over `theirs`, which goes first in turn."""
    pairs = []
    for k in range(rounds):
        costs = {side: side() for side in ((ours, theirs), (theirs, ours))[k % 2]}
        pairs.append([mine / other for mine, other in zip(costs[ours], costs[theirs], strict=True)])
    told = [f"{statistics.median(one):.3g} ({min(one):.3g} to {max(one):.3g})" for one in zip(*pairs, strict=True)]
    return f"| {name} | {' | '.join(told)} | {rounds} |"


def sweep(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """24 cells beside the hand-written script, whose cells share nothing; the harness has its default arms and measurements."""
    kinds = ("norm=none", "precision=float32") if options.few else ("norm=none,batch,group", "precision=float32,float16")
    axes, nums = (*kinds, f"steps={options.steps}"), "2,4" if options.few else "2,4,8,16"
    yield row(
        f"a sweep of {2 if options.few else 24} cells of {options.steps} steps over the hand-written script",
        lambda: command(*HARNESS, "run", "-m", *axes, f"accumulation_steps=[{nums}]", f"results={tempfile.mkdtemp(dir=folder)}"),
        lambda: command(sys.executable, HERE / "by_hand.py", "-m", *axes, f"accumulation_steps={nums}", f"folder={folder}",
                        f"hydra.sweep.dir={folder}"),
        options.rounds,
    )  # fmt: skip


def startup(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Commands from the shell beside the import that none can do without."""
    (folder / "toy.py").write_text(TOY)
    tiny = ("workload=digits_mlp", "effective_batch=4", "accumulation_steps=[2]", "steps=1", "algebra_steps=1")
    sides: dict[str, Callable[[], tuple[object, ...]]] = {
        "run --help": lambda: ("run", "--help"),
        "audit of a toy": lambda: ("audit", f"{folder}/toy.py:train", "--batch-size", 16, "--accumulation-steps", 4),
        "run, one tiny trial": lambda: ("run", *tiny, f"results={tempfile.mkdtemp(dir=folder)}"),
    }
    for name, arguments in sides.items():
        ours = partial(lambda arguments: command(*HARNESS, *arguments()), arguments)
        yield row(f"{name} over `import torch`", ours, lambda: command(sys.executable, "-c", "import torch"), options.rounds)


def watched(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """A window of four micro-batches of a language model with a watch beside one without, once it no longer looks closely."""

    class Side:
        def __init__(self, width: int) -> None:
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.model = nn.Sequential(nn.Embedding(256, width), encoder, nn.Linear(width, 256)).to(DEVICE)
            self.optimizer = torch.optim.AdamW(self.model.parameters())

        def window(self) -> None:
            for _ in range(4):
                tokens = torch.randint(256, (8, 129), device=DEVICE)
                logits = self.model(tokens[:, :-1])
                (functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 4).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    for width in (16,) if options.few else (144, 456):  # 1 and 10 million parameters
        plain, seen = Side(width), Side(width)
        with watch(seen.model, seen.optimizer, tell=None):
            for _ in range(6):
                seen.window()
            plain.window()
            sides = partial(timed, seen.window), partial(timed, plain.window)
            yield row(f"a watched window over an unwatched one, width {width}", *sides, 4 * options.rounds)


def bare_loops(setting: Setting, recipes: Mapping[str, Recipe], stream: Sequence[Tensor]) -> None:
    """Train arms side by side and evaluate them, without anything else."""
    arms = setting.arms(recipes).values()
    for step, ids in enumerate(stream):
        for arm in arms:
            start_randomness(step, setting.device)
            take_step(arm, arm.workload.batch(ids))
    for arm in arms:
        outcome(arm, [0.0])


def training(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """The arms of a trial with all that is measured along their training beside the same arms in bare loops; both evaluate."""
    language = WorkloadConfig(data=Data.text, model=Model.transformer, width=32)
    digits = TrialConfig(steps=options.steps)
    text = TrialConfig(workload=language, norm=Norm.layer, effective_batch=16, accumulation_steps=(2, 4), steps=options.steps)
    for name, config in {"digits": digits, "a small language model": text}.items():
        with deterministic(config.precision, torch.device("cpu")):
            setting = Setting(config, torch.device("cpu"))
            recipes = {REFERENCE: reference(config), **{one.label: one.recipe for one in standard_candidates(config)}}
            nulls, stream = null_recipes(config), list(setting.windows())
            ours = partial(timed, partial(train, setting, recipes, nulls, stream, lambda step, rows: None))
            bare = partial(timed, partial(bare_loops, setting, {**recipes, **nulls}, stream))
            _ = ours(), bare()  # what is made once in a process
            yield row(f"all that a trial measures along a training, {name}", ours, bare, options.rounds)


def report(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """The first report of many stored trials, copies of one real trial, beside what no report can do without."""
    rows: list[dict[str, Any]] = []
    record = studies.run(TrialConfig(experiment="equivalence", steps=30), lambda step, found: rows.extend(found))
    kinds = [(norm, precision) for norm in (Norm.none, Norm.layer) for precision in Precision]
    for number in range(options.trials):
        norm, precision = kinds[number % len(kinds)]
        config = TrialConfig(experiment="equivalence", norm=norm, precision=precision, seed=number)
        labels = {"trial": identity(config), "norm": str(norm), "precision": str(precision), "seed": number}
        with Store(folder / "results").open_trial(config.experiment, identity(config), to_dict(config)) as writer:
            writer.add(*rows)
            writer.finish({**record, "arms": [{**arm, **labels} for arm in record["arms"]]})
    yield row(
        f"the first report of {options.trials:,} trials over `import pandas, matplotlib`",
        lambda: command(*HARNESS, "report", "--results", folder / "results", "--out", tempfile.mkdtemp(dir=folder)),
        lambda: command(sys.executable, "-c", "import pandas, matplotlib"),
        options.rounds,
    )


BENCHMARKS = {"startup": startup, "watched": watched, "training": training, "sweep": sweep, "report": report}


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="which of them (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=10_000, help="of the report")
    parser.add_argument("--steps", type=int, default=100, help="of each training")
    parser.add_argument("--few", action="store_true", help="2 cells in the sweep, and a small model is watched")
    options = parser.parse_args()
    if sys.platform == "linux":  # PR_SET_CHILD_SUBREAPER: what outlives a command becomes a child of this process
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    print(f"commit {commit()['commit']}, {platform.platform()}, {device}, torch {torch.__version__}\n")
    print("| | processor time | on the clock | rounds |\n|---|---|---|---|", flush=True)
    for name in options.names or BENCHMARKS:
        with tempfile.TemporaryDirectory() as folder:
            for line in BENCHMARKS[name](Path(folder), options):
                print(line, flush=True)


if __name__ == "__main__":
    main()
