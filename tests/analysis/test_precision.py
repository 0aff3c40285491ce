import pandas as pd
import pytest

from accumulation_harness.experiments.precision.errors import FLOAT16_ERROR, NOTICEABLE, errors, growth, scaling
from accumulation_harness.judge.gates import ALGEBRA_GATE


def test_growth_is_over_n() -> None:
    rows = pd.DataFrame({"trial": "t", "accumulator": ["bfloat16"] * 3 + ["float32"] * 3, "accumulation_steps": [1, 2, 64] * 2,
                         "arm_error": [1e-9, 1e-3, 7e-3, 1e-7, 1e-7, 1.1e-7]})  # fmt: skip
    grown = growth(rows)
    assert grown["t", "bfloat16"] == pytest.approx(7) and grown["t", "float32"] == pytest.approx(1.1)


def test_errors_are_left_out_of_other_studies() -> None:
    assert errors(pd.DataFrame({"quantity": ["error", "ones"]})).index.tolist() == [0]
    assert errors(pd.DataFrame({"trial": ["a"]})).empty


@pytest.mark.parametrize(
    ("width", "full_error", "allowed"),
    [
        ("float64", 0.1, ALGEBRA_GATE),
        ("float16", 1e-4, FLOAT16_ERROR),
        ("float16", 0.01, NOTICEABLE * 0.01),
    ],
)
def test_how_large_an_error_may_be_under_a_loss_scale(width: str, full_error: float, allowed: float) -> None:
    right = {"trial": "t", "study": "loss_scaling", "width": width, "steps": 1, "steps_after": 1, "steps_when_hit": 0,
             "scale_factor": 0.5, "moved": False}  # fmt: skip
    errors_of = {"full": full_error, "below": 0.99 * allowed, "above": 1.01 * allowed}
    rows = [right | {"arm": arm, "error": error, "error_after": error} for arm, error in errors_of.items()]
    judged = scaling(pd.DataFrame(rows)).set_index("arm")["right"]
    assert judged["below"] and not judged["above"]
