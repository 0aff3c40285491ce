"""What a study needs of a setting is refused by the name of the setting; its own tiny trial is not."""

from typing import Any

import pytest

from accumulation_harness.config import (
    ConfigError,
    Data,
    Device,
    Execution,
    Model,
    Norm,
    OptimizerConfig,
    OptimizerName,
    Precision,
    ScheduleConfig,
    ScheduleName,
    Split,
    TrialConfig,
    WorkloadConfig,
)
from accumulation_harness.config.questions import VERDICTS, studies
from accumulation_harness.config.validation import validate
from tests.simgpu.cases import BASE, STUDIES

TINY = STUDIES | {VERDICTS: {}, "resumption": {}, "replicas": {}}
# Settings of which each study that needs something refuses one at least.
ODD: tuple[dict[str, Any], ...] = (
    {"norm": Norm.group}, {"norm": Norm.batch}, {"split": Split.ragged}, {"steps": 2}, {"accumulation_steps": (1,)},
    {"precision": Precision.float32}, {"optimizer": OptimizerConfig()}, {"device": Device.cuda},
    {"execution": Execution.cuda_graph}, {"optimizer": OptimizerConfig(name=OptimizerName.custom, target="mine.py:Mine")},
    {"workload": WorkloadConfig(data=Data.pairs, model=Model.mlp)}, {"schedule": ScheduleConfig(name=ScheduleName.cosine)},
)  # fmt: skip


@pytest.mark.parametrize("name", studies())
def test_what_is_needed_is_refused_by_name(name):
    tiny = BASE | {"study": name} | TINY[name]
    validate(TrialConfig(**tiny))
    refused = set()
    for odd in ODD:
        try:
            validate(TrialConfig(**tiny | odd))
        except ConfigError as error:
            refused.add(error.field)
    needed = {need.name for need in studies()[name].needs}
    assert not needed or needed & refused
