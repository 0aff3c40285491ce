"""What the page of the fault matrix says of trials made by hand."""

from accumulation_harness.analysis import report
from accumulation_harness.analysis.rates import Rate
from accumulation_harness.experiments.fault_matrix import answers as fault_matrix

FAULT, OTHER = "mean_of_means", "resume_in_window"
SAME = [1.0] * 12
LATE = [1.0] * 5 + [1.2] * 7  # visible from step 5 on


def test_what_was_missed_and_which_optimizer_hides_what(results, tmp_path, make_trial):
    """Adam hides one fault that sgd shows; nobody shows the other, which has a wrong name at N = 4."""
    for optimizer, curve in (("sgd", LATE), ("adam", SAME)):
        change = {(fault, n): {"verdict": "different", "cause": fault} for fault in (FAULT, OTHER) for n in (2, 4)}
        change[OTHER, 4]["cause"] = "loss_not_divided"
        losses = {FAULT: curve, OTHER: SAME}
        make_trial(
            experiment="fault_matrix", optimizer=optimizer, faults=dict.fromkeys(losses, True), losses=losses, change=change
        )
    report.write(results, tmp_path)
    page = (tmp_path / "pages/fault_matrix.html").read_text()
    assert f"under sgd 1 of 2, under adam 2 of 2. adam alone hides {FAULT}." in page
    assert "2 of 8 (25%" in page and "it shows 1 of the faults in no trial" in page
    assert "wrong name: loss_not_divided" in page and "2 of 8 arms." in page
    assert "0 of 2 (0%, 95% interval 0% to 84.2%) trials" in page, "arms are no draws"


def test_how_many_trials_without_a_failure_are_enough():
    assert Rate(0, fault_matrix.ENOUGH).high <= fault_matrix.IN_TRIALS < Rate(0, fault_matrix.ENOUGH - 1).high
