"""One optimizer being watched: its gradients, parameters and state as they change."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from harness.audit.evidence import RANK, Backward, Clip, Intervention, Run, Step, Track, Vector, overflow_is_expected
from harness.audit.observe import shadows
from harness.audit.observe.foreign import Foreign
from harness.audit.observe.forwards import Forwards
from harness.audit.observe.shadows import Shadow
from harness.audit.observe.tensors import dense, gradients, in_a_group, roundoff, vector

LONGEST = 400  # calls kept per window
KEPT = 4  # windows whose contributions are kept: the first ones, as many with another number of backwards, and those asked for
PADDING = 4096  # elements by which the one tensor of a sharded optimizer may be longer than the parameters in it
COLLINEAR = 1e-6  # 1 - cosine below which a gradient was only scaled


class LiveTrack:
    """Collects a `Track`."""

    def __init__(self, optimizer: Optimizer | Foreign, run: Run, forwards: Forwards, keep: frozenset[int]) -> None:
        self.optimizer, self.run, self.forwards, self.keep = optimizer, run, forwards, keep
        self.num_odd = 0
        self.start: Vector | None = None  # parameters before the first window
        self.local: LocalGradients | None = None
        self.stand_in: LocalGradients | None = None
        self.track = Track(name=getattr(optimizer, "name", type(optimizer).__name__), tensors=())
        self.parameters: list[Tensor] = []
        self.inner_stepped = False
        self.num_effective = 0
        self.shadows: list[Shadow] = []
        self.last_shadows: tuple[float, ...] = ()
        self.moving: set[int] = set()  # places of the shadows that have changed
        self.shadow_updates = 0
        self.last_gradient: Vector | None = None
        self.given: Vector | None = None  # gradients as the step began
        self.started: tuple[str, Vector, frozenset[int], Vector | None, list[Any]] | None = None  # of the backward under way
        self.before: Vector | None = None
        self.unscaled = False
        self.refresh()
        self.clear_window()

    def clear_window(self) -> None:
        self.backwards: list[Backward] = []
        self.clips: list[Clip] = []
        self.calls: list[str] = []
        self.filled = False
        self.through_model = False
        self.unscaled = False

    def refresh(self) -> None:
        """Look the parameters up again: frameworks replace them when they shard or move a model."""
        found = [p for group in self.optimizer.param_groups for p in group["params"]]
        if [id(p) for p in found] != [id(p) for p in self.parameters]:
            self.parameters = found
            self.last_parameters: Vector | None = None
            self.last_gradient = None
        names = [self.forwards.names.get(id(p), "parameter") for p in self.parameters]
        alone = Counter(names)
        shown = [name if alone[name] == 1 else f"{name} {i}" for i, name in enumerate(names)]
        self.track.tensors = tuple((name, p.numel()) for name, p in zip(shown, self.parameters, strict=True))

    def note(self, call: str) -> None:
        if len(self.calls) < LONGEST:
            self.calls.append(call)

    def shares(self, other: LiveTrack) -> bool:
        mine = {id(p) for p in self.parameters}
        return any(id(p) in mine for p in other.parameters)

    def own_tensors(self) -> list[Tensor]:
        """Tensors of the optimizer, and gradients: none of these is an average of weights."""
        kept = [v for v in self.optimizer.state.values() if isinstance(v, Mapping)]  # some keep plain numbers beside them
        state = [t for values in kept for t in values.values() if isinstance(t, Tensor)]
        return state + [p.grad for p in self.parameters if p.grad is not None]

    # -- one backward -----------------------------------------------------------------------------------------------

    @overflow_is_expected
    def before_backward(self, unowned: Sequence[Tensor] = ()) -> None:
        """`unowned`: parameters of the model under way that no optimizer holds; this one may hold copies of them."""
        self.refresh()
        start = gradients(self.parameters)
        empty = not start.any()
        if empty:
            kind = "cleared" if self.filled else "empty"
        elif self.last_gradient is not None and np.array_equal(start, self.last_gradient, equal_nan=True):
            kind = "kept"
        else:
            kind = "scaled" if self.last_gradient is not None and _parallel(start, self.last_gradient) else "changed"
        self._see_shadows()
        emptied = self._emptied(start) if kind in ("cleared", "changed") and self.backwards else frozenset()
        self.started = (kind, start, emptied, self._movement(), [_mark(p) for p in self.parameters])
        self.local = LocalGradients(self.parameters) if in_a_group() else None
        self.stand_in = LocalGradients(unowned) if self._may_copy(unowned) else None

    def _emptied(self, start: Vector) -> frozenset[int]:
        """The tensors that the backward before had left a gradient in, and that have none now."""
        if self.last_gradient is None or self.last_gradient.shape != start.shape:
            return frozenset()
        edges = np.cumsum([0, *(p.numel() for p in self.parameters)])
        parts = [slice(a, b) for a, b in pairwise(edges)]
        return frozenset(i for i, part in enumerate(parts) if self.last_gradient[part].any() and not start[part].any())

    def _may_copy(self, unowned: Sequence[Tensor]) -> bool:
        """Whether the optimizer's own tensors have room for these and little more; of one rank only, as ranks share them out."""
        needed, own = sum(p.numel() for p in unowned), sum(p.numel() for p in self.parameters)
        return 0 < needed <= own <= needed + PADDING and not in_a_group()

    @overflow_is_expected
    def after_backward(self, loss: float, scale: float, manual: Vector | None = None) -> bool:
        """Whether it reached this optimizer. `manual` is the gradient when it was returned instead of added."""
        local = self.local.taken() if self.local is not None else None
        local = self.forwards.unsharded.taken(self.parameters) if local is None else local
        behind = self.stand_in.taken() if self.stand_in is not None else None
        self.local = self.stand_in = None
        if self.started is None:
            return False
        kind, start, emptied, moved, marks = self.started
        self.started = None
        forwards, end = self.forwards, gradients(self.parameters)
        same = marks == [_mark(p) for p in self.parameters] and np.array_equal(start, end, equal_nan=True)
        if manual is None and same:  # marks alone do not tell: sharded gradients are added to behind their wrapper
            if behind is None and local is None:
                return False  # this backward did not reach this optimizer
            if behind is not None:
                manual, self.through_model = np.pad(behind, (0, end.size - behind.size)), True
        # FSDP holds the unsharded gradient until ranks are synchronised: FSDP1 in `.grad`, FSDP2 out of sight
        whole = manual is not None or (start.shape == end.shape and not same)
        contribution = (manual if manual is not None else end - start) / scale if whole else None
        self.backwards.append(
            Backward(
                loss=loss / scale,
                scale=scale,
                start="manual" if manual is not None else kind,
                emptied=emptied if manual is None else frozenset(),
                contribution=contribution,
                finite=bool(np.isfinite(end if contribution is None else contribution).all()),
                rescaled=float(np.linalg.norm(start)) / scale if kind == "scaled" and self.backwards else math.nan,
                local=None if local is None else local / scale,
                rows=tuple(row for row, _ in forwards.rows) if self.run.forwards else None,
                lengths=len({length for _, length in forwards.rows}),
                forwards=forwards.count,
                broken_forwards=forwards.broken,
                draws=forwards.draws,
                outside=forwards.outside,
                moved=moved,
                lrs=self.lrs,
                shadows=self.last_shadows,
            )
        )
        self.filled = self.filled or (manual is None and bool(end.any()))  # a loss of 0 leaves nothing that could be cleared
        self.last_gradient = end
        self.track.first_backward = self.track.first_backward or self.run.backwards
        self.track.last_backward = self.run.backwards
        self.note("backward")
        return True

    def reached_with(self, places: frozenset[int]) -> None:
        """The last backward reached the optimizers at these places."""
        self.backwards[-1] = dataclasses.replace(self.backwards[-1], reached=places)

    # -- one optimizer step ----------------------------------------------------------------------------------------

    @property
    def lrs(self) -> tuple[float, ...]:
        return tuple(float(group.get("lr", 1.0)) for group in self.optimizer.param_groups)

    @overflow_is_expected
    def before_step(self) -> None:
        self.refresh()
        self.moved = self._movement()
        self._see_shadows()
        self.before = vector(self.parameters)
        self.given = gradients(self.parameters)
        self.last_parameters = self.before

    def after_step(self, *, in_backward: bool, loss_scale: float) -> None:
        if self.before is None:
            return
        if in_backward:
            self.after_backward(float("nan"), loss_scale)
        found_inf = getattr(self.optimizer, "found_inf", None)
        self.close(gradients(self.parameters), skipped=found_inf is not None and bool(found_inf))

    def skip(self) -> None:
        """A GradScaler left the step out."""
        self.before_step()
        self.close(gradients(self.parameters), skipped=True)

    @overflow_is_expected
    def close(self, gradient: Vector, *, skipped: bool = False) -> None:
        """The step is over: it took `gradient`; what it was given, where it clears gradients itself."""
        assert self.before is not None
        if self.given is not None and self.given.shape == gradient.shape and not gradient.any():
            gradient = self.given
        coarsest = max((roundoff(p.dtype) for p in self.parameters), default=0.0)
        self.run.accumulator_roundoff = max(self.run.accumulator_roundoff, coarsest)
        self.run.roundoff = max(self.run.roundoff, coarsest)
        after = vector(self.parameters)
        state, state_step = self._state()
        self.note("step")
        parts = [b.contribution for b in self.backwards if b.contribution is not None]
        if len(parts) < len(self.backwards) or any(part.shape != gradient.shape for part in parts):
            parts = []
        if not self._kept():
            self.backwards = [dataclasses.replace(b, contribution=None, local=None) for b in self.backwards]
            self.clips = [dataclasses.replace(c, before=c.before if len(self.clips) == 1 else None) for c in self.clips]
        self.track.steps.append(
            Step(
                tensors=self.track.tensors,
                gradient=gradient,
                total=np.sum(parts, axis=0) if parts else None,
                spread=self._spread(parts, gradient),
                lrs=self.lrs,
                decays=tuple(float(group.get("weight_decay") or 0.0) for group in self.optimizer.param_groups),
                before=self.before,
                after=after,
                state=state,
                state_step=state_step,
                moved=self.moved,
                skipped=skipped,
                backwards=tuple(self.backwards),
                clips=tuple(self.clips),
                calls=tuple(self.calls),
                roundoff=max(coarsest, 2.0**-24),
                buffers=self.forwards.buffer_movements(),
                norm_updates=sum(
                    int(n.num_batches_tracked) for n in self.forwards.norms.values() if n.num_batches_tracked is not None
                ),
            )
        )
        self.num_effective += self.track.steps[-1].effective
        self.before, self.given, self.last_parameters, self.last_gradient = None, None, after, gradient
        self.clear_window()

    def _spread(self, parts: Sequence[Vector], gradient: Vector) -> float:
        """||sum_k |c_k|||; in the gradient's own size where parts were seen in the model, maybe with a loss scale in them."""
        if not parts:
            return 0.0
        spread = float(np.linalg.norm(np.sum([np.abs(part) for part in parts], axis=0)))
        total = float(np.linalg.norm(np.sum(parts, axis=0)))
        return spread * float(np.linalg.norm(gradient)) / total if self.through_model and total else spread

    def _kept(self) -> bool:
        """Whether the contributions of the window that ends are kept: rules need those of a few windows only."""
        steps = self.track.steps
        odd = bool(steps) and len(self.backwards) != len(steps[0].backwards)
        self.num_odd += odd
        return len(steps) < KEPT or (odd and self.num_odd <= KEPT) or len(steps) in self.keep

    def _state(self) -> tuple[dict[str, Vector], float | None]:
        states = [self.optimizer.state.get(p, {}) for p in self.parameters]
        first: dict[str, Any] = next((s for s in states if s), {})
        kept = {}
        for key, value in first.items():
            if isinstance(value, Tensor) and value.ndim and all(isinstance(s.get(key), Tensor) for s in states if s):
                kept[str(key)] = vector(s[key] for s in states if s)
        step = first.get("step")
        return kept, None if step is None else float(step)

    # -- between them ----------------------------------------------------------------------------------------------

    def clipped(self, before: Vector, limit: float, scale: float) -> None:
        after = gradients(self.parameters)
        scale = 1.0 if self.unscaled else scale
        active = not np.array_equal(before, after, equal_nan=True)
        self.clips.append(Clip(after=len(self.backwards), before=before, active=active, limit=limit, scale=scale))
        self.note("clip")

    def _movement(self) -> Vector | None:
        """How far the parameters went since the last look, unless they stayed; None before the first window as well."""
        now = vector(self.parameters)
        last, self.last_parameters = self.last_parameters, now
        if last is None or last.shape != now.shape or (not self.track.steps and not self.backwards):
            return None
        return None if np.array_equal(last, now, equal_nan=True) else now - last

    def _see_shadows(self) -> None:
        if not self.shadows:
            return
        copies = tuple(shadow.copied() for shadow in self.shadows)
        sums = tuple(float(copy.values.sum()) for copy in copies)
        if self.track.steps and not self.backwards and not self.track.steps[-1].shadows:
            self.track.steps[-1] = dataclasses.replace(self.track.steps[-1], shadows=copies)
        if self.last_shadows and sums != self.last_shadows:
            self.moving |= {place for place, (a, b) in enumerate(zip(sums, self.last_shadows, strict=True)) if a != b}
            if self.track.steps:
                last = self.track.steps[-1]
                self.track.steps[-1] = dataclasses.replace(last, shadow_updates=last.shadow_updates + 1)
        self.last_shadows = sums

    def finish(self) -> None:
        """The function has returned."""
        self._see_shadows()
        self.track.pending = self.backwards
        if self.moving:  # the others are copies that somebody keeps
            for t, step in enumerate(self.track.steps):
                averages = tuple(s for place, s in enumerate(step.shadows) if place in self.moving)
                self.track.steps[t] = dataclasses.replace(step, shadows=averages)

    # -- what the audit changes in an extra run ----------------------------------------------------------------------

    def intervene(self, what: Intervention, index: int, step: int) -> None:
        """Put the followed run's parameters after its step `step` (-1: at its start), then perturb them."""
        if self.start is None:
            self.start = self.track.steps[0].before if self.track.steps else vector(self.parameters)
            self.track.start = None if self.track.steps else self.start
        if what.hold and self.start.size == sum(p.numel() for p in self.parameters):
            self._put(self.start)
        followed = _followed(what, index)
        if followed is not None and step < len(followed.steps):
            wanted = _own_part(followed.steps[max(step, 0)], after=step >= 0)
            if wanted.size == sum(p.numel() for p in self.parameters):
                self._put(wanted)
        if what.perturb:
            now = vector(self.parameters)
            signs = np.random.default_rng(step + 1).choice((-1.0, 1.0), size=now.shape)
            self._put(now * (1 + what.perturb * signs))
        self.last_parameters = vector(self.parameters)

    def intervene_on_averages(self, what: Intervention, index: int) -> None:
        """Before a forward: put the averaged copies that the followed run had as this window began."""
        followed = _followed(what, index)
        if followed is None or not 0 < self.num_effective <= len(followed.steps):
            return
        for wanted in followed.steps[self.num_effective - 1].shadows:
            shadow = shadows.nearest(self.shadows, wanted)
            if shadow is not None:
                _put(shadow.tensors, wanted.values)

    def _put(self, values: Vector) -> None:
        _put(self.parameters, values)


@torch.no_grad()
def _put(tensors: Sequence[Tensor], values: Vector) -> None:
    start = 0
    for p in tensors:
        value = torch.from_numpy(values[start : start + p.numel()]).reshape(p.shape).to(p.device, p.dtype)
        start += p.numel()
        if hasattr(p, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, p.device_mesh, p.placements)  # type: ignore[attr-defined]
        p.copy_(value)


def _followed(what: Intervention, index: int) -> Track | None:
    tracks = what.follow.tracks if what.follow is not None else []
    return next((t for t in tracks if t.place == index), tracks[0] if len(tracks) == 1 else None)


class LocalGradients:
    """This rank's own gradients of one backward, seen before a wrapper averages them over ranks."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.parts: dict[int, Tensor] = {}
        self.handles = [
            p.register_hook(functools.partial(self._add, id(p)))
            for p in parameters
            if p.requires_grad and not hasattr(p, "full_tensor")
        ]

    def _add(self, key: int, gradient: Tensor) -> None:
        part = dense(gradient).double()
        self.parts[key] = self.parts[key] + part if key in self.parts else part.clone()

    def taken(self) -> Vector | None:
        """[P]; None when no parameter was reached. Stops looking."""
        for handle in self.handles:
            handle.remove()
        if not self.parts:
            return None
        return vector(self.parts.get(id(p), torch.zeros_like(p)) for p in self.parameters)


def _own_part(step: Step, *, after: bool) -> Vector:
    """The parameters of a step; this rank's part where those of all ranks were joined (`ranks.pooled`)."""
    whole = step.after if after else step.before
    if not step.tensors or not step.tensors[0][0].startswith(RANK):
        return whole
    mine = f"{RANK}{torch.distributed.get_rank()} "
    kept = [np.full(count, name.startswith(mine)) for name, count in step.tensors]
    part: Vector = whole[np.concatenate(kept)]
    return part


def _mark(parameter: Tensor) -> tuple[int, int]:
    grad = parameter.grad
    return (0, 0) if grad is None else (id(grad), grad._version)


def _parallel(a: Vector, b: Vector) -> bool:
    sizes = float(np.linalg.norm(a) * np.linalg.norm(b))
    return sizes > 0 and float(a @ b) / sizes > 1 - COLLINEAR
