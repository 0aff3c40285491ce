"""Watching changes nothing, bad input is told plainly, and the optional parameters do what they promise."""

import copy
import itertools
import sys
from functools import partial

import pytest
import torch
from torch import nn

from accumulation_harness.audit import audit, request
from accumulation_harness.audit.evidence import Run
from accumulation_harness.audit.observe.recorder import Recorder
from accumulation_harness.judge.cause import Cause
from scoreboard import data
from tests.audit.asked import audited, named
from tests.audit.loops import habits
from tests.audit.loops.frame import TOKENS, X, divided, mean_over_window, sgd, train
from tests.audit.loops.right_loops import RIGHT, adamw_clipped, sgd_mean_over_window, tokens_weighted
from tests.audit.loops.wrong_loops import dropout, not_divided


def shown_first(batch_size, accumulation_steps):
    """A model that is called for its shapes before there is an optimizer; the loss is not divided."""
    model = data.model()
    model(X[:2])
    train(batch_size, accumulation_steps, model, divided(mean_over_window, 1 / accumulation_steps))


def hooks():
    """Everything that watching replaces or adds, as it is now."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    run = Run(batch_size=1, accumulation_steps=1)
    recorder = Recorder(run)
    replaced = [getattr(owner, name) for owner, name in {**recorder.observed.calls(), **recorder._layers.wraps()}]
    assert len(replaced) == 29
    imported = [sys.modules["tests.audit.loops.right_loops"].__dict__["clip_grad_norm_"]]
    counts = [len(module._global_forward_hooks), len(module._global_forward_pre_hooks), bool(module._has_any_global_hook())]
    counts += [len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)]
    return [*replaced, *imported, *counts]


def final_weights(train):
    """Bits of all parameters that an optimizer of this call ever held, after it."""
    kept = []
    original = torch.optim.Optimizer.add_param_group

    def keep(optimizer, group):
        original(optimizer, group)
        kept.extend(optimizer.param_groups[-1]["params"])

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setattr(torch.optim.Optimizer, "add_param_group", keep)
        train()
    return [p.detach().clone() for p in kept]


@pytest.mark.parametrize("train", [*RIGHT, dropout, not_divided], ids=lambda f: f.__name__)
def test_a_watched_run_is_bit_identical_to_an_unwatched_one(train):
    plain = final_weights(lambda: train(4, 4))
    run = Run(batch_size=4, accumulation_steps=4)
    with Recorder(run, namespaces=[train.__globals__]):
        seen = final_weights(lambda: train(4, 4))
    assert len(plain) == len(seen) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert run.num_steps > 0


def test_hooks_are_taken_away_afterwards_also_after_an_exception():
    before = hooks()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    report = audited(sgd_mean_over_window, max_steps=6)
    assert hooks() == before and torch.equal(torch.rand(4), expected), "no random numbers are drawn"
    gates = report.frame.groupby("arithmetic").gate.max()
    assert report.equivalent and set(gates.index) == {"as trained", "float64"}
    assert gates["float64"] < 1e-13 < 1e-7 < gates["as trained"] < 1e-4
    assert not any("ended there" in line for line in report.hidden), "it ended by itself"

    def fails(batch_size, accumulation_steps):
        adamw_clipped(batch_size, accumulation_steps)
        raise KeyError("no such thing")

    report = audit(fails, batch_size=8, accumulation_steps=(2,))
    assert hooks() == before
    assert "KeyError" in report.problems[0] and report.verdict == "inconclusive"
    with pytest.raises(KeyboardInterrupt):
        audit(_interrupts, batch_size=8, accumulation_steps=(2,))
    assert hooks() == before


def _interrupts(batch_size, accumulation_steps):
    raise KeyboardInterrupt


# -- bad input --------------------------------------------------------------------------------------------------------


def _one_step(outputs=data.CLASSES, seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(data.FEATURES, outputs)
    optimizer = sgd(model)
    model(X).square().sum().backward()
    optimizer.step()


def _never_steps(batch_size, accumulation_steps):
    data.model()(X).sum().backward()


def _does_nothing(batch_size, accumulation_steps):
    """As a function that trains in another process looks from here."""


SEEDS = itertools.count()


def _random(batch_size, accumulation_steps):
    _one_step(seed=next(SEEDS))


def _shape_depends(batch_size, accumulation_steps):
    _one_step(outputs=batch_size)


def _raises_late(batch_size, accumulation_steps):
    steps = itertools.count()

    def fails():
        if next(steps) == 3 and accumulation_steps > 1:
            raise RuntimeError("out of luck")

    train(batch_size, accumulation_steps, data.model(), before_step=fails)


def _seed_depends(batch_size, accumulation_steps):
    torch.manual_seed(accumulation_steps)
    train(batch_size, accumulation_steps, nn.Linear(data.FEATURES, data.CLASSES))


def _overflows(batch_size, accumulation_steps):
    train(batch_size, accumulation_steps, data.model(), divided(mean_over_window, 0.0))


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (_seed_depends, "starts from other weights than N=1"),
        (_overflows, "not finite after optimizer step"),
        (_never_steps, "no step of a torch.optim optimizer"),
        (_does_nothing, "in the calling process"),
        (_random, "not deterministic"),
        (_shape_depends, "must not depend on the arguments"),
        (_raises_late, "RuntimeError: out of luck"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_bad_input_is_told_plainly(train, words):
    report = audited(train)
    assert any(words in problem for problem in report.problems), report.problems
    assert report.verdict == "inconclusive" and report.exit_code == 2 and not report.findings
    assert words in " ".join(str(report).split())
    if train is _raises_late:  # evidence of what came before is kept
        assert "after 3 optimizer steps" in report.problems[0] and sorted(report.frame.optimizer_step.unique()) == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"accumulation_steps": (3,)}, "divide batch_size=16, got 3"),
        ({"accumulation_steps": ()}, "got none"),
        ({"accumulation_steps": 4.0}, r"as \(4, 16\), got 4.0"),
        ({"accumulation_steps": (True,)}, "got True"),
        ({"max_steps": 0}, "max_steps as a whole number of 1 or more, got 0"),
        ({"batch_size": "16"}, "batch_size as a whole number of 1 or more, got '16'"),
        ({"train": None}, "got None"),
        ({"train": lambda batch_size: None}, r"expected train\(batch_size, accumulation_steps\), got train\(batch_size\)"),
        ({"reference": lambda batch_size, accumulation_steps, lr: None}, "expected reference.* lr"),
    ],
)
def test_what_cannot_be_run_raises(given, words):
    with pytest.raises(ValueError, match=words):
        audit(**{"train": sgd_mean_over_window, "batch_size": 16, "accumulation_steps": (4,), **given})


def _endless(batch_size, accumulation_steps):
    """With a new optimizer for every two epochs, of six steps each."""
    model = data.model()
    while True:
        train(batch_size, accumulation_steps, model)


def test_a_run_without_an_end_is_ended():
    told = []
    report = audited(_endless, max_steps=7, progress=told.append)
    assert report.equivalent and len(report.frame[report.frame.tensor == "all"]) == 7
    assert any("7 optimizer steps: runs are ended there" in line for line in report.hidden)
    assert told[0] == "run 1: N=1" and any("weights moved by a rounding" in line for line in told)
    assert any("of 6 optimizer steps agree" in line or "of 7 optimizer steps agree" in line for line in told)


def _left_over(batch_size, accumulation_steps, warm_up=None):
    """Without an end: rows that fill no window leave their gradients to the next epoch."""
    torch.manual_seed(0)
    model = nn.Linear(X.shape[1], 3)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / warm_up) if warm_up else 1.0)
    for _ in range(1000):
        for i, rows in enumerate(torch.split(X[:39], batch_size)):
            (model(rows).square().mean() / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def test_a_script_is_run_into_its_second_epoch():
    report = audit(_left_over, batch_size=4, accumulation_steps=(4,), max_steps=None)
    assert {(f.cause, f.optimizer_step) for f in report.findings} == {("window_misplaced", 9)}, str(report)
    assert request.FEW_STEPS < 9 and len(report.steps) == 10 + 2, "and two windows of the next epoch"


def test_a_warm_up_that_counts_from_1_is_laid_out_for_micro_batches():
    def train(batch_size, accumulation_steps):
        _left_over(batch_size, accumulation_steps, warm_up=20 * accumulation_steps)

    named(train, "schedule_per_micro_batch", batch_size=39, accumulation_steps=(3,), max_steps=12)


def _divergence(batch_size, accumulation_steps, threshold):
    """A loss of three terms: rows, a divergence clamped at 0, and one with the coefficient 0."""
    model, reference = data.model(), data.model()

    def loss(model, ids, window):
        outputs = model(X[ids])
        apart = (outputs - reference(X[ids]).detach()).square().mean(1)
        rows = mean_over_window(model, ids, window)
        return rows + 0.1 * (apart - threshold).clamp(min=0).sum() / len(window) + 0.0 * outputs.sum()

    train(batch_size, accumulation_steps, model, loss)


def test_terms_of_the_loss_without_a_gradient_are_told():
    """At rest the divergence is below its threshold, at work above it."""
    for threshold, silent in ((100.0, ["term 2 of 3 of the loss (Clamp)", "term 3 of 3"]), (0.0, ["term 3 of 3"])):
        report = audited(partial(_divergence, threshold=threshold))
        told = [line for line in report.hidden if "gave no gradient" in line]
        assert report.equivalent and all(map(str.startswith, told, silent)) and len(told) == len(silent), told
        (listed,) = [note for note in report.notes if "3 terms of the loss" in note]
        assert ("> Clamp, weight 0.0125) 0.0%" in listed) == (len(silent) == 2), listed
        assert "Mul by 0.1 > " in listed and listed.endswith("weight 0) 0.0%"), listed


# -- optional parameters ------------------------------------------------------------------------------------------------


def _miscounts(batch_size, accumulation_steps):
    """Padding counts as tokens, at every N alike."""
    model = data.language_model()

    def loss(model, ids, window):
        return data.token_loss(model(TOKENS[ids]), TOKENS[ids]) / TOKENS[window][:, 1:].numel()

    train(batch_size, accumulation_steps, model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3))


def test_a_fault_that_is_the_same_at_every_n_shows_against_a_reference():
    named(_miscounts)
    report = audited(_miscounts, reference=tokens_weighted)
    assert {f.accumulation_steps for f in report.findings} == {1, 4}
    named(tokens_weighted, reference=tokens_weighted)


def test_what_could_not_be_seen_is_said():
    hidden = " ".join(audited(not_divided).hidden)
    assert "every window is full" in hidden and "inputs of one size" in hidden and "constant" in hidden
    for loop in (tokens_weighted, habits.padded_vectors):
        seen = " ".join(audited(loop).hidden)
        assert "every window is full" not in seen and "inputs of one size" not in seen


def test_another_program_s_optimizer_is_no_part_of_it():
    """The function runs a forward before it makes its own; the other one's model has the same shapes."""
    model = data.model()
    optimizer = sgd(model)
    before = [p.detach().clone() for p in model.parameters()]
    named(shown_first, "loss_not_divided")
    assert all(torch.equal(p, own) for p, own in zip(model.parameters(), before, strict=True)) and optimizer.state == {}


@pytest.mark.parametrize("is_divided", [True, False])
def test_an_optimizer_of_before_the_call_is_the_function_s_own_where_it_uses_it(is_divided):
    """Beside somebody else's, which is older and has the same shapes."""
    other, model = data.model(), data.model()
    kept = sgd(other), sgd(model)
    start = copy.deepcopy(model.state_dict())

    def trained(batch_size, accumulation_steps):
        model.load_state_dict(start)
        kept[1].zero_grad()
        loss = divided(mean_over_window, 1 if is_divided else 1 / accumulation_steps)
        train(batch_size, accumulation_steps, model, loss, kept[1])

    named(trained, *[] if is_divided else ["loss_not_divided"])
    assert all(torch.equal(p, start[name]) for name, p in other.named_parameters())


@pytest.mark.parametrize(("repeat", "cause"), [(1, Cause.window_misplaced), (2, Cause.samples_repeated)])
def test_rows_that_come_again_because_the_runs_were_ended_are_not_repeated(repeat, cause):
    """Micro-batches that are left at the end of an epoch belong to the next window: the runs do not end at the same row."""

    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        rows, model = torch.randn(12 if repeat == 1 else 16, 3), nn.Linear(3, 1)
        optimizer = sgd(model, 0.01)
        for _ in range(9):
            for count, part in enumerate(rows.split(batch_size), start=1):
                for _ in range(repeat if accumulation_steps > 1 else 1):
                    (model(part).square().mean() / accumulation_steps).backward()
                if count % accumulation_steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    named(train, cause, batch_size=8, accumulation_steps=(2,), max_steps=4)
