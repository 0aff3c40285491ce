"""What is kept of one arm at one optimizer step: the columns of `steps.parquet`, and the metrics that W&B has (mirror.py)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

Scalar = str | int | float


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """The metrics of one arm at one optimizer step; what is not known is None. A new metric is a field here."""

    step: int
    arm: str
    accumulation_steps: int
    replicate: int
    loss: float
    parameter_distance: float
    gradient_norm: float | None = None
    gradient_difference_norm: float | None = None
    gradient_distance: float | None = None
    scale: float | None = None
    cosine: float | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None  # in float16
    gradient_error: float | None = None  # where the referee looks
    micro_batches: int | None = None  # these four: see `noise_scale`
    window_samples: int | None = None
    micro_batch_square: float | None = None
    window_square: float | None = None

    @property
    def known(self) -> dict[str, Scalar]:
        """The columns that have a value."""
        return {name: value for name, value in vars(self).items() if value is not None}


STEP_COLUMNS = tuple(field.name for field in dataclasses.fields(StepRow))
