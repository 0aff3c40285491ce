import pytest

from tests.trials import measured, trial

CONFIG = trial("study=clipping_threshold effective_batch=24 accumulation_steps=[4] seed=4")
EPSILON = 1e-4  # PyTorch adds 1e-6 to the norm it divides by; the norms here are near 1


def test_what_each_threshold_leaves_of_the_gradient():
    """Of a gradient of norm 1, averaged, or 4, summed, clipped at f·c with c = 1/2 or 3/2: |left / right - 1| by hand."""
    rows = measured(CONFIG)
    assert len(rows) == 12
    for row in rows:
        norm, c = (1.0 if row["arm"] == "averaged" else 4), (0.5 if row["threshold"] == "clipped" else 1.5)
        right, left = min(1.0, c), min(norm, row["factor"] * c)
        assert row["error"] == pytest.approx(abs(left / right - 1), abs=EPSILON)
        assert row["error_of_nth"] == pytest.approx(abs(left / 4 / right - 1), abs=EPSILON)
