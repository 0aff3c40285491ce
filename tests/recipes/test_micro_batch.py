import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accumulation_harness.config import LastWindow
from accumulation_harness.recipes.micro_batch import Even, Ragged, windows

SIZES = st.integers(1, 300)


@given(window=SIZES, micro_batch=SIZES)
def test_even_covers_the_window(window, micro_batch):
    sizes = Even(micro_batch)(window)
    assert sum(sizes) == window and min(sizes) >= 1
    assert all(size == micro_batch for size in sizes[:-1]) and sizes[-1] <= micro_batch


@given(window=SIZES, num=SIZES, batch=SIZES)
def test_ragged_covers_the_window(window, num, batch):
    sizes = Ragged(num, batch)(window)
    assert sum(sizes) == window and min(sizes) >= 1


@pytest.mark.parametrize(("last", "per_epoch", "samples"), [(LastWindow.keep, 4, 25), (LastWindow.drop, 3, 24)])
def test_an_epoch_uses_every_sample_once(last, per_epoch, samples):
    epochs = list(itertools.islice(windows(25, 8, 0, last), 2 * per_epoch))
    for epoch in (epochs[:per_epoch], epochs[per_epoch:]):
        ids = torch.cat(epoch)
        assert len(ids) == samples == len(ids.unique())
    assert not torch.equal(torch.cat(epochs[:per_epoch]), torch.cat(epochs[per_epoch:])), "epochs are shuffled anew"
