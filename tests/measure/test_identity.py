"""What a measurement depends on is declared where it is: a setting that is left out changes nothing, one that is named does."""

import dataclasses
import re

import pytest

from accumulation_harness.config import TrialConfig
from accumulation_harness.measure import algebra, poison, rounding
from accumulation_harness.measure.lock_step import REFERENCE
from accumulation_harness.measure.trial import reference, standard_candidates
from accumulation_harness.recipes.determinism import deterministic
from tests.slow import slow
from tests.toy import CPU
from tests.trials import setting_of, trial

BASE = trial(
    "workload.model=mlp workload.width=2 norm=layer effective_batch=751 accumulation_steps=[3] split=ragged",
    "algebra_steps=3 probe_every=3 permutations=30 clip_norm=0.5",
)
# Another value of every setting of a trial. Those that only faults and methods read have none: such arms share nothing.
OTHERS = [
    "experiment=mine", "study=convergence", "workload.width=3", "data.last_window=drop", "norm=group",
    "optimizer.name=momentum optimizer.lr=0.3", "schedule.warmup_steps=2", "clip_norm=0.01", "ema_decay=0.9",
    "precision=bfloat16", "loss_scale=128", "arms=together", "effective_batch=300", "accumulation_steps=[2]",
    "split=even effective_batch=750", "steps=3", "algebra_steps=2", "probe_every=2", "referee_every=2", "permutations=31",
    "nulls=4", "seed=1",
]  # fmt: skip
MACHINE = {"device", "execution"}  # which cannot be tried here, and are always named


def of(name, config):
    setting = setting_of(config)
    recipes = {REFERENCE: reference(config)} | {one.label: one.recipe for one in standard_candidates(config)}
    windows = list(setting.windows(3))
    match name:
        case "algebra":
            return algebra.measurement(setting, recipes, windows[: config.algebra_steps], [*recipes][-1], ours=True)
        case "rounding":
            return rounding.measurement(setting, recipes, windows[0])
        case _:
            return poison.measurement(setting, recipes, windows[:2])


def test_every_setting_is_tried():
    tried = {re.split("[.=]", other)[0] for other in OTHERS} | MACHINE | {"faults", "methods", "trained_arm"}
    assert tried == {field.name for field in dataclasses.fields(TrialConfig)}


@pytest.mark.parametrize("name", ["rounding", slow("algebra"), slow("poison")])
def test_a_setting_changes_the_result_only_where_it_is_named(name):
    with deterministic(BASE.precision, CPU):
        base = of(name, BASE)
        result, inert = repr(base.make()), []
        assert repr(of(name, BASE).make()) == result and of(name, BASE).identity == base.identity
        for settings in OTHERS:
            other = of(name, trial(settings, base=BASE))
            is_changed = repr(other.make()) != result
            if other.identity == base.identity:
                assert not is_changed, f"{settings} changes the result, and is not named"
            elif not is_changed:
                inert.append(settings)
    # Nothing is named in vain, but what a poisoned window does is so coarse that most settings leave it as it is.
    assert inert == {"algebra": [], "rounding": ["permutations=31"], "poison": inert}[name]


@pytest.mark.parametrize("precision", ["float16", "float64"])
def test_float64_is_measured_once_for_all_precisions(precision):
    """The loss scale of float16 included, for our right arms; not where it is the precision itself that is measured."""
    other = trial(f"precision={precision} loss_scale=3", base=BASE)
    assert (of("algebra", other).identity == of("algebra", BASE).identity) == (precision == "float16")
    assert repr(of("algebra", other).make()) == repr(of("algebra", BASE).make())
    assert of("rounding", other).identity != of("rounding", BASE).identity


def test_the_samples_themselves_are_part_of_it(monkeypatch):
    before = of("rounding", BASE).identity
    kind = type(setting_of(BASE).exact)
    batch = kind.batch
    with monkeypatch.context() as patched:
        patched.setattr(kind, "batch", lambda self, ids: batch(self, (ids + 1) % 1500))
        assert of("rounding", BASE).identity != before
    assert of("rounding", BASE).identity == before
