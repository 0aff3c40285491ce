"""One file per question: `experiments/<name>.py` holds an `EXPERIMENT`, `conf/experiment/<name>.yaml` its grid."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from analysis.content import Material, Section
    from analysis.load import Results


class Ruling(StrEnum):
    """What becomes of a claim."""

    confirmed = "confirmed"
    refuted = "refuted"
    conditional = "conditional"  # true under a condition that the finding names
    not_testable = "not testable"
    needs_full_grid = "needs the full grid"  # the results are there, and too few
    no_data = "no data"
    pending = "pending"  # no experiment of this project decides it yet


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the results say of a claim: a row of the ledger."""

    verdict: Ruling
    measured: float
    threshold: str  # what `measured` was held against
    n: int  # arms, trials or draws that decided
    explanation: str  # one sentence


def undecided(reason: str, n: int) -> Finding:
    """The results are there and do not suffice: `reason` says what is missing."""
    return Finding(verdict=Ruling.needs_full_grid, measured=math.nan, threshold="", n=n, explanation=reason)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the literature and the rule that decides it; its text and sources are in `claims.csv`."""

    id: str
    expects: Ruling  # what the theory leads one to expect
    rule: str  # in words, fixed before the run
    decide: Callable[[Results], Finding]  # from the experiment's own results, which are never empty


@dataclass(frozen=True)
class Answer:
    """What the numbers say of the question."""

    sentences: tuple[str, ...]
    holds: bool | None  # whether the prediction held; None when there is nothing to decide it by


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question, fixed before the trials run, and how the report answers it."""

    name: str
    title: str
    question: str
    prediction: str
    rule: str  # the decision rule, in words
    margin: float = 0.02  # of the equivalence test of L4, nats per loss term
    margin_reason: str = "0.02 nats of loss is a change of perplexity of 2%"
    claims: tuple[Claim, ...] = ()  # of the ledger, that this experiment decides
    answer: Callable[[pd.DataFrame], Answer] | None = None  # from the arms; None: from the findings on its claims
    sections: tuple[Callable[[Material], Section | None], ...]  # what the page shows, in order


def registered() -> dict[str, Experiment]:
    """Every experiment of this folder by its name; folders hold what experiments use."""
    names = [found.name for found in pkgutil.iter_modules(__path__) if not found.ispkg]
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    experiments: list[Experiment] = [module.EXPERIMENT for module in modules]
    return {experiment.name: experiment for experiment in experiments}
