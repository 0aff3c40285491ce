import itertools
import math

import pytest
import torch

from accumulation_harness.config import Data
from accumulation_harness.experiments.gradient_noise.gradient_noise import batch_variance, sample_gradients
from accumulation_harness.referee.oracle import snapshot
from tests.trials import setting_of, trial

CONFIG = (
    "study=gradient_noise workload.width=2 norm=group effective_batch=44 accumulation_steps=[4,2] steps=3 probe_every=2 "
    "split=ragged"
)


@pytest.mark.parametrize(
    "changes",
    ["norm=none", "norm=group", "workload.data=text workload.model=transformer workload.width=4 workload.depth=1 norm=layer",
     "workload.data=ignored_labels workload.model=mlp"],  # a sample's weight depends on its id
)  # fmt: skip
def test_every_sample_has_its_own_gradient(changes):
    """Against one backward per sample of the referee's forward; the mean of the rows is the batch's gradient."""
    setting = setting_of(trial(CONFIG, changes))
    referee = setting.referee()
    state, batch = snapshot(referee.model), setting.exact.batch(torch.arange(3, 14))
    each = sample_gradients(referee, state, batch)
    parts = referee.parts(state, batch, [1] * 11)
    terms = torch.tensor(parts.terms, dtype=torch.float64)
    assert (len(set(parts.terms)) > 1) == (setting.config.workload.data in (Data.text, Data.ignored_labels))
    expected = torch.stack(parts.parts) * (terms / terms.mean()).unsqueeze(1)
    torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(each.mean(0), referee.gradient(state, batch), rtol=1e-9, atol=1e-13)


def population():
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_expected_variance_by_enumeration(size):
    """Every batch of `size` from six samples, ordered with replacement and unordered without."""
    each, generator = population(), torch.Generator().manual_seed(0)
    for replacement, batches in (
        (True, itertools.product(range(6), repeat=size)), (False, itertools.combinations(range(6), size)),
    ):  # fmt: skip
        variances = [float((each[list(batch)].mean(0) - each.mean(0)).square().sum()) for batch in batches]
        found = batch_variance(each, size, 4000, generator, replacement=replacement)
        assert found["expected"] == pytest.approx(sum(variances) / len(variances), rel=1e-12)
        # Of 4,000 draws the mean square has a relative standard error of at most sqrt(2 / 4000), one direction holding all.
        assert found["variance"] == pytest.approx(found["expected"], rel=5 * math.sqrt(2 / 4000))
