"""The numbers of batch sizes and learning rates, on rows made by hand."""

from __future__ import annotations

import pytest

from accumulation_harness.experiments.learning_rate import rates as learning_rates
from tests.experiments.optimizer_rows import results, trained


def test_scaling_from_the_smallest_batch() -> None:
    table = learning_rates.scaled(results(trained())).set_index(["optimizer", "batch", "rule"])["excess"]
    own = table["adam"].to_dict()
    assert own == pytest.approx(
        {(32, "no"): 0.08, (32, "square root"): 0.0, (32, "linear"): 0.08, (128, "no"): 0.16, (128, "square root"): 0.0,
         (128, "linear"): 0.16}, abs=1e-9,
    )  # fmt: skip
    rows = learning_rates.trained(results(trained()))
    assert learning_rates.best_rate_ratios(rows) == pytest.approx({"sgd": 4, "adam": 4})
    assert learning_rates.batch_ratio(rows) == 16


def test_no_seed_chooses_its_own_rate() -> None:
    """A seed that is lucky at one rate does not make that rate its own."""
    rows = learning_rates.trained(results(trained()))
    lucky = (rows["optimizer"] == "sgd") & (rows["batch"] == 8) & (rows["seed"] == 0) & (rows["lr"] == 0.4)
    rows.loc[lucky, "tuning_loss"] = -5.0
    chosen = learning_rates.others_choose(rows, "tuning_loss")
    own = chosen[(chosen["optimizer"] == "sgd") & (chosen["batch"] == 8)].set_index("seed")["lr"]
    assert own[0] == 0.1 and set(own.drop(0)) == {0.4} and len(chosen) == 30
