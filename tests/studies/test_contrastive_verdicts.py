"""The methods for in-batch negatives, judged as any loop is."""

from __future__ import annotations

import pytest

from harness.config import Precision, TrialConfig
from harness.studies import verdicts
from tests.small_corpus import config, corpus

__all__ = ["corpus"]
METHODS = ("grad_cache", "temperature_repeated", "dual_bank@12")
SHORT = {"steps": 3, "algebra_steps": 5, "methods": METHODS}  # five windows: the fifth begins the second epoch


def judged(trial: TrialConfig) -> dict[str, dict[str, object]]:
    return {arm["arm"]: arm for arm in verdicts.run(trial, lambda step, rows: None)["arms"]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_norm": 0.5, "penalty": 0.1, "effective_batch": 10, "accumulation_steps": (5,)},
        {"precision": Precision.float16, "loss_scale": 64.0},
    ],
    ids=["plain", "clipped, penalised, short windows", "float16"],
)
@pytest.mark.slow
def test_grad_cache_is_equivalent_and_the_others_are_not(changes: dict[str, object], corpus: str) -> None:
    arms = judged(config(corpus, **SHORT, **changes))
    assert arms["grad_cache"]["verdict"] == arms["permuted"]["verdict"] == "equivalent"
    plain, repeated, bank = (arms[name] for name in ("accumulated", *METHODS[1:]))
    assert (plain["verdict"], plain["cause"], plain["explained"]) == ("different", "non_separable_loss", True)
    assert repeated["verdict"] == bank["verdict"] == "different"
    # Where clipping is active, a temperature that is too large shrinks the towers too, and is no more alone.
    assert ("in log_scale of the" in str(repeated["reasons"])) == ("clip_norm" not in changes)
    assert "by design: " in str(bank["reasons"])
