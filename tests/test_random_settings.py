"""Under settings drawn over all that is accepted: no right arm is blamed, and a fault is seen wherever it changes something.

Whether a fault changes what is computed is measured without the judge: right and faulty arm are trained alone, and what they
leave is compared.
"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from accumulation_harness.config import Data, Norm, Precision
from accumulation_harness.judge.cause import INHERENT, JOINT
from accumulation_harness.measure.algebra import windows_of
from accumulation_harness.measure.lock_step import arm_state
from accumulation_harness.measure.trial import Candidate, accumulated, permuted, standard_candidates
from accumulation_harness.recipes.catalogue import FAULTS
from accumulation_harness.recipes.determinism import deterministic, start_randomness
from accumulation_harness.recipes.micro_batch import hash_seed
from accumulation_harness.recipes.recipe import take_step
from accumulation_harness.referee.gradients import flatten, gradients, relative_distance
from accumulation_harness.referee.oracle import snapshot
from tests.strategies import fixed, right_trials
from tests.toy import CPU
from tests.trials import arms, setting_of, trial

CHANGED = 1e-9  # relative: a thousand times L0's gate for a gradient
BEYOND_ROUNDING = 100.0  # times what a shuffled full batch changes
ROUGHER = 4.0  # times the right arm's error, twice L1's gate
SEVERAL = st.integers(2, 24).map(lambda n: (n,))


# Of a clipped gradient the small tensors have the rounding of the largest ones, through the norm that all are divided by.
CLIPPED = trial(
    "workload.data=text workload.model=transformer workload.width=5 workload.depth=2 workload.penalty=1 data.last_window=drop",
    "norm=layer optimizer.name=adamw optimizer.lr=1 optimizer.beta1=0.38659510699529864 optimizer.beta2=1e-06",
    "optimizer.eps=7.18622e-14 schedule.warmup_steps=2 clip_norm=7.38131 ema_decay=0.3333333333333333 precision=bfloat16",
    "loss_scale=0.999977 effective_batch=32 accumulation_steps=[14] split=ragged steps=6 probe_every=5 seed=75564",
)
# Where a penalty outgrows the loss, what couples rows shows in small tensors alone.
COUPLED = trial(
    "workload.data=pairs workload.model=mlp workload.width=6 workload.depth=1 workload.penalty=1 optimizer.name=nesterov",
    "optimizer.lr=1 optimizer.weight_decay=1 ema_decay=0.9626699601826701 effective_batch=31 accumulation_steps=[11]",
    "split=ragged steps=1 probe_every=8 seed=271",
)


@pytest.mark.slow
@fixed(40)
@example(CLIPPED)
@example(COUPLED)
@given(right_trials())
def test_no_right_arm_is_blamed(config):
    for arm in arms(config):
        own = {*arm["cause"].split(JOINT)} - {""}
        inherent = arm["verdict"] == "different" and own and INHERENT.issuperset(own) and arm["explained"]
        assert arm["verdict"] in ("equivalent", "inconclusive") or inherent, (arm["arm"], arm["cause"], arm["reasons"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")  # torch's, of a fault that steps it early
@fixed(40)
@given(
    right_trials(SEVERAL, norms=(Norm.none, Norm.group, Norm.layer)).filter(
        lambda config: not config.workload.dropout and config.workload.data != Data.pairs
    ),
    st.sampled_from(FAULTS),
)
def test_a_fault_is_seen_where_it_changes_something(config, fault):
    right = accumulated(config, config.accumulation_steps[0])
    wrong = Candidate(fault.cause, fault.apply(right))
    own, *others = arms(config, [wrong, *standard_candidates(config)])
    beside = next(arm for arm in others if arm["arm"] == "accumulated")
    both_doubtful = own["verdict"] == beside["verdict"] == "inconclusive"
    if own["verdict"] not in ("different", "degraded") and not both_doubtful:
        assert not changes(config, right, fault), own["reasons"]


def changes(config, right, fault):
    """Whether the fault changes what is computed: in float64 over the run, or the first gradient in the format under test."""
    with deterministic(config.precision):
        setting = setting_of(config)
        reference, faulty = trained(setting, right), trained(setting, fault.apply(right))
        control = trained(setting, permuted(config, 0))
        if reference["counted"] != faulty["counted"]:
            return True
        for name in ("weights", "state", "losses"):
            gap = relative_distance(faulty[name], reference[name])
            if gap > CHANGED and gap > BEYOND_ROUNDING * relative_distance(control[name], reference[name]):
                return True
        return config.precision != Precision.float64 and error(setting, fault.apply(right)) > ROUGHER * error(setting, right)


def trained(setting, recipe):
    """Movement of the weights, state, losses and counters after the run in float64."""
    config, windows = setting.config, windows_of(setting)
    arm = setting.arm(recipe, precision=Precision.float64, steps=len(windows))
    start, losses = flatten(arm.model.parameters()), []
    for t, ids in enumerate(windows):
        start_randomness(hash_seed(config.seed, t), CPU)
        losses.append(take_step(arm, setting.exact.batch(ids)).double())
    state = arm_state(arm)
    return {
        "weights": flatten(arm.model.parameters()) - start,
        "state": flatten(state.values()) if state else torch.zeros(0, dtype=torch.float64),
        "losses": torch.stack(losses),
        "counted": (arm.samples, arm.windows, arm.schedule.last_epoch, arm.scaler.get_scale()),
    }


def error(setting, recipe):
    """||g - g_64|| / ||g_64|| of what the first step consumes, in the format under test, without clipping."""
    arm = setting.arm(recipe, clip_norm=None)
    consumed = []
    arm.optimizer.register_step_pre_hook(lambda *_: consumed.append(flatten(gradients(arm.model.parameters()))))
    ids = next(setting.windows(1))
    referee = setting.referee()
    exact = referee.gradient(snapshot(arm.model), setting.exact.batch(ids))
    take_step(arm, arm.workload.batch(ids))
    return relative_distance(consumed[-1], exact) if consumed else 0.0
