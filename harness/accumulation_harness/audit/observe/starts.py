"""What a backward found in `.grad`, beside what the event before had left there."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from accumulation_harness.audit.evidence import Start, Vector
from accumulation_harness.audit.observe.sample import Sample

COLLINEAR = 1e-6  # 1 - cosine below which a gradient was only scaled


def _parallel(a: Vector, b: Vector) -> bool:
    sizes = float(np.linalg.norm(a) * np.linalg.norm(b))
    return sizes > 0 and float(a @ b) / sizes > 1 - COLLINEAR


def start_of(found: Vector, last: Vector | None, *, filled: bool) -> Start:
    """`found` [P]: the gradients as a backward begins; `last`: as the event before left them; `filled`: some have been there."""
    if not found.any():
        return "cleared" if filled else "empty"
    if last is None:
        return "changed"
    if found is last or np.array_equal(found, last, equal_nan=True):
        return "kept"
    return "scaled" if _parallel(found, last) else "changed"


def emptied_since(found: Vector, last: Vector | None, sample: Sample) -> frozenset[int]:
    """The tensors that the backward before had left a gradient in, and that have none now."""
    if last is None or last.shape != found.shape:
        return frozenset()
    edges = np.cumsum([0, *sample.counts])
    parts = [slice(a, b) for a, b in pairwise(edges)]
    return frozenset(i for i, part in enumerate(parts) if last[part].any() and not found[part].any())
