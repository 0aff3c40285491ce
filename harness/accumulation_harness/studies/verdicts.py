"""Every arm judged: the N of the configuration, the permuted full batch, and the faults and methods that are asked for."""

from __future__ import annotations

import dataclasses

from accumulation_harness.config import Precision, TrialConfig
from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.judge.gates import ALGEBRA_GATE
from accumulation_harness.judge.verdict import Outcome
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.training import OnStep, Row
from accumulation_harness.recipes import catalogue, contrastive
from accumulation_harness.recipes.determinism import choose_device, deterministic
from accumulation_harness.results.measurements import Measurements
from accumulation_harness.studies.negatives import bank_error
from accumulation_harness.trial import Candidate, run_trial, with_faults

BANK_WINDOWS = 4  # in which a bank's gradient is held against its oracle


def run(config: TrialConfig, on_step: OnStep, shared: Measurements | None = None) -> Row:
    """L0 to L3 of every arm: see `accumulation_harness.trial.run_trial`."""
    wrong = {name: catalogue.named(name, config.precision) for name in catalogue.names(config)}
    candidates = with_faults(config, wrong | {name: contrastive.named(name) for name in config.methods})
    result = run_trial(config, on_step, candidates, shared)
    for candidate, arm in zip(candidates, result.arms, strict=True):
        is_nameless = arm["verdict"] == Outcome.different and arm["cause"] == Cause.unexplained
        if is_nameless and contrastive.bank_named(candidate.arm):
            arm |= by_design(config, candidate, arm["reasons"])
    return {**result.summary, "arms": result.arms, "faults": catalogue.expected(config)}


def by_design(config: TrialConfig, candidate: Candidate, reasons: list[str]) -> Row:
    """Cause and reasons of an arm with a bank: explained where an oracle reproduces its gradients, nameless where that fails."""
    device, exact = choose_device(config.device), dataclasses.replace(config, precision=Precision.float64)
    with deterministic(exact.precision, device):
        error = bank_error(Setting(exact, device), candidate, BANK_WINDOWS)
    if error > ALGEBRA_GATE:
        wrong = f"with a bank, and {error:.0e} from the loss beside past representations that it should have"
        return {"reasons": [wrong, *reasons]}
    fits = error <= ALGEBRA_GATE  # not where there is no oracle
    shown = f"reproduced to {error:.0e} in {BANK_WINDOWS} windows" if fits else "no oracle reproduces this kind"
    sentence = f"{MEANINGS[Cause.memory_bank].sentence} ({shown})"
    return {"cause": str(Cause.memory_bank), "explained": fits, "reasons": [sentence, *reasons]}
