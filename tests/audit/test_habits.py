"""What the report tells about habits of released trainers; `test_loops.py` audits the loops themselves."""

from __future__ import annotations

from accumulation_harness.audit import audit
from tests.audit.loops import habits


def test_an_update_that_jumps_under_rounding_is_told() -> None:
    told = "not what it makes of them"
    assert any(told in line for line in audit(habits.eigenvectors, batch_size=16, accumulation_steps=(4,)).hidden)
    assert not any(told in line for line in audit(habits.count_among_states, batch_size=16, accumulation_steps=(4,)).hidden)


def test_sequences_of_vectors_have_lengths() -> None:
    report = audit(habits.padded_vectors, batch_size=16, accumulation_steps=(4,))
    assert not any("weighs the same" in line for line in report.hidden)
