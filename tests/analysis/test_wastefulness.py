"""Small batches in place of accumulation: what is planted is found, a planted nothing is not, and the advice follows."""

from __future__ import annotations

import pandas as pd
import pytest

from accumulation_harness.analysis.load import Results
from accumulation_harness.analysis.question import Advice
from accumulation_harness.experiments.convergence import trainings as convergence
from accumulation_harness.experiments.convergence.answers import is_accumulating_wasteful
from accumulation_harness.experiments.convergence.wastefulness import Wasteful, instead_of_accumulating, verdicts
from tests.analysis.test_convergence import rows


def timed(pace: float, effect: float = 0.0, **changes: float) -> pd.DataFrame:
    """The rows with seconds: a window takes the small batch `pace` times as long as accumulation, and the full batch half."""
    frame = rows(effect, **changes)  # type: ignore[arg-type]
    per_window = [pace if arm == "small_batch" else 0.5 if arm == "full" else 1.0 for arm in frame["arm"]]
    return frame.assign(
        step_samples=16, curve_seconds=[[one * i for i in range(51)] for one in per_window],
        curve_optimizer_steps=frame["curve_samples"],
    )  # fmt: skip


def verdict(frame: pd.DataFrame) -> Wasteful:
    (one,) = verdicts(instead_of_accumulating(frame, convergence.judged(frame)))
    return one


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (timed(0.5), Wasteful.yes),
        (timed(0.5, 0.005), Wasteful.yes),  # worse, and by less than the margin
        (timed(2.0), Wasteful.no),
        (timed(0.5, 0.1), Wasteful.no),
        (timed(1.0), Wasteful.undecided),
        (timed(0.5, noise=0.1), Wasteful.undecided),
        (timed(0.5, seeds=4), Wasteful.undecided),
        (timed(0.5, best=0.4), Wasteful.undecided),
    ],
    ids=["faster", "faster and hardly worse", "slower", "worse", "nothing", "noise", "four seeds", "a rate at an end"],
)
def test_what_is_planted_is_found(frame: pd.DataFrame, expected: Wasteful) -> None:
    assert verdict(frame) == expected


def test_a_seed_that_never_arrives_leaves_the_seconds_undecided() -> None:
    frame = timed(0.5)
    stuck = (frame["arm"] == "small_batch") & (frame["seed"] == 3)
    curves = [[2.0] * 51 if one else curve for one, curve in zip(stuck, frame["curve_probe_loss"], strict=True)]
    assert verdict(frame.assign(curve_probe_loss=curves)) == Wasteful.undecided


def test_the_first_page_answers_where_something_is_decided() -> None:
    def row(frame: pd.DataFrame) -> Advice | None:
        about = {"study": "learning_curves", "experiment": "convergence", "rate": 0.1, "test_accuracy": 0.5, "gap": 0.0}
        empty = pd.DataFrame(columns=["experiment", "trial"])
        return is_accumulating_wasteful(Results(empty, frame.assign(**about), empty, ()))  # type: ignore[arg-type]

    found = row(timed(0.5))
    assert found is not None and "wasteful in 1" in found.answer
    assert "small batch of 16, N = 4 (mnist1d, none): 0.50" in found.number
    assert row(timed(1.0)) is None
