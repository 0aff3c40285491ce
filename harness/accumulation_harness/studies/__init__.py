"""Studies: what is measured of a trial, one module each, named in `config.Study`.

`verdicts` judges arms, by its `run(config, on_step, shared)`. Every other study has a function `measurements(setting, on_step)`:
rows of plain values that the rules of `experiments/` decide by.
"""

from __future__ import annotations

import importlib
import time

from accumulation_harness import pace
from accumulation_harness.config import ConfigError, Study, TrialConfig
from accumulation_harness.measure.environment import describe
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.training import OnStep, Row
from accumulation_harness.recipes import precision
from accumulation_harness.recipes.determinism import choose_device, deterministic
from accumulation_harness.results.measurements import Measurements
from accumulation_harness.trial import check_splits, check_terms, standard_candidates
from accumulation_harness.validation import validate


def run(config: TrialConfig, on_step: OnStep, shared: Measurements | None = None) -> Row:
    """The record of a trial: `arms`, `measurements`, `environment`, `seconds` by phase, and what else its study has to say.

    `on_step(step, rows)` receives the rows of each optimizer step; `shared` has measurements that trials of one store share.
    Raises `ConfigError` for what cannot be run on this machine or with this data.
    """
    study = importlib.import_module(f"{__name__}.{config.study}")
    if config.study == Study.verdicts:
        judged: Row = study.run(config, on_step, shared)
        return judged
    started = time.perf_counter()
    validate(config)
    device = choose_device(config.device)
    precision.check_available(config.precision, device)
    with deterministic(config.precision, device) as named:
        setting = Setting(config, device)
        if setting.not_float64:
            raise ConfigError("study", config.study, f"verdicts: the task does not compute in float64 ({setting.not_float64})")
        check_splits(setting, standard_candidates(config))
        check_terms(setting, list(setting.windows()))
        pace.plan({str(config.study): config.steps})

        def told(step: int, rows: list[Row]) -> None:
            on_step(step, rows)
            pace.advance(1)

        rows = list(study.measurements(setting, told))
    seconds = {str(config.study): time.perf_counter() - started}
    return {"arms": [], "measurements": rows, "environment": describe(device, named), "seconds": seconds}
