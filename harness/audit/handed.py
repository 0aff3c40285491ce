"""Weights handed over by the audited function, where no torch optimizer can be watched: only updates are seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.audit.evidence import Step, Track, Vector

HANDED = "weights handed over"


class HandedWeights:
    """Makes a `Track` of snapshots; the update, with its sign turned, stands for the gradient."""

    def __init__(self) -> None:
        self.track = Track(name=HANDED, tensors=())
        self.last: Vector | None = None

    def take(self, weights: Mapping[str, Any]) -> None:
        """Copy the weights. Raises ValueError when there are none, or others than before."""
        arrays = {str(name): np.asarray(value, dtype=np.float64).reshape(-1) for name, value in weights.items()}
        tensors = tuple((name, array.size) for name, array in arrays.items())
        if not tensors or (self.track.tensors and tensors != self.track.tensors):
            raise ValueError(f"expected the same named weights each time, got {[name for name, _ in tensors][:8]}")
        now = np.concatenate(list(arrays.values()))
        if self.last is not None:
            self.track.steps.append(_step(self.last, now))
        self.track.tensors, self.last = tensors, now


def _step(before: Vector, after: Vector) -> Step:
    return Step(
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
        norm_updates=0,
    )
