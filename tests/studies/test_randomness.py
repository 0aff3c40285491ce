import pytest
import torch

from accumulation_harness.experiments.randomness.randomness import distribution
from tests.trials import measured, trial

CONFIG = trial(
    "study=randomness workload.model=mlp workload.width=1 workload.dropout=0.5 effective_batch=22 accumulation_steps=[5]",
    "split=ragged",
)


def normal(num, spread, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    return 1 + shift + spread * torch.randn(num, 50, generator=generator, dtype=torch.float64)


def test_the_law_of_known_draws():
    """50 independent normals: a shift of s moves the first from 1 to 1 + R s^2 / 2, a spread doubled makes the second 4."""
    same = distribution(normal(400, 1, 0, 0), normal(400, 1, 0, 1))
    assert same["mean_shift"] == pytest.approx(1, abs=5 * (2 / 50) ** 0.5) and same["spread_ratio"] == pytest.approx(1, abs=0.05)
    assert same["noise"] == pytest.approx(1, rel=0.05)  # sqrt(50) / |(1, ..., 1)|
    assert distribution(normal(400, 1, 0.3, 0), normal(400, 1, 0, 1))["mean_shift"] == pytest.approx(1 + 400 * 0.09 / 2, rel=0.3)
    assert distribution(normal(400, 2, 0, 0), normal(400, 1, 0, 1))["spread_ratio"] == pytest.approx(4, rel=0.05)


def test_single_runs_law_and_remedy():
    rows = {(row["dropout_layers"], row["masks"]): row for row in measured(CONFIG)}
    assert len(rows) == 6
    for layers in (1, 3):
        assert rows[layers, "masks_of_samples"]["largest_distance"] < 1e-12, "masks of samples: the same gradient"
        assert rows[layers, "masks_repeated"]["distance"] > 0.1
        assert 0.5 < rows[layers, "accumulated"]["spread_ratio"] < 2
    assert rows[3, "accumulated"]["distance"] > 0.1, "layers take turns at the generator"
    assert all(row["noise"] > 0.05 for row in rows.values())
