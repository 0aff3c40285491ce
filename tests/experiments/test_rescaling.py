"""Planted effects of a rescaling are found, their reverses too, and nothing where there is none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.experiments.rescaling.answers import CURVE, FINAL, MARGIN, Effect, advice, effects
from accumulation_harness.recipes.rescaling import Rescaling


def results(effect: float, *, what: str = "rate", seeds: int = 8, spread: float = 0.004) -> load.Results:
    """Runs in which the rescaling `what` moves both measures by `effect`, and the others by nothing."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        task = 0.3 * rng.standard_normal()  # a seed's own, which pairing removes
        for arm in ("small", "small_reordered", *Rescaling):
            own, averaged = (effect * (arm == what and what != name) + spread * rng.standard_normal() for name in ("ema", "rate"))
            rows.append({
                "trial": str(seed), "study": "rescaling", "workload": "digits", "norm": "none", "effective_batch": 128,
                "accumulation_steps": 4, "steps": 96, "lr": 0.01, "seed": seed, "arm": str(arm),
                "validation_loss": math.exp(task + own), "curve_distance": 1 + task + own,
                "probe_loss": 1.0, "ema_probe_loss": 1.0,
                "ema_validation_loss": math.exp(task + averaged), "ema_curve_distance": 1 + task + averaged,
            })  # fmt: skip
    empty = pd.DataFrame(columns=["experiment", "trial"])
    return load.Results(empty, pd.DataFrame(rows), empty, ())


def verdicts(given: load.Results, measure: str) -> dict[str, str]:
    return {str(one.what): one.verdict for one in effects(given) if one.measure == measure}


@pytest.mark.parametrize("measure", [CURVE, FINAL])
@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (results(-0.1), "helps"),
        (results(0.1), "hurts"),
        (results(0.0), "no difference (TOST)"),
        (results(-0.1, seeds=5), "undecided"),
        (results(0.0, spread=0.3), "undecided"),
    ],
    ids=["planted", "the reverse", "nothing", "five seeds", "noise"],
)
def test_what_is_decided(given: load.Results, verdict: str, measure: str) -> None:
    assert verdicts(given, measure)["rate"] == verdict
    if verdict in ("helps", "hurts"):
        assert verdicts(given, measure)["beta2"] == "no difference (TOST)"


def test_the_average_is_judged_by_its_own_weights() -> None:
    assert verdicts(results(-0.1, what="ema"), FINAL)["ema"] == "helps"
    assert verdicts(results(-0.1), FINAL)["ema"] == "no difference (TOST)"


def test_a_diverged_seed_decides_nothing() -> None:
    broken = Effect(("a", "b", 1, 1, 1, 1.0), Rescaling.rate, FINAL, (-0.1,) * 7 + (math.nan,), 0.01)
    assert broken.verdict == "undecided" and broken.p == 1


def test_a_difference_within_the_margin_makes_no_difference_however_significant() -> None:
    small = tuple(MARGIN / 2 + 1e-4 * i for i in range(8))
    assert Effect(("a", "b", 1, 1, 1, 1.0), Rescaling.rate, FINAL, small, 0.001).verdict == "no difference (TOST)"


def test_advice_is_what_all_settings_decide_alike() -> None:
    def one(setting: str, difference: float) -> Effect:
        return Effect((setting,), Rescaling.rate, CURVE, tuple(difference + 0.001 * i for i in range(8)), 0.01)

    assert "rescale: learning rate" in advice([one("a", -0.2), one("b", -0.1)])
    assert "leave: learning rate" in advice([one("a", 0.2), one("b", 0.1)])
    assert "learning rate times" not in advice([one("a", -0.2), one("b", 0.1)])
    assert "none follows" in advice([one("a", -0.2)])
