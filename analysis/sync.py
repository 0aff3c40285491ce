"""`accumulation-harness sync`: upload the offline runs of a store to W&B, and one run per sweep with its verdicts and figures.

A run is uploaded once: the same command takes what is new. Needs `wandb login`, or WANDB_API_KEY (and WANDB_BASE_URL for a
server of one's own).
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis import load, tables
from accumulation_harness.analysis.article import articles
from accumulation_harness.analysis.figures.style import style
from accumulation_harness.config import ConfigError, TrackingConfig, TrackingMode
from accumulation_harness.results import sweeps, tracking
from accumulation_harness.results.record import in_one_line
from accumulation_harness.results.store import State, Store, StoreWarning
from accumulation_harness.system import terminal
from accumulation_harness.system.files import make_folders
from accumulation_harness.system.processes import run_command

SWEEP = "sweep"  # job type
FIRST = ("workload", "norm", "optimizer", "precision", "seed", "effective_batch", "accumulation_steps", "micro_batch", "arm",
         "verdict", "cause")  # columns of the table; the others of verdicts.csv follow  # fmt: skip
DPI = 120
LOGS = "offline-run-*/*.wandb"
DONE = "done"  # written after the whole run of a sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Upload, and say what was: exit code 0, 1 where a run or a trial is not whole, 2 where there is nothing or nobody for it.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        The exit code.
    """
    parser = terminal.parser("sync", __doc__)
    parser.add_argument("--results", type=Path, default="results", metavar="DIR", help="folder of the store (default: results)")
    parser.add_argument("--project", help="W&B project (default: that of each run; of the sweep's, accumulation-harness)")
    parser.add_argument("--entity", help="W&B user or team (default: that of your key)")
    options = parser.parse_args(arguments)
    results: Path = options.results
    if not any(results.rglob(LOGS)):
        expected = f"expected a folder with offline runs of W&B, as `accumulation-harness run results={results}` makes one"
        print(in_one_line(f"--results={results}: {expected}"), file=sys.stderr)
        return 2
    try:
        tracking.check(TrackingConfig(mode=TrackingMode.online))
    except ConfigError as error:
        print(in_one_line(str(error)), file=sys.stderr)
        return 2
    for made in sweep_runs(results, TrackingConfig(project=options.project or TrackingConfig().project, entity=options.entity)):
        print(made, flush=True)
    stored = [*Store(results).status()]
    running = {status.folder for status in stored if status.state == State.running}
    logs = [log for log in sorted(results.rglob(LOGS)) if log.parents[2] not in running]
    todo = [log for log in logs if not _is_uploaded(log)]
    code = tracking.upload(todo, options.project, options.entity) if todo else 0
    missing = [log for log in todo if not _is_uploaded(log)]
    if len(missing) == len(todo) > 1:  # one log that cannot be read keeps wandb from all the others
        for log in todo:
            tracking.upload([log], options.project, options.entity)
        missing = [log for log in todo if not _is_uploaded(log)]
    left = f", {len(running)} trials left because they are running" if running else ""
    print(f"{len(todo) - len(missing)} runs uploaded, {len(logs) - len(todo)} were there already{left}.")
    for log in missing:
        print(in_one_line(f"not uploaded: {log.parent}"), file=sys.stderr)
    return 1 if missing or code or any(status.state == State.damaged for status in stored) else 0


def _is_uploaded(log: Path) -> bool:
    """Whether `wandb sync` has marked the log as sent."""
    return Path(f"{log}.synced").exists()


def sweep_runs(results: Path, config: TrackingConfig) -> Iterator[str]:
    """An offline run for each experiment, unless there is one of the very same verdicts; what each has, in a line.

    Args:
        results: The folder of the store.
        config: Project, entity and mode.

    Yields:
        Lines for a terminal.
    """
    every = load.read(results)
    for experiment in every.experiments:
        own = every.of(experiment)
        if damaged := [f"{experiment}/{one.trial}: {one.detail}" for one in own.missing if one.state == State.damaged]:
            left_out = f"No run of the sweep {experiment}, as verdicts are missing: {damaged[0]}"
            warnings.warn(f"{left_out}; the command that made it runs it again", StoreWarning, stacklevel=2)
            continue
        arms = own.arms
        verdicts = table(arms)
        folder = results / sweeps.FOLDER / f"{experiment}-{hashlib.sha256(tables.to_csv(verdicts)).hexdigest()[:10]}"
        if arms.empty or (folder / DONE).exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)  # of a command that was stopped over it
        make_folders(results, sweeps.FOLDER, folder.name)
        about = {"experiment": experiment}
        counts = {f"num_{verdict}": int(number) for verdict, number in tables.verdict_counts(arms).items()}
        with (
            tempfile.TemporaryDirectory() as scratch,
            tracking.open_run(
                config, about, experiment=experiment, name=f"{experiment}: the sweep", folder=folder, job_type=SWEEP
            ) as run,
        ):
            cells = verdicts.astype(object).where(verdicts.notna(), None).to_numpy().tolist()
            run.show("verdicts", [str(name) for name in verdicts], cells)
            drawn = {name: to_png(one, Path(scratch, f"{name}.png")) for name, one in pictures(results, own)}
            run.show_images(drawn)
            run.finish({**counts, "num_trials": arms["trial"].nunique()}, {})
        if not run.is_whole:
            continue  # which was told: the same command tries again
        (folder / DONE).touch()
        yield f"“{experiment}”: a run of the sweep, with a table of {len(verdicts)} verdicts and {len(drawn)} figures."
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # its own process, before ours ends


def table(arms: DataFrame) -> DataFrame:
    """`verdicts.csv`, with first what one groups by.

    Args:
        arms: Judged arms, a row each.

    Returns:
        The same rows.
    """
    verdicts = tables.verdicts(arms)
    return verdicts[[*FIRST, *(name for name in verdicts if name not in FIRST)]]


def pictures(results: Path, own: load.Results) -> Iterator[tuple[str, Figure]]:
    """The figures of the sweep's page.

    Args:
        results: The folder of the store.
        own: Results of one experiment.

    Yields:
        Name and figure.
    """
    for article in articles(results, own):
        for picture in article.pictures:
            yield picture.name, picture.figure


def to_png(figure: Figure, path: Path) -> Path:
    """Write the figure in the report's style: W&B shows no SVG.

    Args:
        figure: Any figure.
        path: File to write.

    Returns:
        `path`.
    """
    with style():
        figure.savefig(path, format="png", dpi=DPI)
    return path


if __name__ == "__main__":
    sys.exit(run_command(main))
