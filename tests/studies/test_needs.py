"""What a study needs of a setting is refused by the name of the setting; its own tiny trial is not."""

import pytest

from accumulation_harness.config import ConfigError
from accumulation_harness.config.questions import VERDICTS, studies
from accumulation_harness.config.validation import validate
from tests.simgpu.cases import BASE, STUDIES
from tests.trials import trial

TINY = STUDIES | dict.fromkeys((VERDICTS, "resumption", "replicas"), "")
# Settings of which each study that needs something refuses one at least.
ODD = (
    "norm=group", "norm=batch", "split=ragged", "steps=2", "accumulation_steps=[1]", "precision=float32",
    "optimizer.name=sgd optimizer.target=null", "device=cuda", "execution=cuda_graph",
    "optimizer.name=custom optimizer.target=mine.py:Mine", "workload.data=pairs workload.model=mlp", "schedule.name=cosine",
)  # fmt: skip


@pytest.mark.parametrize("name", studies())
def test_what_is_needed_is_refused_by_name(name):
    tiny = trial(BASE, f"study={name}", TINY[name])
    validate(tiny)
    refused = set()
    for odd in ODD:
        try:
            validate(trial(odd, base=tiny))
        except ConfigError as error:
            refused.add(error.field)
    needed = {need.name for need in studies()[name].needs}
    assert not needed or needed & refused
