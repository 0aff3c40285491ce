"""What is measured of a trial, by its study: `verdicts` judges arms, every other is a module of a question (`questions.py`)."""

from __future__ import annotations

import dataclasses
import importlib
import time

from accumulation_harness.config import ConfigError, Precision, TrialConfig
from accumulation_harness.config.questions import VERDICTS, module_of
from accumulation_harness.config.validation import validate
from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.judge.gates import ALGEBRA_GATE
from accumulation_harness.judge.verdict import Outcome
from accumulation_harness.measure.banks import bank_error
from accumulation_harness.measure.environment import describe
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.training import OnStep, Row
from accumulation_harness.measure.trial import (
    Candidate,
    check_splits,
    check_terms,
    full_batch,
    run_trial,
    standard_candidates,
    with_faults,
)
from accumulation_harness.recipes import catalogue, contrastive, precision
from accumulation_harness.recipes.determinism import choose_device, deterministic
from accumulation_harness.results.measurements import Measurements

BANK_WINDOWS = 4  # in which a bank's gradient is held against its oracle


def run(config: TrialConfig, on_step: OnStep, shared: Measurements | None = None) -> Row:
    """Run a trial, whatever its study measures.

    Args:
        config: The trial.
        on_step: Called as `on_step(step, rows)` after each optimizer step.
        shared: Measurements that trials of one store share.

    Returns:
        The record: `arms`, `measurements`, `environment`, `seconds` by phase, and what else its study adds.

    Raises:
        ConfigError: The trial cannot be run on this machine or with this data.
    """
    if config.study == VERDICTS:
        return _judged(config, on_step, shared)
    started = time.perf_counter()
    validate(config)
    study = importlib.import_module(module_of(config.study))
    device = choose_device(config.device)
    precision.check_available(config.precision, device)
    with deterministic(config.precision, device) as named:
        setting = Setting(config, device)
        if setting.not_float64:
            raise ConfigError("study", config.study, f"verdicts: the task does not compute in float64 ({setting.not_float64})")
        check_splits(setting, standard_candidates(config))
        check_terms(setting, list(setting.windows()))

        rows = list(study.measurements(setting, on_step))
    seconds = {config.study: time.perf_counter() - started}
    return {"arms": [], "measurements": rows, "environment": describe(device, named), "seconds": seconds}


def _judged(config: TrialConfig, on_step: OnStep, shared: Measurements | None = None) -> Row:
    """L0 to L3 of every arm: see `accumulation_harness.measure.trial.run_trial`."""
    judged = candidates(config)
    result = run_trial(config, on_step, judged, shared)
    for candidate, arm in zip(judged, result.arms, strict=True):
        is_nameless = arm["verdict"] == Outcome.different and arm["cause"] == Cause.unexplained
        if is_nameless and contrastive.bank_named(candidate.arm):
            arm |= by_design(config, candidate, arm["reasons"])
    return {**result.summary, "arms": result.arms, "faults": catalogue.expected(config)}


def candidates(config: TrialConfig) -> list[Candidate]:
    """The arms that are judged: right ones, the control, and those with the configured faults and methods.

    Args:
        config: The trial.

    Returns:
        The arms.
    """
    wrong = {name: catalogue.named(name, config.precision) for name in catalogue.names(config)}
    return with_faults(config, wrong | {name: contrastive.named(name) for name in config.methods})


def by_design(config: TrialConfig, candidate: Candidate, reasons: str) -> Row:
    """Cause and reasons of an arm with a bank: explained where an oracle reproduces its gradients, nameless where that fails.

    Args:
        config: The trial.
        candidate: An arm with a bank.
        reasons: Why it differs.

    Returns:
        Columns `cause`, `explained`, `reasons`.
    """
    device, exact = choose_device(config.device), dataclasses.replace(config, precision=Precision.float64)
    with deterministic(exact.precision, device):
        error = bank_error(Setting(exact, device), candidate.arm, candidate.recipe, full_batch(exact), BANK_WINDOWS)
    if error > ALGEBRA_GATE:
        wrong = f"with a bank, and {error:.0e} from the loss beside past representations that it should have"
        return {"reasons": f"{wrong}; {reasons}"}
    fits = error <= ALGEBRA_GATE  # not where there is no oracle
    shown = f"reproduced to {error:.0e} in {BANK_WINDOWS} windows" if fits else "no oracle reproduces this kind"
    sentence = f"{MEANINGS[Cause.memory_bank].sentence} ({shown})"
    return {"cause": str(Cause.memory_bank), "explained": fits, "reasons": f"{sentence}; {reasons}"}
