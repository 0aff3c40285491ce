"""Squared norms against per-sample gradients by hand, and a run that does not notice."""

import pytest
import torch

from accumulation_harness.config import Precision
from accumulation_harness.measure.noise_scale import NoiseWatch, read
from accumulation_harness.recipes.micro_batch import Even, Ragged
from accumulation_harness.recipes.recipe import take_step
from accumulation_harness.referee.oracle import snapshot
from tests.reference import softmax_regression_gradients
from tests.toy import Toy, make_arm

EXACT = 1e-13  # relative, sums of a few dozen float64 numbers
SINGLE = 1e-5  # relative, norms of a few dozen float32 numbers
SPLITS = [Even(7), Even(8), Ragged(5, 24), Even(24)]


def squares(row):
    return row["micro_batch_square"], row["window_square"]


def gradients(arm):
    """[24, P] each sample's own gradient at the arm's weights, of one loss term."""
    toy, model = Toy(), snapshot(arm.model)
    weights, bias = model["weight"].numpy(), model["bias"].numpy()
    return softmax_regression_gradients(weights, bias, toy.x.numpy(), toy.y.numpy())


def by_hand(each, ids, sizes):
    """sum_k w_k |g_k|^2 and |g_B|^2 of a window, sample i with 1 + i % 4 terms."""
    terms, start, small = 1 + ids % 4, 0, 0.0
    for size in sizes:
        own = slice(start, start + size)
        micro = terms[own] @ each[ids[own]] / terms[own].sum()
        small += terms[own].sum() / terms.sum() * float(micro @ micro)
        start += size
    whole = terms @ each[ids] / terms.sum()
    return small, float(whole @ whole)


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(
    ("precision", "tolerance"), [(Precision.float64, EXACT), (Precision.float32, SINGLE), (Precision.float16, 1e-2)]
)
@pytest.mark.parametrize("clip_norm", [None, 1e-3])
def test_squared_norms(split, precision, tolerance, clip_norm):
    """Two windows, the second short, with clipping and a loss scale of 4,096 in float16: neither is seen."""
    arm = make_arm(split, precision=precision, clip_norm=clip_norm)
    watch = NoiseWatch(arm)
    for ids in (torch.arange(24).flip(0), torch.tensor([3, 1, 20, 5, 5, 9, 2, 11, 13])):
        expected = by_hand(gradients(arm), ids.numpy(), split(len(ids)))
        take_step(arm, arm.workload.batch(ids))
        row = read({"arm": watch})["arm"]
        assert squares(row) == pytest.approx(expected, rel=tolerance)
        assert (row["micro_batches"], row["window_samples"]) == (len(split(len(ids))), len(ids))
    assert clip_norm is None or all(arm.clipped), "the clip has to be active, or it could not be missed"
