"""What is known of a window when its optimizer step has been taken: plain numbers on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from accumulation_harness.judge.cause import Cause
from accumulation_harness.watch.slopes import Slope

Sketch = npt.NDArray[np.float64]  # [T, WIDTH]


@dataclass(kw_only=True)
class MicroBatch:
    """One backward of a window."""

    contribution: Sketch | None  # of what was differentiated, without the loss scale; None: not seen
    before: Sketch | None = None  # of `.grad` as the backward began; None: not looked at
    after: Sketch | None = None  # and as it ended
    empty: bool = False  # no gradient was there as it began
    scale: float = 1.0  # of the loss
    slopes: Sequence[Slope] | None = None  # None: not looked at
    loss: float = float("nan")
    calls: tuple[str, ...] = ()  # since the backward before, or since the step
    lrs: tuple[float, ...] = ()
    fed: bool = False  # the model's inputs asked for gradients: another model's loss may pass through


@dataclass(kw_only=True)
class Window:
    """The micro-batches between two optimizer steps."""

    index: int
    track: int  # which optimizer
    micro_batches: list[MicroBatch]
    gradient: Sketch  # `.grad` before the last clip, or as the step began
    norm: float = float("nan")  # of the gradient
    whole: bool = True  # all tensors were looked at; of the others, sketches are zero
    at_step: Sketch | None  # as the step began; None: not looked at
    parameters: Sketch | None  # of the weights as the step began
    first: Sketch | None = None  # and at the first backward
    clipped: Sketch | None = None  # `.grad` after the last clip
    narrow: bool = False  # a gradient is kept in 16 bits
    rounded: str = ""  # the 16-bit format that the gradient fits into although its own is wider
    calls: tuple[str, ...] = ()  # between the last backward and the step
    skipped: bool = False  # by the loss scaler
    closure: bool = False
    moved: bool = False  # weights moved inside the window
    state_moved: bool = False
    resumed: bool = False  # the optimizer had a state when the watch began, and this is its first window
    alone: bool = True  # one process
    ranks: Ranks | None = None  # looked at in a sample of windows
    averaged: float | None = None  # the rate at which an average of the weights moves inside the window
    forwards: int = 0  # of the model, in training
    still: bool = False  # the step moved no weights
    buffers_moved: bool = False  # since the step before


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What all ranks showed of one window."""

    contributions: Sequence[Sketch | None]
    gradients: Sequence[Sketch]
    terms: Sequence[float]
    sharded: bool = False


@dataclass(kw_only=True)
class Finding:
    """Something wrong: its cause, where it was seen first and how often."""

    cause: Cause
    message: str
    window: int
    rung: str  # ledger, sketch or replay
    evidence: dict[str, Any] = field(default_factory=dict)
    count: int = 1
