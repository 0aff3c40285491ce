"""What an experiment is: a question fixed before its trials run, the claims that it decides, and how the page answers it."""

from __future__ import annotations

import importlib
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from pandas import DataFrame, Series

from accumulation_harness.analysis.content import Section
from accumulation_harness.analysis.load import Results, Unmeasured
from accumulation_harness.config.questions import FOLDER, questions
from accumulation_harness.results.record import in_one_line

Made = TypeVar("Made")


class Ruling(StrEnum):
    """What becomes of a claim."""

    confirmed = "confirmed"
    refuted = "refuted"
    conditional = "conditional"  # true under a condition that the finding names
    undecided = "undecided"  # enough results, and they exclude neither the claim nor its alternative
    contradicted = "contradicted by its source"  # what the claim appeals to says otherwise, in print
    right_by_arithmetic = "right by arithmetic"  # computed from constants: nothing was measured
    wrong_by_arithmetic = "wrong by arithmetic"
    not_testable = "not testable"
    needs_full_grid = "needs the full grid"  # the results are there, and too few
    no_data = "no data"
    pending = "pending"  # no experiment of this project decides it yet


CONFIRMED, REFUTED, CONDITIONAL, UNDECIDED = Ruling.confirmed, Ruling.refuted, Ruling.conditional, Ruling.undecided


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """What the results say of a claim: a row of the ledger. A conditional one names its condition, and no other keeps any."""

    verdict: Ruling
    condition: str = ""  # one phrase: when, or in what sense, the claim is true
    measured: float
    threshold: str  # what `measured` was held against
    n: int  # arms, trials or draws that decided
    explanation: str  # one sentence

    def __post_init__(self) -> None:
        if self.verdict != Ruling.conditional:
            object.__setattr__(self, "condition", "")
        assert self.condition or self.verdict != Ruling.conditional


def undecided(reason: str, n: int = 0) -> ClaimResult:
    """Rule that the results are there and do not suffice.

    Args:
        reason: What is missing, a sentence.
        n: The number of values that there are.

    Returns:
        A ruling `needs the full grid`.
    """
    return ClaimResult(verdict=Ruling.needs_full_grid, measured=math.nan, threshold="", n=n, explanation=reason)


class TooFew(LookupError):
    """The results that there are do not suffice for a claim: what it takes, and how many there are."""


def takes(what: str, *frames: DataFrame | Series[Any], n: int | None = None) -> None:
    """Make sure that there are rows to decide a claim by.

    Args:
        what: What it takes, a sentence.
        frames: Rows that are needed.
        n: How many there are, if not their rows.

    Raises:
        TooFew: A frame is empty.
    """
    if any(frame.empty for frame in frames):
        raise TooFew(what, sum(map(len, frames)) if n is None else n)


def over_settings(holds: Sequence[bool], fails: Sequence[bool]) -> Ruling:
    """Rule on a claim that holds in some settings and fails in others; a setting that is both counts as holding.

    Args:
        holds: Whether the claim holds, by setting.
        fails: Whether it fails, by setting.

    Returns:
        `confirmed` if it holds in all, else `undecided` if it does neither in one, `conditional` if it holds in some, and
        `refuted` if in none.
    """
    if all(holds):
        return Ruling.confirmed
    if not all(map(operator.or_, holds, fails)):
        return Ruling.undecided
    return Ruling.conditional if any(holds) else Ruling.refuted


@dataclass(frozen=True)
class Claim:
    """A claim of the literature and the rule that decides it; its text and sources are in the question's `claims.csv`."""

    id: str
    expects: Ruling  # what the theory leads one to expect
    rule: str  # in words, fixed before the run
    decide: Callable[[Results], ClaimResult]  # from the experiment's own results, which are never empty
    is_recorded: bool = False  # decided by what is kept with the project, whatever the results


def claim(id: str, expects: Ruling, rule: str) -> Callable[[Callable[[Results], ClaimResult]], Claim]:
    """A decorator that makes a claim of the function that decides it.

    Args:
        id: Identifier of the claim, as `A1`.
        expects: What the theory leads one to expect.
        rule: The decision rule in words, fixed before the run.

    Returns:
        The decorator.
    """
    return partial(Claim, id, expects, rule)


def not_measured(id: str, verdict: Ruling, rule: str, explanation: str, threshold: str = "") -> Claim:
    """A claim about which no run says anything.

    Args:
        id: Identifier of the claim.
        verdict: What becomes of it, whatever the results.
        rule: Why, in words.
        explanation: One sentence.
        threshold: What it was held against.

    Returns:
        The claim.
    """
    finding = ClaimResult(verdict=verdict, measured=math.nan, threshold=threshold, n=0, explanation=explanation)
    return Claim(id, verdict, rule, lambda results: finding)


@dataclass(frozen=True)
class Answer:
    """The answer to the question, from the numbers."""

    sentences: tuple[str, ...]
    holds: bool | None  # whether the printed prediction held; None when there is nothing to decide it by
    compared: bool = True  # whether the printed prediction is compared at all: where it is not, the page does not say


@dataclass(frozen=True)
class Advice:
    """A row of the first screen: the question, the answer in some words, the number with its interval or range, what to do."""

    question: str
    answer: str
    number: str
    action: str
    experiment: str  # whose page has the details


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, fixed before the trials run, and how the report answers it."""

    name: str = ""  # that of its folder
    title: str
    question: str
    prediction: str
    rule: str  # the decision rule, in words
    margin: float = 0.02  # of the equivalence test of L4, nats per loss term; NaN: from the spread between seeds
    margin_reason: str = "0.02 nats of loss is a change of perplexity of 2%"
    claims: tuple[Claim, ...] = ()  # of the ledger, that this experiment decides
    answer: Callable[[DataFrame], Answer] | None = None  # from the arms; None: from the findings on its claims
    predicted: Callable[[Results], bool | None] | None = None  # compares the printed prediction; for an answer from claims
    advice: Callable[[Results], Advice | None] | None = (
        None  # its row of the first screen, from all results; None: they say nothing
    )
    sections: tuple[Callable[[Material], Section | None], ...]  # what the page shows, in order


@dataclass(frozen=True, kw_only=True)
class Material:
    """What the sections of an experiment are made from."""

    experiment: Experiment
    results: Results
    steps: DataFrame  # step rows of the drawn trials, with the columns of their arms
    read_steps: Callable[[Iterable[str]], DataFrame]  # of these trials, with a column `trial`; KeyError: none is there
    l4: DataFrame  # tables.convergence

    def study(self, name: str, columns: Sequence[str] = ()) -> DataFrame:
        """`Results.study` of its results."""
        return self.results.study(name, columns)

    @property
    def arms(self) -> DataFrame:
        """The judged arms of the experiment."""
        return self.results.arms


class ReportWarning(UserWarning):
    """A part of the page could not be made from the results that are there; the page says so in its place."""


def made_of(make: Callable[[], Made], what: str, otherwise: Callable[[str], Made]) -> Made:
    """Make a part of the page, where these results suffice for it.

    Any subset of an experiment's trials may be all there is: the parts of the page that it suffices for are made. A study
    without any is no reason to warn.

    Args:
        make: Makes the part.
        what: Its name, for a ReportWarning.
        otherwise: Called with the reason where the results do not suffice.

    Returns:
        What `make` gives, or else `otherwise`.
    """
    try:
        return make()
    except Unmeasured as study:
        return otherwise(f"it takes trials of study={study}")
    except Exception as error:  # whatever numpy, pandas and matplotlib raise about too few numbers
        told = f"no finished trial has {error.args[0]}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        reason = in_one_line(told)
        warnings.warn(f"{what} could not be made from these results ({reason})", ReportWarning, stacklevel=2)
        return otherwise(reason)


def registered() -> dict[str, Experiment]:
    """The `EXPERIMENT` of every question by its name, in the order of the page: this package imports none of them.

    Returns:
        Name -> experiment.
    """
    return {name: replace(importlib.import_module(f"{FOLDER}.{name}.answers").EXPERIMENT, name=name) for name in questions()}


def advised(results: Results) -> list[Advice]:
    """The rows of the first screen that the results suffice for.

    Args:
        results: What a store holds.

    Returns:
        One row for each question that gives advice.
    """
    found = []
    for name, experiment in registered().items():
        if experiment.advice is not None:
            row = made_of(partial(experiment.advice, results), f"the advice of {name}", lambda reason: None)
            found += [row] if row is not None else []
    return found
