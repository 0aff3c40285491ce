"""Verdicts by cell and the caveats they earn, from rows written by hand."""

import math

from accumulation_harness.results.cells import by_cell, caveats, control_failed
from accumulation_harness.results.judged_arm import VerdictRow

ROW = {
    "experiment": "single", "trial": "t", "workload": "digits", "norm": "none", "optimizer": "sgd", "precision": "float32",
    "seed": 0, "effective_batch": 64, "accumulation_steps": 2, "micro_batch": 32, "arm": "accumulated", "algebra_error": 1e-16,
    "rounding_ratio": 1.0, "scale": 1.0, "cosine": 1.0, "residual": 0.0, "counters_ok": True, "trajectory_ratio": 1.0,
    "verdict": "equivalent", "cause": "", "explained": False,
}  # fmt: skip


def row(**changes):
    return VerdictRow(**{**ROW, **changes})


def wrong(**changes):
    return row(
        **{"norm": "batch", "verdict": "different", "cause": "batch_statistics", "explained": True, "algebra_error": 0.5}
        | changes
    )


def test_a_cell_tells_the_worst_of_its_trials():
    [cell] = by_cell([row(seed=0, algebra_error=1e-16), row(seed=1, verdict="degraded", rounding_ratio=3.0), row(seed=2)])
    assert (cell.verdict, cell.agreeing, cell.trials, cell.rounding_ratio) == ("degraded", 1, 3, 1.0)
    [cell] = by_cell([row(), row(seed=1, algebra_error=2e-16), row(seed=2, algebra_error=math.nan)])
    assert (cell.verdict, cell.agreeing, cell.algebra_error) == ("equivalent", 3, 2e-16)


def test_there_is_a_caveat_for_what_is_wrong_and_none_for_what_is_right():
    right = by_cell([row(), row(arm="permuted", accumulation_steps=1), row(arm="mean_of_means", verdict="different")])
    assert caveats(right) == []
    [caveat] = caveats([*right, *by_cell([wrong(), wrong(optimizer="adam", algebra_error=0.1, precision="float16")])])
    assert str(caveat).startswith("norm=batch, optimizer=sgd|adam, precision=float32|float16: ")
    [beside] = caveats([*right, *by_cell([wrong(workload="another")])])
    assert str(beside).startswith("workload=another, norm=batch, ")
    assert "0.1 to 0.5" in caveat.finding and "batch_statistics" in caveat.finding and "not a fault of the loop" in caveat.finding
    assert "GroupNorm" in caveat.advice


def test_a_control_that_differs_is_told_unless_layers_are_random():
    control = {"arm": "permuted", "accumulation_steps": 1, "verdict": "different"}
    assert control_failed(by_cell([row(**control, cause="unexplained")]))
    assert not control_failed(by_cell([row(**control, cause="stochastic_layers"), row()]))
