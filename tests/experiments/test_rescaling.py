"""What the paired differences of a rescaling are called."""

import math

import pytest

from accumulation_harness.experiments.rescaling.answers import CURVE, FINAL, MARGIN, Effect, advice
from accumulation_harness.recipes.rescaling import Rescaling


@pytest.mark.parametrize(
    ("differences", "p", "verdict"),
    [
        ([-0.1 + 0.001 * k for k in range(8)], 0.01, "helps"),
        ([0.1 + 0.001 * k for k in range(8)], 0.01, "hurts"),
        ([0.1 + 0.001 * k for k in range(8)], 0.06, "undecided"),
        ([MARGIN / 2 + 1e-4 * k for k in range(8)], 0.001, "no difference (TOST)"),  # however significant
        ([-0.1 + 0.001 * k for k in range(7)], 0.01, "undecided"),  # too few seeds
        ([-0.1] * 7 + [math.nan], 0.01, "undecided"),  # one diverged
    ],
)
def test_what_is_decided(differences, p, verdict):
    assert Effect(("a", "b", 1, 1, 1, 1.0), Rescaling.rate, FINAL, tuple(differences), p).verdict == verdict


def test_advice_is_what_all_settings_decide_alike():
    def one(setting, difference):
        return Effect((setting,), Rescaling.rate, CURVE, tuple(difference + 0.001 * i for i in range(8)), 0.01)

    assert "rescale: learning rate" in advice([one("a", -0.2), one("b", -0.1)])
    assert "learning rate times" not in advice([one("a", -0.2), one("b", 0.1)])
    assert "none follows" in advice([one("a", -0.2)])
