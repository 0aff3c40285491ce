"""One optimizer being watched: its gradients, parameters and state as they change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from accumulation_harness.audit.evidence import (
    KEPT,
    Backward,
    Call,
    Change,
    Clip,
    Intervention,
    Run,
    Start,
    Step,
    Term,
    Track,
    Vector,
    emptied,
    norms_by,
    overflow_is_expected,
    rounded_to,
)
from accumulation_harness.audit.observe.forwards import Forwards
from accumulation_harness.audit.observe.frames import site
from accumulation_harness.audit.observe.rank_gradients import LocalGradients, are_hooked
from accumulation_harness.audit.observe.sample import (
    Sample,
    Store,
    all_finite,
    looked_at,
    sample_of,
    signed_sums,
    size_of,
)
from accumulation_harness.audit.observe.tensors import dense, roundoff, size
from accumulation_harness.compare.linear import cosine, norm
from accumulation_harness.observe.fence import Fence
from accumulation_harness.observe.followed import Followed, Mark, Options, mark
from accumulation_harness.observe.tensors import in_a_group
from accumulation_harness.system.state import PLAIN, readable

LONGEST = 400  # calls kept per window
COLLINEAR = 1e-6  # 1 - cosine below which a gradient was only scaled
HOOKED = 1e-5  # relative; what becomes of a sum and is less is its rounding
CANCELLED = 1e-3  # relative; of a sum that is smaller than its parts by more, rounding hides what became of it
Unclipped = tuple[Vector, float | None]
PADDING = 4096  # elements by which the one tensor of a sharded optimizer may be longer than the parameters in it


@dataclass
class OpenWindow:
    """What was seen since the last optimizer step."""

    backwards: list[Backward] = field(default_factory=list)
    clips: list[Clip] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    aside: set[int] = field(
        default_factory=set
    )  # places of backwards whose gradients `.grad` was never given, or that were cleared before another one of these forwards
    filled: bool = False  # some backward has left a gradient
    through_model: bool = False  # gradients were seen in the model, whose parameters the optimizer holds copies of
    unscaled: bool = False  # the loss scale has been taken out of the gradients


@dataclass(frozen=True)
class Begun:
    """A backward under way, and what it found."""

    start: Start
    gradient: Vector
    emptied: frozenset[int]
    moved: Vector | None
    marks: list[Mark]  # of every parameter's `.grad`
    local: LocalGradients | None  # of this rank alone
    stand_in: LocalGradients | None  # of the model's parameters, which the optimizer may hold copies of
    hooked: list[LocalGradients]  # before the run's own hooks, and behind them


class Foreign:
    """What the audit reads of an optimizer that is none of `torch.optim`, in the shape of those."""

    def __init__(self, optimizer: Any, parameters: Sequence[Tensor]) -> None:
        self.name = f"{type(optimizer).__module__.partition('.')[0]} {type(optimizer).__name__}"
        self.optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": 1.0, "weight_decay": 0.0}]
        self.state: Mapping[Tensor, dict[str, Any]] = {}


class LiveTrack(Followed):
    """Collects the `Track` of one optimizer."""

    def __init__(self, optimizer: Optimizer | Foreign, run: Run, forwards: Forwards, what: Intervention, fence: Fence) -> None:
        super().__init__(optimizer)
        self.run, self.forwards, self.what, self.fence = run, forwards, what, fence
        self.store = Store() if what.leads else None
        self.track = Track(name=getattr(optimizer, "name", type(optimizer).__name__), tensors=())
        self.window = OpenWindow()
        self.sample = Sample(())  # the elements of the parameters that are kept
        self.inner: set[int] = set()  # parameters (ids) that other optimizers stepped inside this one's step
        self.num_effective = 0  # steps so far that could move parameters
        self.last_gradient: Vector | None = None  # as the last event left it
        self.start: list[Tensor] | None = None  # parameters before the first window, where they are put back
        self._num_odd = 0  # windows so far with another number of backwards than the first one
        self._begun: Begun | None = None
        self._given: Vector | None = None  # gradients as the step began
        self._before: Vector | None = None  # parameters then
        self._options: Options = {}  # and the numbers of its groups
        self.refresh()

    def now(self) -> list[Tensor]:
        """The parameters now; those of the step before where an engine lends them to the optimizer for its steps alone."""
        return super().now() or (self.parameters if self.num_steps else [])

    def refresh(self) -> None:
        """Look the parameters up again: frameworks replace them when they shard or move a model."""
        if self.look_again():
            self.sample = sample_of(self.parameters)
            self.last_parameters: Vector | None = None
            self.last_gradient = None
        names = [self.forwards.names.get(id(p), "parameter") for p in self.parameters]
        alone = Counter(names)
        paths = [self.forwards.paths.get(id(p), name) for p, name in zip(self.parameters, names, strict=True)]
        others = [path if path not in alone else f"{name} {i}" for i, (path, name) in enumerate(zip(paths, names, strict=True))]
        shown = [name if alone[name] == 1 else other for name, other in zip(names, others, strict=True)]
        self.track.tensors = tuple((name, size(p)) for name, p in zip(shown, self.parameters, strict=True))

    def note(self, call: Call) -> None:
        """Add to the order of calls of the window, and to the lines that made it."""
        if (where := site()) is not None:
            self.run.sites.setdefault(call, Counter())[where] += 1
        if len(self.window.calls) < LONGEST:
            self.window.calls.append(call)

    @property
    def is_wrapper(self) -> bool:
        """Whether other optimizers step all its parameters inside its own steps, and have always done so."""
        return bool(self.inner) and not self.track.steps and self.inner.issuperset(map(id, self.parameters))

    def stepped_inside(self, other: LiveTrack) -> None:
        """Another optimizer has stepped inside this one's step."""
        self.inner.update({id(p) for p in self.parameters} & {id(p) for p in other.parameters})

    def gradients(self) -> Vector:
        """[P] The gradients now. All ranks must agree on which are there when they are sharded."""
        return self.sample.take(p.grad for p in self.parameters)

    def weights(self) -> Vector:
        """[P] The parameters now; the vector of the last look where they are the same."""
        return _shared(self.sample.take(self.parameters), self.last_parameters)

    # -- one backward -----------------------------------------------------------------------------------------------

    @overflow_is_expected
    def before_backward(self, unowned: Sequence[Tensor] = ()) -> None:
        """`unowned`: parameters of the model under way that no optimizer holds; this one may hold copies of them."""
        self.refresh()
        found = _shared(self.gradients(), self.last_gradient)
        self._look_for_returned(found)
        start = _start_of(found, self.last_gradient, filled=self.window.filled)
        last = self.last_gradient if start in ("cleared", "changed") and self.window.backwards else None
        lost = [] if last is None or last.shape != found.shape else emptied(last, found, self.sample.counts)
        hooked = not in_a_group() and are_hooked(self.parameters)
        self._begun = Begun(
            start,
            found,
            frozenset(lost),
            self._movement(),
            [mark(p.grad) for p in self.parameters],
            local=LocalGradients(self.parameters, self.fence) if in_a_group() else None,
            stand_in=LocalGradients(unowned, self.fence) if self.may_copy(unowned) else None,
            hooked=[LocalGradients(self.parameters, self.fence, first=first) for first in (True, False) if hooked],
        )

    def _look_for_returned(self, found: Vector) -> None:
        """Whether what the last backward returned has been put into `.grad`, which is `found` [P] now."""
        window = self.window
        if window.backwards and window.backwards[-1].start == "manual" and not window.through_model:
            last = self.last_gradient
            if not found.any() or (last is not None and np.array_equal(found, last, equal_nan=True)):
                window.aside.add(len(window.backwards) - 1)

    def may_copy(self, unowned: Sequence[Tensor]) -> bool:
        """Whether the optimizer's own tensors have room for these and little more; of one rank only, as ranks share them out."""
        sizes = [*map(size, unowned)]  # only gradients tell where an engine empties them between forwards (ZeRO-3)
        return bool(sizes) and not in_a_group() and (not all(sizes) or self._has_room(sum(sizes)))

    def _has_room(self, needed: int) -> bool:
        """For so many numbers and few more; or it has no tensors but in its steps."""
        own = sum(map(size, self.parameters))
        return 0 < needed <= own <= needed + PADDING or not self.parameters

    @overflow_is_expected
    def after_backward(self, loss: float, scale: float, manual: Vector | None = None) -> bool:
        """Whether it reached this optimizer. `manual` [P] is the gradient when it was returned instead of added."""
        begun, self._begun = self._begun, None
        if begun is None:
            return False
        local = begun.local.taken() if begun.local is not None else None
        local = self.forwards.unsharded.taken(self.parameters) if local is None else local
        behind = begun.stand_in.taken() if begun.stand_in is not None and begun.stand_in.is_whole else None
        behind = behind if behind is not None and self._has_room(behind.size) else None
        bare, left = (self._picked(one.taken()) for one in begun.hooked) if begun.hooked else (None, None)
        end = _shared(self.gradients(), begun.gradient)
        same = begun.marks == [mark(p.grad) for p in self.parameters] and end is begun.gradient
        if manual is None and same:  # marks alone do not tell: sharded gradients are added to behind their wrapper
            if behind is None and local is None and left is None:
                return False  # this backward did not reach this optimizer
            if behind is not None:
                manual = (self.sample if self.parameters else Sample((behind.size,))).pick(behind)
                self.window.through_model = True
            else:  # hooks of the run have taken it elsewhere
                manual = left
        # FSDP holds the unsharded gradient until ranks are synchronised: FSDP1 in `.grad`, FSDP2 out of sight
        whole = manual is not None or (begun.gradient.shape == end.shape and not same)
        contribution = _shared((manual if manual is not None else end - begun.gradient) / scale, end) if whole else None
        finite = bool(np.isfinite(end if contribution is None else contribution).all())
        finite = finite and (self.sample.whole or manual is not None or all_finite(p.grad for p in self.parameters))
        backward = self._backward(begun, loss, scale, contribution, finite=finite, added=manual is None)
        if bare is not None and left is not None:
            parts = begun.gradient + left, np.abs(begun.gradient) + np.abs(left)
            known = (np.abs(parts[0]) > CANCELLED * parts[1]) & (np.abs(parts[0] - end) > HOOKED * parts[1])
            after = ((np.where(known, parts[0], 0.0), np.where(known, end, 0.0)),) if known.any() and manual is None else ()
            hooked = None if np.array_equal(bare, left, equal_nan=True) else (bare, left)
            backward = replace(backward, bare=bare / scale, hooked=hooked, changed=(*backward.changed, *after))
        if backward.start == "cleared" and self.run.forwards and not backward.forwards and self.window.backwards:
            self.window.aside.add(len(self.window.backwards) - 1)
        self.window.backwards.append(replace(backward, local=None if local is None else local / scale))
        # a loss of 0 leaves nothing that could be cleared
        self.window.filled = self.window.filled or (manual is None and bool(end.any()))
        if manual is None or begun.start != "cleared":  # one that only looks takes the clearing before it from no other
            self.last_gradient = end
        self.track.first_backward = self.track.first_backward or self.run.backwards
        self.track.last_backward = self.run.backwards
        self.note("backward")
        return True

    def _backward(
        self, begun: Begun, loss: float, scale: float, contribution: Vector | None, *, finite: bool, added: bool
    ) -> Backward:
        """`added`: the gradient was added to `.grad`, not returned."""
        forwards = self.forwards
        scaled = begun.start == "scaled" and self.window.backwards
        return Backward(
            loss=loss / scale,
            scale=scale,
            start=begun.start if added else "manual",
            emptied=begun.emptied if added else frozenset(),
            contribution=contribution,
            finite=finite,
            rescaled=norm(begun.gradient) / scale if scaled else math.nan,
            changed=self._change(begun.gradient),
            rows=tuple(row for row, _ in forwards.rows) if self.run.forwards else None,
            computed=forwards.computed,
            lengths=len({length for _, length in forwards.rows}),
            forwards=forwards.count,
            broken_forwards=forwards.broken,
            draws=forwards.draws,
            outside=forwards.outside,
            moved=begun.moved,
            lrs=self.lrs,
        )

    def _picked(self, values: Vector | None) -> Vector | None:
        return None if values is None else self.sample.pick(values)

    def _change(self, found: Vector) -> tuple[Change, ...]:
        """What the loop has made of the gradients that the last backward left."""
        last = self.last_gradient if self.window.backwards else None
        return () if last is None or last.shape != found.shape or not found.any() or found is last else ((last, found),)

    def reached_with(self, places: frozenset[int], terms: tuple[Term, ...] = ()) -> None:
        """The last backward reached the optimizers at these places; `terms`: what each addend of its loss gave this one."""
        self.window.backwards[-1] = replace(self.window.backwards[-1], reached=places, terms=terms)

    # -- one optimizer step ----------------------------------------------------------------------------------------

    @overflow_is_expected
    def before_step(self) -> None:
        """Take the parameters and gradients as the step begins."""
        self.refresh()
        self._moved = self._movement()
        self._before = self.last_parameters = self.weights()
        self._options = self.options
        clipped = self.window.clips[-1].left if self.window.clips else None
        self._given = _shared(self.gradients(), self.last_gradient if clipped is None else clipped)
        self._look_for_returned(self._given)
        if self.store is not None and not self.sample.whole and not self.track.weights:
            self.track.weights.append(self.store.add(self.parameters))
        if self.what.freeze_weights and self.start is None:
            self.start = [dense(p).clone() for p in self.parameters]

    def after_step(self, *, in_backward: bool, loss_scale: float) -> None:
        """`in_backward`: the step was taken inside a backward, which then ends for this optimizer."""
        if self._before is None:
            return
        if in_backward:
            self.after_backward(float("nan"), loss_scale)
        found_inf = getattr(self.optimizer, "found_inf", None)
        self.close(self.gradients(), skipped=found_inf is not None and bool(found_inf))

    def skip(self) -> None:
        """A GradScaler left the step out."""
        self.before_step()
        self.close(self.gradients(), skipped=True)

    @overflow_is_expected
    def close(self, gradient: Vector, *, skipped: bool = False) -> None:
        """The step is over: it took `gradient` [P]; what it was given, where it clears gradients itself."""
        assert self._before is not None
        sums = None if self.sample.whole else signed_sums(self.parameters)
        if self._given is not None and self._given.shape == gradient.shape and not gradient.any():
            gradient, sums = self._given, None
        gradient = _shared(gradient, self._given)
        roundoffs = tuple(roundoff(p.dtype) for p in self.parameters)
        coarsest = max(roundoffs, default=0.0)
        self.run.roundoff = max(self.run.roundoff, coarsest)
        after = self.weights()
        if self.store is not None and not self.sample.whole:
            self.track.weights.append(self.store.add(self.parameters))
        state, state_step = _state(self.optimizer, self.parameters)
        self.note("step")
        window = self.window
        if any(b.start != "manual" for b in window.backwards):  # else gradients may be added up elsewhere
            window.clips = [replace(c, after=c.after - sum(k < c.after for k in window.aside)) for c in window.clips]
            window.backwards = _without(window.aside, window.backwards)
        parts = [b.contribution for b in window.backwards if b.contribution is not None]
        if len(parts) < len(window.backwards) or any(part.shape != gradient.shape for part in parts):
            parts = []
        if not (kept := self._kept()):
            window.backwards = [
                replace(b, contribution=None, local=None, bare=None, hooked=None, changed=()) for b in window.backwards
            ]
            window.clips = [
                replace(c, before=c.before if c is window.clips[0] else None, left=c.left if c is window.clips[-1] else None)
                for c in window.clips
            ]
        else:
            self._note_arithmetic(coarsest)
        step = Step(
            tensors=self.track.tensors,
            kept=() if self.sample.whole else self.sample.counts,
            sums=sums,
            gradient=gradient,
            total=_sum(parts),
            spreads=self._spreads(parts, like=gradient if window.through_model else None),
            lrs=self.lrs,
            options={name: each for name, each in self.options.items() if each == self._options.get(name)},
            before=self._before,
            after=after,
            state=state,
            state_step=state_step,
            moved=self._moved,
            skipped=skipped,
            backwards=tuple(window.backwards),
            clips=tuple(window.clips),
            calls=tuple(window.calls),
            changed=self._change(self._given) if kept and self._given is not None else (),
            roundoffs=roundoffs,
        )
        self.track.steps.append(step)
        self.num_steps += 1
        self.num_effective += step.effective
        self._before, self._given, self.last_parameters, self.last_gradient = None, None, after, gradient
        self.window = OpenWindow()

    def _note_arithmetic(self, coarsest: float) -> None:
        """What the window's first backward gave may be rounded to less than any format shows: the loop casts by itself."""
        first = next((b.contribution for b in self.window.backwards[:1] if b.start in ("empty", "cleared", "manual")), None)
        if first is not None and first.size == self.sample.size and (u := rounded_to(self.sample.counts, first)) > coarsest:
            self.run.round_by(u)

    def _spreads(self, parts: Sequence[Vector], *, like: Vector | None) -> tuple[float, ...]:
        """Of each tensor ||sum_k |c_k|||; in the size of `like` where parts were seen in the model."""
        counts = self.sample.counts
        if not parts:
            return (0.0,) * len(counts)
        spreads = norms_by(counts, parts[0] if len(parts) == 1 else np.sum([np.abs(part) for part in parts], axis=0))
        total = norm(np.sum(parts, axis=0)) if like is not None else 0.0
        return tuple((spreads if like is None or not total else spreads * (norm(like) / total)).tolist())

    def _kept(self) -> bool:
        """Whether the contributions of the window that ends are kept: rules need those of a few windows only."""
        steps, place = self.track.steps, self.num_effective  # windows are counted as they are compared
        odd = bool(steps) and len(self.window.backwards) != len(steps[0].backwards)
        self._num_odd += odd
        return place < KEPT or (odd and self._num_odd <= KEPT) or place in self.what.keep

    # -- between them ----------------------------------------------------------------------------------------------

    def before_clip(self) -> Unclipped:
        """The gradients now, which are about to be clipped, and where these are a sample the norm of all elements."""
        return self.gradients(), None if self.sample.whole else size_of(p.grad for p in self.parameters)

    def clipped(self, before: Unclipped, limit: float, scale: float) -> None:
        """Gradients were clipped to `limit`; they were `before`, with the loss scale `scale` unless it was taken out."""
        (values, size), (now, now_size) = before, self.before_clip()
        clip = Clip(
            after=len(self.window.backwards),
            before=_shared(values, self.last_gradient),
            left=_shared(now, values),
            active=size != now_size or not np.array_equal(values, now, equal_nan=True),
            limit=limit,
            scale=1.0 if self.window.unscaled else scale,
        )
        self.window.clips.append(clip)
        self.note("clip")

    def unscaled(self) -> None:
        """The loss scale was taken out of the gradients."""
        self.window.unscaled = True
        self.last_gradient = self.gradients()
        self.note("unscale")

    def _movement(self) -> Vector | None:
        """How far the parameters went since the last look, unless they stayed; None before the first window as well."""
        last, self.last_parameters = self.last_parameters, self.weights()
        now = self.last_parameters
        if last is None or last.shape != now.shape or (not self.track.steps and not self.window.backwards):
            return None
        return None if now is last else now - last

    def finish(self) -> None:
        """The function has returned: its weights are swapped for an average, pruned or rescaled by then."""
        self.track.pending = self.window.backwards
        if self.track.steps and all(map(readable, self.parameters)):
            moves = (*(b.moved for b in self.track.pending), self._movement())
            self.track.moved_after = _sum([moved for moved in moves if moved is not None])


def _start_of(found: Vector, last: Vector | None, *, filled: bool) -> Start:
    """`found` [P]: the gradients as a backward begins; `last`: as the event before left them; `filled`: some have been there."""
    if not found.any():
        return "cleared" if filled else "empty"
    if last is None:
        return "changed"
    if found is last or np.array_equal(found, last, equal_nan=True):
        return "kept"
    return "scaled" if cosine(found, last) > 1 - COLLINEAR else "changed"


def _without(aside: Collection[int], backwards: Sequence[Backward]) -> list[Backward]:
    """Without gradients that were looked at only (a norm for a log, an inner step): their forwards are those of the next one."""
    kept: list[Backward] = []
    look: Backward | None = None
    for place, b in enumerate(backwards):
        if look is not None:
            b = replace(
                b,
                rows=None if look.rows is None or b.rows is None else look.rows + b.rows,
                computed=look.computed or b.computed,
                lengths=max(look.lengths, b.lengths),
                forwards=look.forwards + b.forwards,
                broken_forwards=look.broken_forwards + b.broken_forwards,
                draws=look.draws or b.draws,
                outside=look.outside or b.outside,
            )
        look = b if place in aside else None
        kept += [] if place in aside else [b]
    return kept


def _shared(new: Vector, known: Vector | None) -> Vector:
    """One vector in memory for two of the same bits."""
    same = known is not None and new.shape == known.shape and np.array_equal(new.view(np.int64), known.view(np.int64))
    return known if known is not None and same else new


def _sum(parts: Sequence[Vector]) -> Vector | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    total: Vector = np.sum(parts, axis=0)
    return total


def _state(optimizer: Optimizer | Foreign, parameters: Sequence[Tensor]) -> tuple[dict[str, Vector], float | None]:
    """The entries of the optimizer's state that all parameters have, and its step counter."""
    states = [optimizer.state.get(p, {}) for p in parameters]
    first: dict[str, Any] = next((s for s in states if s), {})
    kept = {}
    for key in first:
        values = _numbers([s.get(key) for s in states if s])
        if values is not None:
            kept[str(key)] = values
    step = first.get("step")
    return kept, None if step is None else float(step)


def _numbers(entries: Sequence[Any]) -> Vector | None:
    """Those of tensors with dimensions; None for anything else, and for tensors of kinds that cannot be read."""
    try:
        if any(
            not isinstance(t, Tensor) or (type(t) in PLAIN and t.layout == torch.strided and not readable(t)) for t in entries
        ):
            return None
        return looked_at(entries) if entries[0].ndim else None
    except Exception:  # a subclass of Tensor may know as few operations as it likes, and raise what it likes
        return None
