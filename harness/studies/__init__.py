"""Studies: what is measured of a trial. One module each, named in `config.Study`, with a function `run(config, on_step)`.

`verdicts` judges arms; every other study gives `measurements`: rows of plain values that the rules of `experiments/` decide by.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from harness.config import TrialConfig, validate
from harness.measure.environment import describe
from harness.measure.lock_step import Setting
from harness.recipes import precision
from harness.recipes.determinism import choose_device, deterministic

Row = dict[str, Any]
OnStep = Callable[[int, list[Row]], None]


def run(config: TrialConfig, on_step: OnStep) -> Row:
    """The record of a trial: `arms`, `measurements`, `environment`, `seconds` by phase, and what else its study has to say.

    `on_step(step, rows)` receives the rows of each optimizer step. Raises `ConfigError` for what cannot be run on this machine or
    with this data.
    """
    record: Row = importlib.import_module(f"{__name__}.{config.study}").run(config, on_step)
    return record


def measured(config: TrialConfig, measure: Callable[[Setting], list[Row]]) -> Row:
    """The record of a study that gives measurements: `measure` runs on the trial's setting, with deterministic algorithms."""
    started = time.perf_counter()
    validate(config)
    device = choose_device(config.device)
    precision.check_available(config.precision, device)
    with deterministic(config.precision):
        rows = measure(Setting(config, device))
    seconds = {str(config.study): time.perf_counter() - started}
    return {"arms": [], "measurements": rows, "environment": describe(device), "seconds": seconds}
