import dataclasses
import math
from typing import get_type_hints

import pytest

from accumulation_harness.config import ConfigError, HarnessConfig, TrialConfig
from accumulation_harness.config.identity import identity
from accumulation_harness.config.validation import validate
from tests.strategies import BOUNDS
from tests.trials import trial


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("accumulation_steps", "accumulation_steps=[3]"),
        ("accumulation_steps", "accumulation_steps=[65] split=ragged"),
        ("accumulation_steps", "accumulation_steps=[]"),
        ("accumulation_steps", "accumulation_steps=[2,2]"),
        ("accumulation_steps", "accumulation_steps=[-1]"),
        ("optimizer.momentum", "optimizer.name=nesterov optimizer.momentum=0"),
        ("workload.model", "workload.model=transformer"),
        ("norm", "workload.data=text workload.model=transformer norm=batch"),
        ("data.root", "data.root=/tmp"),
        ("steps", "steps=10000 effective_batch=50000"),
        ("algebra_steps", "algebra_steps=100000 effective_batch=50000"),
        ("accumulation_steps", f"accumulation_steps=[{','.join(map(str, range(1, 66)))}] effective_batch=65 split=ragged"),
    ],
)
def test_bad_settings_are_named(field, settings):
    with pytest.raises(ConfigError, match="expected") as raised:
        validate(trial(settings))
    assert raised.value.field == field and str(raised.value).startswith(f"{field}=")


def changed(config, name, value):
    """`config` with the field of that dotted name changed."""
    head, _, rest = name.partition(".")
    return dataclasses.replace(config, **{head: changed(getattr(config, head), rest, value) if rest else value})


def numeric_fields(kind, prefix=""):
    found = set()
    for name, hint in get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            found |= numeric_fields(hint, f"{prefix}{name}.")
        elif hint in (int, float, float | None, int | None, tuple[int, ...]):
            found.add(prefix + name)
    return found


def test_every_number_has_bounds():
    assert numeric_fields(HarnessConfig) == BOUNDS.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_hold_the_defaults_and_nothing_beyond_their_ends(name):
    bounds, base = BOUNDS[name], dataclasses.replace(HarnessConfig(), clip_norm=1.0, ema_decay=0.5)
    validate(base)
    step = 1 if bounds.is_integer else max(abs(bounds.low), abs(bounds.high)) * 1e-9
    for value in (bounds.low - step, bounds.high + step, *([] if bounds.is_integer else [math.nan, math.inf, -math.inf])):
        wrong = (value,) if name == "accumulation_steps" else value
        with pytest.raises(ConfigError, match=r"expected an? (integer|number) (from|above)") as raised:
            validate(changed(base, name, wrong))
        assert raised.value.field == name and str(raised.value).startswith(f"{name}=")


def test_every_setting_of_a_trial_is_part_of_its_identity():
    """`auto` counts as the CPU until it is resolved; where a trial runs is no setting of it."""
    others = ("", "seed=1", "referee_every=51", "experiment=other", "optimizer.eps=1e-7", "device=cuda")
    assert len({identity(trial(settings)) for settings in others}) == len(others)
    assert identity(trial("device=cpu")) == identity(TrialConfig())
    assert identity(HarnessConfig(results="elsewhere", workers=7).trial) == identity(TrialConfig())
