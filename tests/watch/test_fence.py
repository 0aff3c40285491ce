"""Whatever of a watch fails, the run goes on bit for bit, everything is put back, and the report says what failed."""

import inspect
import io
import json
import random
import threading
from contextlib import nullcontext
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import CodeType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from accumulation_harness import watch as package
from accumulation_harness.observe import tensors
from accumulation_harness.watch import averages, replay, report, session, sketch, track, watch
from accumulation_harness.watch.callbacks.kept import KeptWatch
from accumulation_harness.watch.compare import shown
from tests.observe.planting import IS_PART, failing, key, noting
from tests.slow import slow
from tests.watch.loops import CLASSES, FEATURES, Loop, is_same, network, objective, summed
from tests.watch.test_session import mean

FOLDER = Path(package.__file__).parent
SHARED = {"followed.py", "graph.py", "loop.py", "tensors.py"}  # with the audit; the others catch what fails
ASIDE = {"compare.py", "__main__.py"}  # no part of a watched run
BEFORE = {"_optimizers", "check", "Watch.__init__"}  # arguments are refused before there is a watch
WINDOWS, N, ROWS = 4, 2, 4


class Run:
    """All that a watch looks at: two optimizers, a loss scaler, clipping, a schedule, an average, a loader, three losses."""

    def __init__(self, *, wrong):
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

    def loss(self, window, model, x, y):
        if window % 3 == 0:
            return functional.cross_entropy(model(x), y)
        if window % 3 == 1:
            return functional.mse_loss(model(x), functional.one_hot(y, CLASSES).float())
        return -model(x).log_softmax(-1)[torch.arange(len(y)), y].mean()

    def train(self, hand_over, ran):
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

    def step(self, ran):
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

        def closure():
            loss = functional.cross_entropy(self.model(torch.ones(ROWS, FEATURES)), torch.arange(ROWS))
            (gradient,) = torch.autograd.grad(loss, [self.model[-1].bias])
            self.model[-1].bias.grad = gradient
            ran(self.head)
            return float(loss.detach())

        self.head.step(closure)

    def state(self):
        """All that the run has, to the bit."""
        kept = [t for o in (self.body, self.head) for s in o.state.values() for t in s.values() if isinstance(t, Tensor)]
        grads = [torch.zeros(1) if p.grad is None else p.grad for p in self.model.parameters()]
        tensors = [*self.model.state_dict().values(), *self.average.state_dict().values(), *kept, *grads, torch.rand(2)]
        return [*(t.detach().clone() for t in tensors), self.scaler.get_scale(), random.random(), np.random.rand()]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few tensors are many, and few objects all: a look at those of the process takes longer than the run."""
    monkeypatch.setattr(track, "MANY", 4)
    monkeypatch.setattr(session, "FIRST", 2)
    monkeypatch.setattr(averages, "gc", SimpleNamespace(get_objects=lambda: [torch.zeros(8, 8), nn.Parameter(torch.ones(8, 8))]))


@cache
def alone(*, wrong):
    """The state of a run that nobody watched."""
    run = Run(wrong=wrong)
    run.train(lambda _: None, lambda _: None)
    return run.state()


def replaced():
    model = nn.Linear(1, 1)
    places = watch(model, torch.optim.SGD(model.parameters()), tell=None).calls()
    return [vars(owner)[name] for owner, name in places]


def watched(folder, *, wrong, planted=None):
    """Watched with all options, and something planted from before `attach` until after `detach`."""
    run = Run(wrong=wrong)

    with planted or nullcontext():
        seen = watch(
            run.model, [run.body, run.head], loss=summed, every=3, log=lambda _: None, tell=io.StringIO(),
            path=folder / "run.json", accumulation_steps=N,
        )  # fmt: skip
        with seen:
            run.train(seen.batch, seen.closure_ran)
    state = run.state()
    assert not run.model._forward_hooks and not any(p._backward_hooks for p in run.model.parameters())
    assert not run.body._optimizer_step_pre_hooks and not run.head._optimizer_step_post_hooks
    return seen.report(folder / "run.md"), state


# -- every function ---------------------------------------------------------------------------------------------------


def is_observer(code):
    path = Path(code.co_filename)
    return (
        (path.parent == FOLDER or (path.parent.name == "observe" and path.parent.parent == FOLDER.parent and path.name in SHARED))
        and path.name not in ASIDE
        and code.co_qualname not in BEFORE
        and not IS_PART.search(code.co_qualname)
    )


@cache
def reached(*, wrong):
    """All functions that a watched run goes through."""
    found = set()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        watched(Path(folder), wrong=wrong, planted=noting(is_observer, found))
    return frozenset(found)


def fails(folder, target, event, *, wrong):
    before, fired = replaced(), []
    for kept in (report.versions, tensors._adds_nothing, sketch._signs):  # is not called again
        kept.cache_clear()
    said, state = watched(folder, wrong=wrong, planted=failing(target, event, fired, is_observer))
    assert replaced() == before, target
    assert is_same(state, alone(wrong=wrong)), target
    assert fired or event == "return", target
    if fired:
        assert said.verdict == "inconclusive", (target, str(said))
        assert "the watch ended at window " in said.reasons[0] and f"Planted: in {target[1]}" in said.reasons[0], (
            target,
            str(said),
        )


def test_a_watched_run_is_the_unwatched_one(tmp_path):
    for wrong in (False, True):
        said, state = watched(tmp_path, wrong=wrong)
        assert is_same(state, alone(wrong=wrong)) and not any("ended" in line for line in said.reasons), str(said)
    assert not is_same(alone(wrong=False), alone(wrong=True))


@pytest.mark.parametrize(("event", "each"), [("call", 24), slow("call", 1), slow("return", 1)])
def test_whatever_fails_the_run_goes_on(event, each, tmp_path):
    """In each function, or in a sample of them."""
    for wrong in (False, True):
        for target in sorted(reached(wrong=wrong) - (reached(wrong=False) if wrong else frozenset()))[::each]:
            fails(tmp_path, target, event, wrong=wrong)


def test_no_function_of_a_watch_is_missed_above():
    """But for those that only pages for an issue, other faults and several ranks go through."""
    everything = {
        key(code)
        for path in (*FOLDER.glob("*.py"), *(FOLDER.parent / "observe").glob("*.py"))
        for code in codes(path)
        if is_observer(code)
    }
    missed = everything - reached(wrong=False) - reached(wrong=True)
    assert len(missed) < 0.25 * len(everything), sorted(missed)


def codes(path):
    """Of all functions in a file."""
    waiting = [compile(path.read_text(), str(path), "exec")]
    while waiting:
        found = [const for const in waiting.pop().co_consts if isinstance(const, CodeType)]
        waiting += found
        yield from (code for code in found if code.co_flags & inspect.CO_NEWLOCALS)


# -- what the user hands over ------------------------------------------------------------------------------------------


def raising(*_, **__):
    raise OSError("no space left")


class Closed(io.StringIO):
    """A stream that is closed when a window has ended."""

    def write(self, text):
        raise ValueError("I/O operation on closed file.")


class Broken(nn.Module):
    """Raises in its second forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.forwards = network(), 0

    def forward(self, x):
        self.forwards += 1
        if self.forwards == 2:
            raise KeyError("of the model")
        return self.inner(x)


@pytest.mark.parametrize(
    ("options", "wrong", "told"),
    [
        ({"log": raising}, False, "the watch ended at window 1: OSError: no space left"),
        ({"tell": Closed()}, True, "the watch ended at window 2: ValueError: I/O operation on closed file."),
        ({"path": "/proc/run.json"}, False, "the watch ended at window 1: FileNotFoundError"),
    ],
)
def test_where_it_is_told_or_written_fails(options, wrong, told):
    make = lambda: Loop(loss=mean) if wrong else Loop()  # noqa: E731
    loop, other = make(), make()
    before = replaced()
    said = loop.watched(**options)
    other.run()
    assert replaced() == before and is_same(loop.weights, other.weights)
    assert said.verdict == "inconclusive" and told in said.reasons[0], str(said)


def test_an_exception_of_the_run_is_its_own():
    loop = Loop(model=Broken())
    before = replaced()
    with pytest.raises(KeyError, match="of the model") as raised, watch(loop.model, loop.optimizer, tell=None) as seen:
        loop.run()
    assert raised.traceback[-1].path.name == "test_fence.py" and replaced() == before
    assert not loop.model._forward_hooks and not any(p._backward_hooks for p in loop.model.parameters())
    assert not any("the watch ended" in line for line in seen.report().reasons)


def test_a_loss_that_fails_in_a_replay_is_the_users_and_all_else_is_ours(monkeypatch):
    def loss(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1].float()[:2])

    refused = [line for line in Loop().watched(loss=loss).reasons if line.startswith("replay: ")]
    assert refused and refused[0].startswith("replay: the loss handed over failed: ") and ".py:" not in refused[0]
    monkeypatch.setattr(replay, "_reversed", attrgetter("nothing"))
    ours = Loop().watched(loss=objective)
    assert "the watch ended at window 2: AttributeError" in ours.reasons[0], str(ours)


def test_threads_are_watched_by_themselves():
    loops, others = ([Loop(), Loop(loss=mean), Loop(), Loop(loss=mean)] for _ in range(2))
    said = {}

    def run(place):
        said[place] = loops[place].watched()

    before = replaced()
    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(loops))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replaced() == before
    assert [said[place].verdict for place in range(4)] == ["equivalent", "different"] * 2, said
    for loop, other in zip(loops, others, strict=True):
        other.run()
        assert is_same(loop.weights, other.weights)


def test_a_run_that_goes_on_in_another_thread_is_followed():
    loop = Loop(windows=[(4, 4)] * 8)
    with watch(loop.model, loop.optimizer, tell=None) as seen:
        thread = threading.Thread(target=loop.run)
        thread.start()
        thread.join()
    assert seen.report().verdict == "equivalent" and seen.report().windows == 7, str(seen.report())


@pytest.mark.parametrize("first", [0, 1])
def test_two_watches_end_in_any_order(first):
    loop = Loop(loss=mean, windows=[(5, 3, 4, 4)] * 2)
    before = replaced()
    seen = [watch(loop.model, loop.optimizer, tell=None).attach() for _ in range(2)]
    loop.run()
    seen[first].detach()
    loop.run()
    seen[1 - first].detach()
    assert replaced() == before and not loop.model._forward_hooks
    assert [seen[first].report().windows, seen[1 - first].report().windows] == [2, 4]
    assert all(one.report().causes == ("mean_of_means",) for one in seen)


def test_a_report_is_kept_while_the_run_goes_on(tmp_path):
    path, said = tmp_path / "run.json", []
    loop = Loop(windows=[(2, 2)] * 24)

    def look(loop):
        loop.optimizer.zero_grad()
        found = json.loads(path.read_text())
        said.append((found["verdict"], found["windows"]))
        assert f"{found['windows']} windows" in shown(path)

    loop.after_step = look
    assert f"{loop.watched(path=path)}\n" == shown(path)
    assert said[0] == ("inconclusive", 1) and said[2] == ("equivalent", 2) and said[-1] == ("equivalent", 16)
    assert json.loads(path.read_text())["windows"] == 24
    wrong = Loop(loss=mean).watched(path=path)
    assert f"{wrong}\n" == shown(path)
    path.write_text(json.dumps({"format": report.FORMAT}))
    with pytest.raises(ValueError, match="of which something is missing"):
        shown(path)
    with pytest.raises(ValueError, match="path: expected a name that ends in"):
        watch(loop.model, loop.optimizer, path="run.txt")
    for kind in (partial(watch, loop.model, loop.optimizer), KeptWatch):
        with pytest.raises(ValueError, match="path: expected a file in a folder that is there"):
            kind(path="no_such_folder/watch.json")


@pytest.mark.slow
def test_a_log_of_weights_and_biases_keeps_the_steps_of_the_loop(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []
    with wandb.init(mode="offline", dir=str(tmp_path)) as run:
        loop = Loop()

        def log(loop):
            loop.optimizer.zero_grad()
            run.log({"loss": float(loop.window)}, step=loop.window)
            assert run.step == loop.window  # a step that has passed would be dropped
            logged.append(run.summary.get("loss"))

        loop.after_step = log
        loop.watched(log=wandb.log)
        assert logged == [None, 0, 1, 2, 3, 4]
        run.log({"loss": 6.0}, step=6)  # which ends the row before
        assert (run.summary["loss"], run.summary["accumulation/loss_terms"]) == (5.0, 16)
