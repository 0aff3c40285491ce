"""Rules on plain numbers: what names a cause, and what must not."""

import dataclasses
import math

import pytest

from accumulation_harness.judge.cause import Cause, parsed
from accumulation_harness.judge.counters import Counter
from accumulation_harness.judge.diagnosis import diagnose
from accumulation_harness.judge.signature import Attribution, Movement, Samples, Signature, WrongWindow

FOURFOLD = Attribution(distance=3.0, scale=4.0, cosine=1.0, weights=(4.0,) * 4, residual=1e-16, condition=3.0)
WINDOW = WrongWindow(
    step=0, whole=FOURFOLD, groups={"matrices": FOURFOLD, "vectors": FOURFOLD}, tensors={"weight": 3.0, "bias": 3.0}
)


WRONG = Signature(probes=5, worst_window=WINDOW, wrong_windows=({(Cause.loss_not_divided,): 1e-16},) * 5)


def wrong(errors):
    """All five probed windows wrong, by joined causes."""
    return {"wrong_windows": ({parsed(causes): error for causes, error in errors.items()},) * 5}


@pytest.mark.parametrize(
    ("changes", "counters", "causes"),
    [
        (wrong({"loss_not_divided": 1e-11}), {}, ("unexplained",)),
        (wrong({"loss_not_divided": math.nan}), {}, ("unexplained",)),
        (wrong({"loss_not_divided": 1e-15, "batch_statistics+clip_per_micro_batch": 0.0}), {}, ("loss_not_divided",)),
        ({"samples": Samples(unknown=3, missing=3)}, {}, ("unexplained",)),
        ({}, {Counter.schedule_index: (1.0, 2.0)}, ("loss_not_divided",)),
        ({"moved": Movement(1e-3, -0.9)}, {}, ("unexplained",)),
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_named(changes, counters, causes):
    found = diagnose(dataclasses.replace(WRONG, **changes), counters)
    assert (found.causes, found.explained) == (causes, causes != ("unexplained",))
