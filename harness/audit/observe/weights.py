"""The weights that an intervention puts in place of the run's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.audit.evidence import Intervention, Step, Track, Vector


@torch.no_grad()
def put(tensors: Sequence[Tensor], values: Vector) -> None:
    """Write `values` [P] into the tensors in order; into sharded ones each rank's own part."""
    start = 0
    for p in tensors:
        value = torch.from_numpy(values[start : start + p.numel()]).reshape(p.shape).to(p.device, p.dtype)
        start += p.numel()
        if hasattr(p, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, p.device_mesh, p.placements)  # type: ignore[attr-defined]
        p.copy_(value)


def followed(what: Intervention, index: int) -> Track | None:
    """The track to follow for the optimizer that was made at this place."""
    tracks = what.follow.tracks if what.follow is not None else []
    return next((t for t in tracks if t.place == index), tracks[0] if len(tracks) == 1 else None)


def own_part(step: Step, *, after: bool) -> Vector:
    """The parameters of a step; this rank's part where those of all ranks were joined (`ranks.pooled`)."""
    whole = step.after if after else step.before
    if not step.shards:
        return whole
    rank = torch.distributed.get_rank()
    start = sum(step.shards[:rank])
    return whole[start : start + step.shards[rank]]
