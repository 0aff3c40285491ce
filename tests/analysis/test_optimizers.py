"""The numbers of optimizer states and their memory, on rows made by hand."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from accumulation_harness.experiments.momentum import states as optimizers
from tests.experiments.optimizer_rows import memory_rows, results, state_rows


def test_half_lives() -> None:
    lives = optimizers.half_lives(pd.DataFrame(memory_rows())).set_index("arm")
    assert lives["half_life"].to_dict() == pytest.approx(
        {"accumulated": 421.04, "small_steps": 105.26, "small_steps_memory": 421.04}, 1e-4
    )
    assert lives["predicted"].to_dict() == pytest.approx(lives["half_life"].to_dict(), 1e-12)


@pytest.mark.parametrize(("stale", "spread"), [(1.0, 0.0), (0.99, 0.99**-3 - 1)])
def test_the_spread_is_within_a_window(stale: float, spread: float) -> None:
    rows = pd.DataFrame([row for row in memory_rows(stale=stale) if row["arm"] == "accumulated"])
    assert optimizers.spread_in_window(rows).to_list() == pytest.approx([spread] * 3, abs=1e-12)


def test_path_ratios_leave_out_what_couples_samples() -> None:
    rows = [*state_rows(), *state_rows("sgd"), *state_rows(norm="batch"), *state_rows(dropout=0.2)]
    (found,) = optimizers.path_ratios(pd.DataFrame(rows), 50).to_dict("records")
    assert found["trial"] == "momentum-none-0.0"
    assert (found["same"], found["rate"], found["memory"]) == (5.0, 0.4, 0.1) and found["ratio"] == pytest.approx(4)


def test_runs_of_enough_steps_and_orders_after_exactly_so_many() -> None:
    measured = results([*state_rows(), *state_rows(norm="batch")])
    assert set(optimizers.long_runs(measured, 200)["trial"]) == {"momentum-none-0.0"}
    assert optimizers.long_runs(measured, 201).empty
    reordered, small = optimizers.orders(measured, 50)
    assert len(reordered) == len(small) == 2 and set(reordered["after_steps"]) == {50}


def test_an_error_that_is_no_number_is_the_largest_and_never_the_smallest() -> None:
    rows = pd.DataFrame({"optimizer": ["adam", "sgd"], "state_error": [1e-15, math.nan], "parameter_error": [1e-16, 2e-15]})
    assert optimizers.largest_error(rows, "state_error") == 1e-15, "SGD has no state"
    assert optimizers.largest_error(rows, "state_error", "parameter_error") == 2e-15
    assert optimizers.largest_error(rows.assign(parameter_error=math.nan), "parameter_error") == math.inf
    now = pd.DataFrame(
        {"optimizer": ["adam", "sgd"], "state_error_now": [math.nan, math.nan], "parameter_error_now": [1e-9, 0.5]}
    )
    assert optimizers.smallest_difference(now) == 0.5, "weights stand for SGD's state, and for no other's"


def test_the_best_rate_has_the_lowest_mean_and_no_seed_without_a_number() -> None:
    losses = {(0.1, 0): 0.5, (0.1, 1): 0.4, (0.2, 0): 0.3, (0.2, 1): 0.7, (0.4, 0): 0.1, (0.4, 1): math.nan}
    rows = pd.DataFrame([{"b": 8, "lr": lr, "seed": seed, "held_out_loss": loss} for (lr, seed), loss in losses.items()])
    chosen = optimizers.at_best_rate(rows, ["b"])
    assert chosen["lr"].to_list() == [0.1, 0.1] and chosen["seed"].to_list() == [0, 1]
