from __future__ import annotations

from torch import nn

from accumulation_harness.workloads.layers import replace_layers


def test_layers_of_a_kind_are_exchanged_wherever_they_are() -> None:
    """In nested modules, in their order, handing on what they were; what is put around a layer is not entered again."""
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), nn.Dropout(0.2))
    linear, first, second = model[1][0], model[1][1], model[2]
    layers = replace_layers(model, nn.Dropout, lambda layer: nn.Sequential(layer, nn.Identity()))
    assert [layer[0] for layer in layers] == [first, second] and [model[1][1], model[2]] == layers
    assert model[1][0] is linear and isinstance(model[0], nn.ReLU)


def test_subclasses_count_and_nothing_else_does() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.LayerNorm(3))
    kept = model[2]
    assert len(replace_layers(model, nn.modules.batchnorm._BatchNorm, lambda layer: nn.Identity())) == 2
    assert model[2] is kept and not replace_layers(model, nn.ReLU, lambda layer: nn.Identity())
