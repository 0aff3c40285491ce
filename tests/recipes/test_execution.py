"""How a model runs: compiled and captured it computes what it computes op by op, and what would differ is seen."""

import pytest
import torch
from torch import nn

from accumulation_harness.config import Execution
from accumulation_harness.recipes.execution import exchange_forward
from tests.simgpu.graphs import graphed_on_cpu
from tests.trials import arms, trial


def verdicts(settings):
    small = "workload.model=mlp effective_batch=12 accumulation_steps=[3] steps=4 algebra_steps=2"
    return {row["verdict"] for row in arms(trial(small, settings))}


def make_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double().train()


def accumulate(model, batches):
    """[P] the gradient of the sum of squares over `batches`."""
    for batch in batches:
        model(batch).square().sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graphed_on_cpu)


BATCHES = [torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(size)) for size in (5, 5, 2, 5)]


def test_captured_gradients_add_up_as_eager_ones_do(graphs):
    eager, captured = make_model(), make_model()
    exchange_forward(captured, Execution.cuda_graph)
    assert torch.equal(accumulate(captured, BATCHES), accumulate(eager, BATCHES))
    for own, others in zip(captured.buffers(), eager.buffers(), strict=True):
        assert torch.equal(own, others)  # capturing has run the model, and left no trace in its statistics


def test_the_first_micro_batch_is_not_overwritten_by_the_next(graphs):
    """All arms of a window read the same memory: a graph whose input it were would write every later micro-batch into it."""
    captured, window = make_model(), torch.arange(30.0, dtype=torch.float64).reshape(10, 3)
    exchange_forward(captured, Execution.cuda_graph)
    before = window.clone()
    accumulate(captured, list(window.split(5)))
    assert torch.equal(window, before)


def test_a_compiler_that_errs_is_seen_in_every_arm(monkeypatch):
    """The reference runs op by op: a gradient 1 % off is `degraded`, and not for being accumulated."""

    def wrong(forward, **_):
        return lambda inputs: forward(inputs) * 1.01

    monkeypatch.setattr(torch, "compile", wrong)
    assert verdicts("execution=compile") == {"degraded"} and verdicts("execution=eager") == {"equivalent"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports what torch deprecates
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_compiled_arms_are_equivalent_to_the_eager_full_batch(precision):
    assert verdicts(f"execution=compile precision={precision}") == {"equivalent"}
