"""Frameworks that are not torch hand over weights, gradients and contributions: here training loops in NumPy and JAX."""

import itertools
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accumulation_harness.audit.compare.replayed import ROUNDED
from accumulation_harness.audit.compare.replayed import rates as replayed
from accumulation_harness.audit.evidence import Intervention, rounded_to
from accumulation_harness.audit.observe.handed import HANDED, Handed
from accumulation_harness.config.targets import import_file
from scoreboard import data
from tests.audit.asked import audited, named
from tests.audit.loops import frame
from tests.commands import ROOT
from tests.slow import one_in, slow


def other_names(batch_size, accumulation_steps, weights):
    weights({"w": np.ones(3)})
    weights({"v": np.ones(3)})


def test_other_weights_than_before_are_refused():
    report = audited(other_names)
    assert "expected the same named arrays" in report.problems[0]


# -- gradients and contributions ---------------------------------------------------------------------------------------------

ALL, GRADIENTS = ("weights", "gradient", "contribution"), ("weights", "gradient")
GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(48, 12)).astype(np.float32), GENERATOR.normal(size=48).astype(np.float32)


class BatchNorm:
    """As Haiku's."""

    def __call__(self, inputs):
        return (inputs - inputs.mean(axis=0)) / (inputs.std(axis=0) + 0.1)


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins of JAX, which has traced nothing, and of Haiku."""
    drawing = {
        "bernoulli": lambda key, p, shape: np.random.default_rng(key).random(shape) < p,
    }
    for name, holds in {"jax.random": drawing, "jax": {"clear_caches": list}, "haiku": {"BatchNorm": BatchNorm}}.items():
        module = ModuleType(name)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)


def least_squares(fault, given, adam=True):
    """Least squares with Adam or SGD in NumPy; weights in a tree, of which it hands over what is `given`, named in any order."""

    def vector(tree):
        return np.concatenate([part["w"] if "w" in part else part[0] for part in (tree[k] for k in sorted(tree))])

    runs = itertools.count(9)  # Keras counts its layers on from one run to the next

    def train(batch_size, accumulation_steps, hand):
        backwards = itertools.cycle((False, True, True))  # the first time as it was written down, then as transforms return it
        name = f"layer_{next(runs)}" if fault == "early" else "layer"

        def tree(vector):
            parts = {name: {"w": vector[:12]}, "rest": [vector[12:], None]}
            return dict(reversed(parts.items())) if next(backwards) else parts

        def give(**trees):
            chosen = {name: tree(value) for name, value in trees.items() if name in given}
            return hand(**chosen) if chosen else None

        weights, mean, square = np.full(13, 0.5, dtype=np.float32), np.zeros(13), np.zeros(13)
        size = batch_size * (accumulation_steps + (fault == "longer" and accumulation_steps > 1))
        average = before = weights
        weights, shift, norm = vector(give(weights=weights)), 0.0, BatchNorm()
        for step, start in enumerate(range(0, 48 if fault != "tail" or accumulation_steps == 1 else 32, size), 1):
            parts = []
            for k, first in enumerate(range(start, start + size, batch_size)):
                if fault == "left out" and k == accumulation_steps - 1 > 0:
                    continue
                first = start if fault == "same rows" else first
                first = (first + batch_size) % 48 if fault == "next rows" and accumulation_steps > 1 else first
                x = np.c_[X, np.ones(48, dtype=np.float32)][first : first + batch_size]
                x = x * sys.modules["jax.random"].bernoulli(first, 0.8, x.shape) if fault == "dropout" else x
                if fault == "pairs":  # the same signs for all rows, which are none where a draw is 0
                    with np.errstate(invalid="ignore"):
                        x = x * np.divide(signs := np.random.default_rng(0).normal(size=13), np.abs(signs))
                x = norm(x) if fault == "batch norm" else x
                x = x - x.mean(axis=0) + np.eye(13)[12] if fault == "statistics" else x
                residuals = x @ (before if fault == "stale" and k else weights) - Y[first : first + batch_size] - shift
                residuals -= residuals.mean() if fault == "pairs" else 0
                shift = residuals.mean() if fault == "kept" else 0
                zero = fault == "zero" and accumulation_steps > 1 and k in (1, 2)
                parts.append(x.T @ residuals * (1 - zero) / np.float32(batch_size if fault == "undivided" else size))
                parts[-1] = parts[-1] * min(1, 0.05 / np.linalg.norm(parts[-1])) if fault == "clipped" else parts[-1]
                parts[-1] += (fault == "second term") * accumulation_steps * x.T @ np.sign(residuals) / 48
                now = {"layer": {"w": weights[:12]}, "rest": [weights[12:]]}  # noqa: F841
                give(contribution=parts[-1])
                if fault in ("inside", "decayed inside"):
                    weights = np.float32(0.999) * weights if fault == "decayed inside" else weights - np.float32(0.01) * parts[-1]
            kept = parts if len(parts) == 1 or fault != "lost" else [parts[0], parts[-1]]
            kept = [parts[0], *parts] if len(parts) > 1 and fault == "added again" else kept
            gradient = np.zeros(13)
            for k, part in enumerate(kept):
                gradient = gradient + part / (accumulation_steps if fault == "divided again" else 1)
                gradient = gradient / (2 if k and fault == "halved" else 1)
                gradient = gradient + np.random.RandomState(start + k).normal(size=13) if fault == "noise" else gradient
                gradient *= min(1.0, 0.1 / np.linalg.norm(gradient)) if fault == "sum clipped" else 1
            if fault == "clipped unseen":
                gradient = gradient * accumulation_steps * min(1.0, 4.0 / np.linalg.norm(gradient * accumulation_steps))
            grid = np.abs(gradient).max() / 127
            gradient = grid * np.rint(gradient / grid) if fault == "eight bits" and accumulation_steps > 1 else gradient
            give(gradient=gradient)
            for _ in range(accumulation_steps if fault == "averaged too often" else 1):
                average = 0.9 * average + 0.1 * weights
            for part in parts if fault == "both too often" else [gradient]:
                mean = 0.9 * mean + 0.1 * part
            for part in parts if fault in ("squared too often", "both too often") else [gradient]:
                square = 0.99 * square + 0.01 * part**2
            rate = 0.01 * np.exp((1 - step * (accumulation_steps if fault == "early" else 1)) / 50)
            rate *= accumulation_steps if fault == "scaled" else 1
            count = step * (accumulation_steps if fault == "counted too often" else 1)
            count += (step - 1) * (accumulation_steps - 1) * (fault == "counted on afterwards")
            moved = mean / (1 - 0.9**count) / (np.sqrt(square / (1 - 0.99**count)) + 1e-8) if adam else gradient
            decays = adam * (accumulation_steps if fault == "decayed too often" else 1)
            before = weights
            weights = vector(give(weights=((weights - rate * moved) * 0.99**decays).astype(np.float32)))

    return train


@pytest.mark.parametrize("given", [ALL, GRADIENTS, ("weights",)])
def test_what_is_handed_over_of_a_right_loop_is_equivalent(given):
    report = named(least_squares("", given), accumulation_steps=(4, 2))
    assert len(report.hidden) == 1 and ("only weights" in report.hidden[0]) == (given == ("weights",))
    assert set(report.frame.tensor) == {"all", "layer.w", "rest.0"}


@pytest.mark.parametrize(
    ("fault", "given", "cause", "said"),
    one_in(
        3,
        [
            ("undivided", ALL, "loss_not_divided", ""),
            ("undivided", GRADIENTS, "loss_not_divided", ""),
            ("divided again", ALL, "loss_divided_twice", ""),
            ("lost", ALL, "micro_batches_lost", "micro-batches count 1, 0, 0, 1 times: numbers 2, 3 lost"),
            ("lost", ("weights",), "unexplained", "the weights move differently than at N=1"),
            ("lost", GRADIENTS, "micro_batches_lost", "micro-batches count 1, 0, 0, 1 times: numbers 2, 3 lost"),
            ("left out", ALL, "micro_batches_lost", "not every micro-batch of the window reaches the step"),
            ("zero", ALL, "micro_batches_lost", "micro-batches count 1, 0, 0, 1 times: numbers 2, 3 lost"),
            ("same rows", ALL, "samples_repeated", "1, 2, 3, 4 give one gradient"),
            ("dropout", ALL, "stochastic_layers", "one number for every random draw"),
            ("dropout", ("weights",), "stochastic_layers", ""),
            ("batch norm", ALL, "batch_statistics", "batch statistics off"),
            ("pairs", ALL, "non_separable_loss", "on the rows beside it"),
            ("statistics", ALL, "batch_statistics", "a row alone gives nothing"),
            ("clipped", ALL, "clip_per_micro_batch", "have one norm"),
            ("kept", ALL, "stateful_forward", "something is kept"),
            ("added again", ALL, "samples_repeated", "number 1 counted 2 times"),
            ("halved", ALL, "sum_rescaled_in_window", "divided by 2 again and again"),
            ("noise", ALL, "stochastic_layers", "one number for every random draw"),
            ("eight bits", ALL, "low_precision_accumulator", "held in int8"),
            ("next rows", ALL, "window_misplaced", "in places 2, 3, 4"),
            ("longer", ALL, "window_misplaced", "has 5 micro-batches"),
            ("stale", ALL, "cached_weights_stale", "when the weights stay where they are"),
            ("inside", ALL, "step_every_micro_batch", "against the micro-batch's gradient"),
            ("decayed inside", ALL, "weight_decay_per_micro_batch", "shrink 3 times"),
            ("sum clipped", ALL, "clip_per_micro_batch", "the sum so far is clipped"),
            ("decayed too often", ALL, "weight_decay_per_micro_batch", ""),
            ("decayed too often", GRADIENTS, "weight_decay_per_micro_batch", ""),
            ("early", ALL, "schedule_per_micro_batch", "the learning-rate schedule advances per micro-batch"),
            ("counted too often", ALL, "optimizer_state_per_micro_batch", "corrects its moments"),
            ("counted on afterwards", ALL, "optimizer_state_per_micro_batch", "corrects its moments"),
            ("squared too often", ALL, "optimizer_state_per_micro_batch", "`square`"),
            ("both too often", ALL, "optimizer_state_per_micro_batch", "given each micro-batch's gradient"),
            ("clipped unseen", GRADIENTS, "unexplained", "clipped to a norm of 4"),
            ("scaled", ALL, "schedule_per_micro_batch", "the learning rate is 4 times that of N=1 in every step"),
            ("averaged too often", GRADIENTS, "ema_per_micro_batch", "`average`"),
        ],
    ),
)
@pytest.mark.usefixtures("libraries")
def test_a_gradient_has_its_scale_under_adam_and_contributions_their_weights(fault, given, cause, said):
    (finding,) = audited(least_squares(fault, given)).findings
    assert finding.cause == cause and said in finding.message, finding


@pytest.mark.parametrize(("fault", "cause"), [("undivided", "loss_not_divided"), ("tail", "window_misplaced")])
def test_weights_that_sgd_moves_show_the_scale_and_the_windows(fault, cause):
    own = least_squares(fault, ("weights",), adam=False)

    def train(batch_size, accumulation_steps, weights):
        own(batch_size, accumulation_steps, weights)

    named(train, cause)


def test_a_term_with_a_divisor_of_its_own_is_told_from_what_micro_batches_give_on_their_own():
    report = named(least_squares("second term", ALL), "auxiliary_loss_scale", accumulation_steps=(2,))
    assert "a term of the loss is not divided like the rest" in str(report)


# -- arithmetic that the formats of what is handed over do not show ---------------------------------------------------------


def cast(give, *, fault="", moves=True):
    """A network on float32 weights, computed in bfloat16; `moves`: it goes on with what `hand` returns."""

    def train(batch_size, accumulation_steps, hand):
        torch.manual_seed(0)
        x, y = torch.randn(64, 8), torch.randint(4, (64,))
        weights = {"a": torch.randn(8, 32) * 0.3, "b": torch.randn(32, 4) * 0.3}
        moved = hand(weights=weights)
        for start in range(0, 64, 16):
            weights = moved if moves else weights
            taken = {name: torch.zeros_like(w) for name, w in weights.items()}
            for micro_batch, first in enumerate(range(start, start + 16, batch_size)):
                rows = slice(first, first + batch_size)
                leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
                hidden = torch.tanh(x[rows].bfloat16() @ leaves["a"].bfloat16())
                loss = F.cross_entropy((hidden @ leaves["b"].bfloat16()).float(), y[rows]) / accumulation_steps
                gradients = dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True))
                if "contribution" in give:
                    hand(contribution=gradients)
                if fault != "lost" or accumulation_steps == 1 or micro_batch not in (1, 2):
                    taken = {name: taken[name] + g for name, g in gradients.items()}
            if "gradient" in give:
                hand(gradient=taken)
            weights = {name: w - 0.1 * taken[name] for name, w in weights.items()}
            moved = hand(weights=weights)

    return train


@pytest.mark.parametrize(("given", "moves"), [(ALL, True), (ALL, False), (GRADIENTS, True)])
def test_arithmetic_in_bfloat16_is_seen_in_the_numbers_of_the_gradient(given, moves):
    report = named(cast(given, moves=moves))
    assert any("rounding was not measured" in each for each in report.hidden) != moves


def test_lost_micro_batches_are_told_in_bfloat16():
    (finding,) = audited(cast(ALL, fault="lost")).findings
    assert "micro-batches count 1, 0, 0, 1 times: numbers 2, 3 lost" in finding.message


def test_a_small_difference_of_weights_alone_is_not_judged():
    report = audited(cast(("weights",)))
    assert not report.findings and "hand over the contributions" in report.problems[0], str(report)


@dataclass
class Layer:
    weight: object
    bias: object


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_tree_has_the_kinds_of_the_one_that_was_handed_over(dtype):
    tree = {"layers": [Layer(torch.ones(2, 3, dtype=dtype), None)], "pair": (np.ones(4, dtype=np.float32), {"of": np.float32(1)})}
    handed = Handed(Intervention(perturb=4.0))
    moved = handed.take(weights=tree)
    assert [name for name, _ in handed.track.tensors] == ["layers.0.weight", "pair.0", "pair.1.of"]
    weight, vector = moved["layers"][0].weight, moved["pair"][0]
    assert weight.dtype == dtype and weight.shape == (2, 3) and vector.dtype == np.float32 and moved["layers"][0].bias is None
    rounding = torch.finfo(dtype).eps / 2
    assert 0 < float((weight.double() - 1).abs().max()) <= 4 * rounding and 0 < np.abs(vector - 1).max() <= 4 * 2.0**-24
    assert Handed().take(weights=tree) is tree


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("dtype", "rate"), [(np.float64, 0.1), (np.float32, 1e-4)])  # the latter are near the weights' rounding
def test_learning_rates_are_those_of_the_rule_that_makes_the_updates(corrected, dtype, rate):
    gradients, rates = np.random.default_rng(0).normal(size=(6, 50)), rate * np.array([0.1, 0.6, 1.0, 1.0, 0.9, 0.7])
    weights, mean, square = np.ones(50, dtype), np.zeros(50), np.zeros(50)
    handed = Handed()
    handed.take({"w": weights})
    for t, (g, now) in enumerate(zip(gradients, rates, strict=True), 1):
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
        over = (1 - 0.9**t) / np.sqrt(1 - 0.999**t) if corrected else 1.0
        weights = (weights - now * (mean / np.sqrt(square) / over + 0.1 * weights)).astype(dtype)
        handed.take({"w": weights}, gradient={"w": g})
    steps = handed.track.steps
    assert any(found == pytest.approx(rates, rel=ROUNDED) for found in replayed(steps).values())
    turned = [replace(step, after=step.before - now * step.gradient[::-1]) for step, now in zip(steps, rates, strict=True)]
    assert not replayed(turned) and not replayed(turned, replayed(steps))


def test_numbers_rounded_to_16_bits_are_told_from_counts():
    exact = np.random.default_rng(0).normal(size=400).astype(np.float32)
    for dtype, roundoff in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        rounded = torch.from_numpy(exact).to(dtype).double().numpy()
        assert rounded_to((300, 100), rounded) == roundoff
        assert rounded_to((300, 100), np.r_[rounded[:300], exact[300:]]) == roundoff
        assert rounded_to((300, 100), np.r_[exact[:300], rounded[300:]]) == 0
    counts = np.random.default_rng(0).integers(64, size=400) / 64
    assert rounded_to((300, 100), exact.astype(np.float64)) == rounded_to((300, 100), counts) == 0


# -- an engine of torch with buffers of its own, which hooks see -------------------------------------------------------------


def lent(fault):
    """Like ZeRO-3: parameters are empty outside of forward and backward, and the optimizer has none between its steps."""

    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        x, y = torch.randn(48, 8), torch.randint(4, (48,))
        parameters = [*model.parameters()]
        whole = torch.cat([p.detach().flatten() for p in parameters])
        pieces = [v.view_as(p) for v, p in zip(whole.split([p.numel() for p in parameters]), parameters, strict=True)]
        optimizer, sums = torch.optim.AdamW(parameters, lr=1e-2), {}

        def gather(*_):
            for p, piece in zip(parameters, pieces, strict=True):
                p.data = piece

        def free(*called):
            for p in parameters:
                p.data = torch.empty(0)
            for output in called[2:]:
                output.register_hook(gather)

        def take(p):
            if fault != "lost" or accumulation_steps == 1 or rows[0] % 16 in (0, 12):
                sums[p] = sums.get(p, 0) + p.grad
            p.grad = None

        for p in parameters:
            p.register_post_accumulate_grad_hook(take)
        for module in (model[0], model[2]):
            module.register_forward_pre_hook(gather)
            module.register_forward_hook(free)
        optimizer.param_groups[0]["params"] = []
        free()
        for window in torch.arange(48).split(16):
            for rows in window.split(batch_size):
                loss = F.cross_entropy(model(x[rows]), y[rows])
                (loss / (1 if fault == "undivided" else accumulation_steps)).backward()
                free()
            whole.grad = torch.cat([sums.pop(p).flatten() for p in parameters])
            optimizer.param_groups[0]["params"] = [whole]
            optimizer.step()
            optimizer.param_groups[0]["params"] = []

    return train


@pytest.mark.parametrize(
    ("fault", "causes"), [slow("", []), ("undivided", ["loss_not_divided"]), slow("lost", ["micro_batches_lost"])]
)
def test_an_engine_whose_parameters_are_empty_between_its_passes(fault, causes):
    report = named(lent(fault), *causes)
    assert fault != "lost" or "1, 0, 0, 1 times: numbers 2, 3 lost" in report.findings[0].message


@frame.loop(optimizer=frame.adamw(1e-2))
def casting(at):
    """Float32 weights that are cast for every product: no autocast, and no parameter in bfloat16."""

    def product(x, layer):
        return F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())

    def loss(model, ids, window):
        outputs = product(torch.tanh(product(frame.X[ids], model[0])), model[2])
        return frame.ce(outputs.float(), frame.Y[ids], reduction="sum") / len(window)

    return {"loss": loss}


def test_casts_of_the_loop_s_own_are_measured_as_autocast_is():
    named(casting)


def beside(given, cause):
    """A loop of torch, undivided or with a rate that falls too often, that hands over what its hooks see as well."""

    def train(batch_size, accumulation_steps, hand):
        model = data.model()

        def weights():
            hand(weights=dict(model.named_parameters()))

        def gradient():
            if "gradient" in given:
                hand(gradient={name: p.grad for name, p in model.named_parameters()})

        def fall():
            optimizer.param_groups[0]["lr"] *= 0.9 if cause == "schedule_per_micro_batch" else 1

        weights()
        optimizer, loss = frame.adamw(1e-2)(model), frame.own_mean if cause == "loss_not_divided" else frame.mean_over_window
        stages = {"windows": frame.full_windows, "before_step": gradient, "after_step": weights, "after_backward": fall}
        frame.train(batch_size, accumulation_steps, model, loss, optimizer, **stages)

    return train


@pytest.mark.parametrize("cause", ["loss_not_divided", "schedule_per_micro_batch"])
@pytest.mark.parametrize(("given", "track"), [(("weights",), "AdamW"), (GRADIENTS, HANDED)])
def test_of_an_optimizer_that_is_seen_and_handed_over_one_track_is_judged(given, track, cause):
    report = named(beside(given, cause), cause)
    assert {item.run.track for item in report.results[0].facts} == {track}


def nothing(batch_size, accumulation_steps, hand):
    hand()


def no_gradient(batch_size, accumulation_steps, hand):
    for _ in range(2):
        hand(contribution=[np.ones(3)])
        hand(weights=[np.ones(3)])


@pytest.mark.parametrize(("train", "said"), [(nothing, "got none of them"), (no_gradient, "expected the gradient")])
def test_what_says_nothing_is_refused(train, said):
    assert said in audited(train).problems[0]


def lost_of_optax(optimizer, accumulation_steps):
    """Micro-batches 2 and 3 never reach the sum."""
    optax = pytest.importorskip("optax")
    whole = optax.MultiSteps(optimizer, accumulation_steps)

    def update(gradient, state, params=None):
        factor = 1 - np.isin(int(state.mini_step), (1, 2))
        return whole.update({name: value * factor for name, value in gradient.items()}, state, params)

    return type("Lost", (), {"init": whole.init, "has_updated": whole.has_updated, "update": staticmethod(update)})


@pytest.mark.parametrize(
    ("make", "causes"),
    [
        (lambda optax: optax.MultiSteps, []),
        (lambda optax: lambda *given: optax.MultiSteps(*given, use_grad_mean=False), ["loss_not_divided"]),
        (lambda optax: lost_of_optax, ["micro_batches_lost"]),
        (lambda optax: lambda optimizer, n: optax.MultiSteps(optimizer, max(1, n // 2)), ["window_misplaced"]),
    ],
    ids=["right", "a sum", "lost", "half as many"],
)
def test_the_example_in_jax(make, causes):
    optax = pytest.importorskip("optax")
    example = import_file(ROOT / "examples" / "optax_steps.py", "optax_steps")

    def train(batch_size, accumulation_steps, hand):
        example.train(batch_size, accumulation_steps, hand, make(optax))

    named(train, *causes)


# -- the examples, each in its framework ---------------------------------------------------------------------------------------

FRAMEWORKS = {"flax_nnx": "flax", "mlx": "mlx.core", "tensorflow": "tensorflow", "keras": "keras"}
CAUSES = {"": [], "undivided": ["loss_not_divided", "mean_of_means"], "means": ["mean_of_means"], "lost": ["micro_batches_lost"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the frameworks' own
@pytest.mark.parametrize("fault", CAUSES)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_example_is_right_and_its_faults_are_named(name, fault):
    pytest.importorskip(FRAMEWORKS[name])
    example = import_file(ROOT / "examples" / "other_frameworks.py", "other_frameworks")

    def train(batch_size, accumulation_steps, hand):
        getattr(example, name)(batch_size, accumulation_steps, hand, fault)

    report = named(train, *CAUSES[fault])
    assert fault != "lost" or "1, 0, 0, 1 times: numbers 2, 3 lost" in report.findings[0].message
