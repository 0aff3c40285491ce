"""Rung 3: the window again, at the same weights, as one large batch; and with its rows reversed, as the floor."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel

from accumulation_harness.compare.linear import norm, proportion, weighted_sum
from accumulation_harness.compare.readings import alike, near
from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.observe.fence import is_ours, is_the_runs, told
from accumulation_harness.observe.tensors import in_a_group, is_plain
from accumulation_harness.system import pytree
from accumulation_harness.system.state import GENERATORS, put_back, standing
from accumulation_harness.watch.evidence import Finding, Sketch
from accumulation_harness.watch.sketch import WIDTH
from accumulation_harness.watch.together import Together
from accumulation_harness.watch.track import Sketched, Track

MOST = 4096  # members of a collection that are looked into
UNHEARD = "not every rank answered"
DEEP = 2  # levels of lists and mappings below a module's attribute that are put back after a replay


class Batches:
    """By reference; of a forward that was called with keywords alone, their mapping."""

    def __init__(self) -> None:
        self.window: list[Any] = []
        self.handed: list[Any] = []  # over, since the last backward
        self._seen: list[Any] = []

    def see(self, args: Any, kwargs: Any) -> None:
        """The model was called so."""
        self._seen.append(dict(kwargs) if kwargs and not args else args[0] if len(args) == 1 and not kwargs else args)

    def end(self, *, reached: bool) -> None:
        """A backward has ended; what was handed over comes before what was seen."""
        if reached:
            self.window.extend(self.handed or self._seen)
        self.handed, self._seen = [], []


def properties(model: nn.Module, *, draws: bool = False) -> dict[Cause, str]:
    """List layers by which a model itself depends on how a batch is cut.

    Args:
        model: The model.
        draws: Whether a forward has drawn random numbers.

    Returns:
        Cause -> a sentence with the layers.
    """
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
    of_rows = isinstance(layer, _BatchNorm) or getattr(layer, "scale_grad_by_freq", False)
    return of_rows or (isinstance(layer, _InstanceNorm) and layer.track_running_stats)


def _drops(layer: nn.Module) -> bool:
    probability = getattr(layer, "p", 0) if isinstance(layer, nn.modules.dropout._DropoutNd) else getattr(layer, "dropout", 0)
    return layer.training and isinstance(probability, (int, float)) and 0 < probability < 1


Loss = Callable[[nn.Module, Any], Any]
Parts = Sequence[Sketch]  # of a gradient: what each micro-batch gave
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
    error: float = float("nan")  # distance of the run's gradient, relative to the large batch's
    floor: float = float("nan")  # of the large batch with its rows reversed
    gate: float = float("nan")
    findings: list[Finding] = field(default_factory=list)
    refused: str = ""  # why nothing could be compared

    @property
    def right(self) -> bool:
        """Whether it was compared, and is the same."""
        return not self.refused and not self.findings and self.error <= self.gate


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A window that was taken again."""

    whole: Sketch  # its gradient
    again: Sketch  # and that of its rows reversed
    terms: float  # of the loss, over which both are sums; 0: they are means
    pieces: str  # how it was taken


class Refusal(ValueError):
    """Why nothing can be compared."""


class Replay:
    """Replays windows of one model through the loss that it was given."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = getattr(model, "module", model) if isinstance(model, DistributedDataParallel) else model, loss

    def run(
        self,
        track: Track,
        gradients: Sketched,
        window: Sequence[Any],
        autocast: torch.dtype | None,
        told: Mapping[Cause, str],
        together: Together | None,
    ) -> Replayed:
        """Compare the gradient at the step with that of the window's batches. It leaves no trace in the run.

        Args:
            track: The optimizer that stepped.
            gradients: Sketches of the gradient that it was given.
            window: The batches of the window, one for each micro-batch.
            autocast: The format of autocast in the run; None without it.
            told: Cause -> sentence of what the model's layers are known to do.
            together: The ranks that share the gradient; None where there is one.

        Returns:
            The findings, or why it could not be replayed.
        """
        replayed = Replayed(window=track.num_windows)
        try:
            self._compare(replayed, track, _on_host(gradients), window, autocast, told, together)
        except Refusal as why:
            replayed.refused, replayed.findings = str(why), []
        return replayed

    def _compare(
        self,
        replayed: Replayed,
        track: Track,
        own: Sketch,
        window: Sequence[Any],
        autocast: torch.dtype | None,
        told: Mapping[Cause, str],
        together: Together | None,
    ) -> None:
        if (hook := _own_hook(self.model)) is not None:
            raise Refusal(f"a hook of the run's own ({hook}) would be called in a replay, and see passes that the run has not")
        if track.is_cut:
            raise Refusal("windows of sharded parameters are not replayed")
        if in_a_group() and together is None:
            raise Refusal("over ranks, windows are replayed where all ranks of a model are watched")
        parts: Parts = [_part(m.contribution, m.scale) for m in track.window.micro_batches]
        window = [pytree.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, batch) for batch in window]
        found = self._taken_again(track, window, autocast)
        if together is not None:
            found, parts = _over_ranks(replayed.window, found, parts, together)
        if isinstance(found, Refusal):
            raise found
        whole, again = found.whole / (found.terms or 1.0), found.again / (found.terms or 1.0)
        size = norm(whole)
        if not np.isfinite(own).all() or not size or not np.isfinite(size):
            raise Refusal("the gradient is zero or not finite")
        replayed.error, replayed.floor = (norm(other - whole) / size for other in (own, again))
        narrow = autocast or next((p.dtype for p in track.parameters if p.dtype in LEAST), None)
        gate = replayed.gate = max(ROUNDING * replayed.floor, LEAST.get(narrow, LEAST_WIDE) if narrow else LEAST_WIDE)
        if Cause.stochastic_layers in told:
            raise Refusal(
                "dropout, or other random draws: the replay does not draw what the run drew, so that they cannot be compared"
            )
        if replayed.floor > 0.1:
            raise Refusal(
                f"rows reversed give another gradient ({replayed.floor:.2g}): the loss depends on their order, or draws"
            )
        if replayed.error <= gate:
            return
        factors, weights = _factors(parts, whole, gate), _on_host(track.weights())
        cause, message = _named(replayed, own, whole, factors, len(window), told, weights)
        if not in_a_group():
            with self._untouched(track, autocast):
                alone, _ = self._gradient(track, window[:1])
            made = weighted_sum(parts[0], [alone, weights])  # up to its weight, and a penalty's
            if made.told_apart and made.residual > gate:
                raise Refusal("on one micro-batch, the loss handed over has another gradient than the run's: another loss")
        evidence = {"distance": replayed.error, "floor": replayed.floor, "gate": gate, "replayed as": found.pieces}
        if factors:
            evidence["weights of micro-batches, of what they should be"] = [float(f"{f:.4g}") for f in factors[:16]]
        replayed.findings.append(Finding(cause=cause, message=message, window=replayed.window, rung="replay", evidence=evidence))

    def _taken_again(self, track: Track, window: Sequence[Any], autocast: torch.dtype | None) -> Taken | Refusal:
        """The window of this rank, as large pieces and reversed."""
        num = len(track.window.micro_batches)
        if len(window) != num:
            return Refusal(f"{len(window)} batches were seen for {num} micro-batches: hand each over with `seen.batch(batch)`")
        try:
            with self._untouched(track, autocast):
                how, pieces = self._pieces(window)
                whole, terms = self._gradient(track, pieces)
                again, _ = self._gradient(track, [_reversed(piece) for piece in reversed(pieces)])
            return Taken(whole=whole, again=again, terms=terms, pieces=how)
        except Refusal as why:
            return why
        except torch.OutOfMemoryError:
            return Refusal("the window does not fit into memory as one batch: let `loss` return its sum and its number of terms")
        except Exception as error:
            if is_ours(error):
                raise
            return Refusal(f"the loss handed over failed: {told(error)}")

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
                raise Refusal(f"the loss handed over is no number that can be differentiated: {told(error)}") from error
        return _on_host(track.gradients()), terms

    @contextmanager
    def _untouched(self, track: Track, autocast: torch.dtype | None) -> Iterator[None]:
        """The arithmetic of the run, on the device that the model is on, without dropout, and without a trace."""
        cast = nullcontext() if autocast is None else torch.autocast(track.parameters[0].device.type, dtype=autocast)
        with untouched(self.model, track.parameters), cast:
            for layer in self.model.modules():
                if isinstance(layer, nn.modules.dropout._DropoutNd):
                    layer.training = False
            yield


def _over_ranks(window: int, own: Taken | Refusal, parts: Parts, together: Together) -> tuple[Taken | Refusal, Parts]:
    """The window of all ranks; and their micro-batches, as gradients that are averaged over ranks weigh them."""
    taken = {"refused": str(own)} if isinstance(own, Refusal) else dataclasses.asdict(own)
    gathered = together.gathered(f"replay/{window}", {**taken, "parts": np.stack(parts)}) or []
    if any("refused" in one for one in gathered) or not gathered:
        return next((Refusal(str(one["refused"])) for one in gathered if "refused" in one), Refusal(UNHEARD)), parts
    if not all(one["terms"] for one in gathered):
        return Refusal("over ranks, a window is replayed where `loss` returns its sum and its number of terms"), parts
    whole, again, terms = (np.sum([one[name] for one in gathered], axis=0) for name in ("whole", "again", "terms"))
    shares = [part / len(gathered) for one in gathered for part in one["parts"]]
    return Taken(whole=whole, again=again, terms=float(terms), pieces=str(gathered[0]["pieces"])), shares


def _named(
    replayed: Replayed,
    own: Sketch,
    whole: Sketch,
    factors: Sequence[float],
    num: int,
    told: Mapping[Cause, str],
    weights: Sketch,
) -> tuple[Cause, str]:
    """Which cause turns the large batch's gradient into the run's."""
    gate, far = replayed.gate, f"the gradient is {replayed.error:.2g} away from one large batch's (floor {replayed.floor:.1g})"
    factor, off = proportion(own, whole)
    tolerance = max(1e-3, 4 * gate)
    if off <= gate and factor > 0:
        if num > 1 and near(factor, num, tolerance):
            return Cause.loss_not_divided, f"the gradient is {factor:.4g} times one large batch's, with {num} micro-batches"
        if num > 1 and near(factor, 1 / num, tolerance):
            return Cause.loss_divided_twice, f"the gradient is {factor:.4g} of one large batch's, with {num} micro-batches"
        raise Refusal(f"the gradient is {factor:.4g} times that of the loss handed over: another loss, or another divisor")
    if factors and not alike(factors, tolerance):
        return Cause.mean_of_means, f"micro-batches are weighted wrongly: {far}"
    if num < 2:
        raise Refusal(f"with one micro-batch, {far}: the loss handed over is another one")
    if Cause.batch_statistics in told:
        return Cause.batch_statistics, far
    penalty, left = proportion(own - whole, weights)
    if left <= 1e-2 and penalty > 0:
        message = f"{far}, by {penalty:.3g} times the weights: a penalty on them counts once per micro-batch"
        return Cause.auxiliary_loss_scale, message
    return Cause.unexplained, f"{far}, and no weighting of micro-batches makes up for it"


def _part(contribution: Any, scale: Any) -> Sketch:
    found = _on_host(contribution)
    return found if scale is None else found / float(scale)


def _on_host(sketched: Sketched) -> Sketch:
    return np.stack([np.zeros(WIDTH) if s is None else s.double().cpu().numpy() for s in sketched])


def _factors(parts: Parts, whole: Sketch, gate: float) -> tuple[float, ...]:
    """The weight of each micro-batch in the run, over that in the large batch: 1 / w with `whole` = sum_k w_k part_k."""
    made = weighted_sum(whole, parts)
    if not made.told_apart or made.residual > gate or not min(made.weights) > 0:
        return ()
    return tuple(1 / weight for weight in made.weights)


# -- without a trace --------------------------------------------------------------------------------------------------


@contextmanager
def untouched(model: nn.Module, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Put back gradients, all that modules hold (buffers, modes, counts and lists of their own) and generators.

    Args:
        model: The model.
        parameters: Further parameters, of the optimizer.

    Yields:
        Nothing; inside, no parameter has a gradient.

    Raises:
        Refusal: Weights were changed in place.
    """
    own = list(dict.fromkeys([*parameters, *model.parameters()]))
    grads = [(p, p.grad) for p in own]
    held = [pair for module in model.modules() for pair in _held(vars(module), DEEP)]
    python, numpy, versions = random.getstate(), np.random.get_state(), [p._version for p in own]
    try:
        with _generators_kept(own):
            for p in own:
                p.grad = None
            yield
        if [p._version for p in own] != versions:  # a copy of all weights would be needed to put them back
            raise Refusal("the loss handed over changes weights in place, and they stay changed in the run")
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
            elif isinstance(value, GENERATORS):
                put_back(value, before)
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
    elif isinstance(value, GENERATORS):
        yield value, standing(value)
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


# -- batches ----------------------------------------------------------------------------------------------------------


def _num_rows(batch: Any) -> int:
    """The first dimension of a batch's first tensor."""
    for tensor in pytree.tensors(batch):
        if tensor.dim():
            return len(tensor)
    raise Refusal("the batches hold no tensor with rows")


def _joined(window: Sequence[Any]) -> Any:
    for tensors in zip(*map(pytree.tensors, window), strict=True):
        if len({t.shape[1:] for t in tensors}) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors[:4])
            raise Refusal(f"batches of unequal shapes ({shapes}) make no single batch: let `loss` return its sum and its terms")
    return pytree.joined(window)


def _halves(batch: Any) -> list[Any]:
    rows = _num_rows(batch)
    parts = (slice(None, rows // 2), slice(rows // 2, None))
    return [batch] if rows < 2 else [pytree.rows(batch, part, of=rows) for part in parts]


def _reversed(batch: Any) -> Any:
    rows = _num_rows(batch)
    return pytree.rows(batch, torch.arange(rows).flip(0), of=rows)
