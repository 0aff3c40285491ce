"""C7 by trainings that change their batch: planted effects of either side, none, and too few seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.experiments.batch_order.answers import early_large_late_small, judged


def rows(
    effect: float, *, seeds: int = 8, noise: float = 0.005, optimizer: str = "adam", best: float = 0.02
) -> list[dict[str, Any]]:
    """Large-then-small ends `effect` nats below small-then-large; validation is best at the rate `best` of three."""
    rng = np.random.default_rng(0)
    return [
        {"trial": f"{optimizer}-{seed}-{lr}", "study": "batch_order", "workload": "digits", "norm": "none",
         "optimizer": optimizer, "steps": 120,
         "effective_batch": 128, "accumulation_steps": 16, "arm": arm, "lr": lr, "seed": seed, "micro_batch": 8, "samples": 1000,
         "switch_loss": 1.0, "validation_loss": abs(np.log(lr / best)),
         "test_loss": 0.5 - (effect if arm == "large_then_small" else 0) + abs(np.log(lr / best)) + noise * rng.standard_normal()}
        for seed in (*range(seeds), 100, 101) for lr in (0.01, 0.02, 0.04)
        for arm in ("large", "small", "large_then_small", "small_then_large")
    ]  # fmt: skip


def twice(effect: float, **more: Any) -> list[dict[str, Any]]:
    """The same in two settings."""
    return [*rows(effect, **more), *rows(effect, optimizer="sgd", **more)]


def decided(measurements: list[dict[str, Any]]) -> Any:
    empty = pd.DataFrame(columns=["experiment", "trial"])
    return early_large_late_small(load.Results(empty, pd.DataFrame(measurements), empty, ()))


@pytest.mark.parametrize(
    ("measurements", "verdict"),
    [
        (twice(0.1), Ruling.confirmed),
        (twice(-0.1), Ruling.refuted),
        (twice(0.0), Ruling.refuted),
        (twice(0.0, noise=0.2), Ruling.undecided),
        ([*rows(0.1), *rows(-0.1, optimizer="sgd")], Ruling.conditional),
        ([*twice(0.1), *({**row, "steps": 60} for row in twice(-0.1))], Ruling.confirmed),
        (rows(-0.1), Ruling.needs_full_grid),
        (twice(0.1, seeds=4), Ruling.needs_full_grid),
        (twice(0.1, best=0.04), Ruling.needs_full_grid),
    ],
    ids=["planted", "the reverse", "nothing", "noise", "by optimizer", "a quick grid beside", "one setting", "four seeds",
         "a rate at an end"],
)  # fmt: skip
def test_c7(measurements: list[dict[str, Any]], verdict: Ruling) -> None:
    found = decided(measurements)
    assert found.verdict == verdict
    assert ("adam" in found.condition) is (verdict == Ruling.conditional)


def test_rates_are_chosen_on_other_seeds() -> None:
    frame = pd.DataFrame(rows(0.1))
    frame.loc[frame["seed"] < 100, "validation_loss"] = -frame["lr"]  # what the judging seeds would choose
    empty = pd.DataFrame(columns=["experiment", "trial"])
    assert set(judged(load.Results(empty, frame, empty, ()))["lr"]) == {0.02}
