"""`accumulation-harness sync`: upload the offline runs of a store to W&B, and one run per sweep with its verdicts and figures.

A run is uploaded once: the same command takes what is new. Needs `wandb login`, or WANDB_API_KEY (and WANDB_BASE_URL for a
server of one's own).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from accumulation_harness.analysis import load, tables
from accumulation_harness.analysis.article import drawn_steps
from accumulation_harness.analysis.figures import common as figures
from accumulation_harness.analysis.figures.style import style
from accumulation_harness.config import ConfigError, TrackingConfig, TrackingMode
from accumulation_harness.processes import run_command
from accumulation_harness.results import sweeps, tracking
from accumulation_harness.results.record import FOLDER_MODE, in_one_line
from accumulation_harness.results.store import Store

SWEEP = "sweep"  # job type
FIRST = ("workload", "norm", "optimizer", "precision", "seed", "effective_batch", "accumulation_steps", "micro_batch", "arm",
         "verdict", "cause")  # columns of the table; the others of verdicts.csv follow  # fmt: skip
DPI = 120
BATCH = 16  # runs that one `wandb sync` takes: between two batches it says where it is


@dataclass(frozen=True)
class Sweep:
    """The run of one experiment that was made now."""

    experiment: str
    verdicts: int
    figures: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Upload, and say what was: exit code 0, 1 where a run was not taken, 2 where there is nothing or nobody to send it to."""
    parser = argparse.ArgumentParser(prog="accumulation-harness sync", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the store (default: results)")
    parser.add_argument("--project", help="W&B project (default: the one that the runs were made for)")
    parser.add_argument("--entity", help="W&B user or team (default: that of your key)")
    options = parser.parse_args(arguments)
    results: Path = options.results
    logs = sorted(results.rglob("offline-run-*/*.wandb"))
    if not logs:
        expected = f"expected a folder with offline runs of W&B, as `accumulation-harness run results={results}` makes one"
        print(in_one_line(f"--results={results}: {expected}"), file=sys.stderr)
        return 2
    try:
        tracking.check(TrackingConfig(mode=TrackingMode.online))
    except ConfigError as error:
        print(in_one_line(str(error)), file=sys.stderr)
        return 2
    made = list(sweep_runs(results, TrackingConfig(project=options.project or project_of(logs[0]), entity=options.entity)))
    found = set(logs) | set(results.rglob("offline-run-*/*.wandb"))
    running = {log for log in found if Store(results).is_running(log.parents[2])}
    todo = sorted(log for log in found - running if not tracking.is_uploaded(log))
    missing = upload(todo, options.project, options.entity)
    for sweep in made:
        print(f"“{sweep.experiment}”: a run of the sweep, with a table of {sweep.verdicts} verdicts and {sweep.figures} figures.")
    left = f", {len(running)} left because their trials are running" if running else ""
    print(f"{len(todo) - len(missing)} runs uploaded, {len(found) - len(running) - len(todo)} were there already{left}.")
    for log in missing:
        print(in_one_line(f"not uploaded: {log.parent}"), file=sys.stderr)
    return 1 if missing else 0


def project_of(log: Path) -> str:
    """The project that a run was made for; the usual one where its log cannot be read."""
    try:
        return tracking.read_offline(log).project or TrackingConfig().project
    except ValueError:
        return TrackingConfig().project


def upload(logs: Sequence[Path], project: str | None, entity: str | None) -> list[Path]:
    """Send runs to the server; those that it has not taken."""
    missing: list[Path] = []
    for start in range(0, len(logs), BATCH):
        part = logs[start : start + BATCH]
        missing += tracking.upload(part, project, entity)
        if len(logs) > BATCH:
            print(f"{start + len(part)} of {len(logs)}, {len(missing)} of them not taken", flush=True)
    return missing


def sweep_runs(results: Path, config: TrackingConfig) -> Iterator[Sweep]:
    """An offline run for each experiment with verdicts, unless there is one of the very same verdicts."""
    every = load.read(results)
    for experiment in every.experiments:
        arms = every.of(experiment).arms
        verdicts = table(arms)
        name = hashlib.sha256(tables.to_csv(verdicts)).hexdigest()[:10]
        folder = results / sweeps.FOLDER / f"{experiment}-{name}"
        if arms.empty or folder.exists():
            continue
        folder.mkdir(FOLDER_MODE, parents=True)
        about = {"experiment": experiment}
        counts = {f"num_{verdict}": int(number) for verdict, number in tables.verdict_counts(arms).items()}
        drawn = dict(pictures(results, experiment, arms))
        with (
            tempfile.TemporaryDirectory() as scratch,
            tracking.open_run(
                config, about, experiment=experiment, name=f"{experiment}: the sweep", folder=folder, job_type=SWEEP
            ) as run,
        ):
            run.show(
                "verdicts",
                [str(name) for name in verdicts],
                verdicts.astype(object).where(verdicts.notna(), None).to_numpy().tolist(),
            )
            run.show_images({name: to_png(figure, Path(scratch) / f"{name}.png") for name, figure in drawn.items()})
            run.finish({**counts, "num_trials": arms["trial"].nunique()})
        yield Sweep(experiment, len(verdicts), len(drawn))
    tracking.end()


def table(arms: pd.DataFrame) -> pd.DataFrame:
    """`verdicts.csv`, with first what one groups by."""
    verdicts = tables.verdicts(arms)
    return verdicts[[*FIRST, *(name for name in verdicts if name not in FIRST)]]


def pictures(results: Path, experiment: str, arms: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """The figures that there are of every sweep, as the report has them."""
    if arms["algebra_error"].notna().any():
        yield "algebra", figures.figure_algebra(arms)
    if arms["arm_error"].notna().any():
        yield "gradient-error", figures.figure_gradient_error(arms[arms["arm_error"].notna()])
    steps, _ = drawn_steps(results, experiment, arms)
    if steps.empty:
        return
    for precision, own in steps.groupby("precision"):
        yield f"loss-{precision}", figures.figure_losses(own)
    yield "distance", figures.figure_distances(steps)


def to_png(figure: Figure, path: Path) -> Path:
    """Write the figure in the report's style: W&B shows no SVG."""
    with style():
        figure.savefig(path, format="png", dpi=DPI)
    return path


if __name__ == "__main__":
    sys.exit(run_command(main))
