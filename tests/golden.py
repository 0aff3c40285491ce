"""The golden table: what is said today of all that is judged, a row each, in `golden.csv`.

    python -m tests.golden [SOURCE ...] [--results DIR]

measures sources again and writes their rows, sorted: a diff shows those that moved. `trial` is read from the quick grids of all
experiments in DIR. `wrong_today` says what would be right, or right as well, of a row: it may move there, no other may.
"""

import argparse
import csv
import importlib.util
import json
import shutil
import tarfile
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from accumulation_harness.analysis import faults, ledger, load
from accumulation_harness.audit import audit
from accumulation_harness.config import TrialConfig, to_dict
from scoreboard import page
from tests.audit.loops import lookalikes, misjudged
from tests.audit.test_loops import RIGHT, WRONG, nothing_is_hidden_by_what_is_allowed
from tests.commands import ROOT, harness
from tests.recipes import test_faults
from tests.watch import foreign, kinds, test_session, test_trainers

FINDINGS = ROOT / "docs" / "findings"
PATH = Path(__file__).with_suffix(".csv")
COLUMNS = ("source", "case", "verdict", "causes", "explained", "wrong_today")
Said = tuple[str, str, str]  # verdict; causes, joined by `+`; whether they explain all, where that is said
Rows = dict[str, Said]  # by case


@dataclass(frozen=True)
class Group:
    """Cases that are measured together: their names begin with the group's."""

    source: str
    name: str
    measure: Callable[[], Rows]
    quick: bool = False
    needs: str = ""  # a package that may be missing
    only: str = ""  # of its cases, those that hold none of this

    def has(self, case):
        return (self.name in ("", case) or case.startswith(f"{self.name} / ")) and not (self.only and self.only in case)


def said(verdict, causes, explained=""):
    return str(verdict), "+".join(sorted({*map(str, causes)} - {""})), explained


# -- trials -----------------------------------------------------------------------------------------------------------


def trials(folder):
    """Every arm of the trials that are stored in a folder."""
    rows = {}
    for path in sorted(folder.glob("*/*/trial.json")):
        trial = json.loads(path.read_bytes())
        settings = " ".join(sorted(_differing(trial["config"], to_dict(TrialConfig()))))
        for arm in trial["arms"]:
            case = f"{trial['experiment']} / {settings} / {arm['arm']} N={arm['accumulation_steps']}"
            assert case not in rows, case
            rows[case] = _judged(arm)
    return rows


def _judged(arm):
    return said(arm["verdict"], arm["cause"].split("+"), str(bool(arm["explained"])))


def _differing(config, usual, inside=""):
    """The settings that identify a trial, as `name=value`; every arm has its own N."""
    for name, value in config.items():
        if isinstance(value, dict) and name in usual:
            yield from _differing(value, usual[name], f"{name}.")
        elif value != usual.get(name) and name not in ("experiment", "device", "study"):
            yield f"{inside}{name}={json.dumps(value, separators=(',', ':'))}".replace('"', "")


def _claims(folder, experiment):
    """What an experiment's trials say of the claims that it decides, also where it judges no arms."""
    found = ledger.table(load.read(folder)).to_dict("records")
    own = [row for row in found if experiment in str(row["experiment"]).split(", ")]
    return {f"{experiment} / claim {row['id']}": said(row["verdict"], ()) for row in own}


def _kept_grids(folder):
    """All rows of the quick grids in a folder; claims are those of seed 0."""
    rows = trials(folder)
    for experiment in sorted({path.parts[-3] for path in folder.glob("*/*seed0-*/trial.json")}):
        with tempfile.TemporaryDirectory() as zero:
            for trial in folder.glob(f"{experiment}/*seed0-*"):
                shutil.copytree(trial, Path(zero) / experiment / trial.name)
            rows |= _claims(Path(zero), experiment)
    return rows


def _swept(experiment):
    """Its quick grid at seed 0."""
    with tempfile.TemporaryDirectory() as folder:
        quick = ("hydra.sweeper.size=quick", "seed=0", "device=cpu", "tracking.mode=disabled")
        harness("run", f"+experiment={experiment}", *quick, f"results={folder}")
        return trials(Path(folder)) | _claims(Path(folder), experiment)


def trial_groups():
    names = sorted({case.split(" / ")[0] for source, case in table() if source == "trial"})
    return [Group("trial", name, partial(_swept, name), only="seed=") for name in names]


# -- planted faults, the audit, the watch ------------------------------------------------------------------------------


def _faults(name):
    return {f"{name} / {arm}": _judged(row) for arm, row in test_faults.judged(name).items()}


def fault_groups():
    return [Group("fault", name, partial(_faults, name), name in test_faults.QUICK) for name in test_faults.SETTINGS]


def _audited(train, *steps):
    report = audit(train, batch_size=16, accumulation_steps=steps)
    lookalikes.KEPT.clear()
    assert all(finding.message and finding.evidence for finding in report.findings)
    if report.findings and steps == (4,):
        nothing_is_hidden_by_what_is_allowed(report)
    if report.equivalent and steps == (4,):
        assert max(step["gate"] for step in report.steps) < 0.2, "so wide a gate lets faults pass"
    return {f"{train.__name__} / N={n}": _of_arm(report, n) for n in steps}


def _of_arm(report, n):
    causes = {finding.cause for finding in report.findings if finding.accumulation_steps == n}
    return said("different" if causes else "inconclusive" if report.problems_of(n) else "equivalent", causes)


def audit_groups():
    """Quick: at N = 4 a loop of each cause, of every fifth set of causes, every twelfth right one, every third once misjudged."""

    def group(train, *runs, name="", quick=False):
        measure = lambda: {case: row for steps in runs for case, row in _audited(train, *steps).items()}  # noqa: E731
        return Group("audit", name or train.__name__, measure, quick)

    kinds = {frozenset(causes): train for train, causes in reversed(WRONG.items())}
    sample = [*(train for k, (causes, train) in enumerate(kinds.items()) if len(causes) < 2 or k % 5 == 0), *RIGHT[::12]]
    return [
        *(
            group(train, (4,), name=f"{train.__name__} / N=4", quick=train in sample or k % 6 == 0)
            for k, train in enumerate((*misjudged.RIGHT, *misjudged.WRONG, *sample))
        ),
        *(group(train, (4,), (2, 8, 16)) for train in (*RIGHT, *WRONG)),
    ]


def _watched(name, train):
    """The reports of a run together: it may have several optimizers."""
    reports = train()
    lookalikes.KEPT.clear()
    verdicts = {report.verdict for report in reports}
    whole = next((v for v in ("different", "inconclusive", "equivalent") if v in verdicts), "inconclusive")
    return {name: said(whole, {cause for report in reports for cause in report.causes})}


def watch_groups():
    def group(name, train, quick=False, needs=""):
        return Group("watch", name, partial(_watched, name, train), quick, needs)

    own = {**test_session.RIGHT, **{str(cause): make for cause, make in test_session.WRONG.items()}, **test_session.OTHERS}
    return [
        *(group(name, lambda make=make: [test_session.watched_and_alone(make)], True) for name, make in own.items()),
        *(group(f"audit's {one.__name__}", partial(foreign.watched, one, 4, 4)) for one in (*RIGHT, *WRONG)),
        *(group(f"trainer: {name}", run, needs=needs) for name, (needs, run) in test_trainers.REPORTS.items()),
        *(group(f"kind: {name}", lambda judge=judge: [judge()], True) for name, judge in kinds.RUNS.items()),
    ]


# -- what is kept ------------------------------------------------------------------------------------------------------


def kept_archive():
    """The newest trials that are kept, whose table lies beside them."""
    return max(FINDINGS.glob("*/trials.tar.xz"))


@cache
def kept_results():
    """As a report reads them: the trials that are kept, without their step rows."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk takes seconds to remove 2,360 folders
    with tempfile.TemporaryDirectory(dir=memory) as name:
        with tarfile.open(kept_archive()) as file:
            file.extractall(name, filter="data")
        return faults.with_visibility(Path(name), load.read(Path(name)))


@cache
def kept_claims():
    """Every claim, decided by today's rules from the trials that are kept."""
    return ledger.table(kept_results())


def _archive():
    return {f"claims / {row['id']}": said(row["verdict"], ()) for row in kept_claims().to_dict("records")}


def _releases():
    """Audits of released trainers, as recorded: what was measured is not kept."""
    return {
        "audits / {name} {function} N={accumulation_steps} {arithmetic}".format(name=record["name"], **arm): said(
            arm["verdict"], arm["causes"]
        )
        for record in page.records(ROOT / "scoreboard/records")
        for arm in record["arms"]
    }


SOURCES = {
    "trial": trial_groups,
    "fault": fault_groups,
    "audit": audit_groups,
    "watch": watch_groups,
    "archive": lambda: [Group("archive", "claims", _archive, True)],
    "release": lambda: [Group("release", "audits", _releases, True)],
}


# -- the table ---------------------------------------------------------------------------------------------------------


@cache
def table():
    """(source, case) -> its verdict, causes, `explained` and `wrong_today`."""
    with PATH.open(newline="") as file:
        _, *rows = csv.reader(file)
    return {(source, case): rest for source, case, *rest in rows}


def is_right(row, wrong_today):
    """Whether what is said is what a note as `A10: inconclusive | different loss_not_divided` calls right."""
    return " ".join(row[:2]).strip() in wrong_today.partition(": ")[2].split(" | ")


def moved(group, rows):
    """The rows of a group that are not those of the table, one line each, and none that moved to what is right."""
    kept = {case: row for (source, case), row in table().items() if source == group.source and group.has(case)}
    return [
        f"{group.source} / {case}: {told(kept.get(case))} -> {told(rows.get(case))}"
        for case in sorted(kept | rows)
        if list(rows.get(case, ())) != kept.get(case, [])[:3]
        and not (case in rows and case in kept and is_right(rows[case], kept[case][3]))
    ]


def told(row):
    return "no row" if row is None else f"{row[0]} ({row[1]}{', explained' if row[2] == 'True' else ''})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", choices=SOURCES, default=[*SOURCES])
    parser.add_argument("--results", type=Path, help="of accumulation-harness run +experiment=all hydra.sweeper.size=quick")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for source in arguments.sources:
        if source == "trial":
            groups = [Group("trial", "", partial(_kept_grids, arguments.results))] if arguments.results else []
        else:
            groups = [group for group in SOURCES[source]() if not group.needs or importlib.util.find_spec(group.needs)]
        write([(group, group.measure()) for group in groups])


def write(measured):
    """Put the rows of groups in the place of those that they had; a note stays until its row is right."""
    table.cache_clear()
    kept = dict(table()) if PATH.exists() else {}
    for group, rows in measured:
        notes = {key: kept.pop(key)[3] for key in [*kept] if key[0] == group.source and group.has(key[1])}
        for case, row in rows.items():
            note = notes.get((group.source, case), "")
            kept[group.source, case] = [*row, "" if is_right(row, note) else note]
    with PATH.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *([*key, *row] for key, row in sorted(kept.items()))])


if __name__ == "__main__":
    main()
