"""Dropout, attention and batch normalisation: counted, and disabled where the intervention says so."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from accumulation_harness.audit.evidence import Intervention, Run
from accumulation_harness.audit.observe.recorder import Recorder

X = torch.arange(24.0).reshape(6, 4) / 10


def recurrent(p, layers=2):
    torch.manual_seed(0)
    return nn.LSTM(4, 4, num_layers=layers, dropout=p)(X)[0]


def attended(*args, **kwargs):
    return functional.scaled_dot_product_attention(X, X, X, *args, **kwargs)


NORMALISED = X / (1 + 1e-5) ** 0.5  # of mean 0 and variance 1, as statistics begin
CASES = {  # -> what is called, the layer, what it gives without
    "dropout": (lambda: functional.dropout(X, 0.5), "dropout", lambda: X),
    "attention": (lambda: attended(None, 0.5), "dropout", attended),
    "attention by name": (lambda: attended(dropout_p=0.5), "dropout", attended),
    "between recurrent layers": (lambda: recurrent(0.5), "dropout", lambda: recurrent(0.0)),
    "batch norm": (lambda: nn.BatchNorm1d(4)(X), "batch_norm", lambda: NORMALISED),
    "of no statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False)(X), "batch_norm", lambda: NORMALISED),
}
AT_REST = {
    "no dropout": lambda: functional.dropout(X, 0.0),
    "no training": lambda: functional.dropout(X, 0.5, training=False),
    "one recurrent layer": lambda: recurrent(0.0, layers=1),
    "running statistics": lambda: nn.BatchNorm1d(4).eval()(X),
}


def watched(function, *disable):
    run = Run(batch_size=6, accumulation_steps=1)
    with Recorder(run, Intervention(disable=frozenset(disable))), torch.random.fork_rng():
        torch.manual_seed(1)
        return function(), (run.dropout_calls, run.norm_calls)


@pytest.mark.parametrize(("function", "layer", "without"), CASES.values(), ids=CASES)
def test_a_layer_is_counted_and_is_gone_where_it_is_disabled(function, layer, without):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = function()
    counts = (1, 0) if layer == "dropout" else (0, 1)
    (other,) = {"dropout", "batch_norm"} - {layer}
    for disable in ((), (other,)):
        seen, counted = watched(function, *disable)
        assert torch.equal(plain, seen) and counted == counts, "watching changes nothing"
    assert torch.allclose(watched(function, layer)[0], without(), rtol=1e-6) and not torch.allclose(plain, without())


@pytest.mark.parametrize("function", AT_REST.values(), ids=AT_REST)
def test_layers_at_rest_are_not_counted(function):
    assert watched(function)[1] == (0, 0)
