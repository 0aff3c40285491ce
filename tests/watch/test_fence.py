"""Whatever of a watch fails, the run goes on bit for bit, everything is put back, and the report says what failed."""

from __future__ import annotations

import inspect
import io
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from accumulation_harness import watch as package
from accumulation_harness.watch import Report, averages, report, session, sketch, track, watch
from tests.watch.loops import CLASSES, FEATURES

FOLDER = Path(package.__file__).parent
KERNEL = {"fence.py"}  # what catches the others
ASIDE = {"compare.py", "__main__.py"}  # no part of a watched run
BEFORE = {"watch", "_optimizers", "Watch.__init__"}  # arguments are refused before there is a watch
IS_PART = re.compile(r"<(listcomp|setcomp|dictcomp|genexpr|module)>$")  # of the function around it
WINDOWS, N, ROWS = 4, 2, 4
Key = tuple[str, str, int]  # file, qualified name, first line of a function


class Run:
    """All that a watch looks at: two optimizers, a loss scaler, clipping, a schedule, an average, a loader, three losses."""

    def __init__(self, *, wrong: bool) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        )
        self.body = torch.optim.AdamW(self.model[:-1].parameters(), lr=1e-2)
        self.head = torch.optim.SGD(self.model[-1].parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.body, 1.0, 0.5, total_iters=WINDOWS)
        self.average = AveragedModel(self.model)
        rows = WINDOWS * N * ROWS
        data = TensorDataset(torch.randn(rows, FEATURES), torch.randint(0, CLASSES, (rows,)))
        self.loader, self.wrong = DataLoader(data, batch_size=ROWS), wrong

    def loss(self, window: int, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if window % 3 == 0:
            return functional.cross_entropy(model(x), y)
        if window % 3 == 1:
            return functional.mse_loss(model(x), functional.one_hot(y, CLASSES).float())
        return -model(x).log_softmax(-1)[torch.arange(len(y)), y].mean()

    def train(self, hand_over: Callable[[Any], Any], ran: Callable[[Any], Any]) -> None:
        for step, (x, y) in enumerate(self.loader):
            window, k = divmod(step, N)
            hand_over((x, y))
            if self.wrong and window > 1 and k:
                self.head.zero_grad()
                self.scaler.unscale_(self.body)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
            self.scaler.scale(self.loss(window, self.model, x, y) / (1 if self.wrong else N)).backward()
            if k == N - 1:
                self.step(ran)

    def step(self, ran: Callable[[Any], Any]) -> None:
        if not self.wrong:
            self.scaler.unscale_(self.body)
            self.scaler.unscale_(self.head)
            nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.scaler.step(self.body)
        self.scaler.step(self.head)
        self.scaler.update()
        self.body.zero_grad()
        self.head.zero_grad()
        self.schedule.step()
        self.average.update_parameters(self.model)

        def closure() -> float:
            loss = functional.cross_entropy(self.model(torch.ones(ROWS, FEATURES)), torch.arange(ROWS))
            (gradient,) = torch.autograd.grad(loss, [self.model[-1].bias])
            self.model[-1].bias.grad = gradient
            ran(self.head)
            return float(loss.detach())

        self.head.step(closure)

    def state(self) -> list[Any]:
        """All that the run has, to the bit."""
        kept = [t for o in (self.body, self.head) for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
        grads = [torch.zeros(1) if p.grad is None else p.grad for p in self.model.parameters()]
        tensors = [*self.model.state_dict().values(), *self.average.state_dict().values(), *kept, *grads, torch.rand(2)]
        return [*(t.detach().clone() for t in tensors), self.scaler.get_scale(), random.random(), np.random.rand()]


def is_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tensors are many, and few objects all: a look at those of the process takes longer than the run."""
    monkeypatch.setattr(track, "MANY", 4)
    monkeypatch.setattr(session, "FIRST", 2)
    monkeypatch.setattr(averages, "gc", SimpleNamespace(get_objects=lambda: [torch.zeros(8, 8), nn.Parameter(torch.ones(8, 8))]))


@cache
def alone(*, wrong: bool) -> list[Any]:
    """The state of a run that nobody watched."""
    run = Run(wrong=wrong)
    run.train(lambda _: None, lambda _: None)
    return run.state()


def replaced() -> list[Any]:
    model = nn.Linear(1, 1)
    places = watch(model, torch.optim.SGD(model.parameters()), tell=None)._seen()
    return [vars(owner)[name] for owner, name in places]


def watched(folder: Path, *, wrong: bool, planted: Any = None) -> tuple[Report, list[Any]]:
    """Watched with all options, and something planted from before `attach` until after `detach`."""
    run = Run(wrong=wrong)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    with planted or nullcontext():
        seen = watch(
            run.model, [run.body, run.head], loss=loss, every=3, log=lambda _: None, tell=io.StringIO(),
            path=folder / "run.json", accumulation_steps=N,
        )  # fmt: skip
        with seen:
            run.train(seen.batch, seen.closure_ran)
    state = run.state()
    assert not run.model._forward_hooks and not any(p._backward_hooks for p in run.model.parameters())
    assert not run.body._optimizer_step_pre_hooks and not run.head._optimizer_step_post_hooks
    return seen.report(folder / "run.md"), state


# -- every function ---------------------------------------------------------------------------------------------------


class Planted(RuntimeError):
    """What fails."""


def key(code: CodeType) -> Key:
    return Path(code.co_filename).name, code.co_qualname, code.co_firstlineno


@contextmanager
def tracing(trace: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def is_observer(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return (
        path.parent == FOLDER
        and path.name not in KERNEL | ASIDE
        and code.co_qualname not in BEFORE
        and not IS_PART.search(code.co_qualname)
    )


@cache
def reached(*, wrong: bool) -> frozenset[Key]:
    """All functions that a watched run goes through."""
    found: set[Key] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if is_observer(frame.f_code):
            found.add(key(frame.f_code))

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        watched(Path(folder), wrong=wrong, planted=tracing(note))
    return frozenset(found)


def failing(target: Key, event: str) -> Any:
    """That function raises as it is called, or as it returns, once."""

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        if key(frame.f_code) != target or not is_observer(frame.f_code):
            return None
        if what == event:
            raise Planted(f"in {target[1]}")
        frame.f_trace_lines = False
        return trace

    trace.__code__ = trace.__code__.replace(co_filename="<planted>")  # or this file would be what has failed
    return tracing(trace)


def fails(folder: Path, target: Key, event: str, *, wrong: bool) -> None:
    before = replaced()
    for kept in (report.versions, sketch._adds_nothing):  # is not called again
        kept.cache_clear()
    said, state = watched(folder, wrong=wrong, planted=failing(target, event))
    assert replaced() == before, target
    assert is_same(state, alone(wrong=wrong)), target
    assert said.verdict == "inconclusive", (target, str(said))
    assert "the watch ended at window " in said.reasons[0] and f"Planted: in {target[1]}" in said.reasons[0], (target, str(said))


def test_a_watched_run_is_the_unwatched_one(tmp_path: Path) -> None:
    for wrong in (False, True):
        said, state = watched(tmp_path, wrong=wrong)
        assert is_same(state, alone(wrong=wrong)) and not any("ended" in line for line in said.reasons), str(said)
    assert not is_same(alone(wrong=False), alone(wrong=True))


@pytest.mark.parametrize("event", ["call", pytest.param("return", marks=pytest.mark.slow)])
def test_whatever_fails_the_run_goes_on(event: str, tmp_path: Path) -> None:
    for wrong in (False, True):
        for target in sorted(reached(wrong=wrong) - (reached(wrong=False) if wrong else frozenset())):
            fails(tmp_path, target, event, wrong=wrong)


def test_no_function_of_a_watch_is_missed_above() -> None:
    """But for those that only a page for an issue, other faults and several ranks go through."""
    everything = {key(code) for path in FOLDER.glob("*.py") for code in codes(path) if is_observer(code)}
    missed = everything - reached(wrong=False) - reached(wrong=True)
    assert len(missed) < 0.2 * len(everything), sorted(missed)


def codes(path: Path) -> Iterator[CodeType]:
    """Of all functions in a file."""
    waiting = [compile(path.read_text(), str(path), "exec")]
    while waiting:
        found = [const for const in waiting.pop().co_consts if isinstance(const, CodeType)]
        waiting += found
        yield from (code for code in found if code.co_flags & inspect.CO_NEWLOCALS)
