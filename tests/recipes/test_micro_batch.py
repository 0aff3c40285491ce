import itertools

import pytest
import torch

from accumulation_harness.config import LastWindow
from accumulation_harness.recipes.micro_batch import windows


@pytest.mark.parametrize(("last", "per_epoch", "samples"), [(LastWindow.keep, 4, 25), (LastWindow.drop, 3, 24)])
def test_an_epoch_uses_every_sample_once(last, per_epoch, samples):
    epochs = list(itertools.islice(windows(25, 8, 0, last), 2 * per_epoch))
    for epoch in (epochs[:per_epoch], epochs[per_epoch:]):
        ids = torch.cat(epoch)
        assert len(ids) == samples == len(ids.unique())
    assert not torch.equal(torch.cat(epochs[:per_epoch]), torch.cat(epochs[per_epoch:])), "epochs are shuffled anew"
