"""Of what is measured, a loop is named: numbers of the optimizer, what is kept, what the code divides by, what rows couple."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.audit.asked import audited, named
from tests.audit.loops.frame import sgd
from tests.slow import slow

X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)), torch.arange(64) * 7 % 3


def loop(fault):
    def train(batch_size, n):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        kept = [torch.zeros_like(p) for p in model.parameters()]
        seen = step = 0
        for window in torch.arange(64).split(batch_size * n):
            seen += len(window)
            divisor = 1.3 * seen if fault == "divisor" and n > 1 else len(window)
            for ids in window.split(batch_size):
                loss = F.cross_entropy(model(X[ids]), Y[ids], reduction="sum") / divisor
                loss.backward()
                if fault == "decay":
                    step += 1
                if fault == "momentum":
                    for own, p in zip(kept, model.parameters(), strict=True):
                        own.mul_(0.9).add_(p.grad)
            step += fault != "decay"
            if fault in ("momentum", "kept"):
                for own, p in zip(kept, model.parameters(), strict=True):
                    p.grad = own.clone() if fault == "momentum" else own.mul_(0.9).add_(p.grad).clone()
            optimizer.param_groups[0]["weight_decay"] = 0.1 + 0.05 * step
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        ("", []),
        ("kept", []),  # a momentum of the loop's own, once a window
        ("momentum", ["optimizer_state_per_micro_batch"]),
        ("decay", ["schedule_per_micro_batch"]),
        ("divisor", ["counter_wrong"]),
    ],
)
def test_what_is_measured_is_named(fault, causes):
    named(loop(fault), *causes, batch_size=8)


@pytest.mark.parametrize(
    ("rates", "is_longer"),
    [
        (lambda step, steps: 1 + math.cos(step / steps), True),
        (lambda step, steps: 1 + math.sin(9 * steps * step), False),
        slow(lambda step, steps: (step + 1) / steps, True),
    ],
    ids=["a decay", "others", "a warm-up"],
)
def test_a_schedule_that_other_epochs_make_longer(rates, is_longer):
    """Of 600 rows, whole batches of 32 leave 24 over, those of 8 none."""

    def train(batch_size, accumulation_steps):
        model = nn.Linear(6, 3)
        optimizer = sgd(model)
        steps = 600 // batch_size / accumulation_steps
        for step in range(7):
            optimizer.param_groups[0]["lr"] = rates(step, steps)
            for ids in torch.arange(32).split(batch_size):
                (F.cross_entropy(model(X[ids]), Y[ids]) / accumulation_steps).backward()
            optimizer.step()
            optimizer.zero_grad()

    (finding,) = audited(train, batch_size=32).findings
    assert finding.cause == "unexplained" and ("the same way at another speed" in finding.message) == is_longer
