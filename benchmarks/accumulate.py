"""Time, samples and memory to a target over b and N, of three small tasks: docs/findings/accumulate.csv and its figure.

python benchmarks/accumulate.py [TASK ...]      # trains what is asked for, all by default; a task's rows replace its former ones
"""

from __future__ import annotations

import csv
import datetime
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

from accumulation_harness.advise.measured import measure
from accumulation_harness.advise.race import Entry, Race
from accumulation_harness.analysis.figures.forms import curves, lines
from accumulation_harness.analysis.figures.style import to_svg
from accumulation_harness.config.compose import compose_trial
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.recipes.determinism import deterministic, threads

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "findings" / "accumulate.csv"
TASKS = {
    "digits, MLP, SGD": ["workload.model=mlp", "optimizer=sgd", "optimizer.lr=0.4", "steps=60"],
    "digits, convolutions, momentum": ["optimizer=momentum", "optimizer.lr=0.08", "steps=60"],
    "two spirals, AdamW": [
        "workload=custom",
        f"workload.target={__file__}:Spirals",
        "optimizer=adamw",
        "optimizer.lr=0.003",
        "steps=150",
    ],
}
BATCHES = (16, 32, 64, 128, 256, 512)
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times those of the rule
NUMBERS = (1, 2, 4, 8)
SHOWN = {"samples": "samples to the target", "seconds": "seconds to the target", "megabytes": "memory of a step, MB"}


class Spirals:
    """Two noisy spirals of points in the plane."""

    def model(self, norm: str) -> torch.nn.Module:
        """A perceptron."""
        return torch.nn.Sequential(
            torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )

    def train(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Points and their spiral."""
        return self._points(4096, 0)

    def held_out(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Others."""
        return self._points(512, 1)

    def losses(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        """Binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(outputs[:, 0], batch[1].to(outputs.dtype), reduction="none")

    def _points(self, number: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(seed)
        turn, label = 1 + 8 * torch.rand(number, generator=draw), torch.arange(number) % 2
        angle = turn + math.pi * label
        points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 5 + 0.08 * torch.randn(number, 2, generator=draw)
        return list(zip(points, label, strict=True))


def swept(task: str) -> list[dict[str, object]]:
    """For every b and N the fastest of the rates."""
    config = compose_trial([*TASKS[task], "accumulation_steps=[1]"]).trial
    device = torch.device("cpu")
    with deterministic(config.precision, device), threads(1):
        setting = Setting(config, device)
        seen = measure(setting, None)
        race = Race(setting, seen)
        race.begin()
        steps: dict[int, tuple[float, float]] = {}
        for batch in BATCHES:
            if batch > seen.population // 2:
                continue
            best = (math.inf, math.nan)
            for by in RATES:
                limit = 40 * race.seconds(race.base) if best[0] == math.inf else best[0] * race.step_seconds(Entry(batch))
                best = min(best, (race.steps_of(Entry(batch, by), limit), by))
            steps[batch] = best
    sizes = {size.b: size for size in seen.sizes}
    return [
        {"task": task, "b": b, "N": num, "rate_by": by, "steps": taken, "samples": taken * b * num,
         "seconds": taken * seen.step_seconds(sizes[b], num), "bytes": sizes[b].bytes, "noise": seen.noise.estimate}
        for num in NUMBERS for b in sizes if b * num in steps
        for taken, by in [steps[b * num]] if math.isfinite(taken)
    ]  # fmt: skip


def figure() -> bytes:
    """The SVG of docs/should_i_accumulate.md: samples, seconds and memory to the target over b, a line for each N."""
    rows = pd.read_csv(STORED).sort_values(["N", "b"])
    rows["megabytes"] = rows["bytes"] / 1e6
    shown = {
        f"{task}\n{label}": lines(own, "N", "b", column, "N = {}".format)
        for task, own in rows.groupby("task", sort=False)
        for column, label in SHOWN.items()
    }
    return to_svg(curves(shown, "micro-batch b", "", height=2.5, columns=len(SHOWN), sharey=False))


def main(asked: list[str]) -> None:
    """Train, store, draw."""
    kept = list(csv.DictReader(STORED.open())) if STORED.exists() else []
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    for task in asked or TASKS:
        rows = [{**row, "commit": commit, "date": str(datetime.date.today())} for row in swept(task)]
        kept = [row for row in kept if row["task"] != task] + rows
        with STORED.open("w") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(kept)
    (ROOT / "docs" / "gallery" / "accumulate.svg").write_bytes(figure())


if __name__ == "__main__":
    main(sys.argv[1:])
