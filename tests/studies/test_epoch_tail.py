import pytest

from accumulation_harness.config import LastWindow
from tests.studies.by_hand import Loop
from tests.trials import measured, trial

# Micro-batches of 75: an epoch of 1,500 has 20, which 3 do not divide: two are left over.
CONFIG = "study=epoch_tail workload.model=mlp effective_batch=225 accumulation_steps=[3] seed=2"
GATE = 1e-12


def run(*changes):
    return {row["arm"]: row for row in measured(trial(CONFIG, *changes))}


def test_steps_and_samples_of_the_loops_by_arithmetic():
    rows = run()
    assert {row["windows"] for row in rows.values()} == {14} and {row["tail_samples"] for row in rows.values()} == {150}
    counts = {name: (row["steps"], row["leaked_samples"], row["unused_samples"]) for name, row in rows.items()}
    assert counts == {
        "as_written": (12, 150, 150),  # what the first epoch leaves, and what the second does
        "cleared": (12, 0, 300),
        "stepped": (14, 0, 0),
        "complete": (14, 0, 0),
    }
    assert rows["complete"]["gradient_error"] <= GATE and rows["cleared"]["gradient_error"] <= GATE
    assert rows["stepped"]["gradient_error"] == pytest.approx(1 / 3, rel=1e-9), "two thirds of the mean of two micro-batches"
    assert rows["as_written"]["gradient_error"] > 0.1


def test_leaked_gradient_by_hand():
    """SGD with lr so small that the weights stand still: the leak adds the tail's gradient, divided by N, to the first window."""
    still = "optimizer.lr=1e-16"
    loop = Loop(trial(CONFIG, still))
    stream = loop.windows(75, LastWindow.keep)
    parts = [loop.gradient(next(stream)) for _ in range(40)]
    expected = float((parts[18] + parts[19]).norm() / sum(parts[20:23]).norm())
    assert run(still)["as_written"]["gradient_error"] == pytest.approx(expected, rel=1e-9)


def test_without_a_remainder_the_four_loops_are_one():
    rows = run("effective_batch=300")
    assert {(row["steps"], row["leaked_samples"], row["unused_samples"]) for row in rows.values()} == {(10, 0, 0)}
    assert all(row["gradient_error"] <= GATE for row in rows.values())
