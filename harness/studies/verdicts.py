"""Every arm judged: the N of the configuration, the permuted full batch, and the faults and methods that are asked for."""

from __future__ import annotations

from harness.config import TrialConfig
from harness.judge.verdict import Outcome
from harness.measure.training import OnStep, Row
from harness.recipes import catalogue, contrastive
from harness.results.measurements import Measurements
from harness.trial import run_trial, with_faults

BY_DESIGN = "by design: negatives come from a bank of past representations, another computation than any batch's"


def run(config: TrialConfig, on_step: OnStep, shared: Measurements | None = None) -> Row:
    """L0 to L3 of every arm: see `harness.trial.run_trial`."""
    wrong = {name: catalogue.named(name, config.precision) for name in catalogue.names(config)}
    candidates = with_faults(config, wrong | {name: contrastive.named(name) for name in config.methods})
    result = run_trial(config, on_step, candidates, shared)
    for arm in result.arms:
        if arm["arm"].partition("@")[0] in contrastive.BANKS and arm["verdict"] == Outcome.different:
            arm["reasons"] = [BY_DESIGN, *arm["reasons"]]
    return {**result.summary, "arms": result.arms, "faults": catalogue.expected(config)}
