"""Of what is measured, a loop is named: numbers of the optimizer, what is kept, what the code divides by, what rows couple."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from accumulation_harness.audit import audit

X, Y = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)), torch.arange(64) * 7 % 3


class Remembering(nn.Sequential):
    """It adds to the outputs the mean of those before."""

    last = 0.0

    def forward(self, x):
        out = super().forward(x)
        out, self.last = out + self.last, out.detach().mean(0)
        return out


def loop(fault):
    def train(batch_size, n):
        torch.manual_seed(0)
        model = (Remembering if fault == "memory" else nn.Sequential)(nn.Linear(6, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        kept = [torch.zeros_like(p) for p in model.parameters()]
        seen = step = 0
        for window in torch.arange(64).split(batch_size * n):
            seen += len(window)
            divisor = 1.3 * seen if fault == "divisor" and n > 1 else len(window)
            for ids in window.split(batch_size):
                loss = F.cross_entropy(model(X[ids]), Y[ids], reduction="sum") / divisor
                (loss.log() * len(ids) / len(window) if fault == "mean" else loss).backward()
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
        ("", set()),
        ("kept", set()),  # a momentum of the loop's own, once a window
        ("momentum", {"optimizer_state_per_micro_batch"}),
        ("decay", {"schedule_per_micro_batch"}),
        ("divisor", {"counter_wrong"}),
        pytest.param("mean", {"non_separable_loss"}, marks=pytest.mark.slow),
        pytest.param("memory", {"stateful_forward"}, marks=pytest.mark.slow),
    ],
)
def test_what_is_measured_is_named(fault, causes):
    report = audit(loop(fault), batch_size=8, accumulation_steps=(4,))
    assert {str(f.cause) for f in report.findings} == causes
    assert report.equivalent is not bool(causes)


@pytest.mark.parametrize(
    ("rates", "is_longer"),
    [
        (lambda step, steps: 1 + math.cos(step / steps), True),
        (lambda step, steps: 1 + math.sin(9 * steps * step), False),
        pytest.param(lambda step, steps: (step + 1) / steps, True, marks=pytest.mark.slow),
    ],
    ids=["a decay", "others", "a warm-up"],
)
def test_a_schedule_that_other_epochs_make_longer(rates, is_longer):
    """Of 600 rows, whole batches of 32 leave 24 over, those of 8 none."""

    def train(batch_size, accumulation_steps):
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = 600 // batch_size / accumulation_steps
        for step in range(7):
            optimizer.param_groups[0]["lr"] = rates(step, steps)
            for ids in torch.arange(32).split(batch_size):
                (F.cross_entropy(model(X[ids]), Y[ids]) / accumulation_steps).backward()
            optimizer.step()
            optimizer.zero_grad()

    (finding,) = audit(train, batch_size=32, accumulation_steps=(4,)).findings
    assert finding.cause == "unexplained" and ("the same way at another speed" in finding.message) == is_longer
