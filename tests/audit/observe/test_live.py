"""One optimizer as it is watched: what each backward found and gave, what is kept, and what an intervention puts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from accumulation_harness.audit.evidence import Intervention, Run, Start
from accumulation_harness.audit.observe.live import KEPT, LONGEST
from accumulation_harness.audit.observe.recorder import Recorder
from accumulation_harness.audit.observe.starts import COLLINEAR
from accumulation_harness.audit.observe.tensors import vector

X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 7 - 0.5


def gradients(parameters: list[nn.Parameter]) -> np.ndarray:
    return vector(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)


def watched(train: Callable[[nn.Linear, torch.optim.SGD], None], intervention: Intervention | None = None) -> Run:
    run = Run(batch_size=4, accumulation_steps=1)
    with Recorder(run, intervention or Intervention()):
        torch.manual_seed(0)
        model = nn.Linear(3, 2, dtype=torch.float64)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run


Change = Callable[[nn.Linear], object]


def turned(share: float) -> Change:
    """Turns every gradient until 1 - cosine is this share of `COLLINEAR`."""

    def change(model: nn.Linear) -> None:
        for p in model.parameters():
            assert p.grad is not None
            across = torch.randn_like(p.grad)
            across -= p.grad * (across * p.grad).sum() / p.grad.square().sum()
            p.grad += across * p.grad.norm() / across.norm() * (2 * share * COLLINEAR) ** 0.5

    return change


def halved(model: nn.Linear) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= 0.5


CHANGES: list[tuple[Start, Change]] = [
    ("kept", lambda model: None),
    ("cleared", lambda model: model.zero_grad()),
    ("scaled", halved),
    ("scaled", turned(0.9)),
    ("changed", turned(1.1)),
]


@pytest.mark.parametrize(("start", "change"), CHANGES)
def test_a_backward_tells_what_it_found(start: Start, change: Change) -> None:
    given: list[np.ndarray] = []

    def train(model: nn.Linear, optimizer: torch.optim.SGD) -> None:
        parameters = list(model.parameters())
        model(X[:2]).square().sum().backward()
        given.append(gradients(parameters))
        change(model)
        given.append(gradients(parameters))
        model(X[2:]).square().sum().backward()
        given.append(gradients(parameters))
        optimizer.step()

    (step,) = watched(train).tracks[0].steps
    first, second = step.backwards
    assert (first.start, second.start) == ("empty", start)
    np.testing.assert_array_equal(first.contribution, given[0])
    np.testing.assert_array_equal(second.contribution, given[2] - given[1])
    assert second.emptied == (frozenset({0, 1}) if start == "cleared" else frozenset())
    assert np.isfinite(second.rescaled) == (start == "scaled")
    if start == "scaled":
        assert second.rescaled == pytest.approx(np.linalg.norm(given[1]))


def test_a_returned_gradient_is_found_nowhere() -> None:
    def train(model: nn.Linear, optimizer: torch.optim.SGD) -> None:
        grads = torch.autograd.grad(model(X).square().sum(), list(model.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()

    (step,) = watched(train).tracks[0].steps
    assert [b.start for b in step.backwards] == ["manual"]
    np.testing.assert_array_equal(step.backwards[0].contribution, step.gradient)


def steps_of(lengths: list[int], keep: frozenset[int] = frozenset()) -> list[bool]:
    """Per step, whether the contributions of its window were kept."""

    def train(model: nn.Linear, optimizer: torch.optim.SGD) -> None:
        for length in lengths:
            for _ in range(length):
                model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    (track,) = watched(train, Intervention(keep=keep)).tracks
    return [all(b.contribution is not None for b in step.backwards) for step in track.steps]


def test_contributions_of_a_few_windows_are_kept() -> None:
    assert steps_of([1] * (KEPT + 2)) == [True] * KEPT + [False] * 2
    assert steps_of([1] * (KEPT + 2), frozenset({KEPT + 1})) == [True] * KEPT + [False, True]
    assert steps_of([1] * KEPT + [2] * (KEPT + 1)) == [True] * 2 * KEPT + [False]  # as many with another number of backwards


def test_calls_of_a_window_end_somewhere() -> None:
    def train(model: nn.Linear, optimizer: torch.optim.SGD) -> None:
        for _ in range(LONGEST):
            optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()

    (step,) = watched(train).tracks[0].steps
    assert step.calls == ("zero_grad",) * LONGEST and len(step.backwards) == 1


def descends(model: nn.Linear, optimizer: torch.optim.SGD) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()


def faster(model: nn.Linear, optimizer: torch.optim.SGD) -> None:
    optimizer.param_groups[0]["lr"] = 0.05
    descends(model, optimizer)


def test_an_intervention_puts_other_weights() -> None:
    reference = watched(descends)
    theirs = reference.tracks[0].steps
    followed = watched(faster, Intervention(follow=reference)).tracks[0].steps
    for mine, wanted in zip(followed, theirs, strict=True):
        np.testing.assert_array_equal(mine.before, wanted.before)
        np.testing.assert_array_equal(mine.gradient, wanted.gradient)
        np.testing.assert_allclose(mine.after - mine.before, 0.5 * (wanted.after - wanted.before), rtol=1e-12)
    frozen = watched(descends, Intervention(freeze_weights=True)).tracks[0].steps
    assert all((step.before == theirs[0].before).all() for step in frozen)
    perturbed = watched(descends, Intervention(perturb=1e-3)).tracks[0].steps[0]
    np.testing.assert_allclose(np.abs(perturbed.before / theirs[0].before - 1), 1e-3, rtol=1e-10)


def test_what_was_watched_is_what_happened() -> None:
    seen: list[np.ndarray] = []

    def train(model: nn.Linear, optimizer: torch.optim.SGD) -> None:
        seen.append(vector(list(model.parameters())))
        descends(model, optimizer)
        seen.append(vector(list(model.parameters())))

    (track,) = watched(train).tracks
    np.testing.assert_array_equal(track.steps[0].before, seen[0])
    np.testing.assert_array_equal(track.steps[-1].after, seen[1])
    assert track.start is not None and (track.start == seen[0]).all() and track.place == 0
