"""The wrong loops of the audit's own tests that are equivalent under `watch`: what it says that it cannot see of them."""

import pytest

from tests import golden
from tests.audit.test_loops import WRONG
from tests.watch.foreign import watched

UNSEEN = {  # wrong, and equivalent in what was seen -> words of the line that says so
    "which rows": ("window_straddles", "counts_too_many"),
    "by hand": (
        "schedule_by_hand", "report_wrong", "overflow_at_one_split", "cache_not_refreshed", "copy_renewed_too_late",
        "average_in_one_vector_inside", "average_made_anew_inside", "warm_up_before_a_cosine_of_micro_batches",
        "probe_by_hand_undivided", "shrunk_at_the_end_by_micro_batches",
        "squared_gradients_so_far", "target_for_later_by_micro_batches",
    ),
    "act on each other": ("drawn_rows", "standardised_over_the_micro_batch", "normalised_between_modules"),
    "random draws": ("dropout", "drawn_by_an_own_generator", "noise_in_the_model"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_what_is_missed_was_said_to_be_unseen():
    by_name = {train.__name__: train for train in WRONG}
    for words, names in UNSEEN.items():
        for name in names:
            assert all(words in str(report) for report in watched(by_name[name], 4, 4)), name


def test_every_loop_that_is_missed_is_listed():
    missed = {train.__name__ for train in WRONG if golden.table()["watch", f"audit's {train.__name__}"][0] == "equivalent"}
    assert missed == {name for names in UNSEEN.values() for name in names}
