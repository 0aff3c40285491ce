"""The weights that an intervention puts in place of the run's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from accumulation_harness.audit.evidence import Intervention, Step, Track, Vector
from accumulation_harness.audit.observe.handed import LENT
from accumulation_harness.audit.observe.live import LiveTrack
from accumulation_harness.audit.observe.pooling import places
from accumulation_harness.audit.observe.sample import BLOCK
from accumulation_harness.audit.observe.tensors import dense, put, roundoff, size, write


def intervene(live: LiveTrack, what: Intervention, index: int, step: int) -> None:
    """Put the followed run's parameters after step `step` of those that could move them (-1: at its start), then perturb them.

    `index`: the place of the optimizer among those that were made.

    Args:
        live: The optimizer that is followed.
        what: What is to be done to the run.
        index: The place of the optimizer among those that were made.
        step: The step that has just ended.
    """
    if not live.parameters:  # of an engine that lends them for steps alone
        return
    if live.track.start is None and not live.track.steps:
        live.track.start = live.last_parameters = live.weights()
    if what.freeze_weights and live.start is not None and _sizes(live.start) == _sizes(live.parameters):
        for p, start in zip(live.parameters, live.start, strict=True):
            write(p, start)
    track = _followed(what, index)
    # an optimizer may begin with a step that only prepares, and moves nothing (SOAP's basis)
    moving = [place for place, one in enumerate(track.steps) if one.effective] if track is not None else []
    step_there = what.led(step + 1) - 1
    if track is not None and step_there < len(moving):
        _follow(live, track, moving[step_there] if step_there >= 0 else -1)
    if what.perturb:
        _perturb(live.parameters, what, step + 1)
    if what.freeze_weights or track is not None or what.perturb:
        live.last_parameters = live.weights()


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [size(tensor) for tensor in tensors]


def _follow(live: LiveTrack, track: Track, step: int) -> None:
    """Put the parameters after step `step` of the track, of all its steps."""
    if track.weights:
        if [count for _, count in track.tensors] == _sizes(live.parameters) and step + 1 < len(track.weights):
            track.weights[step + 1].put(live.parameters)
        return
    theirs, size = track.steps[max(step, 0)], sum(_sizes(live.parameters))
    wanted = _own_part(theirs, after=step >= 0)
    if wanted.size > size and live.track.start is not None and live.track.start.size == size:
        held = places(live.track.tensors, live.track.start, track)  # this rank holds a part of the model that is followed
        wanted = wanted if held is None else wanted[theirs.elements(held)]
    if wanted.size == size:
        put(live.parameters, wanted)


def lend(lives: Sequence[LiveTrack], model: nn.Module | None) -> Callable[[], None]:
    """Other weights; what puts their own back, and counts on where the model has counted.

    Args:
        lives: Optimizers that are followed.
        model: Model whose counting buffers are put back as well, or None.

    Returns:
        A function that puts everything back.
    """
    own = [(live, [dense(p).clone() for p in live.parameters]) for live in lives]
    parts = [] if model is None else [*model.modules()]
    counts = [{name: value for name, value in vars(part).items() if type(value) in (int, float)} for part in parts]

    def restore() -> None:
        for part, before in zip(parts, counts, strict=True):
            for name, value in vars(part).items():
                if type(value) in (int, float) and before.get(name) != value:
                    vars(part)[name] = value + 1
        for live, weights in own:
            for p, value in zip(live.parameters, weights, strict=True):
                write(p, value)
            live.last_parameters = live.weights()

    for live in lives:
        _perturb(live.parameters, Intervention(perturb=1.0, arithmetic=LENT), 0)
        live.last_parameters = live.weights()
    return restore


def _perturb(parameters: Sequence[Tensor], what: Intervention, seed: int) -> None:
    """Multiply every element by 1 plus or minus so many roundings of its tensor's own format, in float64."""
    random = np.random.default_rng(seed)
    for p in parameters:
        blocks, apart = [], what.perturb * max(roundoff(p.dtype), what.arithmetic)
        for block in dense(p).reshape(-1).split(BLOCK):
            signs = random.choice((-1.0, 1.0), size=block.numel())
            moved = block.to("cpu", torch.float64) * torch.from_numpy(1 + apart * signs)
            blocks.append(moved.to(block.dtype))
        write(p, torch.cat(blocks))


def _followed(what: Intervention, index: int) -> Track | None:
    """The track to follow for the optimizer that was made at this place."""
    tracks = [*what.follow.beside, *what.follow.tracks] if what.follow is not None else []
    return next((t for t in tracks if t.place == index), tracks[0] if len(tracks) == 1 else None)


def _own_part(step: Step, *, after: bool) -> Vector:
    """The parameters of a step; this rank's part where those of all ranks were joined (`pooling`)."""
    whole = step.after if after else step.before
    return whole[step.elements(step.shards[torch.distributed.get_rank()])] if step.shards else whole
