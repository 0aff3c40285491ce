"""Runs, steps and backwards as the recorder writes them, made up from a few vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accumulation_harness.audit.evidence import Backward, Run, Step, Track, Vector

P = 24
TENSORS = (("weight", 16), ("bias", 8))


def vectors(count: int, seed: int = 0) -> list[Vector]:
    """Vectors [P] that no few of span each other."""
    return list(np.random.default_rng(seed).normal(size=(count, P)))


def backward(contribution: Vector | None, **changes: Any) -> Backward:
    given: dict[str, Any] = {
        "loss": 1.0,
        "scale": 1.0,
        "start": "kept",
        "contribution": contribution,
        "finite": True,
        "rows": None,
        "lengths": 0,
        "forwards": 1,
        "broken_forwards": 0,
        "draws": False,
        "outside": False,
        "moved": None,
        "lrs": (0.1,),
    }
    return Backward(**given | changes)


def step(parts: Sequence[Vector], gradient: Vector | None = None, **changes: Any) -> Step:
    """Plain SGD at a rate of 0.1 from weights of 1; the gradient is the sum of the parts unless given."""
    total = np.sum(parts, axis=0)
    taken = total if gradient is None else gradient
    given: dict[str, Any] = {
        "tensors": TENSORS,
        "gradient": taken,
        "total": total,
        "spread": float(np.linalg.norm(np.sum(np.abs(parts), axis=0))),
        "lrs": (0.1,),
        "decays": (0.0,),
        "before": np.ones(P),
        "after": np.ones(P) - 0.1 * taken,
        "state": {},
        "state_step": None,
        "moved": None,
        "skipped": False,
        "backwards": tuple(backward(part, start="kept" if k else "empty") for k, part in enumerate(parts)),
        "clips": (),
        "calls": ("forward", "backward") * len(parts) + ("step",),
    }
    return Step(**given | changes)


def run(*steps: Step, n: int = 1, **changes: Any) -> Run:
    track = Track(name="SGD", tensors=TENSORS, steps=list(steps))
    return Run(batch_size=16 // n, accumulation_steps=n, tracks=[track], **changes)
