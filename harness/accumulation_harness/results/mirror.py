"""A trial as W&B has it: its run, and with `tracking.per_arm` one run for every arm that is judged. Names: `docs/tracking.md`.

W&B groups, filters and colours runs by flat values of their settings: these are beside the trial's own, and the verdicts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from accumulation_harness.config import TrackingConfig, TrialConfig, to_dict
from accumulation_harness.config.arm_name import ACCUMULATED, FULL, NULL, ULP, ArmName, arm_of
from accumulation_harness.results import tracking
from accumulation_harness.results.cells import SEVERITY

TRIAL, ARM = "trial", "arm"  # job types
FLAT = ("algebra_error", "rounding_ratio", "trajectory_ratio", "held_out_loss", "held_out_accuracy", "final_loss", "explained")


class Mirror(ExitStack):
    """A trial's W&B runs. As a context manager it closes them, as failed after an exception."""

    def __init__(self, config: TrackingConfig, trial: TrialConfig, *, name: str, folder: Path) -> None:
        """`name`: the trial's identity; `folder`: where the logs of the runs are written."""
        super().__init__()
        self._trial, self._name, self._per_arm = trial, name, config.per_arm
        self._open = partial(tracking.open_run, config, experiment=trial.experiment, folder=folder, tags=_tags(trial))
        self._run = self.enter_context(self._open(settings(trial, name), name=name, job_type=TRIAL))
        self._arms: dict[ArmName, tracking.Run] = {}

    def log(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The rows of one optimizer step, one per arm."""
        self._run.log(step, flat_metrics(rows))
        for row in rows if self._per_arm else ():
            arm = arm_of(row)
            if arm.name != NULL and str(arm) != ULP:
                self._of(arm).log(step, _metrics(row, arm))

    def finish(self, record: Mapping[str, Any]) -> None:
        """Give the runs what was found, and close them."""
        environment = {"environment": record.get("environment", {})}
        self._run.finish(summary(record), {**verdicts(record["arms"]), **environment})
        ends = {arm_of(arm): arm for arm in record["arms"]} | {ArmName(FULL): record.get("reference", {})}
        for arm, run in self._arms.items():
            found = _scalars(ends.get(arm, {}))
            said: dict[str, Any] = {name: found[name] for name in ("verdict", "cause") if name in found}
            run.finish(found, {**said, **environment})

    def _of(self, arm: ArmName) -> tracking.Run:
        if arm not in self._arms:
            own = settings(self._trial, self._name, arm)
            self._arms[arm] = self.enter_context(self._open(own, name=f"{self._name} {arm}", job_type=ARM))
        return self._arms[arm]


def settings(trial: TrialConfig, name: str, arm: ArmName | None = None) -> dict[str, Any]:
    """Flatten the settings of a trial for W&B.

    Args:
        trial: The settings.
        name: The trial's identity.
        arm: The arm, if the run is one arm's.

    Returns:
        The nested settings and, flat, the identity and the names in tables; of an arm, or of a trial of one N, also `N` and
        `b` = B / N, the mean number of samples in a micro-batch.
    """
    flat: dict[str, Any] = {"trial": name, "workload_name": trial.workload.label, "optimizer_name": trial.optimizer.label}
    numbers = trial.accumulation_steps if arm is None else (arm.accumulation_steps,)
    if len(numbers) == 1:
        flat |= {"N": numbers[0], "b": trial.effective_batch / numbers[0]}
    return {**to_dict(trial), **flat, **({"arm": arm.name} if arm else {})}


def own_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a W&B run that are settings of the trial.

    Args:
        config: The configuration of the run.

    Returns:
        Those that are fields of `TrialConfig`.
    """
    return {name: value for name, value in config.items() if name in TrialConfig.__dataclass_fields__}


def verdicts(arms: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """`verdict/ARM` and `cause/ARM` of every arm, and `verdict` and `cause` of the trial: the worst at any N.

    Args:
        arms: Rows of the judged arms.

    Returns:
        Name of a W&B summary -> text.
    """
    found = {f"{name}/{arm_of(arm)}": str(arm[name]) for arm in arms for name in ("verdict", "cause")}
    right = [arm for arm in arms if arm["arm"] == ACCUMULATED]
    if not right:
        return found
    worst = max((arm["verdict"] for arm in right), key=SEVERITY.index)
    causes = sorted({str(arm["cause"]) for arm in right if arm["verdict"] == worst})
    return {**found, "verdict": str(worst), "cause": ", ".join(causes)}


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """Choose what W&B keeps of a trial: scalars of every arm, where its training ended, measurements; no evidence.

    Args:
        record: The content of `trial.json`.

    Returns:
        Everything under `arms`, and what one sorts by also flat, as `algebra_error/accumulated-4`.
    """
    arms = {str(arm_of(arm)): _scalars(arm) for arm in record["arms"]}
    flat = {f"{name}/{arm}": found[name] for arm, found in arms.items() for name in FLAT if name in found}
    whole = {"arms": arms, "reference": record.get("reference", {}), "measurements": record.get("measurements", [])}
    return {**flat, **verdicts(record["arms"]), **whole}


def flat_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Name one step's rows as W&B has them: `metric/arm`, the arm in its text form.

    >>> flat_metrics([{"step": 3, "arm": "null", "accumulation_steps": 1, "replicate": 2, "loss": 0.5}])
    {'loss/null-1.2': 0.5}

    Args:
        rows: The rows of one step, one for each arm.

    Returns:
        Name -> value.
    """
    return {f"{name}/{arm}": value for row in rows for arm in (arm_of(row),) for name, value in _metrics(row, arm).items()}


def _metrics(row: Mapping[str, Any], arm: ArmName) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "step" and name not in arm.columns}


def _scalars(arm: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arm.items() if not isinstance(value, (dict, list))}


def _tags(trial: TrialConfig) -> list[str]:
    return [trial.workload.label, f"norm-{trial.norm}", trial.optimizer.label, str(trial.precision)]
