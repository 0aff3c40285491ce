"""Copies that lock-step keeps, counted on a model small enough for a test."""

from __future__ import annotations

import pytest

from accumulation_harness.bench import memory, watch


def test_copies_do_not_grow_with_the_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are small beside 80,000 parameters, as they are beside the ten million of the bench."""
    monkeypatch.setattr("accumulation_harness.referee.gradients.BLOCK", 2000)
    monkeypatch.setattr(memory, "SIZE", 80_000)
    few, many = memory.kept_copies(2), memory.kept_copies(6)
    assert 1 < few < 2.3 and many == pytest.approx(few, abs=0.1)


def test_the_growth_of_a_process_is_its_own_and_not_that_of_the_one_that_started_it() -> None:
    held = b"x" * 2**30  # more than the process that is measured ever holds
    assert watch.peak("plain", 10**6) > 16 * 10**6  # bytes of weights, gradients and two moments
    assert len(held) == 2**30
