"""The parts of the page that belong to one experiment: its answer, its sections, their figures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pandas import DataFrame

from accumulation_harness.analysis import caveats, faults, ledger, load, sections, tables
from accumulation_harness.analysis.content import Block, Matrix, Picture, Section, Text, counted, plain, share
from accumulation_harness.analysis.question import Answer, Experiment, Material, ReportWarning, made_of, registered
from accumulation_harness.judge.cause import MEANINGS, Cause

UNNAMED = "single"  # the experiment of trials that were given no name


@dataclass(frozen=True)
class Article:
    """An experiment on the page."""

    experiment: Experiment
    answer: Answer
    sections: tuple[Section, ...]
    results: load.Results

    @property
    def id(self) -> str:
        """The name of its file and the id of its heading."""
        return plain(self.experiment.name)

    @property
    def href(self) -> str:
        """Where its page is, from the entry."""
        return f"pages/{self.id}.html"

    @property
    def is_own(self) -> bool:
        """Whether it is a sweep of the user's own, which no file in `experiments/` asks for."""
        return not self.experiment.rule

    @property
    def ended(self) -> float:
        """When its latest trial was finished, in seconds since the epoch."""
        return float(self.results.trials["ended"].max())

    @property
    def blocks(self) -> list[Block]:
        """What its sections show, in order."""
        return [block for section in self.sections for block in section.blocks]

    @property
    def pictures(self) -> list[Picture]:
        """Those of its sections."""
        return [block for block in self.blocks if isinstance(block, Picture)]

    def file_of(self, picture: Picture) -> str:
        """The name of a picture's file, without suffix."""
        return plain(f"{self.experiment.name}-{picture.name}")

    @property
    def lead(self) -> Block | None:
        """The figure, or else the matrix, that carries the answer: the first on its page."""
        return next((block for kind in (Picture, Matrix) for block in self.blocks if isinstance(block, kind)), None)

    @property
    def has_cells(self) -> bool:
        """Whether it has judged arms, and so a table of verdicts by cell."""
        return bool((self.results.arms["arm"] == "accumulated").any())


def articles(results: Path, loaded: load.Results) -> Iterator[Article]:
    """One for each experiment, in the order of the page; those that no file asks for come last.

    Args:
        results: The folder of the store.
        loaded: What `load.read` found there.

    Yields:
        The articles.
    """
    known = registered()
    places = {name: place for place, name in enumerate(known)}
    for name in sorted(loaded.experiments, key=lambda name: (places.get(name, len(known)), name)):
        yield _article(results, loaded.of(name), known.get(name) or _unregistered(name, loaded.of(name), known))


def _article(results: Path, own: load.Results, experiment: Experiment) -> Article:
    if math.isnan(experiment.margin):
        experiment = replace(experiment, margin=tables.half_spread(own.arms))
    steps, damaged = _drawn_steps(results, experiment.name, own.arms)
    material = Material(
        experiment=experiment,
        results=own,
        steps=steps,
        read_steps=partial(_step_rows, results, experiment.name),
        l4=tables.convergence(own.arms, experiment.margin),
    )
    shown = [section for make in experiment.sections if (section := _made(make, material)) is not None]
    if damaged:
        if {one.trial for one in damaged} - {one.trial for one in own.torn}:  # those are told of the whole report
            first = f"{experiment.name}/{damaged[0].trial}: {damaged[0].detail}"
            warnings.warn(f"Curves of {len(damaged)} trials are missing, the first: {first}", ReportWarning, stacklevel=2)
        lost = "; ".join(f"{one.trial} ({one.detail})" for one in damaged)
        shown.append(Section("Curves that are missing", (Text(f"The step rows of these trials cannot be read: {lost}."),)))
    return Article(experiment, _answer(experiment, own), tuple(shown), own)


def _step_rows(results: Path, experiment: str, trials: Iterable[str]) -> DataFrame:
    rows, _ = load.steps(results, experiment, trials)
    if rows.empty:
        raise KeyError("step rows that can be read")
    return rows


def _drawn_steps(results: Path, experiment: str, arms: DataFrame) -> tuple[DataFrame, tuple[load.Missing, ...]]:
    """The step rows of the trials that are drawn, with the names of their arms; and the trials whose rows cannot be read."""
    chosen = tables.drawn(arms)
    rows, damaged = load.steps(results, experiment, chosen["trial"])
    labels = chosen[["trial", "model", "workload", "norm", "optimizer", "precision", "seed"]]
    return rows.merge(labels, on="trial"), damaged


def _made(make: Callable[[Material], Section | None], material: Material) -> Section | None:
    """A section with its pictures drawn, or one that says why there is none."""
    name = make.__name__.replace("_", " ").strip()

    def made() -> Section | None:
        with suppress(load.Unmeasured):
            return make(material)
        return None

    def otherwise(reason: str) -> Section:
        text = f"This section ({name}) could not be made from the results that are there: {reason}."
        return Section("A section that is missing", (Text(text),))

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


def _sentences(causes: str) -> str:
    """What is wrong, of one cause or several that are joined by `+`."""
    said = "; ".join(MEANINGS[Cause(one)].sentence for one in causes.split("+"))
    return said[0].upper() + said[1:]


def _unregistered(name: str, own: load.Results, known: Mapping[str, Experiment]) -> Experiment:
    """The experiment for trials of a name that no file in `experiments/` has: they are shown without a question.

    Learning curves are shown as the question of convergence shows them.

    Returns:
        An experiment without claims.
    """
    if own.has("learning_curves"):
        asked = known["convergence"]
        question = "Do the large batch, its accumulation and the small batch end alike in these trainings?"
        return replace(
            asked, name=name, title=f"Your trainings “{name}”", question=question, prediction="", claims=(), advice=None
        )

    def count(arms: DataFrame) -> Answer:
        right, wrong = arms.query("not fault"), faults.judged(arms)
        runs, controls = (right.query("arm == @name") for name in ("accumulated", "permuted"))
        counts = {str(verdict): number for verdict, number in tables.verdict_counts(runs).items()}
        same = f"Accumulation is the large batch's computation in {share(counts.pop('equivalent', 0), len(runs))} runs"
        others = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        why = [
            f"{_sentences(str(cause))} ({cause}): an exact simulation of it gives {counted(own['explained'])} differences."
            for cause, own in runs.query("cause != '' and verdict == 'different'").groupby("cause")
            if own["explained"].any()
        ]
        found = f"Of {len(wrong)} runs that are wrong on purpose, {int(wrong['detected'].sum())} are found." if len(wrong) else ""
        right_controls = counted(controls["verdict"] == "equivalent")
        told = f"The control, a large batch with its rows shuffled, is equivalent {right_controls} times."
        accumulated = f"{same}{f'; others: {others}' if others else ''}." if len(runs) else ""
        sentences = tuple(filter(None, [accumulated, *why, told if len(controls) else "", found]))
        return Answer(sentences or ("None of these trials has a run that is judged.",), None)

    return Experiment(
        name=name,
        title="Your trials" if name == UNNAMED else f"Your sweep “{name}”",
        question="Is accumulation the same computation as the large batch in these trials, and where not, why?",
        prediction="",
        rule="",
        margin=math.nan,  # of its losses nothing is known beforehand
        margin_reason="half the standard deviation of the full batch's held-out loss between seeds",
        answer=count,
        sections=(
            sections.verdict_matrix,
            caveats.caveats_that_occur,
            sections.convergence,
            sections.gradient_error,
            sections.algebra,
            sections.batch_norm,
            sections.losses,
            sections.distances,
            sections.unjudged,
        ),
    )
