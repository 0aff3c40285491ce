from __future__ import annotations

import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.experiments.adaptive_windows.answers import CLAIMS, balance

Row = dict[str, object]
EMPTY = pd.DataFrame({"experiment": []})


def decide(name: str, rows: list[Row]) -> str:
    (one,) = [claim for claim in CLAIMS if claim.id == name]
    return str(one.decide(load.Results(EMPTY, pd.DataFrame(rows), EMPTY, ())).verdict)


def adapted(name: str, distance: float, **changes: object) -> Row:
    usual: Row = {"study": "adaptive_windows", "arm": name, "distance": distance, "gradient_error": 1e-16, "distinct_n": 4}
    return usual | changes


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([adapted("constant_batch", 1e-15), adapted("varying_batch", 0.1)], "conditional"),
        ([adapted("constant_batch", 1e-15), adapted("varying_batch", 1e-9)], "confirmed"),
        ([adapted("constant_batch", 1e-3), adapted("varying_batch", 0.1)], "refuted"),
        ([adapted("constant_batch", 1e-15, gradient_error=1e-6), adapted("varying_batch", 0.1)], "refuted"),
        ([adapted("constant_batch", 1e-15, distinct_n=1), adapted("varying_batch", 0.1)], "needs the full grid"),
        ([], "needs the full grid"),
    ],
)
def test_rule_of_a_changing_n(rows: list[Row], verdict: str) -> None:
    assert decide("A18", rows) == verdict


def tensors(norm: str, *pairs: tuple[float, float]) -> list[Row]:
    return [{"study": "tensor_norms", "workload": "digits", "trial": norm, "norm": norm, "accumulation_steps": 4, "step": 0,
             "full_norm": full,
             "accumulated_norm": own} for full, own in pairs]  # fmt: skip


def towers(left: float, trials: int = 6) -> list[Row]:
    """Trials of two towers; accumulation multiplies the left one's norm, which is the larger one, by about `left`."""
    shared: Row = {"study": "tensor_norms", "workload": "pairs", "norm": "none", "accumulation_steps": 4, "step": 0}
    norms = [("left.0.weight", 2.0, 2.0 * left), ("right.0.weight", 1.0, 1.0)]
    return [
        shared | {"trial": f"pairs-{k}", "tensor": name, "full_norm": full, "accumulated_norm": own * (1 + 1e-3 * k * (own > 1))}
        for k in range(trials) for name, full, own in norms
    ]  # fmt: skip


BATCH = tensors("batch", (1.0, 1.2), (0.1, 0.1))


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([*tensors("none", (1.0, 1.0), (0.1, 0.1)), *BATCH, *towers(1.2)], "conditional"),
        ([*tensors("none", (1.0, 1.0), (0.1, 0.1)), *BATCH, *towers(0.9)], "refuted"),
        ([*tensors("none", (1.0, 1.0), (0.1, 0.1)), *BATCH, *towers(0.9975)], "refuted"),
        ([*tensors("none", (1.0, 1.5), (0.1, 0.1)), *BATCH, *towers(1.2)], "confirmed"),
        ([*tensors("none", (1.0, 0.9), (0.1, 0.1)), *BATCH, *towers(1.2)], "undecided"),  # another balance, and not a worse one
        ([*tensors("none", (1.0, 1.0), (0.1, 0.1)), *BATCH, *towers(1.2, trials=3)], "needs the full grid"),
        ([*tensors("none", (1.0, 1.0), (0.1, 0.1)), *towers(1.2)], "needs the full grid"),
        ([*tensors("none", (1.0, 1.0)), *tensors("batch", (1.0, 1.0)), *towers(1.2)], "needs the full grid"),  # blind
    ],
)
def test_rule_of_the_balance(rows: list[Row], verdict: str) -> None:
    assert decide("A17", rows) == verdict


def test_balance_by_hand_leaves_out_gradients_that_are_zero() -> None:
    (row,) = balance(pd.DataFrame(tensors("batch", (2.0, 3.0), (0.5, 0.5), (1e-17, 4e-17)))).to_dict("records")
    assert row["off"] == pytest.approx(0.5) and row["aggravation"] == pytest.approx(6 / 4 - 1)
