"""What a function means by its two numbers, and what its evaluations draw, is seen and said; a fault stays one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from accumulation_harness.audit import audit

X, Y = torch.randn(96, 5, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 3
WHOLE, EVALUATION = "batch_size is the whole batch here", "evaluation draws from the random numbers"


def whole_batch(divide=True, steps_per_epoch=None):
    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        micro_batch = batch_size // accumulation_steps
        if not micro_batch:
            raise ValueError(f"batch_size={batch_size} is less than accumulation_steps={accumulation_steps}")
        for rows in torch.arange(96).split(batch_size)[:steps_per_epoch]:
            for part in rows.split(micro_batch):
                (cross_entropy(model(X[part]), Y[part]) / (accumulation_steps if divide else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def evaluating(divide=True, uses_eval=True):
    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.train(not uses_eval)
            with torch.no_grad():
                model(X[torch.randint(96, (batch_size,))])
            model.train()
            for _ in range(accumulation_steps):
                part = torch.randint(96, (batch_size,))
                (cross_entropy(model(X[part]), Y[part]) / (accumulation_steps if divide else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


@pytest.mark.parametrize(
    ("train", "steps", "causes", "said"),
    [
        (whole_batch(), (2, 4), set(), WHOLE),
        (whole_batch(divide=False), (2, 4), {"loss_not_divided"}, WHOLE),
        (whole_batch(), (16,), set(), WHOLE),
        (whole_batch(steps_per_epoch=1), (4,), set(), WHOLE),
        (evaluating(), (4,), set(), EVALUATION),
        (evaluating(divide=False), (4,), {"loss_not_divided"}, EVALUATION),
        (evaluating(uses_eval=False), (4,), {"stochastic_layers"}, ""),
    ],
)
def test_the_function_is_understood(train, steps, causes, said):
    report = audit(train, batch_size=16, accumulation_steps=steps)
    assert {finding.cause for finding in report.findings} == causes and not report.problems, str(report)
    assert [note[: len(said)] for note in report.notes] == [said] * bool(said)


def test_an_error_of_another_kind_is_none_of_the_convention():
    def train(batch_size, accumulation_steps):
        if accumulation_steps > 1:
            raise ValueError("no")
        whole_batch()(batch_size, accumulation_steps)

    report = audit(train, batch_size=16, accumulation_steps=(16,))
    assert report.status == "inconclusive" and not report.notes and "ValueError: no" in report.problems[0]
