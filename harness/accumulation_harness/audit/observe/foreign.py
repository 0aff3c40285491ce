"""What is not a `torch.optim` optimizer: the shape in which others are read, and weights that are handed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumulation_harness.audit.evidence import FLOAT32, Step, Track, Vector
from accumulation_harness.audit.observe.sample import sample_of

HANDED = "weights handed over"


class Foreign:
    """What the audit reads of an optimizer, in the shape of `torch.optim.Optimizer`."""

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self.name = f"{type(optimizer).__module__.partition('.')[0]} {type(optimizer).__name__}"
        self.optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 1.0, "weight_decay": 0.0}]
        self.state: Mapping[Tensor, dict[str, Any]] = {}


class HandedWeights:
    """Makes a `Track` of snapshots; the update, with its sign turned, stands for the gradient."""

    def __init__(self) -> None:
        self.track = Track(name=HANDED, tensors=())
        self.last: Vector | None = None

    def take(self, weights: Mapping[str, Any]) -> None:
        """Copy the weights, in any order of the names. Raises ValueError when there are none, or others than before."""
        arrays = {str(name): np.asarray(value, dtype=np.float64).reshape(-1) for name, value in sorted(weights.items())}
        tensors = tuple((name, array.size) for name, array in arrays.items())
        if not tensors:
            raise ValueError("expected named weights, got none")
        if self.track.tensors and tensors != self.track.tensors:
            raise ValueError(f"expected the same named weights each time, {self.track.tensors[:8]}, got {tensors[:8]}")
        formats = [np.asarray(value).dtype for _, value in sorted(weights.items())]
        roundoffs = tuple(float(np.finfo(f).eps) / 2 if f.kind in "fc" else FLOAT32 for f in formats)
        sample = sample_of([torch.from_numpy(array) for array in arrays.values()])
        now = sample.pick(np.concatenate(list(arrays.values())))
        if self.last is not None:
            kept = () if sample.whole else sample.counts
            self.track.steps.append(replace(_step(tensors, self.last, now), kept=kept, roundoffs=roundoffs))
        self.track.tensors, self.last = tensors, now


def _step(tensors: tuple[tuple[str, int], ...], before: Vector, after: Vector) -> Step:
    return Step(
        tensors=tensors,
        total=None,
        spreads=(0.0,) * len(tensors),
        roundoffs=(),
        gradient=before - after,
        lrs=(),
        decays=(),
        before=before,
        after=after,
        state={},
        state_step=None,
        moved=None,
        skipped=False,
        backwards=(),
        clips=(),
        calls=(),
    )
