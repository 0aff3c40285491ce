"""What an audit costs beside one plain run, on models small enough for a test."""

from __future__ import annotations

import pytest

from accumulation_harness.bench import audit
from accumulation_harness.bench.audit import MEMORY, SIZES, TIME, Trained, Transformer, cost
from accumulation_harness.bench.cost import Cost


@pytest.mark.parametrize("size", SIZES[:3])
def test_models_have_about_the_size_they_are_asked_for(size: int) -> None:
    model = Transformer(Trained(size).width)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.35)


def test_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"plain": Cost(1.0, 2.0, 10 * 2**20), "audit": Cost(5.0, 14.0, 40 * 2**20)}
    monkeypatch.setattr(audit, "cost", lambda side, size: costs[side])
    time, memory = list(audit.measurements(rounds=1))[:2]
    assert (time.wall.median, time.target, time.met) == (7.0, TIME, True) and time.cpu == time.wall
    assert (memory.wall.median, memory.target, memory.met) == (4.0, MEMORY, False)
    assert memory.note == "40 MiB over 10 MiB" and "1e+05 parameters" in memory.name


@pytest.mark.slow
def test_memory_and_time_of_a_large_model_meet_their_targets() -> None:
    plain, audited = (cost(side, 3 * 10**6) for side in ("plain", "audit"))
    assert 1 < audited.peak / plain.peak < MEMORY
    assert 3 < audited.cpu / plain.cpu < TIME  # it makes four runs
