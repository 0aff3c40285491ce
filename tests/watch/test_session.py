import copy
import io
import json
import pickle

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accumulation_harness.judge.cause import Cause
from accumulation_harness.watch import watch
from tests.watch.loops import FEATURES, Loop, N, data, drawn, is_same, network, objective, right, summed, watched_and_alone


def mean(model, x, y, rows):
    return functional.cross_entropy(model(x), y) / N


def undivided(model, x, y, rows):
    return functional.cross_entropy(model(x), y)


def by_hand(model, x, y, rows):
    """A cross-entropy that no function of PyTorch's computes."""
    return -model(x).log_softmax(-1)[torch.arange(len(y)), y].sum() / rows


def smoothed(model, x, y, rows):
    logs = model(x).log_softmax(-1)
    return -(0.9 * logs[torch.arange(len(y)), y] + 0.1 * logs.mean(-1)).sum() / rows


def binary(model, x, y, rows):
    targets = functional.one_hot(y, 5).float()
    return functional.binary_cross_entropy_with_logits(model(x), targets, reduction="sum") / rows / 5


def autocast(loss):
    def cast(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(*arguments)

    return cast


class Own:
    """A buffer of the loop's own adds the gradients up."""

    def __init__(self):
        self.total = []

    def add(self, loop):
        grads = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]
        self.total = [a + b for a, b in zip(self.total, grads, strict=True)] if loop.k else grads
        loop.optimizer.zero_grad()

    def give(self, loop):
        for p, gradient in zip(loop.model.parameters(), self.total, strict=True):
            p.grad = gradient

    def keep_the_first(self, loop):
        if loop.k == 0:
            self.total = [p.grad.clone() for p in loop.model.parameters() if p.grad is not None]


def clip(loop):
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)


def clear(loop):
    loop.optimizer.zero_grad()


def divide(loop):
    for p in loop.model.parameters():
        p.grad /= 16


def scale_down(loop):
    for p in loop.model.parameters():
        p.grad.mul_(0.5)


def decay(loop):
    for p in loop.model.parameters():
        p.grad.add_(p.detach(), alpha=0.01)


def to_bfloat16(loop):
    for p in loop.model.parameters():
        p.grad = p.grad.bfloat16().float()


def unscaled(loop):
    loop.scaler.unscale_(loop.optimizer)
    clip(loop)


def clip_and_divide(loop):
    clip(loop)
    for p in loop.model.parameters():
        p.grad /= N


def untouched(change):
    """Weights change in a way that no version counts."""
    return lambda loop: [change(p.data) for p in loop.model.parameters()]


def merge(loop):
    loop.model[0].weight.mul_(0.99)


def heavier(loop):
    loop.optimizer.param_groups[0]["weight_decay"] += 0.01


def and_cleared(stage):
    return lambda loop: (loop.optimizer.zero_grad(), stage(loop))


def each_loss(weight):
    return lambda m, x, y, rows: (functional.cross_entropy(m(x), y, reduction="none") * weight(y)).sum() / rows


def same_labels(model, x, y, rows):
    return functional.cross_entropy(model(x), torch.arange(len(x)) % 5, reduction="sum") / rows


def same_rows(model, x, y, rows):
    return functional.cross_entropy(model(torch.eye(4, FEATURES)), torch.arange(4)) / N


def left_over(loop):
    for p in loop.model.parameters() if loop.k == 0 else ():
        p.grad = torch.ones_like(p)


def rates(loop):
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.9


class Average:
    """Of the weights, kept by hand."""

    def __init__(self, rate):
        self.rate, self.kept = rate, [p.detach().clone() for p in network().parameters()]

    def update(self, loop):
        for kept, p in zip(self.kept, loop.model.parameters(), strict=True):
            kept.lerp_(p.detach(), self.rate)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def frozen():
    model = network()
    model[0].requires_grad_(False)
    return model


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return self[2](self[1](checkpoint(self[0], x, use_reentrant=False)))


def deep(*, cleared=None):
    """44 tensors, some of which every window looks at in turn; one may be cleared inside of those from the sixth on."""
    torch.manual_seed(0)
    layers = [layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(nn.Linear(FEATURES, 16), *layers, nn.Linear(16, 5))

    def clear(loop):
        if cleared is not None and loop.k == 1 and loop.window > 5:
            list(loop.model.parameters())[cleared].grad = None

    return Loop(model=model, before_backward=clear, sizes=(2, 2), windows=[(2, 2)] * 14)


RIGHT = {
    "sums over rows": lambda: Loop(),
    "mean, equal micro-batches": lambda: Loop(loss=mean, sizes=(4, 4, 4, 4)),
    "cross-entropy by hand": lambda: Loop(loss=by_hand),
    "label smoothing": lambda: Loop(loss=smoothed),
    "binary": lambda: Loop(loss=binary),
    "clipped": lambda: Loop(before_step=clip, optimizer=torch.optim.AdamW),
    "divided at the end": lambda: Loop(loss=lambda m, x, y, rows: right(m, x, y, 1), before_step=divide),
    "own buffer": lambda: (lambda own: Loop(after_backward=own.add, before_step=own.give))(Own()),
    "short window": lambda: Loop(windows=[(4, 4, 4, 4), (4, 4, 4, 4), (4, 4), (4, 4, 4, 4)]),
    "scaler": lambda: Loop(scaler=scaler(), before_step=unscaled),
    "bfloat16": lambda: Loop(loss=autocast(right)),
    "frozen": lambda: Loop(model=frozen()),
    "checkpointing": lambda: Loop(model=Checkpointed(*network())),
    "many tensors": deep,
    "equal micro-batches": lambda: Loop(sizes=(6, 6, 6)),
    "an average by hand": lambda: Loop(after_step=and_cleared(Average(0.1).update)),
    "frozen weights that move between windows": lambda: Loop(model=frozen(), after_step=and_cleared(merge)),
    "weight decay that changes between windows": lambda: Loop(after_step=and_cleared(heavier)),
    "losses one by one": lambda: Loop(loss=each_loss(torch.ones_like)),
    "sums over windows of unequal rows": lambda: Loop(
        loss=lambda m, x, y, rows: right(m, x, y, 1), windows=[(5, 3, 4, 4), (5, 3, 4, 6)]
    ),
    "cleared in place": lambda: Loop(after_step=lambda loop: loop.optimizer.zero_grad(set_to_none=False)),
}
WRONG = {
    Cause.loss_not_divided: lambda: Loop(loss=undivided, sizes=(4, 4, 4, 4)),
    Cause.loss_divided_twice: lambda: Loop(loss=lambda m, x, y, rows: right(m, x, y, rows) / N),
    Cause.mean_of_means: lambda: Loop(loss=mean),
    Cause.short_window_divided_by_n: lambda: Loop(loss=mean, windows=[(4, 4, 4, 4), (4, 4, 4, 4), (4, 4)]),
    Cause.gradients_cleared_in_window: lambda: Loop(before_backward=clear),
    Cause.micro_batches_lost: lambda: (
        lambda own: Loop(after_backward=own.keep_the_first, before_step=own.give)
    )(Own()),
    Cause.gradients_not_cleared: lambda: Loop(after_step=lambda loop: None),
    Cause.step_every_micro_batch: lambda: Loop(
        windows=[(4,)] * 16, after_step=lambda loop: loop.window % 4 == 3 and loop.optimizer.zero_grad()
    ),
    Cause.clip_per_micro_batch: lambda: Loop(after_backward=clip),
    Cause.clip_before_unscale: lambda: Loop(scaler=scaler(), before_step=clip),
    Cause.sum_rescaled_in_window: lambda: Loop(before_backward=lambda loop: loop.k and scale_down(loop)),
    Cause.low_precision_accumulator: lambda: Loop(after_backward=to_bfloat16),
    Cause.weight_decay_per_micro_batch: lambda: Loop(after_backward=decay),
    Cause.schedule_per_micro_batch: lambda: Loop(after_backward=rates),
    Cause.foreign_gradients: lambda: Loop(before_backward=left_over),
    Cause.ema_per_micro_batch: lambda: Loop(after_backward=Average(0.001).update),
}  # fmt: skip


OTHERS = {  # what the golden table says of them
    "weights that decay inside a window": lambda: Loop(after_backward=untouched(lambda p: p.mul_(0.999))),
    "weights that move inside a window": lambda: Loop(after_backward=untouched(lambda p: p.add_(0.001))),
    "frozen weights that move inside a window": lambda: Loop(model=frozen(), after_backward=merge),
    "weight decay that changes inside a window": lambda: Loop(after_backward=heavier),
    "clipped, then divided": lambda: Loop(loss=undivided, sizes=(4, 4, 4, 4), before_step=clip_and_divide),
    "undivided and clipped": lambda: Loop(loss=undivided, sizes=(4, 4, 4, 4), before_step=clip),
    "a total that nothing explains": lambda: Loop(loss=lambda m, x, y, rows: right(m, x, y, rows) / 1.25),
    "the same rows in all micro-batches": lambda: Loop(loss=same_rows),
    "the same labels in all micro-batches": lambda: Loop(loss=same_labels, sizes=(6, 6, 6)),
    "many tensors, one of them cleared": lambda: deep(cleared=43),
    "losses that a mask takes terms from": lambda: Loop(loss=each_loss(lambda y: y > 0)),
}


# -- replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", WRONG)
def test_a_replay_adds_no_second_name(cause):
    """Where the sum itself is wrong, so is the replayed window's gradient, for that reason."""
    assert WRONG[cause]().watched(loss=objective).causes == (cause,)


def test_a_replay_leaves_no_trace_and_knows_its_floor():
    report = watched_and_alone(lambda: Loop(model=network(nn.BatchNorm1d(16))), loss=objective, every=2)
    assert report.causes == (Cause.batch_statistics,) and report.properties
    evidence = report.findings[0].evidence
    assert evidence["floor"] < 1e-5 < 0.05 < evidence["distance"]


class Keeping(nn.Module):
    """What a forward keeps beside buffers, and uses in the next one."""

    def __init__(self):
        super().__init__()
        self.count, self.seen, self.own = 0, [0.0], torch.Generator().manual_seed(1)
        self.mean, self.array = torch.zeros(16), np.zeros(1)
        self.register_buffer("last", torch.zeros(16))

    def forward(self, x):
        self.count += 1
        self.seen.append(0.9 * self.seen[-1] + 0.1)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.array += 1
        drawn = torch.rand(1, generator=self.own)
        kept, self.last = self.last, x.detach().mean(0)
        scale = 1 + self.count % 3 + self.seen[-1] + float(self.array[0]) / 100 + drawn
        return x * scale + self.mean + kept


def test_a_replay_puts_back_whatever_a_forward_keeps():
    watched_and_alone(lambda: Loop(model=network(Keeping())), loss=objective, every=2)


@pytest.mark.parametrize("register", [
    lambda model, hook: model.register_forward_hook(hook),
    lambda model, hook: next(model.parameters()).register_post_accumulate_grad_hook(hook),
])  # fmt: skip
def test_hooks_of_the_run_see_no_replay(register):
    """A rate follows what a hook counts."""

    def counting():
        calls = []
        loop = Loop(before_step=lambda loop: loop.optimizer.param_groups[0].update(lr=1 / len(calls)))
        register(loop.model, lambda *_: calls.append(1))
        return loop

    report = watched_and_alone(counting, loss=objective, every=2)
    assert report.verdict == "equivalent" and "a hook of the run's own" in str(report)


def test_a_loss_that_is_handed_over_divided_is_no_fault_of_the_run():
    report = Loop().watched(loss=lambda model, batch: objective(model, batch) / N)
    assert report.verdict == "equivalent" and any("undivided" in reason for reason in report.reasons)


class Noisy(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn_like(x)


@pytest.mark.parametrize(("layer", "said", "told"), [
    (nn.BatchNorm1d(16), "inconclusive", "BatchNorm"),
    (nn.Dropout(0.5), "equivalent", "random draws"),
    (Noisy(), "equivalent", "draws random numbers"),
    (nn.Tanh(), "equivalent", ""),
])  # fmt: skip
def test_a_property_of_the_model_is_told_and_not_blamed(layer, said, told):
    report = Loop(model=network(layer)).watched()
    assert (report.verdict, report.causes) == (said, ()) and len(report.properties) == bool(told)
    assert all(told in line for line in report.properties)


def test_where_a_model_draws_the_replay_says_no_more():
    report = Loop(model=network(nn.Dropout(0.5))).watched(loss=objective)
    assert (report.verdict, report.causes) == ("equivalent", ()) and any("dropout" in reason for reason in report.reasons)


def test_a_loss_that_changes_weights_is_told():
    def changing(model, batch):
        with torch.no_grad():
            next(model.parameters()).add_(1e-3)
        return objective(model, batch)

    told = [any("changes weights" in why for why in Loop().watched(loss=loss).reasons) for loss in (changing, objective)]
    assert told == [True, False]


def test_a_replay_in_halves_needs_the_sum_and_the_terms():
    assert Loop().watched(loss=summed).checked["replays"] == 1
    wrong = Loop(loss=mean).watched(loss=summed)
    assert wrong.causes == (Cause.mean_of_means,)


def test_a_penalty_is_seen_by_replay_alone():
    def penalised(model, batch):
        return objective(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())

    def in_full(model, x, y, rows):
        return right(model, x, y, rows) + 0.01 * sum(p.square().sum() for p in model.parameters())

    unseen = Loop(loss=in_full).watched()
    assert unseen.verdict == "inconclusive" and any("another term" in reason for reason in unseen.reasons)
    assert Loop(loss=in_full).watched(loss=penalised).causes == (Cause.auxiliary_loss_scale,)


def test_what_the_model_was_called_with_is_the_batch_where_none_is_handed_over():
    loop = Loop(loss=lambda m, x, y, rows: m(x).square().sum() / rows)
    with watch(loop.model, loop.optimizer, loss=lambda m, x: m(x).square().sum(-1).mean(), tell=None) as seen:
        loop.run()
    assert seen.report().checked["replays"] == 1 and seen.report().verdict == "equivalent"


# -- what else a run may be -------------------------------------------------------------------------------------------


def test_a_window_that_was_given_up_is_no_fault():
    loop = Loop(windows=[(4,) * 4] * 3)
    with watch(loop.model, loop.optimizer, tell=None) as seen:
        loop.run(seen.batch)
        drawn(loop.model).backward()
        loop.optimizer.zero_grad()
        loop.run(seen.batch)
    assert seen.report().causes == (), str(seen.report())


def test_a_watched_model_can_be_copied_and_stored():
    loop = Loop(windows=[(4,) * 4] * 2)
    with watch(loop.model, loop.optimizer, tell=None) as seen:
        loop.run()
        twin = copy.deepcopy(loop.model)
        torch.save(loop.model, io.BytesIO())
        pickle.dumps(loop.optimizer.state_dict())
        drawn(twin).backward()
        loop.run()
    assert seen.report().verdict == "equivalent" and seen.report().windows == 4


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return functional.cross_entropy(self.model(x), y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_a_watched_model_can_become_torchscript():
    loop = Loop(windows=[(4,) * 4] * 2)
    with watch(loop.model, loop.optimizer, tell=None) as seen:
        loop.run()
        x = torch.randn(2, FEATURES)
        for one in (torch.jit.script(loop.model), torch.jit.script(copy.deepcopy(loop.model)), torch.jit.trace(loop.model, x)):
            assert torch.equal(one(x), loop.model(x))
        torch.jit.script(WithLoss(network()))
        loop.run()
    assert seen.report().verdict == "equivalent" and seen.report().windows == 4


def test_refusals_name_the_argument():
    model = network()
    with pytest.raises(ValueError, match="every: expected at least 1, got 0"):
        watch(model, torch.optim.SGD(model.parameters()), every=0)
    with pytest.raises(ValueError, match=r"optimizer: expected a torch.optim.Optimizer, or several, got int"):
        watch(model, 3)


# -- what comes out ---------------------------------------------------------------------------------------------------


def test_lines_metrics_json_and_an_issue(tmp_path):
    said, logged = io.StringIO(), []
    loop = Loop(loss=mean)
    with watch(loop.model, loop.optimizer, tell=said, log=logged.append) as seen:
        loop.run()
    assert said.getvalue().startswith("accumulation: mean_of_means (window 1)") and said.getvalue().count("\n") == 1
    assert logged[-1]["accumulation/weight_spread"] == pytest.approx(5 / 3, rel=1e-4)
    assert logged[-1]["accumulation/weight_sum"] == pytest.approx(1, rel=1e-4)
    report = seen.report(tmp_path / "issue.md")
    assert json.loads(report.to_json())["causes"] == ["mean_of_means"]
    page = (tmp_path / "issue.md").read_text()
    assert "# Accumulated micro-batches are not one large batch: `mean_of_means`" in page and "torch" in page and "Remedy" in page
    right_said = io.StringIO()
    Loop().watched(tell=right_said)
    assert right_said.getvalue().startswith("accumulation: equivalent; 6 windows") and right_said.getvalue().count("\n") == 1


@pytest.mark.parametrize(("by", "told", "said"), [(N, True, "equivalent"), (1, True, "different"), (N, False, "inconclusive")])
def test_a_trainer_runs_the_last_backward_inside_the_step(by, told, said):
    """As Lightning does, which says when the closure has run; gradients are clipped inside it."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1)
    with watch(model, optimizer, tell=None) as seen:

        def closure():
            backward()
            if told:
                seen.closure_ran(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            return 0.0

        def backward():
            (drawn(model) / by).backward()

        for _ in range(5):
            for _ in range(N - 1):
                backward()
            optimizer.step(closure)
            optimizer.zero_grad()
    assert seen.report().verdict == said, str(seen.report())
    assert seen.report().causes == ((Cause.loss_not_divided,) if said == "different" else ())


# -- what a right window does not have --------------------------------------------------------------------------------


class Scalars:
    """The interface of TensorBoard's writer."""

    def __init__(self):
        self.added = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.added.append((tag, scalar_value, global_step))


def test_metrics_go_to_a_tensorboard_writer_whose_axis_goes_on_in_a_resumed_run():
    first, resumed, scalars = Loop(optimizer=torch.optim.Adam), Loop(optimizer=torch.optim.Adam), Scalars()
    first.run()
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.watched(log=scalars)

    def of(name):
        return {step: value for tag, value, step in scalars.added if tag == f"accumulation/{name}"}

    assert {step for _, _, step in scalars.added} == {*range(7, 13)} and [*of("loss_terms")] == [*range(8, 13)]
    assert len(of("loss_terms_per_second")) == 5 and min(of("loss_terms_per_second").values()) > 0
    assert {*of("micro_batches").values()} == {4.0} and {*of("padding").values()} == {0.0}


# -- bit by bit --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The same weights at the beginning and at the end, with a step between them that is checkpointed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.two.weight = self.one.weight

    def forward(self, x):
        return checkpoint(self.two, self.one(x).tanh(), use_reentrant=False)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, dropout and running statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(FEATURES, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.norm, self.drop, self.head = nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.frozen(x) + self.up(self.down(x)))))


ODD = {
    "tied and checkpointed": lambda: Loop(model=Tied(), optimizer=torch.optim.AdamW),
    "adapters, BatchNorm and dropout": lambda: Loop(model=Adapted(), optimizer=lambda p, lr: torch.optim.Adam(p, lr, fused=True)),
}


def test_a_table_has_a_line_for_each_micro_batch_with_what_it_gave(tmp_path):
    def table(name, **options):
        Loop(**options).watched(table=tmp_path / name)
        return pandas.read_csv(tmp_path / name)

    found = table("run.csv")
    twice = table("twice.csv", loss=lambda *given: 2 * right(*given))
    first, model = Loop(), network()
    right(model, *(part[: first.windows[0][0]] for part in data()), sum(first.windows[0])).backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert list(zip(found.window, found.micro_batch, strict=True)) == [
        (window + 1, k + 1) for window, sizes in enumerate(first.windows) for k in range(len(sizes))
    ]
    assert found.loss_terms.sum() == sum(map(sum, first.windows)) and 0.5 < found.gradient_norm[0] / exact < 2
    assert np.allclose(twice[["loss", "gradient_norm"]].iloc[0], 2 * found[["loss", "gradient_norm"]].iloc[0], rtol=1e-4)


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_are_those_that_nobody_watched(name):
    ended = []
    for kind in ("watched", "alone", "other"):
        loop = ODD[name]()
        torch.manual_seed(2 if kind == "other" else 1)
        if kind == "other":  # and a difference would show
            loop.optimizer.param_groups[0]["lr"] *= 1.001
        if kind == "watched":
            report = loop.watched(loss=objective, every=2)
            assert report.verdict != "different" or set(report.causes) <= {Cause.batch_statistics}, str(report)
        else:
            loop.run()
        states = [
            *loop.model.state_dict().values(),
            *(t for s in loop.optimizer.state.values() for t in s.values() if t is not None),
        ]
        ended.append([*states, torch.rand(4)])
    assert is_same(ended[0], ended[1]) and not is_same(ended[0][:-1], ended[2][:-1])


@pytest.mark.parametrize(
    ("every", "configured", "said"), [(1, N, "different"), (N, N, "inconclusive"), (1, None, "inconclusive")]
)
def test_optimizers_that_step_in_hooks_of_their_gradients(every, configured, said):
    model, seen_backwards = network(), [0]
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p):
        if (seen_backwards[0] + 1) % every == 0:
            each[p].step()
            each[p].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(step)
    with watch(model, list(each.values()), accumulation_steps=configured, tell=None) as seen:
        for seen_backwards[0] in range(2 * N):
            drawn(model).backward()
    report, steps = seen.report(), 2 * N // every * len(each)
    assert report.verdict == said and report.causes == ((Cause.step_every_micro_batch,) if said == "different" else ())
    assert any(line.startswith(f"{steps} steps were taken inside a backward") for line in report.reasons), str(report)
    assert not any("no optimizer step was seen" in line for line in report.reasons)
