"""`python -m analysis.report [--results DIR] [--out DIR]`: the page, the verdicts and the figures, from the store alone."""

from __future__ import annotations

import argparse
import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from analysis import faults, ledger, load, sections, tables
from analysis.content import Picture, Section, Text, number, plain
from analysis.figures import style
from analysis.question import Answer, Experiment, Material, ReportWarning, made_of, registered
from harness.judge.gates import ALGEBRA_GATE, RANK_LEVEL, ROUNDING_GATE, TRAJECTORY_GATE
from harness.processes import run_command
from harness.results.record import FOLDER_MODE, in_one_line, keep_others_out, told, write_atomically

MAX_LISTED = 50
# The order of the page: the main question, then special cases, then how far the answers can be trusted.
FIRST = (
    "equivalence", "normalisation_of_loss", "batchnorm", "groupnorm", "randomness", "momentum", "adam", "learning_rate",
    "gradient_noise", "order_of_operations", "adaptive_windows", "precision", "replicas", "memory_and_time", "accounting",
    "released_trainers", "fault_matrix", "calibration", "sensitivity",
)  # fmt: skip


@dataclass(frozen=True)
class Article:
    """An experiment on the page."""

    experiment: Experiment
    answer: Answer
    sections: tuple[Section, ...]
    results: load.Results
    figures: dict[str, Figure]  # of its sections, by the name of the picture

    @property
    def id(self) -> str:
        """The id of its heading."""
        return plain(self.experiment.name)


@dataclass(frozen=True)
class Figure:
    """A picture that has been drawn: the name of its file, without suffix, and the file."""

    name: str
    svg: bytes
    alt: str

    @property
    def inline(self) -> Markup:
        """As an element of the page."""
        return Markup(style.inline(self.svg, self.name, self.alt))


class NothingToReport(RuntimeError):
    """No finished trial in the store."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; exit code 1 when there is nothing to report or it cannot be read or written."""
    parser = argparse.ArgumentParser(prog="python -m analysis.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the store (default: results)")
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder to write to (default: reports)")
    options = parser.parse_args(arguments)
    keep_others_out()
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", ReportWarning)
            written = write(options.results, options.out)
    except (NothingToReport, OSError) as error:
        print(in_one_line(f"analysis.report: {error}"), file=sys.stderr)
        return 1
    for line in dict.fromkeys(in_one_line(str(warning.message)) for warning in seen):
        print(f"analysis.report: {line}", file=sys.stderr)
    print(f"{written}")
    return 0


def write(results: Path, out: Path) -> Path:
    """Write figures, `verdicts.csv`, `claims.csv`, `faults.csv` and, last, `index.html`, each whole or not at all.

    Raises NothingToReport without trials. A store without faults of the catalogue has no `faults.csv`: one that an earlier
    report left there is removed.
    """
    loaded = load.read(results)
    if not loaded.trials.empty:
        loaded = faults.with_visibility(results, loaded)
    if loaded.trials.empty:
        raise NothingToReport(_nothing(results, loaded.missing))
    articles = list(_articles(results, loaded))
    claims = ledger.table(loaded)
    notes = _notes(loaded)
    for note in notes:
        warnings.warn(note, ReportWarning, stacklevel=2)
    page = _page(loaded, articles, claims, notes)
    for folder in (out.parent, out, out / "figures"):
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    for figure in (figure for article in articles for figure in article.figures.values()):
        write_atomically(out / "figures" / f"{figure.name}.svg", figure.svg)
    write_atomically(out / "verdicts.csv", tables.to_csv(tables.verdicts(loaded.arms)))
    _write_faults(loaded.arms, out / "faults.csv")
    write_atomically(out / "claims.csv", tables.to_csv(claims))
    write_atomically(out / "index.html", page.encode())
    return out / "index.html"


def _write_faults(arms: pd.DataFrame, path: Path) -> None:
    table = faults.to_table(arms)
    if table.empty:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, tables.to_csv(table))


def _nothing(results: Path, missing: Sequence[load.Missing]) -> str:
    if not missing:
        return f"no trials in {results}: run some first, for example `python -m harness +experiment=equivalence`"
    states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(one.state for one in missing).items()))
    first = next((f"; {one.experiment}/{one.trial}: {one.detail}" for one in missing if one.detail), "")
    return f"no finished trial in {results} ({states}{first})"


def _articles(results: Path, loaded: load.Results) -> Iterator[Article]:
    known = registered()
    places = {name: place for place, name in enumerate(FIRST)}
    for name in sorted(loaded.experiments, key=lambda name: (name not in known, places.get(name, len(FIRST)), name)):
        yield _article(results, loaded.of(name), known.get(name) or _unregistered(name))


def _article(results: Path, own: load.Results, experiment: Experiment) -> Article:
    chosen = tables.drawn(own.arms)
    rows, damaged = load.steps(results, experiment.name, chosen["trial"])
    labels = chosen[["trial", "model", "workload", "norm", "optimizer", "precision", "seed"]]
    material = Material(
        experiment=experiment,
        results=own,
        steps=rows.merge(labels, on="trial"),
        read_steps=lambda trials: load.steps(results, experiment.name, trials)[0],
        l4=tables.convergence(own.arms, experiment.margin),
    )
    shown: list[Section] = []
    figures: dict[str, Figure] = {}
    for make in experiment.sections:
        section, drawn = _made(make, material)
        shown += [section] if section is not None else []
        figures |= drawn
    if damaged:
        lost = "; ".join(f"{one.trial} ({one.detail})" for one in damaged)
        shown.append(Section("Curves that are missing", (Text(f"The step rows of these trials cannot be read: {lost}."),)))
    return Article(experiment, _answer(experiment, own), tuple(shown), own, figures)


def _made(make: Callable[[Material], Section | None], material: Material) -> tuple[Section | None, dict[str, Figure]]:
    """A section with its pictures drawn, or one that says why there is none."""
    name = make.__name__.replace("_", " ")

    def made() -> tuple[Section | None, dict[str, Figure]]:
        section = make(material)
        pictures = [block for block in (section.blocks if section else ()) if isinstance(block, Picture)]
        names = {picture.name: plain(f"{material.experiment.name}-{picture.name}") for picture in pictures}
        drawn = {one.name: Figure(names[one.name], style.to_svg(one.figure), one.alt) for one in pictures}
        return section, drawn

    def otherwise(reason: str) -> tuple[Section, dict[str, Figure]]:
        text = f"This section ({name}) could not be made from the results that are there: {reason}."
        return Section("A section that is missing", (Text(text),)), {}

    return made_of(made, f"{material.experiment.name}: the section {name}", otherwise)


def _answer(experiment: Experiment, own: load.Results) -> Answer:
    answer = experiment.answer
    if answer is None:
        return ledger.answer(experiment, own)
    return made_of(
        lambda: answer(own.arms),
        f"the answer of {experiment.name}",
        lambda reason: Answer((f"It cannot be answered from the results that are there: {reason}.",), None),
    )


def _unregistered(name: str) -> Experiment:
    """The experiment for trials of a name that no file in `experiments/` has: they are shown without a question."""

    def count(arms: pd.DataFrame) -> Answer:
        right, wrong = arms[~arms["fault"]], faults.judged(arms)
        counts = ", ".join(f"{number} {verdict}" for verdict, number in tables.verdict_counts(right).items())
        found = f"Of {len(wrong)} arms that are wrong on purpose, {int(wrong['detected'].sum())} are found." if len(wrong) else ""
        return Answer((f"{len(right)} arms: {counts}.", *filter(None, [found])), None)

    return Experiment(
        name=name,
        title=f"Trials of “{name}”",
        question="Single trials, without a question fixed beforehand.",
        prediction="",
        rule="",
        answer=count,
        sections=(sections.verdict_matrix, sections.gradient_error, sections.algebra, sections.losses, sections.unjudged),
    )


def _notes(loaded: load.Results) -> list[str]:
    """What else is to be said of the store, in a line each."""
    torn = [f"{one.experiment}/{one.trial}: {one.detail}" for one in loaded.torn]
    return [
        *told(torn, "Step rows that are damaged, and in no curve; the verdict stands"),
        *told(loaded.foreign, "Not of this store, and left alone"),
    ]


def _page(loaded: load.Results, articles: Sequence[Article], claims: pd.DataFrame, notes: Sequence[str]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    gates = {"algebra": ALGEBRA_GATE, "trajectory": TRAJECTORY_GATE, "rounding": ROUNDING_GATE, "rank": RANK_LEVEL}
    return environment.get_template("report.html.j2").render(
        articles=articles,
        ledger=ledger.ledger(claims),
        names=[article.experiment.name for article in articles],
        meanings=[(state, sections.SYMBOLS[state], words) for state, words in sections.MEANINGS.items()],
        gates={name: f"{gate:g}" for name, gate in gates.items()},
        missing=loaded.missing[:MAX_LISTED],
        num_missing=len(loaded.missing),
        notes=notes,
        facts=_facts(loaded),
        environments=_environments(loaded.trials),
    )


def _facts(loaded: load.Results) -> list[tuple[str, str]]:
    """What identifies the results of a page, and the time they took."""
    names = "".join(f"{e}/{t}\n" for e, t in zip(loaded.trials["experiment"], loaded.trials["trial"], strict=True))
    spent = tables.seconds(loaded.trials)
    phases = ", ".join(f"{name} {_duration(value)}" for name, value in spent.drop("total").items())
    return [
        ("Trials", f"{len(loaded.trials)} finished, {len(loaded.missing)} without a result"),
        ("Arms", f"{len(loaded.arms)}, and {int(loaded.trials['rows'].sum()):,} rows of steps"),
        ("Configurations", f"SHA-256 {hashlib.sha256(names.encode()).hexdigest()} (over the sorted names of the trials)"),
        ("Time", f"{_duration(spent['total'])} of computing, summed over trials ({phases})"),
    ]  # fmt: skip


def _environments(trials: pd.DataFrame) -> list[tuple[str, int]]:
    counts: dict[Any, int] = trials["environment"].value_counts().to_dict()
    return sorted(((str(name), count) for name, count in counts.items()), key=lambda pair: (-pair[1], pair[0]))[:10]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{number(round(seconds, 1))} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    sys.exit(run_command(main))
