"""One file per question: `experiments/<name>.py` holds an `EXPERIMENT`, `conf/experiment/<name>.yaml` its grid."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from analysis.content import Material, Section


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
    margin: float  # of the equivalence test of L4, nats per loss term
    margin_reason: str
    claims: tuple[str, ...] = ()  # ids of the claims ledger that this experiment decides
    answer: Callable[[pd.DataFrame], Answer]  # from the arms
    sections: tuple[Callable[[Material], Section | None], ...]  # what the page shows, in order


def registered() -> dict[str, Experiment]:
    """Every experiment of this folder by its name; folders hold what experiments use."""
    names = [found.name for found in pkgutil.iter_modules(__path__) if not found.ispkg]
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    experiments: list[Experiment] = [module.EXPERIMENT for module in modules]
    return {experiment.name: experiment for experiment in experiments}
