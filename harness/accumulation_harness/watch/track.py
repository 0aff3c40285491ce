"""One watched optimizer: its parameters' hooks, and the window that is open."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from accumulation_harness.compare.readings import Constant
from accumulation_harness.observe.fence import Fence
from accumulation_harness.watch.averages import Averages
from accumulation_harness.watch.evidence import Call, MicroBatch, Ranks, Sketch, Window
from accumulation_harness.watch.gradients import GATE
from accumulation_harness.watch.sketch import WIDTH, Sketches, is_known, local_part
from accumulation_harness.watch.slopes import Fits, Numbers, Slope, concluded, is_transformed, reported
from accumulation_harness.watch.together import Together

Sketched = list[Tensor | None]  # [T] of [WIDTH], on the device of the gradients
NARROW = (torch.bfloat16, torch.float16)
LOOKED_AT = 512  # entries of each gradient whose format is looked at
FEWEST = 64  # that must not be zero
MANY = 32  # tensors, of which every window looks at a share of
SHARE = 5  # one in so many, in turn
AVERAGED = 1  # index of the window in which averages of the weights are looked for


@dataclass
class Head:
    """One loss in a backward: numbers that are still on their device."""

    fits: Fits
    rows: int
    dtype: torch.dtype | None = None  # of the logits and their slope; None: a loss function was called
    classes: int = 1
    constants: tuple[Constant, ...] | None = None  # on the way from the root of the backward


@dataclass(kw_only=True)
class Backward:
    """A micro-batch before its numbers are on the host."""

    contribution: Sketched | None
    before: Sketched | None
    after: Sketched | None
    empty: bool
    scale: Tensor | None
    loss: Tensor | None
    heads: Sequence[Head] | None
    calls: tuple[Call, ...]
    lrs: tuple[float, ...]
    fed: bool
    forwards: int
    others: bool


@dataclass
class Open:
    """The window that is open."""

    backwards: list[Backward] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    unclipped: Sketched | None = None
    weights: int = 0  # versions of the parameters at the first backward
    state: int = 0
    moved: bool = False
    state_moved: bool = False
    closure: bool = False
    rounded: str = ""
    averages: Averages | None = None  # since the first backward
    averaged: float | None = None  # the rate at which they move inside the window
    inside: int = 0  # backwards inside the optimizer's step
    first: Sketched | None = None  # of the weights at the first backward
    clipped: Sketched | None = None  # `.grad` after the last clip
    forwards: int = 0  # after the last backward
    still: bool = False  # the step moves no weights
    late: bool = False  # weights move between the last backward and the step
    buffers_moved: bool = False
    unused: Sequence[Tensor] = ()  # values of losses that no backward has differentiated


class Track:
    """Hooks on the parameters of one optimizer, and what they have shown of its open window."""

    def __init__(self, index: int, optimizer: Optimizer, model: nn.Module, fence: Fence) -> None:
        self.index, self.optimizer, self.fence = index, optimizer, fence
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.parameters: list[Tensor] = []
        self.known: list[bool] = []  # whether each can be looked at
        self.sketched: list[bool] = []  # and is, in the open window, as to what micro-batches give to it
        self._hooked: set[int] = set()
        self._sums: Sketched = []
        self.window = Open()
        self.num_windows = 0
        self.resumed = False
        self.detail = self.whole = True  # whether `.grad` is looked at around every backward; whether all tensors are
        self._before: Sketched | None = None
        self._empty = self._reached = False
        self._in_backward = False
        self.stepped_inside = False  # the backward under way
        self._marks: list[tuple[int, int]] = []

    def attach(self) -> None:
        """Begin."""
        self._hooked.clear()
        self.refresh()

    def refresh(self) -> None:
        """Follow the optimizer's groups, and parameters that have been frozen or freed."""
        found = [p for group in self.optimizer.param_groups for p in group["params"]]
        if [id(p) for p in found] != [id(p) for p in self.parameters]:
            self.parameters, self.known = found, [is_known(p) for p in found]
            names = [self.names.get(id(p), f"parameter {i}") for i, p in enumerate(found)]
            self.sketches = Sketches(zip(names, found, self.known, strict=True))
            self._sums = [None] * len(found)
            self._hooked &= {id(p) for p in found}
            self._choose()
        for i, p in enumerate(found):
            if self.known[i] and id(p) not in self._hooked and p.requires_grad:
                self.fence.hooked(p.register_hook, partial(self.add, i))
                self._hooked.add(id(p))

    @property
    def unlooked(self) -> str:
        """Which parameters cannot be looked at, in a sentence; empty where all can."""
        kinds = {type(p).__name__ for p, known in zip(self.parameters, self.known, strict=True) if not known}
        if not kinds:
            return ""
        return f"{self.known.count(False)} parameters are no plain tensors ({', '.join(sorted(kinds))}): not looked at"

    @property
    def sharded(self) -> bool:
        """Whether parameters are shards, which are differentiated out of sight."""
        return any(hasattr(p, "to_local") for p in self.parameters)

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of them is a parameter of the optimizer."""
        own = {id(t) for t in tensors}
        return any(id(p) in own for p in self.parameters)

    def add(self, place: int, gradient: Tensor) -> None:
        """A gradient on its way to `.grad`."""
        if not self._in_backward:
            return
        sketched = self.sketched[place]
        if (sketched or not self._reached) and is_transformed(gradient):
            return
        self._reached = True
        if not sketched:
            return
        if not is_known(gradient):
            self.known[place] = self.sketched[place] = False
            return
        found = self.sketches.signs[place].of(gradient.detach())
        known = self._sums[place]
        self._sums[place] = found if known is None else known + found

    def _choose(self) -> None:
        """Which tensors the window that begins looks at: all, or a share in turn."""
        every = self.whole or len(self.parameters) < MANY
        self.sketched = [known and (every or (place + self.num_windows) % SHARE == 0) for place, known in enumerate(self.known)]

    @property
    def grads(self) -> list[Tensor | None]:
        """`.grad` of each that can be looked at."""
        grads = [p.grad if known else None for p, known in zip(self.parameters, self.known, strict=True)]
        for place, gradient in enumerate(grads):
            if gradient is not None and not is_known(gradient):
                self.known[place], grads[place] = False, None
        return grads

    def gradients(self) -> Sketched:
        """Sketches of `.grad` now."""
        return self.sketches.of(self.grads)

    def weights(self) -> Sketched:
        """Sketches of the parameters now."""
        return self.sketches.of([p if known else None for p, known in zip(self.parameters, self.known, strict=True)])

    @property
    def lrs(self) -> tuple[float, ...]:
        """Learning rates now."""
        return tuple(float(group.get("lr", 1.0)) for group in self.optimizer.param_groups)

    # -- one backward ------------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """A backward begins, which may reach this optimizer."""
        self.refresh()
        window = self.window
        if window.backwards:
            window.moved = window.moved or window.weights != versions(self.parameters)
            if window.averages is not None:
                window.averaged, window.averages = None if window.moved else window.averages.rate(), None
            window.state_moved = window.state_moved or window.state != versions(_state(self.optimizer))
        else:
            if not self.num_windows:
                self.resumed = bool(self.optimizer.state)
            self._choose()
            window.weights, window.state = versions(self.parameters), versions(_state(self.optimizer))
            window.first = self.weights() if self.detail else None
        self.look_at_format()
        self._empty = all(g is None for g in self.grads)
        self._before = self.gradients() if self.detail and not self._empty else None
        self._sums = [None] * len(self.parameters)
        self._marks = [_mark(g) for g in self.grads] if self.sharded else []
        self._in_backward, self._reached = True, False

    def after_backward(
        self,
        heads: Sequence[Head] | None,
        scale: Tensor | None,
        loss: Tensor | None,
        *,
        fed: bool,
        forwards: int,
        others: bool,
    ) -> bool:
        """Whether it reached this optimizer."""
        self._in_backward = False
        reached = self._reached
        changed = bool(self._marks) and self._marks != [_mark(g) for g in self.grads]
        stepped, self.stepped_inside = self.stepped_inside, False
        if stepped or (not reached and not self._marks):
            return False
        after = self.gradients() if self.detail else None
        contribution: Sketched | None = self._sums
        if self._marks:  # FSDP2 assigns gradients behind its hooks, and holds them back until ranks are synchronised
            contribution = _minus(after, self._before) if changed and after is not None else None
        self.window.backwards.append(
            Backward(
                contribution=contribution, before=self._before, after=after, empty=self._empty, scale=scale, loss=loss,
                heads=heads, calls=tuple(self.window.calls), lrs=self.lrs, fed=fed, forwards=forwards, others=others,
            )
        )  # fmt: skip
        self.window.calls.clear()
        self._sums, self._before = [None] * len(self.parameters), None
        if self.num_windows == AVERAGED and len(self.window.backwards) == 1 and not self.sharded:
            known = [p for p, is_known in zip(self.parameters, self.known, strict=True) if is_known]
            self.window.averages = Averages(known, [*(g for g in self.grads if g is not None), *_state(self.optimizer)])
        self.window.unclipped = self.window.clipped = None
        return True

    def look_at_format(self) -> None:
        """Whether a sum of at least two micro-batches has been rounded to 16 bits."""
        if self.detail and not self.window.rounded and len(self.window.backwards) > 1:
            self.window.rounded = _fits_16_bits(self.grads)

    def abort(self) -> None:
        """A backward raised."""
        self._in_backward = False

    # -- the step ----------------------------------------------------------------------------------------------------

    def before_clip(self) -> None:
        """`.grad` is about to be clipped: what it is now is compared with the sum."""
        if self.window.backwards and self.window.unclipped is None:
            self.window.unclipped = self.gradients()

    def after_clip(self) -> None:
        """It has been."""
        if self.window.unclipped is not None:
            self.window.clipped = self.gradients()

    @property
    def still(self) -> bool:
        """Whether the weights are those of the first backward."""
        return self.window.weights == versions(self.parameters)

    def close(
        self,
        *,
        skipped: bool,
        gradients: Sketched | None,
        parameters: Sketched | None,
        alone: bool | None,
        together: Together | None,
    ) -> Window | None:
        """The window that ends with an optimizer step, on the host with one copy; None when nothing was differentiated.

        `alone`: no other rank has a part in the gradient; None: where it shows in the gradient itself.
        """
        opened, self.window = self.window, Open()
        if not opened.backwards:
            return None
        known = np.array(self.known)
        sketched = np.array(self.sketched) & known
        self.num_windows += 1
        before_clip = opened.unclipped if opened.unclipped is not None else gradients
        assert before_clip is not None
        differentiated = [
            (b.contribution, b.before, b.after, b.scale, b.loss, [(head.fits, head.constants) for head in b.heads or ()])
            for b in opened.backwards
        ]
        ends = (before_clip, gradients, parameters, opened.first, opened.clipped)
        parts, ends, unused = on_host((differentiated, ends, opened.unused))
        micro_batches = [_micro_batch(*part) for part in zip(opened.backwards, parts, strict=True)]
        gradient, at_step, weights, first, clipped = map(_sketch, ends)
        assert gradient is not None
        norm = float(np.sqrt(np.square(gradient).mean(axis=1).sum()))
        for m in micro_batches if not known.all() else ():  # also what was looked at before one was found to be unknown
            for part in (m.contribution, m.before, m.after):
                if part is not None:
                    part[~known] = 0
        for end in (gradient, at_step, clipped):
            if end is not None:
                end[~sketched] = 0
        ranks = None
        if alone is None:
            alone = _is_own_sum(micro_batches, gradient)
        elif not alone and self.detail and together is not None:
            name = f"{self.index}/{self.num_windows}"
            ranks = gathered(together, name, micro_batches, gradient, sharded=self.sharded)
        if not alone and ranks is None:  # what a term weighs depends on the terms of all ranks
            for m in micro_batches:
                m.slopes = None
        return Window(
            index=self.num_windows - 1,
            track=self.index,
            micro_batches=micro_batches,
            gradient=gradient,
            norm=norm,
            whole=bool(sketched.all()),
            at_step=at_step if opened.unclipped is not None else None,
            parameters=weights,
            first=first,
            clipped=clipped,
            narrow=any(g is not None and g.dtype in NARROW for g in self.grads),
            half=any(g is not None and g.dtype is torch.float16 for g in self.grads),
            rounded=opened.rounded,
            calls=tuple(opened.calls),
            skipped=skipped,
            closure=opened.closure,
            moved=opened.moved,
            state_moved=opened.state_moved,
            resumed=self.resumed and self.num_windows == 1,
            alone=alone,
            ranks=None if skipped else ranks,
            averaged=opened.averaged,
            forwards=opened.forwards + sum(b.forwards for b in opened.backwards),
            still=opened.still,
            late=opened.late,
            buffers_moved=opened.buffers_moved,
            unused=tuple(map(_number, unused)),
        )


def gathered(together: Together, name: str, parts: Sequence[MicroBatch], gradient: Sketch, *, sharded: bool) -> Ranks | None:
    """What every rank has seen of a window; None where not all are heard."""
    contributions = [part.contribution for part in parts]
    total = None if any(c is None for c in contributions) else np.sum([c for c in contributions if c is not None], axis=0)
    terms = sum(slope.terms for part in parts for slope in (part.slopes or ())[:1])
    found = together.gathered(name, (total, gradient, float(terms)))
    if found is None:
        return None
    return Ranks(
        contributions=[c for c, _, _ in found],
        gradients=[g for _, g, _ in found],
        terms=[t for _, _, t in found],
        sharded=sharded,
    )


def _is_own_sum(parts: Sequence[MicroBatch], gradient: Sketch) -> bool:
    """Whether the gradient at the step is what this rank's own micro-batches gave."""
    known = [part.contribution for part in parts if part.contribution is not None]
    size = max(np.linalg.norm(part) for part in known) if known else 0.0
    return len(known) == len(parts) and bool(np.linalg.norm(gradient - np.sum(known, axis=0)) <= GATE * size)


def on_host(nest: Any) -> Any:
    """The same nest with vectors in place of its tensors, one copy for each device and format."""
    leaves, form = tree_flatten(nest)
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    for kind in {(t.device, t.dtype) for t in tensors.values()}:
        own = {i: t for i, t in tensors.items() if (t.device, t.dtype) == kind}
        whole = torch.cat([t.detach().reshape(-1) for t in own.values()]).double().cpu().numpy()
        edges = np.cumsum([t.numel() for t in own.values()])[:-1]
        for i, part in zip(own, np.split(whole, edges), strict=True):
            leaves[i] = part
    return tree_unflatten(leaves, form)


def _sketch(found: Sequence[Sketch | None] | None) -> Sketch | None:
    """Zeros where there was no gradient."""
    return None if found is None else np.stack([np.zeros(WIDTH) if part is None else part for part in found])


def _number(found: Any) -> float:
    return math.nan if found is None else float(found[0])


def _micro_batch(backward: Backward, found: Sequence[Any]) -> MicroBatch:
    """`found`: its numbers, on the host."""
    *sketches, scale, loss, fits = found
    factor = 1.0 if scale is None else _number(scale)
    contribution, before, after = (None if s is None else s / factor for s in map(_sketch, sketches))
    slopes: list[Slope] | None = None
    if backward.heads is not None:
        slopes = [_slope(head, factor, *forms) for head, forms in zip(backward.heads, fits, strict=True)]
    return MicroBatch(
        contribution=contribution,
        before=before,
        after=after,
        empty=backward.empty,
        scale=factor,
        slopes=slopes,
        loss=_number(loss) / factor,
        calls=backward.calls,
        lrs=backward.lrs,
        fed=backward.fed,
        others=backward.others,
    )


def _slope(head: Head, scale: float, forms: Fits, constants: Sequence[Constant] | None) -> Slope:
    fits = {kind: Numbers(*map(_number, form)) for kind, form in forms.items()}
    found = reported(fits, head.rows) if head.dtype is None else concluded(fits, head.rows, head.dtype)
    return replace(found, classes=head.classes, constants=None if constants is None else tuple(_constants(constants, scale)))


def _constants(found: Sequence[Constant], scale: float) -> Iterator[Constant]:
    """Those on the host, without the loss scale."""
    for factor, divides in found:
        number = factor if isinstance(factor, float) else _number(factor)
        if number and number not in (1.0, scale):
            yield Constant(1 / number if divides else number, divides)


def versions(tensors: Sequence[Tensor]) -> int:
    """How often they have been written to, as far as it is counted; no code of a subclass of Tensor is called for that."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(t._version for t in tensors if not t.is_inference())


def _state(optimizer: Optimizer) -> list[Tensor]:
    kept = [values for values in optimizer.state.values() if isinstance(values, Mapping)]
    return [t for values in kept for t in values.values() if isinstance(t, Tensor)]


def _mark(gradient: Tensor | None) -> tuple[int, int]:
    """Of a sharded gradient, what is here: FSDP2 adds to that behind the tensor that shows."""
    held = getattr(gradient, "_local_tensor", gradient)
    return (0, 0) if held is None else (id(held), held._version)


def _minus(after: Sketched | None, before: Sketched | None) -> Sketched | None:
    if after is None or before is None:
        return after
    return [a if b is None or a is None else a - b for a, b in zip(after, before, strict=True)]


def _fits_16_bits(gradients: Sequence[Tensor | None]) -> str:
    """The 16-bit format in which nearly all entries of wide gradients can be written: then they have been rounded to it."""
    parts = [local_part(g)[0].reshape(-1)[:LOOKED_AT] for g in gradients if g is not None and g.dtype not in NARROW]
    if not parts:
        return ""
    with torch.no_grad():
        found = torch.cat([part.float() for part in parts])
        found = found[found != 0]
        for narrow in NARROW:
            if len(found) >= FEWEST and float((found == found.to(narrow).float()).float().mean()) > 0.98:
                return str(narrow).removeprefix("torch.")
    return ""
