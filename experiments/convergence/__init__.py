"""Do the large batch, its accumulation and the small batch converge alike: to which loss, after how many samples and seconds?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accumulation_harness.config.arm_name import ACCUMULATED, PERMUTED, ArmName, arm_of
from accumulation_harness.config.questions import Question, Study


def _of_learning_curves(row: Mapping[str, Any]) -> tuple[ArmName, float] | None:
    """Arms that compute what the full batch does have its rate, and choose none."""
    return None if row["arm"] in (ACCUMULATED, PERMUTED) else (arm_of(row), row["curve_validation_loss"][-1])


QUESTION = Question(place=100, studies={"learning_curves": Study(loss=_of_learning_curves, arm_by_arm=True)})
