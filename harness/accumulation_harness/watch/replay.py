"""Rung 3: the window again, at the same weights, as one large batch; and with its rows reversed, as the floor."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel

from accumulation_harness.compare.linear import proportion, weighted_sum
from accumulation_harness.compare.readings import alike, near
from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.observe.fence import is_ours, is_the_runs, told
from accumulation_harness.observe.tensors import in_a_group, is_plain
from accumulation_harness.system import nest
from accumulation_harness.watch.evidence import Finding, Rung, Sketch
from accumulation_harness.watch.heads import Heads
from accumulation_harness.watch.sketch import WIDTH
from accumulation_harness.watch.together import Together
from accumulation_harness.watch.track import Sketched, Track

MOST = 4096  # members of a collection that are looked into
DEEP = 2  # levels of lists and mappings below a module's attribute that are put back after a replay


class Batches:
    """By reference; of a forward that was called with keywords alone, their mapping."""

    def __init__(self, *, keep: bool) -> None:
        self.keep, self.paused = keep, False
        self.window: list[Any] = []
        self._handed: list[Any] = []
        self._seen: list[Any] = []

    def hand_over(self, batch: Any) -> None:
        """The loop hands the batch of the next backward over."""
        if self.keep and not self.paused:
            self._handed.append(batch)

    def see(self, args: Any, kwargs: Any) -> None:
        """The model was called so."""
        if self.keep and not self.paused:
            self._seen.append(dict(kwargs) if kwargs and not args else args[0] if len(args) == 1 and not kwargs else args)

    def end(self, *, reached: bool) -> None:
        """A backward has ended; what was handed over comes before what was seen."""
        if reached:
            self.window.extend(self._handed or self._seen)
        self._handed, self._seen = [], []

    def forget(self) -> None:
        """The window has ended."""
        self.window = []


def properties(model: nn.Module, *, draws: bool = False) -> dict[Cause, str]:
    """Cause -> a sentence with the layers that have it; `draws`: whether a forward has drawn random numbers."""
    norms = [name for name, layer in model.named_modules() if _normalises(layer) and layer.training]
    drops = [name for name, layer in model.named_modules() if _drops(layer)]
    drops = drops or ["its forward draws random numbers"] * draws
    found = {}
    for cause, names in ((Cause.batch_statistics, norms), (Cause.stochastic_layers, drops)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            found[cause] = f"a property of the model ({names[0] or type(model).__name__}{more}): {MEANINGS[cause].sentence}"
    return found


def _normalises(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats)


def _drops(layer: nn.Module) -> bool:
    probability = getattr(layer, "p", 0) if isinstance(layer, nn.modules.dropout._DropoutNd) else getattr(layer, "dropout", 0)
    return layer.training and isinstance(probability, (int, float)) and 0 < probability < 1


Loss = Callable[[nn.Module, Any], Any]
ROUNDING = 16.0  # floors that a distance may be
LEAST = {torch.bfloat16: 3e-2, torch.float16: 1e-2}  # of the gate, in 16-bit arithmetic: whole batches round otherwise than parts
LEAST_WIDE = 1e-5
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
WITHOUT_STATE = ("cpu", "meta", "mps")  # the CPU's is kept in any case; the others' is not a device's


@dataclass(kw_only=True)
class Replayed:
    """One window beside itself."""

    window: int
    pieces: str = ""  # how it was taken
    error: float = float("nan")  # distance of the run's gradient, relative to the large batch's
    floor: float = float("nan")  # of the large batch with its rows reversed
    gate: float = float("nan")
    factors: tuple[float, ...] = ()  # of each micro-batch: its weight in the run, over that in the large batch
    findings: list[Finding] = field(default_factory=list)
    refused: str = ""  # why nothing could be compared

    @property
    def right(self) -> bool:
        """Whether it was compared, and is the same."""
        return not self.refused and not self.findings and self.error <= self.gate


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A window that was taken again: its gradient, and that of its rows reversed."""

    whole: Sketch
    again: Sketch
    terms: float  # by which both are to be divided; 0: they are means

    def of(self, gradient: Sketch) -> Sketch:
        """One of both, as a mean over its terms."""
        return gradient / self.terms if self.terms else gradient


class Unequal(ValueError):
    """Batches that cannot be put together, or cut; or a loss that is none."""


class Replay:
    """Replays windows of one model through the loss that it was given."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = getattr(model, "module", model) if isinstance(model, DistributedDataParallel) else model, loss

    def run(
        self,
        track: Track,
        gradients: Sketched,
        batches: Batches,
        heads: Heads,
        told: Mapping[Cause, str],
        together: Together | None,
    ) -> Replayed:
        """Compare the gradient at the step, of these sketches; leaves no trace in the run. `told`: properties of the model."""
        replayed = Replayed(window=track.num_windows)
        if (hook := _own_hook(self.model)) is not None:
            replayed.refused = (
                f"a hook of the run's own ({hook}) would be called in a replay, and see passes that the run has not"
            )
            return replayed
        if track.sharded:
            replayed.refused = "windows of sharded parameters are not replayed"
            return replayed
        if in_a_group() and together is None:
            replayed.refused = "over ranks, windows are replayed where all ranks of a model are watched"
            return replayed
        parts: Sequence[Sketch | None] = [_part(m.contribution, m.scale) for m in track.window.micro_batches]
        found = self._taken_again(replayed, track, batches.window, heads.autocast)
        if together is not None:
            found, parts = _over_ranks(replayed, found, parts, together)
        if found is not None and not replayed.refused:
            whole, again = found.of(found.whole), found.of(found.again)
            _compare(replayed, track, gradients, whole, again, parts, heads.autocast, told)
            if (
                replayed.findings
                and not in_a_group()
                and not self._is_the_runs(replayed, track, batches.window[0], parts[0], heads)
            ):
                replayed.findings.clear()
                replayed.refused = "on one micro-batch, the loss handed over has another gradient than the run's: another loss"
        return replayed

    def _is_the_runs(self, replayed: Replayed, track: Track, batch: Any, part: Sketch | None, heads: Heads) -> bool:
        """Whether the loss handed over is the run's, but for its weight and a penalty's: as the first micro-batch shows it."""
        if part is None:
            return True
        with untouched(self.model, track.parameters), _without_dropout(self.model), _cast(heads.autocast, track.parameters):
            alone, _ = self._gradient(track, [batch])
        made = weighted_sum(part, [alone, _on_host(track.weights())])
        return not made.told_apart or made.residual <= replayed.gate

    def _taken_again(self, replayed: Replayed, track: Track, window: Sequence[Any], autocast: torch.dtype | None) -> Taken | None:
        """The window of this rank, as large pieces and reversed; None where `replayed.refused` says why."""
        num = len(track.window.micro_batches)
        window = [nest.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch) for batch in window]
        if len(window) != num:
            replayed.refused = f"{len(window)} batches were seen for {num} micro-batches: hand each over with `seen.batch(batch)`"
            return None
        try:
            with untouched(self.model, track.parameters), _without_dropout(self.model), _cast(autocast, track.parameters):
                replayed.pieces, pieces = self._pieces(window)
                whole, terms = self._gradient(track, pieces)
                again, _ = self._gradient(track, [_reversed(piece) for piece in reversed(pieces)])
            return Taken(whole=whole, again=again, terms=terms)
        except Unequal as error:
            replayed.refused = str(error)
        except torch.OutOfMemoryError:
            replayed.refused = (
                "the window does not fit into memory as one batch: let `loss` return its sum and its number of terms"
            )
        except Exception as error:
            if is_ours(error):
                raise
            replayed.refused = f"the loss handed over failed: {told(error)}"
        return None

    def _pieces(self, window: Sequence[Any]) -> tuple[str, list[Any]]:
        """Halves of the micro-batches where the loss gives its sum and its terms; else the whole window as one batch."""
        with torch.no_grad():
            probe = self.loss(self.model, window[0])
        if isinstance(probe, tuple):
            halves = [half for batch in window for half in _halves(batch)]
            return f"{len(halves)} halves of micro-batches", halves
        return f"one batch of {sum(map(_num_rows, window))} rows", [_joined(window)]

    def _gradient(self, track: Track, pieces: Sequence[Any]) -> tuple[Sketch, float]:
        """The gradient's sketch, of a sum over so many terms; 0 terms: of a mean."""
        for p in track.parameters:
            p.grad = None
        terms = 0.0
        for piece in pieces:
            given = self.loss(self.model, piece)
            try:
                loss, own = given if isinstance(given, tuple) else (given, 0)
                terms += float(own)
                loss.backward()
            except Exception as error:
                raise Unequal(f"the loss handed over is no number that can be differentiated: {told(error)}") from error
        return _on_host(track.gradients()), terms


def _over_ranks(
    replayed: Replayed, own: Taken | None, parts: Sequence[Sketch | None], together: Together
) -> tuple[Taken | None, Sequence[Sketch | None]]:
    """The window of all ranks; and their micro-batches, as gradients that are averaged over ranks weigh them."""
    world = len(together.members)
    gathered = together.gathered(f"replay/{replayed.window}", (own, list(parts), replayed.refused)) or []
    refused = [reason for _, _, reason in gathered if reason]
    taken: list[Taken] = [one for one, _, _ in gathered if one is not None]
    if refused or len(taken) < world:
        replayed.refused = refused[0] if refused else "a rank has no window to replay"
    elif not all(one.terms for one in taken):
        replayed.refused = "over ranks, a window is replayed where `loss` returns its sum and its number of terms"
    if replayed.refused:
        return None, parts
    whole: Sketch = np.sum([one.whole for one in taken], axis=0)
    again: Sketch = np.sum([one.again for one in taken], axis=0)
    shares = [None if part is None else part / world for _, ranked, _ in gathered for part in ranked]
    return Taken(whole=whole, again=again, terms=sum(one.terms for one in taken)), shares


def _compare(
    replayed: Replayed,
    track: Track,
    gradients: Sketched,
    whole: Sketch,
    again: Sketch,
    parts: Sequence[Sketch | None],
    autocast: torch.dtype | None,
    told: Mapping[Cause, str],
) -> None:
    size = float(np.linalg.norm(whole))
    own = _on_host(gradients)
    if not np.isfinite(own).all() or not size or not np.isfinite(size):
        replayed.refused = "the gradient is zero or not finite"
        return
    replayed.error = float(np.linalg.norm(own - whole)) / size
    replayed.floor = float(np.linalg.norm(again - whole)) / size
    narrow = autocast or next((p.dtype for p in track.parameters if p.dtype in LEAST), None)
    replayed.gate = max(ROUNDING * replayed.floor, LEAST.get(narrow, LEAST_WIDE) if narrow else LEAST_WIDE)
    if Cause.stochastic_layers in told:
        replayed.refused = (
            "dropout, or other random draws: the replay does not draw what the run drew, so that they cannot be compared"
        )
        return
    if replayed.floor > 0.1:
        replayed.refused = (
            f"rows reversed give another gradient ({replayed.floor:.2g}): the loss depends on their order, or draws"
        )
        return
    if replayed.error <= replayed.gate:
        return
    replayed.factors = _factors(parts, whole, replayed.gate) if all(p is not None for p in parts) else ()
    cause, message = _named(replayed, own, whole, len(track.window.micro_batches), told, track)
    evidence = {"distance": replayed.error, "floor": replayed.floor, "gate": replayed.gate, "replayed as": replayed.pieces}
    if replayed.factors:
        evidence["weights of micro-batches, of what they should be"] = [float(f"{f:.4g}") for f in replayed.factors[:16]]
    if cause is not None:
        replayed.findings.append(
            Finding(cause=cause, message=message, window=replayed.window, rung=Rung.replay, evidence=evidence)
        )


def _named(
    replayed: Replayed, own: Sketch, whole: Sketch, num: int, told: Mapping[Cause, str], track: Track
) -> tuple[Cause | None, str]:
    """Which cause turns the large batch's gradient into the run's."""
    gate, far = replayed.gate, f"the gradient is {replayed.error:.2g} away from one large batch's (floor {replayed.floor:.1g})"
    factor, off = proportion(own, whole)
    tolerance = max(1e-3, 4 * gate)
    if off <= gate and factor > 0:
        if num > 1 and near(factor, num, tolerance):
            return Cause.loss_not_divided, f"the gradient is {factor:.4g} times one large batch's, with {num} micro-batches"
        if num > 1 and near(factor, 1 / num, tolerance):
            return Cause.loss_divided_twice, f"the gradient is {factor:.4g} of one large batch's, with {num} micro-batches"
        replayed.refused = f"the gradient is {factor:.4g} times that of the loss handed over: another loss, or another divisor"
        return None, ""
    if replayed.factors and not alike(replayed.factors, tolerance):
        return Cause.mean_of_means, f"micro-batches are weighted wrongly: {far}"
    if num < 2:
        replayed.refused = f"with one micro-batch, {far}: the loss handed over is another one"
        return None, ""
    if Cause.batch_statistics in told:
        return Cause.batch_statistics, far
    penalty = _penalty(own, whole, track)
    if penalty is not None:
        return (
            Cause.auxiliary_loss_scale,
            f"{far}, by {penalty:.3g} times the weights: a penalty on them counts once per micro-batch",
        )
    return Cause.unexplained, f"{far}, and no weighting of micro-batches makes up for it"


def _penalty(own: Sketch, whole: Sketch, track: Track) -> float | None:
    """The multiple of the weights that is the difference."""
    factor, off = proportion(own - whole, _on_host(track.weights()))
    return factor if off <= 1e-2 and factor > 0 else None


def _part(contribution: Any, scale: Any) -> Sketch | None:
    if contribution is None:
        return None
    found = _on_host(contribution)
    return found if scale is None else found / float(scale)


def _on_host(sketched: Sketched) -> Sketch:
    return np.stack([np.zeros(WIDTH) if s is None else s.double().cpu().numpy() for s in sketched])


def _factors(parts: Sequence[Sketch | None], whole: Sketch, gate: float) -> tuple[float, ...]:
    """Weights w with `whole` = sum_k w_k part_k; their inverses are what each part weighs of what it should."""
    made = weighted_sum(whole, [cast(Sketch, part) for part in parts])
    if not made.told_apart or made.residual > gate or not min(made.weights) > 0:
        return ()
    return tuple(1 / weight for weight in made.weights)


# -- without a trace --------------------------------------------------------------------------------------------------


@contextmanager
def untouched(model: nn.Module, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Gradients, all that modules hold (buffers, modes, counts and lists of their own) and generators are put back."""
    own = list(dict.fromkeys([*parameters, *model.parameters()]))
    grads = [(p, p.grad) for p in own]
    held = [pair for module in model.modules() for pair in _held(vars(module), DEEP)]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with _generators_kept(own):
            for p in own:
                p.grad = None
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for p, grad in grads:
            p.grad = grad
        for value, before in held:  # no function of its own, which could fail in between
            if isinstance(value, Tensor):
                if not torch.equal(value, before):
                    value.detach().copy_(before)
            elif isinstance(value, np.ndarray):
                value[...] = before
            elif isinstance(value, torch.Generator):
                value.set_state(before)
            elif isinstance(value, random.Random):
                value.setstate(before)
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = before
            elif isinstance(value, dict):
                if [*map(id, value.values())] != [*map(id, before.values())] or [*value] != [*before]:
                    value.clear()
                    value.update(before)
            elif [*map(id, value)] != [*map(id, before)]:
                value.clear()
                value.extend(before)


def _held(value: Any, deep: int) -> Iterator[tuple[Any, Any]]:
    """What a module's attribute leads to that a forward may change (numbers, members of collections), and a copy of it."""
    if isinstance(value, Tensor):
        if is_plain(value) and not (value.requires_grad or isinstance(value, nn.Parameter)):  # which no forward writes
            yield value, value.detach().clone()
    elif isinstance(value, torch.Generator):
        yield value, value.get_state()
    elif isinstance(value, random.Random):
        yield value, value.getstate()
    elif isinstance(value, np.random.Generator):
        yield value, value.bit_generator.state
    elif isinstance(value, (np.ndarray, dict, list, deque)):
        yield value, value.copy()
        for member in list(value.values() if isinstance(value, dict) else value) if deep and len(value) <= MOST else ():
            yield from _held(member, deep - 1)


def _own_hook(model: nn.Module) -> str | None:
    """A hook on modules or parameters that is neither ours nor PyTorch's: it may count, or step, what nobody can put back."""
    found = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    for one in (*model.modules(), *filter(is_plain, model.parameters())):
        found += [hooks for name in HOOKS if (hooks := getattr(one, name, None))]
    hook = next((hook for hooks in found for hook in hooks.values() if is_the_runs(hook)), None)
    return None if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__)


def _generators_kept(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """The CPU's and those of the tensors' own devices: of all that there are torch would warn, where there are several."""
    devices = {t.device for t in tensors if t.device.type not in WITHOUT_STATE}
    return torch.random.fork_rng(devices=devices, device_type=next((device.type for device in devices), "cuda"))


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Layers that draw are in evaluation mode; `untouched` puts them back."""
    for layer in model.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd) and not isinstance(layer, _BatchNorm):
            layer.training = False
    yield


@contextmanager
def _cast(dtype: torch.dtype | None, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Autocast of the device that the model is on: a loop on the CPU of a machine with GPUs is cast on the CPU."""
    if dtype is None:
        yield
        return
    with torch.autocast(parameters[0].device.type, dtype=dtype):
        yield


# -- batches ----------------------------------------------------------------------------------------------------------


def _num_rows(batch: Any) -> int:
    """The first dimension of a batch's first tensor."""
    for tensor in nest.tensors(batch):
        if tensor.dim():
            return len(tensor)
    raise Unequal("the batches hold no tensor with rows")


def _joined(window: Sequence[Any]) -> Any:
    for tensors in zip(*map(nest.tensors, window), strict=True):
        if len({t.shape[1:] for t in tensors}) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4])
            raise Unequal(f"batches of unequal shapes ({shapes}) make no single batch: let `loss` return its sum and its terms")
    return nest.joined(window)


def _halves(batch: Any) -> list[Any]:
    rows = _num_rows(batch)
    parts = (slice(None, rows // 2), slice(rows // 2, None))
    return [batch] if rows < 2 else [nest.rows(batch, part, of=rows) for part in parts]


def _reversed(batch: Any) -> Any:
    rows = _num_rows(batch)
    return nest.rows(batch, torch.arange(rows).flip(0), of=rows)
