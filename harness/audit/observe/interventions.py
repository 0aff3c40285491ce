"""The weights that an intervention puts in place of the run's own."""

from __future__ import annotations

import numpy as np
import torch

from harness.audit.evidence import Intervention, Step, Track, Vector
from harness.audit.observe.live import LiveTrack
from harness.audit.observe.tensors import put, vector


def intervene(live: LiveTrack, what: Intervention, index: int, step: int) -> None:
    """Put the followed run's parameters after its step `step` (-1: at its start), then perturb them.

    `index`: the place of the optimizer among those that were made.
    """
    if live.start is None:
        live.start = live.track.steps[0].before if live.track.steps else vector(live.parameters)
        live.track.start = None if live.track.steps else live.start
    size = sum(p.numel() for p in live.parameters)
    if what.freeze_weights and live.start.size == size:
        put(live.parameters, live.start)
    track = _followed(what, index)
    if track is not None and step < len(track.steps):
        wanted = _own_part(track.steps[max(step, 0)], after=step >= 0)
        if wanted.size == size:
            put(live.parameters, wanted)
    if what.perturb:
        now = vector(live.parameters)
        signs = np.random.default_rng(step + 1).choice((-1.0, 1.0), size=now.shape)
        put(live.parameters, now * (1 + what.perturb * signs))
    live.last_parameters = vector(live.parameters)


def intervene_on_averages(live: LiveTrack, what: Intervention, index: int) -> None:
    """Before a forward: put the averaged copies that the followed run had as this window began."""
    track = _followed(what, index)
    if track is not None and 0 < live.num_effective <= len(track.steps):
        live.averages.put(track.steps[live.num_effective - 1].shadows)


def _followed(what: Intervention, index: int) -> Track | None:
    """The track to follow for the optimizer that was made at this place."""
    tracks = what.follow.tracks if what.follow is not None else []
    return next((t for t in tracks if t.place == index), tracks[0] if len(tracks) == 1 else None)


def _own_part(step: Step, *, after: bool) -> Vector:
    """The parameters of a step; this rank's part where those of all ranks were joined (`ranks.pooled`)."""
    whole = step.after if after else step.before
    if not step.shards:
        return whole
    rank = torch.distributed.get_rank()
    start = sum(step.shards[:rank])
    return whole[start : start + step.shards[rank]]
