"""Whatever of the audit's observer fails, the observed function goes on bit for bit, and the run says what failed, as ours."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import accumulation_harness.audit.observe.torch_run  # noqa: F401 (else the first run imports it, and what it defines counts as called)
from accumulation_harness.audit import audit, observe
from accumulation_harness.audit.evidence import Intervention
from accumulation_harness.audit.observe import frames, places, variables
from accumulation_harness.audit.observe.handed import OBSERVER, Most
from accumulation_harness.audit.observe.runs import Job, watch
from accumulation_harness.observe import tensors
from tests.observe.planting import IS_PART, failing, noting

FOLDER = Path(observe.__file__).parent
OF_RUNS = {
    "adapters.py",
    "pooling.py",
    "ranks.py",
    "recorded.py",
    "runs.py",
    "torch_run.py",
}  # call the function
SHARED = {"followed.py", "graph.py", "loop.py", "tensors.py"}  # with the watch; the others catch what fails
# What is called before there is a run as well, and what only counts its steps.
OUTSIDE = {"__init__", "__enter__", "__exit__", "_put_back", "_ended", "_before_step", "_after_step"}
OUTSIDE |= {"count_step", "look_whether_over"}
OUTSIDE |= {"_is_stepping", "_noting_owner", "_any_reached", "calls", "clear", "reset", "returned", "seen", "stop", "wraps"}
OF_GRAPHS = {"graph.py", "loss_graph.py"}  # a graph that cannot be walked shows nothing, and is no failure
OF_PROBES = {"by_position", "looked_at", "is_plain", "_adds_nothing"}  # likewise: called for them first
PROBED = Intervention(leads=True, probe=1, terms=1)

KEPT = []


def train(batch_size, accumulation_steps):
    """Two optimizers, a loss scaler, clipping, a schedule, a penalty, and gradients that are returned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.LSTM(8, 8, num_layers=2, dropout=0.1))
    head = nn.Linear(8, 3)
    body, last = torch.optim.AdamW(model.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)
    schedule, scaler = torch.optim.lr_scheduler.StepLR(body, 1), torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    for _ in range(2):
        for _ in range(accumulation_steps):
            z = head(model(torch.randn(batch_size, 6))[0])
            loss = functional.cross_entropy(z, torch.randint(0, 3, (batch_size,))) + 1e-3 * z.square().mean()
            scaler.scale(loss / accumulation_steps).backward()
            losses.append(float(loss.detach()))
        scaler.unscale_(body)
        nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 1.0)
        scaler.step(body)
        scaler.step(last)
        scaler.update()
        schedule.step()
        body.zero_grad()
        head.zero_grad()
        given = torch.autograd.grad(head(torch.ones(2, 8)).square().mean(), list(head.parameters()))
        for p, gradient in zip(head.parameters(), given, strict=True):
            p.grad = gradient
        last.step()
    KEPT.append([p.detach().clone() for p in (*model.parameters(), *head.parameters())])
    return losses


def is_observer(code):
    path = Path(code.co_filename)
    ours = (path.parent == FOLDER and path.name not in OF_RUNS) or (
        path.parent == FOLDER.parents[1] / "observe" and path.name in SHARED
    )
    return ours and code.co_qualname.rpartition(".")[2] not in OUTSIDE and not IS_PART.search(code.co_qualname)


def observed(what, planted):
    KEPT.clear()
    with planted:
        run = watch(train, Job(batch_size=4, accumulation_steps=2, intervention=what, most=Most(20)), collect=False)
    assert KEPT, run.error
    (weights,) = KEPT
    return run.error, weights


@cache
def reached(what):
    found = set()
    error, _ = observed(what, noting(is_observer, found))
    assert error is None
    return frozenset(found)


def fails(target, event):
    fired = []
    remembered = (variables.places, frames._owner, places._places, tensors._adds_nothing)
    for kept in remembered:  # is not called again
        kept.cache_clear()
    error, weights = observed(PROBED, failing(target, event, fired, is_observer))
    assert fired or event == "return", target
    if fired and not (error is None and (target[0] in OF_GRAPHS or target[1] in OF_PROBES)):
        assert error.startswith(OBSERVER) and f"Planted: in {target[1]}" in error, (target, error)
    assert all(torch.equal(a, b) for a, b in zip(weights, alone(), strict=True)), target


@cache
def alone():
    KEPT.clear()
    with torch.random.fork_rng():
        train(4, 2)
    return KEPT[0]


def test_whatever_fails_the_function_goes_on():
    functions = sorted(reached(PROBED))
    assert len(functions) > 100
    for target in functions[::24]:
        fails(target, "call")


@pytest.mark.slow
@pytest.mark.parametrize("event", ["call", "return"])
def test_every_function_that_fails(event):
    for target in sorted(reached(PROBED)):
        if event == "call" or target[0] != "layers.py":  # which give back what they have called: nothing is left to fail
            fails(target, event)


def test_a_failure_is_told_as_the_audits_own(monkeypatch):
    monkeypatch.setattr("accumulation_harness.audit.observe.live._sum", lambda parts: parts.nothing)
    report = audit(train, batch_size=4, accumulation_steps=(2,))
    assert not report.equivalent and "the audit's own observer ended at window 1: AttributeError" in str(report)
    assert "function raised" not in str(report)
