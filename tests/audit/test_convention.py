"""What a function means by its two numbers, and what its evaluations draw, is seen and said; a fault stays one."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from tests.audit.asked import audited, named
from tests.audit.loops.frame import At, sgd
from tests.slow import slow

X, Y = torch.randn(48, 5, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3
WHOLE, EVALUATION = "batch_size is the whole batch here", "evaluation draws from the random numbers"


def linear():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    return model, sgd(model)


def step(model, optimizer, parts, divisor):
    for part in parts:
        (cross_entropy(model(X[part]), Y[part]) / divisor).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_batch(divide=True, steps_per_epoch=None):
    def train(batch_size, accumulation_steps):
        made = linear()
        if batch_size < accumulation_steps:
            raise ValueError(f"batch_size={batch_size} is less than accumulation_steps={accumulation_steps}")
        for rows in torch.arange(48).split(batch_size)[:steps_per_epoch]:
            step(*made, rows.split(batch_size // accumulation_steps), accumulation_steps if divide else 1)

    return train


def evaluating(divide=True, uses_eval=True):
    def train(batch_size, accumulation_steps):
        model, optimizer = linear()
        for _ in range(3):
            model.train(not uses_eval)
            with torch.no_grad():
                model(X[torch.randint(48, (batch_size,))])
            model.train()
            parts = (torch.randint(48, (batch_size,)) for _ in range(accumulation_steps))
            step(model, optimizer, parts, accumulation_steps if divide else 1)

    return train


@pytest.mark.parametrize(
    ("train", "steps", "causes", "said"),
    [
        (whole_batch(divide=False), (4,), ["loss_not_divided"], WHOLE),
        slow(whole_batch(divide=False), (2, 4), ["loss_not_divided"], WHOLE),
        (whole_batch(), (16,), [], WHOLE),
        slow(whole_batch(steps_per_epoch=1), (4,), [], WHOLE),
        (evaluating(), (4,), [], EVALUATION),
        slow(evaluating(divide=False), (4,), ["loss_not_divided"], EVALUATION),
        (evaluating(uses_eval=False), (4,), ["stochastic_layers"], ""),
    ],
)
def test_the_function_is_understood(train, steps, causes, said):
    report = named(train, *causes, accumulation_steps=steps)
    assert [note[: len(said)] for note in report.notes] == [said] * bool(said)


def test_an_error_of_another_kind_is_none_of_the_convention():
    def train(batch_size, accumulation_steps):
        if accumulation_steps > 1:
            raise ValueError("no")
        whole_batch()(batch_size, accumulation_steps)

    report = audited(train, accumulation_steps=(16,))
    assert report.verdict == "inconclusive" and not report.notes and "ValueError: no" in report.problems[0]


SENTENCES = [torch.randint(2, 20, (2 + 7 * k % 13,), generator=torch.Generator().manual_seed(k)) for k in range(48)]


def padded(filler, time_first, divisor):
    """Each micro-batch is padded to its longest sentence; what the model is given has lost the last element of that one."""

    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(20, 4), torch.nn.Linear(4, 20))
        for _, cut in At(batch_size, accumulation_steps, model, sgd(model)).windows(torch.arange(48).split):
            parts = [pad_sequence([SENTENCES[k] for k in part], True, filler) for part in cut]
            terms = [(rows[:, 1:] != filler).sum() for rows in parts]
            for rows, own in zip(parts, terms, strict=True):
                given, wanted = (rows.T[:-1], rows.T[1:]) if time_first else (rows[:, :-1], rows[:, 1:])
                outputs = model(given).flatten(0, 1)
                summed = cross_entropy(outputs, wanted.flatten(), ignore_index=filler, reduction="sum")
                (summed / (sum(terms) if divisor == "window" else own * len(parts))).backward()

    return train


@pytest.mark.parametrize(
    ("filler", "time_first"),
    [slow(0, False), slow(1, False), (1, True)],
)
@pytest.mark.parametrize(("divisor", "causes"), [("window", []), ("micro-batch", ["mean_of_means"])])
def test_a_sequence_is_known_however_far_it_is_padded(filler, time_first, divisor, causes):
    named(padded(filler, time_first, divisor), *causes)


@pytest.mark.parametrize(("divide", "causes"), [(True, []), (False, ["loss_not_divided"])])
def test_losses_that_are_added_up_without_a_module_accumulate(divide, causes):
    def train(batch_size, accumulation_steps):
        weight = torch.zeros(5, 3, requires_grad=True)
        at = At(batch_size, accumulation_steps, None, torch.optim.SGD([weight], lr=0.1))
        for _, parts in at.windows(torch.arange(48).split):
            losses = [cross_entropy(X[part] @ weight, Y[part]) for part in parts]
            (sum(losses) / (accumulation_steps if divide else 1)).backward()

    named(train, *causes)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_misplaced_window_hides_no_schedule_of_before():
    def train(batch_size, accumulation_steps):
        model, optimizer = linear()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        parts = [part for _ in range(3) for part in torch.randperm(40).split(batch_size)]
        for count, part in enumerate(parts, start=1):
            (cross_entropy(model(X[part]), Y[part]) / accumulation_steps).backward()
            if count % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()

    named(train, "window_misplaced", "schedule_per_micro_batch")
