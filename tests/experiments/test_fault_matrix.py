"""The fault matrix: what its prediction is decided by, and what the page says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accumulation_harness.analysis import faults, load, report
from accumulation_harness.analysis.rates import Rate
from accumulation_harness.experiments.fault_matrix import answers as fault_matrix

FAULT = "mean_of_means"
SAME = [1.0] * 12
LATE = [1.0] * 5 + [1.2] * 7  # visible from step 5 on


def different(cause: str, **more: Any) -> dict[str, Any]:
    return {"verdict": "different", "cause": cause, "explained": "unexplained" not in cause, **more}


def both(changes: dict[str, Any], fault: str = FAULT) -> dict[tuple[str, int], dict[str, Any]]:
    """The same for both N."""
    return {(fault, n): changes for n in (2, 4)}


def answer(results: Path) -> Any:
    arms = faults.with_visibility(results, load.read(results)).arms
    return fault_matrix.answer(arms[arms["experiment"] == "fault_matrix"])


def matrix_trials(make_trial, odd: dict[str, Any], num: int = 50) -> None:
    for seed in range(num):
        change = both(different(FAULT)) | ({(FAULT, 4): odd} if seed == 0 else {})
        make_trial(experiment="fault_matrix", seed=seed, faults={FAULT: True}, losses={FAULT: LATE}, change=change)


@pytest.mark.parametrize(
    ("odd", "holds"),
    [
        (different(FAULT), True),
        ({"verdict": "equivalent"}, False),  # one of a hundred missed
        (different("unexplained"), True),  # 99 % named
        (different("loss_not_divided"), True),  # 1 % confidently wrong
    ],
)
def test_the_prediction_of_the_matrix(results: Path, make_trial, odd: dict[str, Any], holds: bool) -> None:
    matrix_trials(make_trial, odd)
    found = answer(results)
    assert found.holds is holds
    told = " ".join(found.sentences)
    assert ("99 of 100 (99%) " in told) is (odd.get("cause") != FAULT)
    assert ("49 of 50 (98%, 95% interval 89.4% to 99.949%) trials" in told) is (odd.get("cause") != FAULT), "arms are no draws"


def test_few_trials_can_refute_and_not_confirm(results: Path, make_trial) -> None:
    assert Rate(0, fault_matrix.ENOUGH).high <= fault_matrix.IN_TRIALS < Rate(0, fault_matrix.ENOUGH - 1).high
    matrix_trials(make_trial, different(FAULT), num=2)
    assert answer(results).holds is None
    make_trial(experiment="fault_matrix", seed=9, faults={FAULT: True}, losses={FAULT: LATE})
    assert answer(results).holds is False


def test_too_many_wrong_names_refute(results: Path, make_trial) -> None:
    matrix_trials(make_trial, different("loss_not_divided"), num=10)  # 5 %
    assert answer(results).holds is False


def test_nothing_decides_without_faults(results: Path, make_trial) -> None:
    make_trial(experiment="fault_matrix", faults={FAULT: False}, losses={FAULT: SAME})
    assert answer(results).holds is None


def test_the_page_lists_what_was_missed(results: Path, tmp_path: Path, make_trial) -> None:
    matrix_trials(make_trial, different("loss_not_divided"), num=2)
    report.write(results, tmp_path)
    page = (tmp_path / "pages/fault_matrix.html").read_text()
    assert "wrong name: loss_not_divided" in page
    assert "1 of 4 arms." in page


def test_which_optimizer_hides_what(results: Path, tmp_path: Path, make_trial) -> None:
    """Adam hides one fault that sgd shows; nobody shows the other."""
    for optimizer, curve in (("sgd", LATE), ("adam", SAME)):
        names = {FAULT: True, "resume_in_window": True}
        change = both(different(FAULT)) | both(different("resume_in_window"), "resume_in_window")
        losses = {FAULT: curve, "resume_in_window": SAME}
        make_trial(experiment="fault_matrix", optimizer=optimizer, faults=names, losses=losses, change=change)
    report.write(results, tmp_path)
    page = (tmp_path / "pages/fault_matrix.html").read_text()
    assert f"under sgd 1 of 2, under adam 2 of 2. adam alone hides {FAULT}." in page
    assert "2 of 8 (25%" in page
    assert "it shows 1 of the faults in no trial" in page
