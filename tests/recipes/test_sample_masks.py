import torch

from accumulation_harness.recipes.sample_masks import SampleDropout


def masked(ids, length=6, key=7, layer=1):
    own = SampleDropout(0.4, layer)
    own.key, own.ids = key, torch.tensor(ids)
    return own(torch.ones(len(ids), length, 4))


def test_a_mask_belongs_to_its_sample():
    """Whatever stands beside it and however long the row is; another key, layer or sample has another."""
    [first, _, last] = masked([5, 2, 9])
    assert torch.equal(masked([9])[0], last) and torch.equal(masked([9], length=3)[0], last[:3])
    for other in (first, masked([9], key=8)[0], masked([9], layer=2)[0]):
        assert not torch.equal(other, last)
