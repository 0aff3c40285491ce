"""Precision and recall of the lint on the loops that the audit is tried on; docs/findings/lint.md has the same numbers."""

from tests.lint import cases
from tests.lint.measured import SEEN, UNSEEN, loops

BY_RULES = {cause for _, cause in cases.WRONG.values()}  # causes that some rule tells


def test_no_right_loop_is_told_and_no_other_cause():
    measured = loops((*SEEN, *UNSEEN))
    assert sum(not loop.causes for loop in measured) == 73
    assert {loop.name: loop.told for loop in measured if loop.told - loop.causes} == {}


def test_recall():
    """Most faults of these loops are in what they compute, not in the text of the loop."""
    wrong = [loop for loop in loops((*SEEN, *UNSEEN)) if loop.causes]
    within = [loop for loop in wrong if loop.causes & BY_RULES]
    told = [loop for loop in wrong if loop.told]
    assert (len(wrong), len(within)) == (130, 71)
    assert len(told) >= 26


def test_the_measure_would_see_a_false_alarm():
    """Of the loops that are wrong by their text, those told differ in nothing from a right one but in the fault."""
    by_name = {loop.name: loop for loop in loops((*SEEN, *UNSEEN))}
    assert by_name["clip_inside"].told == {"clip_per_micro_batch"} and not by_name["adamw_clipped"].told
    assert by_name["unscaled_per_micro_batch"].told == {"scaler_updated_in_window"} and not by_name["unscaled_per_step"].told
