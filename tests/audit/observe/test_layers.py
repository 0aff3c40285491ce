"""Dropout, attention and batch normalisation: counted, and disabled where the intervention says so."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accumulation_harness.audit.evidence import Intervention, Run
from accumulation_harness.audit.observe.recorder import Recorder

X = torch.arange(24.0).reshape(6, 4) / 10


def dropped():
    return functional.dropout(X, 0.5)


def attended():
    return functional.scaled_dot_product_attention(X, X, X, None, 0.5)


def attended_by_name():
    return functional.scaled_dot_product_attention(X, X, X, dropout_p=0.5)


def recurrent():
    torch.manual_seed(0)
    layers = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    out: Tensor = layers(X)[0]
    assert layers.dropout == 0.5
    return out


def normalised():
    return nn.BatchNorm1d(4)(X)


def normalised_without_statistics():
    return nn.BatchNorm1d(4, track_running_stats=False)(X)


def watched(function, *disable):
    run = Run(batch_size=6, accumulation_steps=1)
    with Recorder(run, Intervention(disable=frozenset(disable))), torch.random.fork_rng():
        torch.manual_seed(1)
        return function(), run


@pytest.mark.parametrize("function", [dropped, attended, attended_by_name, recurrent, normalised, normalised_without_statistics])
def test_watching_alone_changes_nothing(function):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = function()
    seen, run = watched(function)
    assert torch.equal(plain, seen)
    assert (run.dropout_calls, run.norm_calls) == ((0, 1) if "norm" in function.__name__ else (1, 0))


def test_disabled_dropout_hands_on_its_input():
    assert torch.equal(watched(dropped, "dropout")[0], X) and not torch.equal(watched(dropped, "batch_norm")[0], X)
    plain = functional.scaled_dot_product_attention(X, X, X)
    for function in (attended, attended_by_name):
        assert torch.equal(watched(function, "dropout")[0], plain) and not torch.equal(watched(function)[0], plain)


def test_layers_of_a_recurrent_network_drop_nothing_where_that_is_disabled():
    torch.manual_seed(0)
    plain = nn.LSTM(4, 4, num_layers=2)(X)[0]
    assert torch.equal(watched(recurrent, "dropout")[0], plain) and not torch.equal(watched(recurrent)[0], plain)
    with torch.random.fork_rng():
        for layers in (nn.LSTM(4, 4, num_layers=2), nn.LSTM(4, 4, num_layers=2, dropout=0.5).eval()):
            assert watched(lambda layers=layers: layers(X)[0])[1].dropout_calls == 0


def test_disabled_batch_normalisation_uses_fixed_statistics():
    expected = X / (1 + 1e-5) ** 0.5  # of mean 0 and variance 1, as they begin
    for function in (normalised, normalised_without_statistics):
        assert torch.allclose(watched(function, "batch_norm")[0], expected)
        assert not torch.allclose(watched(function)[0], expected)


def test_layers_at_rest_are_not_counted():
    assert watched(lambda: functional.dropout(X, 0.5, training=False))[1].dropout_calls == 0
    assert watched(lambda: functional.dropout(X, 0.0))[1].dropout_calls == 0
    assert watched(lambda: nn.BatchNorm1d(4).eval()(X))[1].norm_calls == 0
