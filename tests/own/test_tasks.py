"""Tasks of the user's own: judged right through every level, and refused in one line where they cannot be."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from accumulation_harness.config import ConfigError
from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.gates import ALGEBRA_GATE
from accumulation_harness.judge.verdict import (
    SHARED_DRAWS,
    WIDENED,
    Doubt,
    Outcome,
)
from accumulation_harness.measure.trial import with_faults
from accumulation_harness.recipes.catalogue import named
from tests.own import optimizers, tasks
from tests.slow import one_in, slow
from tests.trials import arms, setting_of, trial

FILE = Path(tasks.__file__)
BASE = (  # the last of five windows is short
    "norm=as_is effective_batch=9 accumulation_steps=[2,4] split=ragged steps=2 algebra_steps=5 "
    "optimizer.name=adam optimizer.lr=1e-3"
)
SHORT = "steps=4 algebra_steps=3 accumulation_steps=[3] split=even"


def own(name, *settings):
    return trial(f"workload.data=custom workload.target={FILE}:{name}", BASE, *settings)


def planted(config, *faults):
    """The arms by name: the right ones and those with a fault."""
    recipes = with_faults(config, {name: named(name, config.precision) for name in faults})
    return {arm["arm"]: arm for arm in arms(config, recipes)}


@pytest.mark.parametrize(
    ("name", "settings"),
    one_in(
        2,
        [
            ("Images", "norm=group workload.args.width=6"),
            ("Images", "norm=none precision=bfloat16"),
            ("Images", "norm=layer precision=float16"),
            ("Frozen", "clip_norm=0.1"),
            ("TwoNames", "norm=layer"),
            ("Cancelling", "effective_batch=10 accumulation_steps=[5] split=even algebra_steps=20 probe_every=1"),
            ("Ragged", "precision=float64 ema_decay=0.9"),
            *((name, "accumulation_steps=[4]") for name in ("Complex", "ForcesSwitchedOn", "Leaves", "Weighted")),
            *((name, "") for name in ("Ragged", "Unbalanced", "LearntWeights", "Timewise", "TimeFirst", "Refuses")),
            ("Scenes", ""),
        ],
    ),
)
def test_an_accumulated_task_is_the_large_batch(name, settings):
    for arm in arms(own(name, settings)):
        assert arm["verdict"] == Outcome.equivalent, arm["reasons"]
        assert arm["algebra_error"] < 1e-13


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Images", Cause.batch_statistics),
        ("OddBatchNorm", Cause.batch_statistics),
        ("Mixed", Cause.batch_statistics),
        ("MixedBesideBatchNorm", Cause.batch_statistics),
        ("Contrast", Cause.non_separable_loss),
        ("Balanced", Cause.non_separable_loss),
        ("BalancedAfterBatchNorm", "batch_statistics+non_separable_loss"),
        ("Drops", Cause.stochastic_layers),
        ("Variational", Cause.stochastic_layers),
        ("Spectral", Cause.stateful_forward),
        ("TwoViews", Cause.batch_statistics),
        ("Queue", Cause.stateful_forward),
        ("Capacity", Cause.non_separable_loss),
        slow("Padded", Cause.non_separable_loss),
        slow("OldSpectral", Cause.stateful_forward),
        slow("FollowsInputs", Cause.stateful_forward),
        slow("SpectralAndBatchNorm", "batch_statistics+stateful_forward"),
    ],
)
def test_what_couples_rows_is_named_and_reproduced(name, cause):
    *accumulated, permuted = arms(own(name))
    for arm in accumulated:
        assert (arm["verdict"], arm["cause"], arm["explained"]) == (Outcome.different, str(cause), True), arm["reasons"]
    shuffled = str(cause) if cause == Cause.stochastic_layers or name in ("Queue", "Capacity") else ""  # these see their order
    assert (permuted["cause"], permuted["explained"]) == (shuffled, bool(shuffled))


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_state_that_a_forward_moves_is_compared_with_the_full_batchs(kind):
    """Four forwards a window: the function changes between windows, inside of one, or never."""
    for after, right in ((20, False), (18, False), (10**9, True)):
        settings = f"workload.args.kind={kind} workload.args.after={after} accumulation_steps=[4] steps=10 algebra_steps=10"
        arm, permuted = arms(own("Counting", settings))
        cause = "" if right else "stateful_forward"
        assert (arm["verdict"], arm["cause"]) == ("equivalent" if right else "different", cause), arm["reasons"]
        assert ("model.calls is " in arm["reasons"]) == right
        assert permuted["verdict"] == "equivalent"


def test_draws_that_happen_to_be_the_full_batchs_are_equivalent_and_told():
    """A draw of 8 x 4 numbers is two of 4 x 4 in a row, since the CPU's stream comes in sixteens; not four of 2 x 4."""
    two, four, permuted = arms(own("OneDraw", "effective_batch=8 split=even steps=3 algebra_steps=3"))
    assert two["verdict"] == Outcome.equivalent and two["reasons"].startswith(SHARED_DRAWS) and two["algebra_error"] < 1e-13
    for arm in (four, permuted):
        assert arm["cause"] == Cause.stochastic_layers and SHARED_DRAWS not in arm["reasons"]
    assert all(SHARED_DRAWS not in arm["reasons"] for arm in arms(own("Frozen", SHORT)))


def test_the_float64_batch_is_the_float32_one():
    setting = setting_of(own("Contrast"))
    ids = torch.tensor([3, 0, 7])
    wide, narrow = (setting.workloads[dtype].batch(ids).inputs for dtype in (torch.float64, torch.float32))
    assert type(wide).__name__ == "Pair" and wide.left.dtype == torch.float64
    assert torch.equal(wide.left, narrow.left.double())
    assert not torch.equal(wide.left, torch.from_numpy(tasks.Contrast().pairs[3].left).expand_as(wide.left))


@pytest.mark.parametrize(("norm", "groups"), [("group", 6), ("layer", 1), ("none", None)])
def test_batch_norm_is_exchanged(norm, groups):
    layer = setting_of(own("Images", f"norm={norm} workload.args.width=6")).initial[1]
    assert isinstance(layer, nn.GroupNorm if groups else nn.Identity) and getattr(layer, "num_groups", None) == groups


def with_optimizer(name, *settings, task="Ragged"):
    return own(task, f"optimizer.name=custom optimizer.target={optimizers.__file__}:{name}", *settings)


@pytest.mark.parametrize(
    ("config", "inherent", "fault"),
    [
        (own("Balanced", SHORT), "non_separable_loss", "loss_not_divided"),
        (own("Spectral", SHORT), "stateful_forward", "loss_not_divided"),
        (own("Ragged", SHORT), "", "mean_of_means"),
        (own("Ragged", SHORT), "", "cached_weights_stale"),
        (with_optimizer("Narrow", SHORT, "optimizer.lr=0.1", task="Frozen"), "", "loss_not_divided"),  # it has no float64
        (with_optimizer("Narrow", SHORT, "optimizer.lr=0.1", task="Frozen"), "", "optimizer_state_per_micro_batch"),
        (with_optimizer("Centred", SHORT, "optimizer.lr=0.1", task="Frozen"), "", "gradients_not_cleared"),
    ],
    ids=str,
)
def test_a_fault_is_named_beside_what_the_task_is(config, inherent, fault):
    found = planted(config, fault)
    assert found["accumulated"]["cause"] == inherent, found["accumulated"]["reasons"]
    assert found["accumulated"]["verdict"] == ("different" if inherent else "equivalent")
    assert found[fault]["cause"] == "+".join(filter(None, (inherent, fault))), found[fault]["reasons"]


def test_batch_norm_without_float64_is_named():
    found = planted(own("KernelAndBatchNorm", SHORT, "accumulation_steps=[2] split=ragged"))
    assert found["accumulated"]["cause"] == Cause.batch_statistics and found["permuted"]["verdict"] == Outcome.inconclusive


def test_code_that_narrows_its_numbers_is_judged_in_float64():
    """Casts to float32 in the model and in the loss, a tensor of the default format."""
    for name, arm in planted(own("Narrow", SHORT), "loss_not_divided", "low_precision_accumulator").items():
        right = name in ("accumulated", "permuted")
        assert (arm["verdict"], arm["cause"]) == (("equivalent", "") if right else ("different", name)), arm["reasons"]
        assert WIDENED in arm["reasons"]
        assert (arm["algebra_error"] < 1e-13) == right
    assert WIDENED not in planted(own("Frozen", SHORT))["accumulated"]["reasons"]


@pytest.mark.parametrize("precision", ["float32", slow("float16")])
def test_a_task_without_float64_is_judged_by_what_remains(precision):
    faults = ("mean_of_means", "loss_not_divided", "counter_wrong", "optimizer_state_per_micro_batch")
    for name, arm in planted(own("Kernel", SHORT, f"split=ragged precision={precision}"), *faults).items():
        right = name in ("accumulated", "permuted")
        assert (arm["verdict"], arm["cause"]) == (("inconclusive", "") if right else ("different", name)), arm["reasons"]
        assert not arm["explained"] and math.isnan(arm["algebra_error"]) and math.isnan(arm["rounding_ratio"])
        [told] = [reason for reason in arm["reasons"].split("; ") if reason.startswith(Doubt.no_float64)]
        assert "(AssertionError: this kernel has no float64): not measured were rounding (L1)" in told


REFUSED = {
    "NoLosses": "a task with the methods model, train, held_out and losses; NoLosses has no losses",
    "Raises": "it raised RuntimeError: no such luck (tasks.py:",
    "MeanLoss": "losses(...) that gives a tensor [n], one number for each of n=9 rows, got a tensor of shape []",
    "NotANumber": "finite losses at the initial weights, got nan",
    "Detached": "depend on the model's parameters, got values without a gradient",
    "Constant": "losses with a gradient at the initial weights, got zeros",
    "ChangingData": "the same whenever they are read; they changed between two reads",
    "Foreign": "forwards that repeat from the same weights, buffers and seed of torch; two of them differ",
    "DrawnLoss": "random numbers of the model's forward alone, by rand, rand_like, randn",
    "Sparse": "dense gradients, got sparse ones",
    "HiddenGradient": "torch.autograd.grad and backward() give the same gradients; those of first.1.weight differ",
    "Scripted": "a model whose forwards can be seen, got a scripted one",
    "Forces": "a forward of held_out() under torch.no_grad() (torch.enable_grad() around what needs gradients)",
    "HeldOutOfOtherShape": "around what needs gradients); it raised RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    "InPlace": "a forward and losses that leave the batch as it is; they changed it in place",
    "Lazy": "parameters have their values, got some of a lazy layer or on the device meta",
    "NoDisk": "train() and collate() that give a batch of the samples ",
    "NegativeTerms": "terms(batch) that gives numbers from 0 on, got torch.float32 from -0.5 on",
    "TermsRaise": "terms(batch) that gives a number for each row; it raised TypeError",
    "Stream": "train() that gives something with len() and [i], got list_iterator",
    "Endless": "train() with 1 to ",
    "NoLength": "train() whose len() is a number of samples; it raised TypeError",
    "Meta": "it raised NotImplementedError: Cannot copy out of meta tensor",
    "WrongRows": "it raised ValueError: Expected input batch_size (8) to match target batch_size (9). (tasks.py:",
    "Missing": "a class or function of that name; tasks.py has Images",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_told_in_one_line(name):
    with pytest.raises(ConfigError) as caught:
        arms(own(name))
    text = str(caught.value)
    assert text.startswith(f"workload.target={FILE}:{name}: expected ") and REFUSED[name] in text, text
    assert "\n" not in text


def test_wrong_arguments_are_told():
    with pytest.raises(ConfigError, match=r"makes a task with workload.args; it raised TypeError.*'depth'"):
        setting_of(own("Images", "workload.args.depth=3"))


def test_a_micro_batch_of_one_row_under_batch_norm_is_told():
    expected = r"accumulation_steps=4: expected micro-batches of at least 2 samples with norm=as_is and the model of Rows"
    with pytest.raises(ConfigError, match=expected):
        arms(own("Rows"))
    [arm, _] = arms(own("Rows", "accumulation_steps=[2]"))
    assert arm["cause"] == Cause.batch_statistics and arm["explained"]


def test_batch_norm_that_is_not_there_is_told():
    with pytest.raises(ConfigError, match="norm=batch: expected as_is, group, layer or none: the task's model has no BatchNorm"):
        setting_of(own("Frozen", "norm=batch"))


# -- optimizers ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_of_ones_own_is_judged():
    config = with_optimizer("Lion", "optimizer.weight_decay=0.1 optimizer.args.beta=0.9 accumulation_steps=[4]")
    for name, arm in planted(config, "loss_not_divided").items():
        assert arm["optimizer"] == "Lion(beta=0.9)"
        assert arm["cause"] == ("loss_not_divided" if name == "loss_not_divided" else ""), arm["reasons"]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("plain", "optimizer.weight_decay=0.1", "optimizer.weight_decay=0.1: expected 0: plain takes none"),
        ("not_one", "", "expected a torch.optim.Optimizer, got int"),
        ("Bare", "", "expected an optimizer that calls super().__init__()"),
        ("closing", "", "this one asks for a closure"),
        ("raises", "", "it raised RuntimeError: no such luck (optimizers.py:"),
        ("Lion", "optimizer.args.gamma=1", "it raised TypeError"),
        ("Stuck", "", "an optimizer whose step() runs; it raised RuntimeError: no such luck (optimizers.py:"),
        ("Tiger", "", "a class or function of that name; optimizers.py has Lion, Stuck, plain, not_one, raises"),
        ("partial", "", "an optimizer of all parameters that require gradients; its groups lack norm.weight"),
        ("Dice", "", "a step() that repeats from the same seed of torch; two of them differ"),
        ("Idle", "", "an optimizer whose step() moves weights or keeps state; it did nothing"),
        ("Wild", "", "an optimizer whose step() gives finite weights, got NaN or infinity"),
    ],
)
def test_what_makes_no_optimizer_is_told_in_one_line(name, settings, expected):
    with pytest.raises(ConfigError) as caught:
        arms(with_optimizer(name, settings))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "steps"), [(4, 2), (8, 4)])
def test_batch_norm_over_two_values_is_explained(size, steps):
    """In batches of 4 the shuffled full batch itself differs by 1e-10.

    In micro-batches of 2 gradients and running statistics are as ill-conditioned, and what float64 resolves of them is no error.
    A fault in the loop is named beside BatchNorm all the same, and a shuffled full batch is not judged where it resolves little.
    """
    short = f"effective_batch={size} accumulation_steps=[{steps}] steps=1 algebra_steps=1 nulls=1 split=even precision=float64"
    rows = planted(own("Deep", short), "loss_not_divided")
    right, wrong, permuted = rows["accumulated"], rows["loss_not_divided"], rows["permuted"]
    assert (right["cause"], right["explained"]) == (Cause.batch_statistics, True), right["reasons"]
    assert Cause.loss_not_divided in wrong["cause"] and wrong["verdict"] == Outcome.different, wrong["reasons"]
    resolved = permuted["evidence"]["algebra"]["floor"] <= ALGEBRA_GATE
    assert resolved == (size == 8) and permuted["verdict"] == (Outcome.equivalent if resolved else Outcome.inconclusive)
