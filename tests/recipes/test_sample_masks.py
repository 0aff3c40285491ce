import torch

from accumulation_harness.recipes.sample_masks import SampleDropout


def test_a_mask_belongs_to_its_sample():
    """Whatever stands beside it and however long the row is; another key, layer or sample has another."""
    layer = SampleDropout(0.4, 1)
    layer.key, layer.ids = 7, torch.tensor([5, 2, 9])
    together = layer(torch.ones(3, 6, 4))
    layer.ids = torch.tensor([9])
    torch.testing.assert_close(layer(torch.ones(1, 6, 4))[0], together[2], rtol=0, atol=0)
    torch.testing.assert_close(layer(torch.ones(1, 3, 4))[0], together[2, :3], rtol=0, atol=0)
    assert not torch.equal(together[0], together[1])
    for changed in ({"key": 8}, {"layer": 2}):
        for name, value in changed.items():
            before = getattr(layer, name)
            setattr(layer, name, value)
            assert not torch.equal(layer(torch.ones(1, 6, 4))[0], together[2])
            setattr(layer, name, before)
