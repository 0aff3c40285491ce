"""Learning rates are chosen on seeds of their own, and what judges is run at the chosen ones alone.

In a study that has a loss to choose by, trials with seeds from `TUNING_SEEDS` on choose and the others judge. Nobody looks at an
arm that judges at another rate than its best: it need not be trained, and most are of that kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from accumulation_harness.config import TUNING_SEEDS
from accumulation_harness.config.arm_name import ArmName
from accumulation_harness.config.identity import identity
from accumulation_harness.config.questions import studies
from accumulation_harness.results.record import read_trial
from accumulation_harness.sweep.child import Cell


class Group(NamedTuple):
    """Cells of a tuned study that differ in seed and learning rate alone."""

    tuning: list[Cell]
    judging: list[Cell]

    @property
    def waits(self) -> bool:
        """Whether there is something to choose, and to choose by."""
        return bool(self.judging) and len(set(map(_rate, self.tuning))) > 1

    def worth_judging(self) -> list[Cell]:
        """Choose the judging cells at the rate at which an arm has its lowest mean loss over the tuning seeds, with these arms.

        Returns:
            These cells; all of them where a tuning trial has not finished, so that what it would have chosen is not known.
        """
        if not all(cell.is_finished() for cell in self.tuning):
            return self.judging
        arms: dict[float, list[ArmName]] = defaultdict(list)
        for arm, lr in _best_rates(self.tuning).items():
            arms[lr].append(arm)
        return [one for cell in self.judging for one in _arm_by_arm(cell, arms[_rate(cell)])]


def split(cells: Sequence[Cell]) -> tuple[list[Cell], list[Group]]:
    """Split a sweep into what can run now and what waits for a learning rate to be chosen.

    Args:
        cells: The trials.

    Returns:
        The trials to run first, and the groups whose judging trials wait.
    """
    groups = [group for group in _groups(cells) if group.waits]
    waiting = {cell.folder for group in groups for cell in group.judging}
    return [cell for cell in cells if cell.folder not in waiting], groups


def _arm_by_arm(cell: Cell, arms: Sequence[ArmName]) -> list[Cell]:
    """A cell for each arm; one of all where the study has no arms to train alone, or where that is stored already."""
    if not arms or not studies()[cell.config.study].arm_by_arm or cell.is_finished():
        return [cell] if arms else []
    configs = [
        dataclasses.replace(cell.config, trained_arm=str(arm), methods=tuple(n for n in cell.config.methods if n == arm.name))
        for arm in arms  # methods beside it make no other trial of it, which the grids of several may share
    ]
    return [Cell(config, cell.store, identity(config.trial)) for config in configs]


def _best_rates(tuning: Sequence[Cell]) -> dict[ArmName, float]:
    """Choose the learning rate with the lowest mean loss for each arm; a loss that is no number is the worst.

    Args:
        tuning: Finished trials of the tuning seeds.

    Returns:
        Arm -> learning rate.
    """
    losses: dict[ArmName, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in tuning:
        loss_of = studies()[cell.config.study].loss
        assert loss_of is not None
        for row in read_trial(cell.folder).record["measurements"]:
            if (found := loss_of(row)) is not None:
                arm, loss = found
                losses[arm][_rate(cell)].append(math.inf if loss is None or math.isnan(loss) else loss)
    return {arm: min(rates, key=lambda lr: math.fsum(rates[lr]) / len(rates[lr])) for arm, rates in losses.items()}


def _groups(cells: Iterable[Cell]) -> list[Group]:
    groups: dict[str, Group] = defaultdict(lambda: Group([], []))
    for cell in cells:
        if studies()[cell.config.study].loss is not None:
            trial = cell.config.trial
            alike = dataclasses.replace(trial, seed=0, optimizer=dataclasses.replace(trial.optimizer, lr=0.0))
            group = groups[f"{cell.store.root} {identity(alike)}"]
            (group.tuning if cell.config.seed >= TUNING_SEEDS else group.judging).append(cell)
    return list(groups.values())


def _rate(cell: Cell) -> float:
    return cell.config.optimizer.lr
