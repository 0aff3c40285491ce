import dataclasses
import math
from typing import Any

import pytest

from harness.config import (
    ConfigError,
    Data,
    DataConfig,
    HarnessConfig,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    ScheduleConfig,
    Split,
    TrialConfig,
    WorkloadConfig,
    identity,
    to_dict,
    validate,
)  # fmt: skip


def test_defaults_are_valid() -> None:
    validate(TrialConfig())


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("accumulation_steps", {"accumulation_steps": (3,)}),
        ("accumulation_steps", {"accumulation_steps": (65,), "split": Split.ragged}),
        ("accumulation_steps", {"accumulation_steps": ()}),
        ("accumulation_steps", {"accumulation_steps": (2, 2)}),
        ("accumulation_steps", {"accumulation_steps": (-1,)}),
        ("effective_batch", {"effective_batch": 0}),
        ("steps", {"steps": 0}),
        ("permutations", {"permutations": 29}),
        ("nulls", {"nulls": 4}),
        ("loss_scale", {"loss_scale": math.inf}),
        ("clip_norm", {"clip_norm": 0.0}),
        ("optimizer.lr", {"optimizer": OptimizerConfig(lr=math.nan)}),
        ("optimizer.beta2", {"optimizer": OptimizerConfig(beta2=1.0)}),
        ("optimizer.momentum", {"optimizer": OptimizerConfig(name=OptimizerName.nesterov, momentum=0.0)}),
        ("optimizer.weight_decay", {"optimizer": OptimizerConfig(weight_decay=-0.1)}),
        ("schedule.warmup_steps", {"schedule": ScheduleConfig(warmup_steps=-1)}),
        ("workload.model", {"workload": WorkloadConfig(model=Model.transformer)}),
        ("workload.dropout", {"workload": WorkloadConfig(dropout=1.0)}),
        ("norm", {"workload": WorkloadConfig(data=Data.text, model=Model.transformer), "norm": Norm.batch}),
        ("data.root", {"workload": WorkloadConfig(data=Data.mnist)}),
        ("data.root", {"data": DataConfig(root="/tmp")}),
    ],
    ids=str,
)
def test_bad_settings_are_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected") as raised:
        validate(dataclasses.replace(TrialConfig(), **changes))
    assert raised.value.field == field and str(raised.value).startswith(f"{field}=")


def test_every_setting_of_a_trial_is_part_of_its_identity() -> None:
    base = TrialConfig()
    others = [
        dataclasses.replace(base, seed=1),
        dataclasses.replace(base, probe_every=21),
        dataclasses.replace(base, referee_every=51),
        dataclasses.replace(base, experiment="other"),
        dataclasses.replace(base, optimizer=OptimizerConfig(eps=1e-7)),
        dataclasses.replace(base, data=DataConfig(root="/data")),
    ]
    assert len({identity(config) for config in [base, *others]}) == 1 + len(others)


def test_where_a_trial_runs_is_not_part_of_its_identity() -> None:
    assert identity(HarnessConfig(results="elsewhere", workers=7).trial) == identity(TrialConfig())


def test_to_dict_is_plain() -> None:
    plain = to_dict(TrialConfig())
    assert plain["norm"] == "none" and type(plain["norm"]) is str and plain["accumulation_steps"] == [2, 4, 8, 16]
