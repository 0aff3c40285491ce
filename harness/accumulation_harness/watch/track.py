"""One watched optimizer: its parameters' hooks, and the window that is open."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from accumulation_harness.compare.linear import norm, proportion
from accumulation_harness.observe.fence import Fence
from accumulation_harness.observe.followed import Followed, Mark, mark, versions
from accumulation_harness.observe.tensors import is_known, is_transformed
from accumulation_harness.watch.averages import Averages
from accumulation_harness.watch.evidence import Call, Group, MicroBatch, Ranks, Sketch, Window
from accumulation_harness.watch.gradients import ALIKE, GATE, is_of_weights
from accumulation_harness.watch.shards import Held, Shards
from accumulation_harness.watch.sketch import FOLDED, WIDTH, Sketches, folded, local_part
from accumulation_harness.watch.slopes import Bend, Taken, number
from accumulation_harness.watch.together import Together

Sketched = list[Tensor | None]  # [T] of [WIDTH], on the device of the gradients
Gradient = Callable[[Tensor], Tensor | None]  # of a parameter: where the sum over the micro-batches is kept
State = tuple[list[int], int, list[float]]  # of an optimizer: its tensors, how often they were written to, its numbers
NARROW = (torch.bfloat16, torch.float16)
LOOKED_AT = 512  # entries of each gradient whose format is looked at
FEWEST = 64  # that must not be zero
MANY = 32  # tensors, of which every window looks at a share of
SHARE = 5  # one in so many, in turn
NOTHING = np.zeros(WIDTH)
USUAL = (type(None), Tensor)  # of the gradient of a parameter that can be looked at
AVERAGED = 1  # index of the window in which averages of the weights are looked for


@dataclass(kw_only=True)
class Open(Window):
    """The window that is open: what it shows in tensors is on their device until it is closed."""

    ends: dict[str, Sketched] = field(default_factory=dict)  # `.grad`: `unclipped`, `clipped`, `written` to by the step
    waiting: list[Call] = field(default_factory=list)  # calls since the last backward
    times: Counter[int] = field(default_factory=Counter)  # of schedules and averages, before the first one
    weights: int = 0  # versions of the parameters at the first backward
    frozen: int = 0  # and of those that are frozen
    state: State = ([], 0, [])
    averages: Averages | None = None  # since the first backward
    inside: int = 0  # backwards inside the optimizer's step
    norms: Sequence[Tensor] = ()  # of the gradients at its end
    values: Sequence[Tensor] = ()  # of losses that no backward has differentiated

    def leave_out_looks(self) -> None:
        """Leave out gradients that were looked at only (a norm for a log, an inner step), where others are added to `.grad`."""
        some = any(not m.returned for m in self.micro_batches)  # else they may be added up elsewhere
        kept, calls = [], tuple[Call, ...]()
        for m in self.micro_batches:
            calls += m.calls
            if not some or m.placed or not m.returned:
                m.calls, calls = calls, ()
                kept.append(m)
        self.micro_batches, self.waiting = kept, [*calls, *self.waiting]
        self.forwards += sum(m.forwards for m in kept)


class Track(Followed):
    """Hooks on the parameters of one optimizer, and what they have shown of its open window."""

    def __init__(
        self, index: int, optimizer: Optimizer, fence: Fence, model: nn.Module, shards: Shards, gradient: Gradient | None
    ) -> None:
        """`gradient`: of a parameter of the model, where an engine keeps it and the optimizer has other parameters."""
        super().__init__(optimizer)
        self.index, self.fence, self.model, self.shards, self.gradient = index, fence, model, shards, gradient
        self.known: list[bool] = []  # whether each can be looked at
        self.sketched: list[bool] = []  # and is, in the open window
        self.held: list[Held] = []
        self.is_cut = False  # some are shards
        self._hooks: dict[int, list[Any]] = {}  # by the parameter's identity
        self._sums: Sketched = []
        self._bare: Sketched = []  # where the run has hooks of its own
        self.num_windows = self._size = 0  # of micro-batches of the last window
        self.window = self._opened()
        self.resumed = False
        self.detail = self.whole = True  # whether the window is looked at closely; whether all tensors are
        self._before: Sketched | None = None
        self._weights: Any = None  # at the backward
        self._empty = self._reached = False
        self.in_backward = False
        self.stepped = math.nan  # when it did so last, in seconds
        self.stepped_inside = False  # the backward under way
        self._marks: list[Mark] = []
        self._after: list[Mark] = []  # the parameters as the last step has left them
        self._frozen: list[Tensor] = []

    def now(self) -> list[Tensor]:
        """Those of the model, where the optimizer has others."""
        if self.gradient is not None:
            return [p for p in self.model.parameters() if p.requires_grad]
        return self.shards.flattened(super().now())

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of them is a parameter that is followed, or another one of the optimizer's."""
        listed = list(tensors)
        others = super().now() if self.gradient is not None or self.shards.flats else []
        return super().holds(listed) or not set(map(id, listed)).isdisjoint(map(id, others))

    def _opened(self) -> Open:
        return Open(index=self.num_windows, track=self.index)

    def attach(self) -> None:
        """Begin."""
        self.fence.patches.removing(self)
        self.refresh()

    def remove(self) -> None:
        """Take the hooks away."""
        while self._hooks:
            for handle in self._hooks.popitem()[1]:
                handle.remove()

    def _drop(self, key: int) -> None:
        for handle in self._hooks.pop(key, ()):
            handle.remove()

    def _hook(self, place: int, p: Any) -> None:
        """See what comes behind the hooks that the run itself has, and, where there are some, before them."""
        others, last = dict(_hooks_of(p)), self.fence.hook(partial(self.add, place))
        handles = self._hooks[id(p)] = [p.register_hook(last)]
        if others:
            first = self.fence.hook(partial(self.add, place, bare=True))
            handles.append(p.register_hook(first))
            p._backward_hooks.clear()  # they are called in the order in which they were put here
            p._backward_hooks.update({handles[1].id: first, **others, handles[0].id: last})
        if self.fence.reason:  # looking at this parameter has failed, and all hooks were taken away before this one came
            self._drop(id(p))

    def refresh(self) -> None:
        """Follow the optimizer's groups, and parameters that have been frozen or freed."""
        if self.look_again():
            self.known = [is_known(p) for p in self.parameters]
            self.places = {id(p): place for place, p in enumerate(self.parameters)}
            nothing = torch.empty(0)
            looked_at = [nothing if p is None else p for p in self.there]
            self.held = list(map(self.shards.held, looked_at))
            self.is_cut = any(held.here >= 0 for held in self.held)
            self.sketches = Sketches(zip(looked_at, self.held, strict=True))
            self._sums = [None] * len(self.parameters)
            self.remove()
            self._choose()
        for p in self.parameters if not self.window.micro_batches else ():
            own, every = [handle.id for handle in self._hooks.get(id(p), ())], list(_hooks_of(p))
            if own and every and own != [every[-1], every[0]][: len(own)]:
                self._drop(id(p))  # the run has hooks of its own since
        for place, p in enumerate(self.parameters):
            if self.sketched[place] and id(p) not in self._hooks and p.requires_grad:
                self._hook(place, p)

    @property
    def there(self) -> list[Any]:
        """The parameters; None in the place of one that cannot be looked at."""
        return [p if known else None for p, known in zip(self.parameters, self.known, strict=True)]

    @property
    def unlooked(self) -> str:
        """Which parameters cannot be looked at, in a sentence; empty where all can."""
        kinds = {type(p).__name__ for p, known in zip(self.parameters, self.known, strict=True) if not known}
        if not kinds:
            return ""
        of = ", ".join(sorted(kinds))
        return f"{self.known.count(False)} parameters are no plain tensors ({of}): not compared"

    def add(self, place: int, gradient: Tensor, *, bare: bool = False) -> None:
        """A gradient on its way to `.grad`; `bare`: before hooks of the run's own have seen it."""
        if not self.in_backward:
            return
        if is_transformed(gradient) or not self.parameters[place].requires_grad:  # frozen since, it takes nothing
            return
        self._reached = True
        if not self.sketched[place]:
            return
        if not is_known(gradient):
            self.known[place] = self.sketched[place] = False
            return
        if (placements := getattr(gradient, "placements", None)) and any(placement.is_partial() for placement in placements):
            self.held[place] = self.held[place].of_parts(self.parameters[place], gradient)
        found = self.sketches.signs[place].of(gradient.detach())
        sums = self._bare if bare else self._sums
        known = sums[place]
        sums[place] = found if known is None else known + found
        self.window.narrow = self.window.narrow or gradient.dtype in NARROW

    def gathered(self, shard: Tensor, whole: Tensor) -> None:
        """For a forward, a shard was exchanged for the whole parameter, which is what is differentiated."""
        place = self.places.get(id(shard))
        if place is not None and id(whole) not in self._hooks and whole.requires_grad and is_known(whole):
            self._hook(place, whole)

    def _choose(self) -> None:
        """Which tensors the window that begins looks at: all, or a share in turn, which alone are hooked."""
        every = self.whole or len(self.parameters) < MANY
        self.sketched = [known and (every or (place + self.num_windows) % SHARE == 0) for place, known in enumerate(self.known)]
        for p, is_looked_at in zip(self.parameters, self.sketched, strict=True):
            if not is_looked_at:
                self._drop(id(p))

    def grads(self, *, at_end: bool = False) -> list[Tensor | None]:
        """`.grad` of each that can be looked at; where an engine has others, nothing before the window's end, and those then."""
        of = attrgetter("grad") if self.gradient is None else self.gradient if at_end else _nothing
        grads = [None if p is None else of(p) for p in self.there]
        for place, gradient in enumerate(grads):
            if self.known[place] and type(gradient) not in USUAL and not is_known(gradient):
                self.known[place], grads[place] = False, None
        return grads

    def gradients(self, *, at_end: bool = False) -> Sketched:
        """Sketches of `.grad` now, of the tensors that the window looks at."""
        grads = self.grads(at_end=at_end)
        return self.sketches.of([g if chosen else None for g, chosen in zip(grads, self.sketched, strict=True)])

    @property
    def looks(self) -> bool:
        """Whether `.grad` is looked at around every backward."""
        return self.detail and self.gradient is None

    def weights(self) -> Sketched:
        """Sketches of the parameters now; none of those that DeepSpeed's ZeRO-3 or FSDP1 puts together for a forward only."""
        return self.sketches.of([None if hasattr(p, "ds_numel") or hasattr(p, "_local_shard") else p for p in self.there])

    # -- one backward ------------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """A backward begins, which may reach this optimizer."""
        window = self.window
        if not window.micro_batches and self.known:
            self._choose()
        self.refresh()
        self._look_for_returned()
        if window.micro_batches:
            window.moved = window.moved or not self.are_still
            again = self.detail and (window.moved or len(window.micro_batches) == 1)  # writes to `.data` are not counted
            self._weights = self.weights() if again else None
            window.buffers_moved = window.buffers_moved or window.frozen != versions(self._frozen)
            state, window.state = window.state, _marks(self.optimizer)
            window.state_moved = window.state_moved or state != window.state
        else:
            if not self.num_windows:
                self.resumed = bool(self.optimizer.state)
            window.weights, window.state = versions(self.parameters), _marks(self.optimizer)
            if self.detail:
                self._frozen = [p for p in self.model.parameters() if is_known(p) and not p.requires_grad]
            window.frozen = versions(self._frozen)
            now = zip(self._after, self._written(), strict=False)
            writes = {b - a for (own, a), (other, b) in now if own == other} - {0}  # since the step, by hand
            window.as_often = self._size > 1 and (self._size in window.times.values() or writes == {self._size})
            self._weights = self.weights() if self.detail else None
        self.look_at_format()
        grads = self.grads()
        self._empty = self.gradient is None and all(g is None for g in grads)
        self._before = self.gradients() if self.looks and not self._empty else None
        self._sums, self._bare = [None] * len(self.parameters), [None] * len(self.parameters)
        self._marks = [] if all(self.sketched) and not self.is_cut else list(map(mark, grads))
        self.in_backward, self._reached = True, False

    def _look_for_returned(self) -> None:
        """Whether what the last backward returned has been put into `.grad`."""
        last = self.window.micro_batches[-1] if self.window.micro_batches else None
        if last is not None and last.returned and list(map(mark, self.grads())) != self._marks:
            last.placed = any(g is not None and bool(g.any()) for g in self.grads())

    def after_backward(self, taken: Taken, scale: Tensor | None, loss: Tensor | None, *, returned: bool = False) -> bool:
        """Whether it reached this optimizer. `returned`: its gradients are the result, and not added to `.grad`."""
        self.in_backward = False
        changed = not self._reached and bool(self._marks) and self._marks != list(map(mark, self.grads()))
        stepped, self.stepped_inside = self.stepped_inside, False
        if stepped or not (self._reached or changed):
            return False
        window = self.window
        after = self.gradients() if self.looks else None
        in_tensors: dict[str, Any] = {
            "contribution": self._sums, "hooks": self._bare, "before": self._before, "after": after, "scale": scale, "loss": loss,
            **taken._asdict(),
        }  # fmt: skip
        calls, window.waiting = tuple(window.waiting), []
        window.micro_batches.append(
            MicroBatch(
                empty=self._empty, calls=calls, lrs=self.lrs, options=self.options, returned=returned,
                trained=sum(p is not None and p.requires_grad for p in self.there),
                weights=self._weights, **in_tensors,
            )
        )  # fmt: skip
        if returned:
            self._marks = list(map(mark, self.grads()))
        self._sums, self._before = [None] * len(self.parameters), None
        if self.num_windows == AVERAGED and len(window.micro_batches) == 1 and not self.is_cut:
            known = [p for p in self.there if p is not None]
            window.averages = Averages(known, [*(g for g in self.grads() if g is not None), *_state(self.optimizer)])
        elif window.averages is not None:  # also inside the second backward, by a hook
            window.averaged, window.averages = window.averages.rate() if self.are_still else None, None
        for name in ("unclipped", "clipped"):
            window.ends.pop(name, None)
        return True

    def look_at_format(self) -> None:
        """Whether a sum of at least two micro-batches has been rounded to 16 bits."""
        if self.looks and not self.window.rounded and len(self.window.micro_batches) > 1:
            self.window.rounded = _fits_16_bits(self.grads())

    # -- the step ----------------------------------------------------------------------------------------------------

    def called(self, call: Call, by: object) -> None:
        """A schedule was advanced, or an average moved."""
        window = self.window
        window.waiting.append(call)
        if not window.micro_batches:
            window.times[id(by)] += 1

    def before_clip(self) -> None:
        """`.grad` is about to be clipped: what it is now is compared with the sum."""
        window = self.window
        if window.micro_batches and "unclipped" not in window.ends:
            window.ends["unclipped"] = self._at_end()
        scaled = "unscale" not in window.waiting and any(m.scale is not None for m in window.micro_batches)
        window.waiting.append("clip scaled" if scaled else "clip")

    def unscaled(self) -> None:
        """Gradients are clipped rightly from now on."""
        self.window.waiting.append("unscale")

    def after_clip(self) -> None:
        """It has been."""
        if "unclipped" in self.window.ends:
            self.window.ends["clipped"] = self.gradients(at_end=True)

    def _at_end(self) -> Sketched:
        """Sketches of `.grad` as the micro-batches have left it."""
        self.window.norms = _norms(self.grads(at_end=True))
        return self.gradients(at_end=True)

    def at_step(self) -> Sketched:
        """Sketches of `.grad` as the step takes it."""
        found = self.gradients(at_end=True) if "unclipped" in self.window.ends else self._at_end()
        self._marks = list(map(mark, self.grads()))
        factor = getattr(self.optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
        if not isinstance(factor, Tensor):
            return found
        self.window.norms = [n / factor.to(n.device) for n in self.window.norms]
        return [None if g is None else g / factor.to(g.device) for g in found]

    def _written(self) -> list[Mark]:
        """How often each parameter was written to."""
        return [*map(mark, self.there)]

    def after_step(self) -> None:
        """Look at `.grad` again where the step has written to it (has divided it, say): that is what it took."""
        if self._marks != list(map(mark, self.grads())) and getattr(self.optimizer, "grad_scale", None) is None:
            self.window.ends["written"] = self.gradients(at_end=True)

    @property
    def are_still(self) -> bool:
        """Whether the weights are those of the first backward."""
        return self.window.weights == versions(self.parameters)

    def close(
        self, gradients: Sketched, parameters: Sketched | None, alone: bool | None, together: Together | None
    ) -> Window | None:
        """Close the window at an optimizer step, and move it to the host with one copy.

        Args:
            gradients: Sketches of the gradient at the step.
            parameters: Sketches of the parameters.
            alone: Whether no other rank has a part in the gradient; None where it shows in the gradient itself.
            together: The ranks that share the gradient; None where there is one.

        Returns:
            The window; None when nothing was differentiated in it.
        """
        self._look_for_returned()
        window, self.window = self.window, self._opened()
        window.leave_out_looks()
        if not window.micro_batches:
            return None
        self.num_windows += 1
        self.window.index += 1
        self._size, self._after = len(window.micro_batches), self._written()
        known = np.array(self.known)
        looked = known & self.sketched  # less than what was looked at where a tensor was found to be unknown since
        ends = {"at_step": gradients, "parameters": parameters, **window.ends}
        parts, found, norms, values = _on_host(([*map(vars, window.micro_batches)], ends, window.norms, window.values))
        for m, part in zip(window.micro_batches, parts, strict=True):
            vars(m).update(part)
            window.hooked |= _settled(m, looked, known)
        window.choose()
        window.parameters = _sketch(found["parameters"], known)
        names = ("unclipped", "at_step", "clipped", "written")
        unclipped, at_step, window.clipped, written = (_sketch(found.get(name), looked) for name in names)
        if written is not None and written.any() and not is_of_weights(window.parameters, written - at_step):
            at_step = written
        total = np.sum([m.contribution for m in window.micro_batches], axis=0)
        if unclipped is not None and proportion(at_step, total)[1] <= GATE < proportion(unclipped, total)[1]:
            unclipped = window.clipped = None  # it was looked at, and the sum that the loop keeps has been put in its place
        window.gradient, window.at_step = (at_step, None) if unclipped is None else (unclipped, at_step)
        window.alone = _is_own_sum(window.micro_batches, window.gradient) if alone is None else alone
        if alone is False and self.detail and together is not None:
            name = f"{self.index}/{self.num_windows}"
            window.ranks = _heard(together, name, window, self.held)
        if not window.alone and window.ranks is None:  # what a term weighs depends on the terms of all ranks
            for m in window.micro_batches:
                m.slopes = None
        formats = {g.dtype for g in self.grads() if g is not None}
        window.norm, window.whole = math.hypot(*map(number, norms)), bool(looked.all())
        window.narrow, window.half = window.narrow or not formats.isdisjoint(NARROW), torch.float16 in formats
        window.calls, window.unused = tuple(window.waiting), tuple(map(number, values))
        window.resumed = self.resumed and self.num_windows == 1
        window.ranks = None if window.skipped else window.ranks
        window.ends, window.norms, window.values, window.averages = {}, (), (), None  # nothing is held on the device any longer
        return window


def _settled(m: MicroBatch, looked: Any, known: Any) -> bool:
    """Numbers in place of the vectors that were copied to the host; whether hooks of the run's own have changed what it gives."""
    m.scale = 1.0 if m.scale is None else number(m.scale)
    m.weights, m.loss = _sketch(m.weights, known), number(m.loss) / m.scale
    there = np.array([one is not None for one in m.hooks])
    m.contribution, m.before, m.after, bare = (_sketch(s, looked, m.scale) for s in (m.contribution, m.before, m.after, m.hooks))
    m.hooks, off = proportion(m.contribution[there], bare[there]) if there.any() else (1.0, 0.0)
    no_factor = off > GATE or (abs(m.hooks - 1) > ALIKE and bool(m.contribution[~there].any()))  # of all that it gives
    m.hooks = 1.0 if no_factor else m.hooks
    m.slopes, m.own = (
        None if of is None else [[form.on_host(m.scale) for form in forms] for forms in of] for of in (m.slopes, m.own)
    )
    m.bends = [Bend(*map(number, bend)) for bend in m.bends]
    return no_factor or any(abs(bend.factor - 1) > ALIKE or bend.off > 1 for bend in m.bends)


def _nothing(_: Tensor) -> None:
    """Of an engine's gradients before the window's end."""


def _hooks_of(p: Any) -> Mapping[int, Any]:
    """Those of a plain tensor; a subclass is not asked."""
    return (p._backward_hooks or {}) if type(p) in (Tensor, nn.Parameter) else {}


def _heard(together: Together, name: str, window: Window, held: Sequence[Held]) -> Ranks | None:
    """Gather what every rank has seen of a window.

    Args:
        together: The channel between the ranks.
        name: The window's name, the same on all ranks.
        window: What was seen here.
        held: Of each parameter, what is here and who shares it.

    Returns:
        Each group's contributions and gradients, and the terms of the largest one; None where not all are heard.
    """
    parts, gradient = window.micro_batches, window.gradient
    before = parts[0].before if parts[0].before is not None else np.zeros_like(gradient)
    sketches = np.sum([part.contribution for part in parts], axis=0), gradient, before
    rows = max((one.ranks for one in held), key=len)  # and what nobody is said to share they have to share, too
    groups: dict[Any, list[int]] = {}  # the same tensors on all ranks
    for place, one in enumerate(held):
        groups.setdefault((one.ranks or rows, one.shards, one.summed or rows), []).append(place)
    own = [[folded(sketch[places], max(1, FOLDED // len(groups))) for places in groups.values()] for sketch in sketches]
    terms = sum(slope.terms for part in parts for slope in (part.slopes or ())[:1])
    found = together.gathered(name, {"sketches": np.stack([np.concatenate(of) for of in own]), "terms": terms})
    if found is None:
        return None
    by_rank = dict(zip(together.members, found, strict=True))
    ends = np.cumsum([len(rows) for rows in own[0]])[:-1]

    def of(what: int, number: int, ranks: Sequence[int], shards: int = 1) -> list[Sketch]:
        """Add up the sketches of each `shards` neighbouring ranks, which hold parts of one tensor."""
        of_all = np.stack([np.split(by_rank[rank]["sketches"][what], ends)[number] for rank in ranks]).astype(float)
        return list(of_all.reshape(-1, shards, *of_all.shape[1:]).sum(1))

    return Ranks(
        groups=[
            Group(
                contributions=of(0, number, summed),
                gradients=of(1, number, ranks, shards),
                before=of(2, number, ranks, shards),
            )
            for number, ((ranks, shards, summed), places) in enumerate(groups.items())
        ],
        terms=[float(by_rank[rank]["terms"]) for rank in rows],
    )


def _is_own_sum(parts: Sequence[MicroBatch], gradient: Sketch) -> bool:
    """Whether the gradient at the step is what this rank's own micro-batches gave."""
    given = [part.contribution for part in parts]
    size = max(map(norm, given))
    return norm(gradient - np.sum(given, axis=0)) <= GATE * size


def _on_host(nest: Any) -> Any:
    """Copy a nest to the host, with one copy for each device and format.

    Args:
        nest: Lists, tuples and mappings of tensors.

    Returns:
        The same with float64 vectors in place of its tensors.
    """
    leaves, structure = tree_flatten(nest)
    places: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            places.setdefault((leaf.device, leaf.dtype), []).append(place)
    for own in places.values():
        whole = torch.cat([leaves[place].detach().reshape(-1) for place in own]).double().cpu().numpy()
        ends = np.cumsum([leaves[place].numel() for place in own])
        for place, vector in zip(own, np.split(whole, ends[:-1]), strict=True):
            leaves[place] = vector
    return tree_unflatten(leaves, structure)


def _sketch(found: Any, of: Any, scale: float = 1.0) -> Any:
    """[T, WIDTH] of these tensors, without the loss scale; zeros where there was no gradient."""
    if found is None:
        return None
    return np.stack([NOTHING if part is None or not chosen else part for part, chosen in zip(found, of, strict=True)]) / scale


def _norms(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Of each gradient, or of what of it is here."""
    parts = [local_part(g) for g in gradients if g is not None]
    narrow, wide = ([p for p in parts if (p.dtype in NARROW) is is_narrow] for is_narrow in (True, False))
    with torch.no_grad():
        found = torch._foreach_norm(narrow, 2, torch.float32) if narrow else ()
        return [*found, *(torch._foreach_norm(wide) if wide else ())]


def _state(optimizer: Optimizer) -> list[Any]:
    kept = [values for values in optimizer.state.values() if isinstance(values, dict)]
    return [one for values in kept for one in values.values() if isinstance(one, (Tensor, int, float))]


def _marks(optimizer: Optimizer) -> State:
    """Tells whether the state was moved: by writing to its tensors, by others in their place, by its numbers."""
    kept = _state(optimizer)
    tensors = [one for one in kept if isinstance(one, Tensor)]
    return [*map(id, tensors)], versions(tensors), [one for one in kept if not isinstance(one, Tensor)]


def _fits_16_bits(gradients: Sequence[Tensor | None]) -> str:
    """The 16-bit format in which nearly all entries of wide gradients can be written: then they have been rounded to it."""
    parts = [local_part(g).reshape(-1)[:LOOKED_AT] for g in gradients if g is not None and g.dtype not in NARROW]
    if not parts:
        return ""
    with torch.no_grad():
        found = torch.cat([part.float() for part in parts])
        found = found[found != 0]
        for narrow in NARROW:
            if len(found) >= FEWEST and float((found == found.to(narrow).float()).float().mean()) > 0.98:
                return str(narrow).removeprefix("torch.")
    return ""
