"""The questions of this project: a folder each in `experiments/`, found by itself.

A folder's `__init__.py` has the question as its docstring and a `QUESTION`; it is read before any trial runs and imports neither
torch nor pandas. `grid.yaml` is its sweep, `answers.py` has its rules and sections, `claims.csv` the claims that they decide, and
each study is a module of its name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from accumulation_harness.config import COUPLED, ConfigError, Norm, Split, TrialConfig
from accumulation_harness.config.arm_name import ArmName

FOLDER = "accumulation_harness.experiments"
VERDICTS = "verdicts"  # the study that judges arms, and belongs to no question

# Of a row of measurements: which arm chooses its learning rate by it, if any, and the loss, of which the lowest is the best.
Loss = Callable[[Mapping[str, Any]], tuple[ArmName, float] | None]


@dataclass(frozen=True)
class Need:
    """What a study needs of a setting: without it there is nothing that it could measure."""

    name: str  # of the field
    is_met: Callable[[TrialConfig], bool]
    expected: str

    def check(self, config: TrialConfig) -> None:
        """Raise `ConfigError` where it is not met."""
        if not self.is_met(config):
            value = value_of(config, self.name)
            shown = list(value) if isinstance(value, tuple) else value
            raise ConfigError(self.name, shown, f"{self.expected}, with study={config.study}")


def value_of(config: Any, name: str) -> Any:
    """The value of the field of that dotted name; None where there is no such field.

    Args:
        config: A tree of dataclasses.
        name: Dotted name, as `optimizer.lr`.

    Returns:
        The value, or None.
    """
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


EQUAL_SPLIT = Need("split", lambda c: c.split == Split.even, "even: it speaks of micro-batches of one size b")
OWN_GRADIENTS = (
    Need("norm", lambda c: c.norm != Norm.batch, "none, group or layer: under BatchNorm a sample has no gradient of its own"),
    Need("workload.data", lambda c: c.workload.data not in COUPLED, "a loss in which a sample has a gradient of its own"),
)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A measurement: its module has `measurements(setting, on_step)`, which gives rows of plain values."""

    needs: tuple[Need, ...] = ()
    loss: Loss | None = None  # by which learning rates are chosen, on seeds of their own
    arm_by_arm: bool = False  # whether its arms can be trained alone


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a folder says of itself."""

    place: int | None = None  # on the page; None: measurements that several questions share, and no question
    core: bool = False  # whether every report measures it
    studies: Mapping[str, Study] = field(default_factory=dict)


@cache
def folders() -> Mapping[str, Question]:
    """List every folder's QUESTION by its name, in the order of the page.

    Returns:
        Name -> question.
    """
    path = importlib.import_module(FOLDER).__path__
    found = {one.name: importlib.import_module(f"{FOLDER}.{one.name}").QUESTION for one in pkgutil.iter_modules(path)}
    return dict(sorted(found.items(), key=lambda item: (item[1].place is None, item[1].place, item[0])))


def questions() -> dict[str, Question]:
    """List the folders of `experiments/` that are questions of the report.

    Returns:
        Name -> question, those that only have a study left out.
    """
    return {name: one for name, one in folders().items() if one.place is not None}


@cache
def studies() -> Mapping[str, Study]:
    """Every study by its name.

    Returns:
        Name -> study, `verdicts` first.
    """
    return {VERDICTS: Study()} | {name: one for folder in folders().values() for name, one in folder.studies.items()}


def module_of(study: str) -> str:
    """Find the module that measures a study. It is imported only when a trial runs.

    Args:
        study: A name of `studies()`.

    Returns:
        A dotted name.
    """
    folder = next(folder for folder, own in folders().items() if study in own.studies)
    return f"{FOLDER}.{folder}.{study}"


def grids() -> dict[str, Path]:
    """The `grid.yaml` of each question that has one.

    Returns:
        Name -> path.
    """
    paths = {name: Path(str(importlib.import_module(f"{FOLDER}.{name}").__file__)).with_name("grid.yaml") for name in questions()}
    return {name: path for name, path in paths.items() if path.exists()}
