"""`accumulation-harness report [--results DIR] [--out DIR]`: the page, the verdicts and the figures, from the store alone."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from accumulation_harness.analysis import article, caveats, faults, ledger, load, site, tables
from accumulation_harness.analysis.question import ReportWarning
from accumulation_harness.config.questions import questions
from accumulation_harness.results.record import MOST_TOLD, in_one_line, summarised
from accumulation_harness.results.store import State, StoreWarning
from accumulation_harness.system import terminal
from accumulation_harness.system.files import keep_others_out, write_atomically
from accumulation_harness.system.processes import run_command

FAULTS = "faults.csv"


class NothingToReport(RuntimeError):
    """No finished trial in the store."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; exit code 1 when there is nothing to report or it cannot be read or written.

    Args:
        arguments: Words of the command line; None: those of the process.

    Returns:
        The exit code.
    """
    parser = terminal.parser("report", __doc__)
    parser.add_argument("--results", type=Path, default="results", metavar="DIR", help="folder of the store (default: results)")
    parser.add_argument("--out", type=Path, default="reports", metavar="DIR", help="folder to write to (default: reports)")
    options = parser.parse_args(arguments)
    keep_others_out()
    gc.set_threshold(200_000, 50, 100)  # thousands of records are read, and all of them kept
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as seen:
        for kind in (ReportWarning, StoreWarning):
            warnings.simplefilter("always", kind)
        try:
            written = write(options.results, options.out)
        except (NothingToReport, OSError) as caught:
            error = caught
    for line in dict.fromkeys([*(str(warning.message) for warning in seen), *([str(error)] if error else ())]):
        print(in_one_line(f"accumulation-harness report: {line}"), file=sys.stderr)
    if error is None:
        print(written)
    return 0 if error is None else 1


def write(results: Path, out: Path) -> Path:
    """Write figures, tables, CSV files, the pages and, last, `index.html`, each whole or not at all.

    A store without faults of the catalogue has no `faults.csv`: one that an earlier report left there is removed.

    Args:
        results: The folder of the store.
        out: The folder to write to; it is made.

    Returns:
        The path of `index.html`.

    Raises:
        NothingToReport: The store has no finished trial.
    """
    made = files(results)
    for folder in (out.parent, out, *(out / name for name in ("figures", "pages", "tables"))):
        folder.mkdir(parents=True, exist_ok=True)
    if FAULTS not in made:
        (out / FAULTS).unlink(missing_ok=True)
    for name, content in made.items():
        write_atomically(out / name, content)
    return out / "index.html"


def files(results: Path) -> dict[str, bytes]:
    """Make every file of the report, `index.html` last; what is missing is a ReportWarning.

    Args:
        results: The folder of the store.

    Returns:
        Path -> content.

    Raises:
        NothingToReport: The store has no finished trial.
    """
    loaded = load.read(results)
    if not loaded.trials.empty:
        loaded = faults.with_visibility(results, loaded)
    if loaded.trials.empty:
        raise NothingToReport(_nothing(results, loaded.missing))
    articles = list(article.articles(results, loaded))
    claims = ledger.with_recorded(ledger.table(loaded))
    if not {*loaded.experiments} & {*questions()}:  # a sweep of the user's own decides no claim of the literature
        claims = claims.iloc[:0]
    notes = summarised(_torn(loaded), "Step rows that are missing or damaged, and in no curve; the verdict stands")
    damaged = [f"{one.experiment}/{one.trial}: {one.detail}" for one in loaded.missing if one.state == State.damaged]
    notes += summarised(damaged, "Damaged, and in no number of this report; the command that made it runs it again")
    stale = [f"{one.experiment}/{one.trial}: {one.detail}" for one in loaded.stale]
    notes += summarised(stale, "Made with other code or data than there are now; the command that made it runs it again")
    for note in notes:
        warnings.warn(note, ReportWarning, stacklevel=2)
    made = {f"figures/{one.file_of(picture)}.svg": picture.svg for one in articles for picture in one.pictures}
    for one in (one for one in articles if one.has_cells):
        cells = caveats.cells_table(one.results.arms)
        made |= {f"tables/{one.id}.csv": tables.to_csv(cells), f"tables/{one.id}.tex": caveats.to_latex(cells)}
    made["verdicts.csv"] = tables.to_csv(tables.verdicts(loaded.arms))
    if not (planted := faults.to_table(loaded.arms)).empty:
        made[FAULTS] = tables.to_csv(planted)
    made["claims.csv"] = tables.to_csv(claims)
    return made | {name: content.encode() for name, content in site.pages(loaded, articles, claims, notes)}


def _nothing(results: Path, missing: Sequence[load.Missing]) -> str:
    if not missing:
        return f"no trials in {results}: run some first, for example `accumulation-harness run +experiment=equivalence`"
    states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(one.state for one in missing).items()))
    first = next((f"; {one.experiment}/{one.trial}: {one.detail}" for one in missing if one.detail), "")
    return f"no finished trial in {results} ({states}{first})"


def _torn(loaded: load.Results) -> list[str]:
    """The trials without step rows; of many, as where only `trial.json` was kept, how many of which experiments."""
    torn = [f"{one.experiment}/{one.trial}: {one.detail}" for one in loaded.torn]
    if len(torn) <= MOST_TOLD:
        return torn
    finished, lost = Counter(loaded.trials["experiment"]), Counter(one.experiment for one in loaded.torn)
    counts = ", ".join(f"{name} {count} of {finished[name]}" for name, count in sorted(lost.items()))
    return [f"trials of {counts}; the first is {torn[0]}"]


if __name__ == "__main__":
    sys.exit(run_command(main))
