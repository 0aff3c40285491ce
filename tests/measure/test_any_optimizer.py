"""Optimizers of every kind: right accumulation is exact beside the twin, and what a window does wrong is seen."""

import dataclasses
import threading
from collections import deque

import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accumulation_harness.config import ConfigError
from accumulation_harness.judge.diagnosis import diagnose
from accumulation_harness.judge.gates import ALGEBRA_GATE
from accumulation_harness.judge.verdict import algebra_failures
from accumulation_harness.measure import lock_step, poison
from accumulation_harness.measure.algebra import measure
from accumulation_harness.measure.lock_step import REFERENCE, LockStep, Setting
from accumulation_harness.measure.optimizer_state import copied, optimizer_state
from accumulation_harness.measure.training import outcome
from accumulation_harness.measure.trial import accumulated, permuted, reference
from accumulation_harness.recipes.faults import (
    loss_not_divided,
    non_finite_micro_batch,
    optimizer_state_per_micro_batch,
    step_every_micro_batch,
)
from accumulation_harness.recipes.recipe import evaluated, set_mode, take_step
from accumulation_harness.referee.gradients import flatten
from tests.slow import one_in
from tests.toy import CPU, Toy
from tests.trials import trial

CONFIG = trial("effective_batch=12 accumulation_steps=[3] steps=6 split=ragged")


class Perceptron(Toy):
    """The toy with two layers and a parameter that no output depends on, which never has a gradient."""

    has_vectors = True

    def make_model(self):
        layers = nn.Sequential(nn.Linear(5, 6, bias=self.has_vectors), nn.Tanh(), nn.Linear(6, 3, bias=self.has_vectors))
        layers.register_parameter("unused", nn.Parameter(torch.ones(2, 2)))
        return layers


class Matrices(Perceptron):
    """Without biases: Muon takes nothing else."""

    has_vectors = False


class Odd(Optimizer):
    """State of every kind (attributes, also of parameters, lists, queues, numbers, text, nothing, for no parameter).

    It overwrites its gradients.
    """

    def __init__(self, groups, lr, beat=2):
        super().__init__(groups, {"lr": lr, "beat": beat})
        self.count, self.history, self.told = 0, deque[float](maxlen=3), "nothing"
        self.generator = torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        whole = self.state["all"]
        whole["norms"] = [
            *whole.get("norms", []),
            float(sum(p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None)),
        ]
        self.history.append(whole["norms"][-1])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["sums"] = [a + 1 for a in state.get("sums", [0, 0.5])]
                state["nothing"], state["name"] = None, "p"
                state["last"] = {"gradient": p.grad.clone(), "scale": float(p.grad.abs().max())}
                p.grad.mul_(1 + self.count % group["beat"]).div_(1 + sum(self.history) + state["sums"][1])
                noise = torch.randn(p.shape, generator=self.generator, dtype=p.dtype) + torch.randn(p.shape, dtype=p.dtype)
                kept = vars(p).setdefault("kept", torch.zeros_like(p)).mul_(0.5).add_(p.grad)
                p.add_(kept + 1e-2 * noise, alpha=-group["lr"])


class Both(Optimizer):
    """Muon for the matrices and AdamW for the rest, as scripts write it: one optimizer that holds two."""

    def __init__(self, groups, lr):
        everything = [p for group in groups for p in group["params"]]
        self.held = [
            torch.optim.Muon([p for p in everything if p.dim() == 2], lr=lr),
            torch.optim.AdamW([p for p in everything if p.dim() != 2], lr=lr, weight_decay=0.1),
        ]
        super().__init__(everything, {"lr": lr})
        self.param_groups = [group for each in self.held for group in each.param_groups]

    def step(self, closure=None):
        for each in self.held:
            each.step()


def torchs(name, **options):
    return lambda groups: getattr(torch.optim, name)(groups, lr=0.01, **options)


def theirs(name, **options):
    return lambda groups: getattr(pytorch_optimizer, name)(groups, lr=0.01, **options)


MAKERS = {
    "AdamW": torchs("AdamW"),
    "Nesterov": torchs("SGD", momentum=0.9, nesterov=True, weight_decay=0.01),
    "a rate that is a tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01), foreach=False),
    "Adafactor": torchs("Adafactor"),
    "Muon": torchs("Muon"),
    **{name: theirs(name) for name in ("Lion", "Lamb", "LARS")},
    "SOAP, often": theirs("SOAP", precondition_frequency=1),
    "Lookahead": lambda groups: pytorch_optimizer.Lookahead(torch.optim.SGD(groups, lr=0.01, momentum=0.9), k=2),
    "schedule-free SGD": lambda groups: schedulefree.SGDScheduleFree(groups, lr=0.1, weight_decay=0.1),
    "of one's own": lambda groups: Odd(groups, lr=0.05),
    "two in one": lambda groups: Both(groups, lr=0.01),
}
MORE = {
    **{name: torchs(name) for name in ("SGD", "Adam", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "ASGD", "Adamax")},
    "AMSGrad": torchs("Adam", amsgrad=True, weight_decay=0.01),
    **{name: theirs(name) for name in ("SOAP", "Shampoo", "Prodigy", "AdEMAMix", "ScheduleFreeAdamW")},
    "schedule-free AdamW": lambda groups: schedulefree.AdamWScheduleFree(groups, lr=0.01, foreach=False),
}
OVERWRITTEN = ("Rprop", "ASGD")  # what they keep takes no part in the next step, or by its sign alone


def setting_of(monkeypatch, make, toy=Perceptron, *options):
    """Of a trial with that optimizer; its parameters are in two groups without names, which may have `options`."""
    own = options or ({}, {})

    def make_optimizer(_, parameters):
        everything = list(parameters)
        half = len(everything) // 2
        made = make([{"params": everything[:half], **own[0]}, {"params": everything[half:], **own[1]}])
        set_mode(made, "train")
        return made

    monkeypatch.setattr(lock_step, "make_workload", lambda config, *, device, dtype: toy(dtype))
    monkeypatch.setattr(lock_step, "make_optimizer", make_optimizer)
    return Setting(CONFIG, CPU)


def after_each(change):
    """Something is done after every backward."""
    return lambda recipe: dataclasses.replace(recipe, after_backward=(change,))


def takes_a_step_more(arm):
    """The state moves after the window's first backward; weights and gradients are put back."""
    if arm.position == 0:
        kept = [(p, p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in arm.model.parameters()]
        arm.optimizer.step()
        for p, value, gradient in kept:
            p.data.copy_(value)
            p.grad = gradient


def loses_state(arm):
    """In the second window one entry is halved; a counter of the user's own goes one further."""
    if (arm.windows, arm.position) != (1, 0):
        return
    if isinstance(arm.optimizer, Odd):
        arm.optimizer.count += 1
        return
    states = [state for one in (arm.optimizer, *getattr(arm.optimizer, "held", ())) for state in one.state.values()]
    members = [each for state in states for value in state.values() for each in (value if isinstance(value, list) else [value])]
    next(each for each in members if isinstance(each, Tensor) and each.dim() and each.count_nonzero()).mul_(0.5)


RIGHT, FLOOR = "right", "floor"
CHANGES = {
    RIGHT: lambda recipe: recipe,
    "loss_not_divided": loss_not_divided,
    "step_every_micro_batch": step_every_micro_batch,
    "optimizer_state_per_micro_batch": after_each(takes_a_step_more),
    "unexplained": after_each(loses_state),
}


def judged(setting, changes):
    recipes = {REFERENCE: reference(CONFIG), FLOOR: permuted(CONFIG, 0)}
    recipes |= {name: change(accumulated(CONFIG, 3)) for name, change in changes.items()}
    return measure(setting, recipes, list(setting.windows()), FLOOR)


def assert_exact(found):
    assert not algebra_failures(found.algebra) and not found.counters
    assert found.signature.probes and found.signature.update.length == 0, found.signature.update
    assert not any(found.signature.state_errors.values()), found.signature.state_errors


def causes(found):
    assert not found.signature.is_exact or found.counters
    return tuple(map(str, diagnose(found.signature, found.counters).causes))


@pytest.mark.parametrize("name", one_in(3, [*MAKERS, *MORE]))
def test_right_accumulation_is_exact_and_a_fault_is_told(monkeypatch, name):
    setting = setting_of(monkeypatch, {**MAKERS, **MORE}[name], Matrices if name == "Muon" else Perceptron)
    changes = {cause: change for cause, change in CHANGES.items() if cause != "unexplained" or name != "SGD"}
    found = judged(setting, changes)
    for label in (RIGHT, FLOOR, *(["unexplained"] if name in OVERWRITTEN else [])):
        assert_exact(found.pop(label))
    for cause, wrong in found.items():
        assert causes(wrong) == (cause,), wrong.signature


def decays_state(optimizer, factors):
    for state in optimizer.state.values():
        for name, factor in factors.items():
            state[name].mul_(factor)


@pytest.mark.parametrize(
    ("make", "factors"),
    [
        (theirs("Lion", betas=(0.9, 0.95)), {"exp_avg": 0.95}),
        (torchs("SGD", momentum=0.8, weight_decay=0.1), {"momentum_buffer": 0.8}),
        (torchs("Adam", betas=(0.9, 0.95), weight_decay=0.1), {"exp_avg": 0.9, "exp_avg_sq": 0.95}),
    ],
    ids=["Lion", "SGD", "Adam"],
)
def test_state_that_decays_for_every_micro_batch_is_named(monkeypatch, make, factors):
    """As gradients of zero would make it, whatever an optimizer calls its moments; by another factor nothing explains it."""

    def decay(factors):
        return after_each(lambda arm: decays_state(arm.optimizer, factors) if arm.position else None)

    other = {name: 0.99 * factor for name, factor in factors.items()}
    found = judged(setting_of(monkeypatch, make), {"right": lambda recipe: recipe, "own": decay(factors), "other": decay(other)})
    assert_exact(found["right"])
    assert causes(found["own"]) == ("optimizer_state_per_micro_batch",) and found["own"].signature.advanced_error <= ALGEBRA_GATE
    assert causes(found["other"]) == ("unexplained",) and found["other"].signature.advanced_error > 1e-3


@pytest.mark.parametrize("name", ["Adafactor", "NAdam", "schedule-free AdamW"])
def test_state_that_is_advanced_by_hand_in_part_is_named(monkeypatch, name):
    """The catalogue's fault reaches only the count (Adafactor), count and moments (NAdam), or only moments (schedule-free)."""

    def otherwise(arm):
        for state in arm.optimizer.state.values() if arm.position else ():
            for entry in state.values():
                entry.add_(1 if entry.dim() == 0 else 1e-3)

    changes = {RIGHT: CHANGES[RIGHT], "fault": optimizer_state_per_micro_batch, "other": after_each(otherwise)}
    found = judged(setting_of(monkeypatch, {**MAKERS, **MORE}[name]), changes)
    assert_exact(found[RIGHT])
    assert causes(found["fault"]) == ("optimizer_state_per_micro_batch",)
    assert causes(found["other"]) == ("unexplained",) and found["other"].signature.advanced_error > 1e-6


def test_a_planted_advance_takes_the_first_two_of_several_betas(monkeypatch):
    found = judged(setting_of(monkeypatch, MORE["AdEMAMix"]), {"fault": optimizer_state_per_micro_batch})
    assert causes(found["fault"]) == ("optimizer_state_per_micro_batch",)


def test_each_group_decays_and_steps_by_its_own(monkeypatch):
    def decay(of):
        def act(arm):
            for group in arm.optimizer.param_groups if arm.position else ():
                for p in group["params"]:
                    p.data.mul_(1 - group["lr"] * of(group))

        return after_each(act)

    options = {"lr": 0.05, "weight_decay": 0.2}, {"lr": 0.01, "weight_decay": 0.0}
    changes = {"right": lambda recipe: recipe, "own": decay(lambda group: group["weight_decay"]), "all": decay(lambda group: 0.2)}
    found = judged(setting_of(monkeypatch, torchs("AdamW"), Perceptron, *options), changes)
    assert_exact(found["right"])
    assert causes(found["own"]) == ("weight_decay_per_micro_batch",)
    assert causes(found["all"]) == ("unexplained",), "the second group has no decay"


def test_gradients_that_an_optimizer_overwrites_are_compared_as_they_were(monkeypatch):
    """Also where they are too many to be copied into one vector."""

    class Wide(Toy):
        def make_model(self):
            return nn.Sequential(nn.Linear(5, 12_000), nn.Tanh(), nn.Linear(12_000, 3))

    setting = setting_of(monkeypatch, lambda groups: Odd(groups, lr=1e-3), Wide)
    right = accumulated(CONFIG, 3)
    lock = LockStep(setting.arms({REFERENCE: reference(CONFIG), "right": right, "wrong": loss_not_divided(right)}), 0)
    records = lock.step(next(setting.windows()), gradients="compared")
    assert records[REFERENCE].gradient_distance == 0 and records[REFERENCE].scale == pytest.approx(1)
    assert records["right"].gradient_distance < 1e-5 and records["right"].scale == pytest.approx(1, abs=1e-5)
    assert records["wrong"].scale > 2.5


def step_with(optimizer, parameters):
    torch.manual_seed(1)
    for p in parameters:
        p.grad = torch.cos(p.detach())
    optimizer.step()


def test_what_is_no_number_is_left_out_and_what_cannot_be_copied_is_said():
    p = nn.Parameter(torch.ones(2))
    optimizer = Odd([{"params": [p], "beat": 3}], lr=0.1)
    step_with(optimizer, [p])
    assert optimizer_state(optimizer, [p]).keys() == {"sums", "last"}
    assert optimizer_state(optimizer, [p])["sums"].tolist() == [1.0, 1.5] and len(optimizer_state(optimizer, [p])["last"]) == 3
    optimizer.lock = threading.Lock()
    with pytest.raises(ConfigError, match="optimizer=Odd: expected an optimizer that can be copied; its lock cannot: "):
        copied(optimizer, [p])


def test_a_schedule_free_arm_is_evaluated_at_its_average(monkeypatch):
    setting = setting_of(monkeypatch, MAKERS["schedule-free SGD"], Toy)
    arm = setting.arm(accumulated(CONFIG, 3))
    for ids in setting.windows(3):
        take_step(arm, arm.workload.batch(ids))
    held_out, trained = arm.workload.held_out, flatten(arm.model.parameters())
    state, momentum = optimizer_state(arm.optimizer, arm.model.parameters())["z"], arm.optimizer.param_groups[0]["momentum"]
    with evaluated(arm):
        average = flatten(arm.model.parameters())
        losses = arm.workload.losses(arm.model(held_out.inputs).detach(), held_out)
    torch.testing.assert_close(average, (trained - (1 - momentum) * state) / momentum, rtol=1e-5, atol=1e-6)
    assert not torch.equal(average, trained), "the two are told apart"
    expected = float(losses.sum() / arm.workload.num_terms(held_out).sum())
    assert outcome(arm, [1.0]).held_out_loss == pytest.approx(expected, rel=1e-6)
    assert arm.model.training and torch.equal(flatten(arm.model.parameters()), trained), "to the bit"


@pytest.mark.parametrize(("name", "is_seen"), [("Shampoo", False), ("AdamW", True)])
def test_an_optimizer_that_refuses_what_is_not_finite_says_nothing_of_it(monkeypatch, name, is_seen):
    setting = setting_of(monkeypatch, {**MAKERS, **MORE}[name])
    recipes = {REFERENCE: reference(CONFIG), "wrong": non_finite_micro_batch(accumulated(CONFIG, 3))}
    found = poison.measure(setting, recipes, list(setting.windows(2)))
    assert bool(poison.differing(found, "wrong")) == is_seen
