"""`watch`: follow a training loop through the calls that it makes anyway."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol, TextIO, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from accumulation_harness.audit.report.remedies import Status
from accumulation_harness.judge.cause import Cause
from accumulation_harness.observe.fence import Fence, See, Seeing, entry
from accumulation_harness.observe.patches import Place
from accumulation_harness.watch.calls import laid_out
from accumulation_harness.watch.conclusion import concluded
from accumulation_harness.watch.evidence import Call, Finding, Rung
from accumulation_harness.watch.heads import Heads
from accumulation_harness.watch.judge import Judge
from accumulation_harness.watch.replay import Batches, Loss, Replay, properties
from accumulation_harness.watch.report import SUFFIXES, Report
from accumulation_harness.watch.sketch import is_known, is_plain
from accumulation_harness.watch.slopes import is_transforming
from accumulation_harness.watch.together import Together, agreed, declared, in_a_group
from accumulation_harness.watch.track import Sketched, Track, versions

FIRST = 4  # windows that are looked at closely when a watch begins, and after something was seen
EVERY = 16  # and how often then
REPLAYED_FIRST = 1  # index of the first window that is replayed


@runtime_checkable
class Writer(Protocol):
    """What TensorBoard's `SummaryWriter` offers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Add one number."""


Log = Callable[[Mapping[str, float]], Any] | Writer


def watch(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Any],
    *,
    every: int = 500,
    loss: Loss | None = None,
    accumulation_steps: int | None = None,
    log: Log | None = None,
    tell: TextIO | EllipsisType | None = ...,
    path: str | Path | None = None,
) -> Watch:
    """Watch the windows of a run, as a context manager or between `attach` and `detach`.

    Args:
        model: What is trained; where it is wrapped (DDP, `torch.compile`), either the wrapper or what is inside.
        optimizer: One, or several.
        every: Every how many windows one is replayed (the second of a run is, too); only with `loss`.
        loss: `loss(model, batch)`: the loss of a batch as training on it alone would take it, not divided by the number of
            micro-batches; or its sum and its number of terms, with which a window is replayed in halves of its micro-batches.
        accumulation_steps: What the run is set to; otherwise its most frequent number of micro-batches.
        log: Called after each window with `accumulation/*` metrics; one that takes `commit`, as `wandb.log` does, with
            `commit=False`: they go with the loop's own next row. Or a TensorBoard writer, whose `add_scalar` is called with each
            of them and the number of the window.
        tell: Where a line goes as soon as something is wrong: `sys.stderr` unless given.
        path: Where the report is kept while the run goes on, as JSON or, where it ends in `.md`, as a page for an issue: written
            whenever the verdict changes, every 16th window and at the end; of several ranks, by the first.

    Raises ValueError for arguments that cannot be watched. Whatever fails later ends the watch, and not the run.
    """
    if every < 1:
        raise ValueError(f"every: expected at least 1, got {every}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if path is not None and Path(path).suffix not in SUFFIXES:
        raise ValueError(f"path: expected a name that ends in {' or '.join(SUFFIXES)}, got {path}")
    told = sys.stderr if isinstance(tell, EllipsisType) else tell
    return Watch(model, _optimizers(optimizer), every, loss, accumulation_steps, log, told, None if path is None else Path(path))


def _itself(seen: Watch) -> Watch:
    return seen


class Watch:
    """A run that is being watched."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        every: int,
        loss: Loss | None,
        accumulation_steps: int | None,
        log: Log | None,
        tell: TextIO | None,
        path: Path | None,
    ) -> None:
        self.fence = Fence(self._ended, "the watch", own_thread=True)
        self.model, self.optimizers, self.every, self.loss, self.log = model, optimizers, every, loss, log
        self.path, self._tell = path, tell
        self._begin(accumulation_steps)

    @entry(lambda *_: None)
    def _begin(self, accumulation_steps: int | None) -> None:
        self.tracks = [Track(i, optimizer, self.model, self.fence) for i, optimizer in enumerate(self.optimizers)]
        self.judge = Judge(accumulation_steps, self._tell)
        self.heads, self.batches = Heads(self.fence), Batches(keep=self.loss is not None)
        self.replay = Replay(self.model, self.loss) if self.loss is not None else None
        self._options = {"commit": False} if _takes_commit(self.log) else {}
        self._depth = self._buffers = 0
        self._stepped: set[int] = set()  # tracks that stepped during the last backward
        self._paused = False
        self._scale: Tensor | None = None
        self._stepping: Track | None = None
        self._closed: Counter[int] = Counter()
        self._loaders: WeakSet[DataLoader[Any]] = WeakSet()  # that have begun before
        self._state: list[Any] | None = None  # of the generators, before the forward under way
        self._draws = False  # whether a forward has drawn random numbers
        self._held: dict[int, tuple[Sketched, Sketched | None]] = {}
        self._close_until = -1
        self._kept: Status | None = None  # the verdict of the report at `path`
        self._alone: bool | None = True  # whether no other rank has a part in the gradient; None: where it shows in it
        self._together: Together | None = None
        self._unheard = ""  # why not

    # -- the outside -------------------------------------------------------------------------------------------------

    @entry(_itself)
    def attach(self) -> Watch:
        """Begin to watch."""
        if self.fence.is_open or self.fence.reason:
            return self
        self._agree()
        self.fence.open()
        self.fence.patches.follow()
        self.fence.replace(self._seen())
        for track in self.tracks:
            track.attach()
            self.fence.hooked(track.optimizer.register_step_pre_hook, self._before_step)
            self.fence.hooked(track.optimizer.register_step_post_hook, self._after_step)
        self.fence.hooked(self.model.register_forward_pre_hook, self._before_forward)
        self.fence.hooked(self.model.register_forward_hook, self._after_forward, with_kwargs=True)
        if (layer := _first_layer(self.model)) is not None:
            self.fence.hooked(layer.register_forward_pre_hook, self._inside)
        return self

    def _agree(self) -> None:
        """Whether this rank is watched with others."""
        parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"] if is_known(p)]
        if not in_a_group():
            return
        members = declared(self.model, parameters)
        if len(members) < 2:
            self._alone = None
            self._unheard = "nothing declares several ranks to be replicas or shards (DDP, a mesh): this one is judged by itself"
            return
        self._alone, self._together = False, agreed(members, parameters)
        if self._together is None:
            self._unheard = "not all ranks of the model are watched: what they put together was not judged"

    @entry(lambda _: None)
    def detach(self) -> None:
        """Stop watching; the report stays."""
        if not self.fence.is_open:
            return
        self.fence.close()
        if self._together is not None:
            self._together.leave()
        for track in self.tracks:
            if track.window.backwards:
                self.judge.left_over = len(track.window.backwards)
        self.judge.finish()
        self._keep(last=True)
        found = self.report()
        if self._tell is not None and found.verdict is not Status.different:
            print(found.headline, file=self._tell, flush=True)

    @entry(_itself)
    def __enter__(self) -> Watch:
        return self.attach()

    @entry(lambda *_: None)
    def __exit__(self, *_: object) -> None:
        self.detach()

    @entry(lambda _, batch: batch)
    def batch(self, batch: Any) -> Any:
        """Hand over the batch of the next micro-batch, for the replay; returns it."""
        self.batches.hand_over(batch)
        return batch

    @entry(lambda seen, *_: Report.ended(seen.fence.reason))
    def report(self, path: str | Path | None = None) -> Report:
        """What is known now; also written to `path`, as JSON or, where it ends in `.md`, as a page for an issue."""
        found = concluded(self.judge)
        lines = [track.unlooked for track in self.tracks if track.unlooked]
        if lines:
            verdict = Status.inconclusive if found.verdict is Status.equivalent else found.verdict
            found = replace(found, verdict=verdict, reasons=(*lines, *found.reasons))
        if self._unheard:
            found = replace(found, reasons=(self._unheard, *found.reasons))
        if self.fence.reason:
            found = replace(found, verdict=Status.inconclusive, reasons=(self.fence.reason, *found.reasons))
        if path is not None:
            found.save(path)
        return found

    @entry(lambda seen: Report.ended(seen.fence.reason).to_json())
    def to_json(self) -> str:
        """The report as JSON."""
        return self.report().to_json()

    @entry(lambda _: dict[str, float]())
    def metrics(self) -> dict[str, float]:
        """`accumulation/*` of the last window, as far as there are numbers."""
        return {name: value for name, value in self.judge.metrics().items() if value == value}

    def _ended(self) -> None:
        """Something has failed."""
        if self._together is not None:
            self._together.leave()
        self._keep(last=True)
        if self._tell is not None:
            print(f"accumulation: {self.fence.reason}; the run goes on", file=self._tell, flush=True)

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def _seen(self) -> Mapping[Place, See]:
        """What is replaced, and who sees its calls."""
        return {
            (torch.autograd, "backward"): self._backward,
            (torch.autograd, "grad"): self._grad,
            (nn.utils, "clip_grad_norm_"): self._clip,
            (nn.utils, "clip_grad_value_"): self._clip,
            (LRScheduler, "step"): self._noting(Call.schedule, self._is_of),
            (GradScaler, "scale"): self._scaled,
            (GradScaler, "unscale_"): self._noting(Call.unscale, _unscales),
            (GradScaler, "step"): self._scaler_step,
            (GradScaler, "update"): self._noting(Call.update_scale, lambda track, scaler, *_, **__: scaler.is_enabled()),
            (AveragedModel, "update_parameters"): self._noting(Call.average, _averages),
            (DataLoader, "__iter__"): self._epoch,
            **self.heads.functions(),
        }

    def _backward(self, *args: Any, **kwargs: Any) -> Seeing:
        yield from self._differentiate(args[0] if args else kwargs.get("tensors"))

    def _grad(self, *args: Any, **kwargs: Any) -> Seeing:
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
        if any(track.holds(wanted) for track in self.tracks):  # else a gradient penalty, say: no part of the sum
            yield from self._differentiate(args[0] if args else kwargs.get("outputs"))

    def _differentiate(self, root: Any) -> Seeing:
        if self._depth or self._paused:  # checkpointing runs backward inside backward
            return
        self._depth += 1
        self.heads.before(root)
        for track in self.tracks:
            track.before_backward()
        try:
            yield
        except BaseException:
            for track in self.tracks:
                track.abort()
            raise
        finally:
            self._depth -= 1
        self._look_at_steps_inside()
        heads, fed, forwards, others = self.heads.taken()
        scale, self._scale = self._scale, None
        loss = root.detach().clone() if is_plain(root) and root.numel() == 1 else None
        reached = [
            track for track in self.tracks if track.after_backward(heads, scale, loss, fed=fed, forwards=forwards, others=others)
        ]
        for track in reached:
            track.window.inside += self._stepping is track
            track.window.closure = track.window.closure or self._stepping is track
        self.batches.end(reached=bool(reached))

    def _look_at_steps_inside(self) -> None:
        """An optimizer that steps in two backwards, one after the other, accumulates nothing."""
        before, self._stepped = self._stepped, {track.index for track in self.tracks if track.stepped_inside}
        steps = self.judge.configured or 1
        if before & self._stepped and steps > 1:
            message = f"optimizers step during every backward, and {steps} micro-batches are configured"
            self.judge._add(Finding(cause=Cause.step_every_micro_batch, message=message, window=0, rung=Rung.ledger))

    def _clip(self, *args: Any, **kwargs: Any) -> Seeing:
        given = args[0] if args else kwargs.get("parameters")
        members = [given] if isinstance(given, Tensor) else list(given or ())
        touched = [track for track in self.tracks if track.holds(members)]
        for track in touched:
            track.before_clip()
            scaled = Call.unscale not in track.window.calls and any(b.scale is not None for b in track.window.backwards)
            track.window.calls.append(Call.clip_scaled if scaled else Call.clip)
        yield
        for track in touched:
            track.after_clip()

    def _noting(self, call: Call, concerns: Callable[..., bool]) -> See:
        """Note a call in the windows of the optimizers that it `concerns`, of which it is told with the call's own arguments."""

        def see(*args: Any, **kwargs: Any) -> Seeing:
            yield
            for track in self.tracks:
                if concerns(track, *args, **kwargs):
                    track.window.calls.append(call)

        return see

    def _is_of(self, track: Track, scheduler: Any, *_: Any, **__: Any) -> bool:
        concerned = getattr(scheduler, "optimizer", None) is track.optimizer
        if concerned and (steps := laid_out(scheduler)) is not None:
            self.judge.laid_out.add(steps)
        return concerned

    def _epoch(self, loader: Any) -> Seeing:
        if self.model.training and torch.is_grad_enabled():  # not an evaluation
            for track in self.tracks:
                if track.window.backwards and loader in self._loaders:
                    track.window.calls.append(Call.epoch)
            self._loaders.add(loader)
        yield

    def _inside(self, layer: nn.Module, args: Any) -> None:
        if _is_training(layer):
            self.heads.inside()

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if _is_training(model) and not is_transforming():
            self._state = _generators() if self.heads.detail and not self._draws and not self._paused else None

    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not _is_training(model):
            return
        if self._state is not None:
            self._draws, self._state = self._state != _generators(), None
        self.heads.see(args, kwargs, output)
        self.batches.see(args, kwargs)

    # -- the loss scaler ---------------------------------------------------------------------------------------------

    def _scaled(self, scaler: Any, *_: Any, **__: Any) -> Seeing:
        yield
        if scaler.is_enabled() and not self._paused:
            self._scale = scaler._scale.detach().clone()

    def _scaler_step(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Seeing:
        mine = [track for track in self.tracks if track.optimizer is optimizer]
        taken = [self._closed[track.index] for track in mine]
        yield
        for track, count in zip(mine, taken, strict=True):
            if self._closed[track.index] == count and track.window.backwards:
                self._close(track, skipped=True)

    # -- the step ----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        track = self._track(optimizer)
        if track is None or self._paused:
            return
        self._stepping = track
        self.fence.patches.follow()
        if self._depth:  # an optimizer in the backward: the last micro-batch is not complete
            track.window.closure = track.stepped_inside = True
        track.refresh()
        track.window.late = not track.window.moved and not track.still  # as counted writes show
        track.look_at_format()
        gradients = track.gradients()
        factor = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
        if isinstance(factor, Tensor):
            gradients = [None if g is None else g / factor.to(g.device) for g in gradients]
        parameters = track.weights() if track.detail else None
        self._held[track.index] = (gradients, parameters)
        if not any(map(callable, (*args, *kwargs.values()))):  # a closure may have a backward to come
            self._replay(track, gradients)

    @entry(lambda *_: None)
    def closure_ran(self, optimizer: Optimizer) -> None:
        """A trainer says that the closure of the step under way has differentiated: `.grad` is complete."""
        track = self._track(optimizer)
        if track is None or self._stepping is not track:
            return
        gradients, parameters = self._held[track.index]
        if track.window.inside == 1:
            track.window.closure = False
            gradients = track.gradients()
            self._held[track.index] = (gradients, parameters)
        self._replay(track, gradients)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        track = self._track(optimizer)
        self._stepping = None
        if track is not None and not self._paused:
            found_inf = getattr(optimizer, "found_inf", None)
            self._close(track, skipped=isinstance(found_inf, Tensor) and bool(found_inf))

    def _close(self, track: Track, *, skipped: bool) -> None:
        gradients, parameters = self._held.pop(track.index, (None, None))
        if gradients is None:
            gradients = track.gradients()
        if track.window.inside and track.window.clipped is not None:  # by a trainer, inside its closure
            gradients = track.window.clipped
        self._closed[track.index] += 1
        track.window.forwards, track.window.still = self.heads.forgotten(), track.still
        track.window.unused = self.heads.unused() if len(self.tracks) == 1 else ()
        buffers, self._buffers = self._buffers, versions(list(self.model.buffers()))
        track.window.buffers_moved = bool(track.num_windows) and buffers != self._buffers
        window = track.close(
            skipped=skipped, gradients=gradients, parameters=parameters, alone=self._alone, together=self._together
        )
        self.batches.forget()
        if window is None:
            self.judge.closures += self._depth > 0
            return
        if track.detail:
            self.judge.properties = {**self.judge.properties, **properties(self.model, draws=self._draws)}
        suspicious = self.judge.see(window)
        if suspicious and self._together is None:  # which would be looking at other windows than the other ranks
            self._close_until = window.index + FIRST
        nearest = window.index + 1
        track.detail = nearest < FIRST or nearest <= self._close_until or nearest % EVERY == 0
        track.whole = track.detail or (self.replay is not None and self._is_replayed(track))
        self.heads.detail = any(t.detail for t in self.tracks)
        self._write()
        self._keep()
        self.fence.windows = max(t.num_windows for t in self.tracks)

    def _write(self) -> None:
        """Log the metrics of the last window."""
        if isinstance(self.log, Writer):
            for name, value in self.judge.metrics().items():
                self.log.add_scalar(name, value, self.judge.windows)
        elif self.log is not None:
            self.log(self.judge.metrics(), **self._options)

    def _keep(self, *, last: bool = False) -> None:
        """Write the report where somebody will look for it if the run does not end by itself."""
        if self.path is not None and (not in_a_group() or torch.distributed.get_rank() == 0):
            found = self.report()
            if last or found.verdict is not self._kept or self.judge.windows % EVERY == 0:
                found.save(self.path)
                self._kept = found.verdict

    # -- the replay --------------------------------------------------------------------------------------------------

    def _is_replayed(self, track: Track) -> bool:
        index = track.num_windows
        return track.index == 0 and (index == REPLAYED_FIRST or index % self.every == self.every - 1)

    def _replay(self, track: Track, gradients: Sketched) -> None:
        if self.replay is None or not track.window.backwards or not self._is_replayed(track):
            return
        self._paused = self.heads.paused = self.batches.paused = True
        try:
            given = track.window.unclipped if track.window.unclipped is not None else gradients
            told = properties(self.model, draws=self._draws)
            self.judge.replayed(self.replay.run(track, given, self.batches, self.heads, told, self._together))
        finally:
            self._paused = self.heads.paused = self.batches.paused = False

    def _track(self, optimizer: Any) -> Track | None:
        return next((track for track in self.tracks if track.optimizer is optimizer), None)


def _takes_commit(log: Log | None) -> bool:
    """Whether it is one of W&B's, which ends the loop's own step where it is not told to wait."""
    try:
        return log is not None and "commit" in inspect.signature(log).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no function, or one that says nothing of itself
        return False


def _is_training(module: nn.Module) -> bool:
    """Whether a forward is one that trains; inside a compiled one, outputs have no numbers yet."""
    return not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled()


def _unscales(track: Track, scaler: GradScaler, optimizer: Any) -> bool:
    return scaler.is_enabled() and track.optimizer is optimizer


def _averages(track: Track, averaged: AveragedModel, model: nn.Module) -> bool:
    return track.holds(model.parameters())


def _first_layer(model: nn.Module) -> nn.Module | None:
    """A layer with weights of its own; None in a compiled model, which another hook would compile again."""
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        return None
    return next((m for m in model.modules() if m is not model and next(m.parameters(recurse=False), None) is not None), None)


def _optimizers(given: Any) -> list[Optimizer]:
    """Also out of wrappers that keep theirs in `.optimizer` (accelerate)."""
    if isinstance(given, Mapping):
        given = list(given.values())
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    found = []
    for one in listed:
        inner = getattr(one, "optimizer", one)
        if not isinstance(inner, Optimizer):
            raise ValueError(f"optimizer: expected a torch.optim.Optimizer, or several, got {type(one).__name__}")
        found.append(inner)
    if not found:
        raise ValueError("optimizer: expected at least one, got none")
    return found


def _generators() -> list[Any]:
    """What shows whether PyTorch's generators have been drawn from, without waiting for a device."""
    found: list[Any] = [torch.default_generator.get_state().numpy().tobytes()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        found += [generator.get_offset() for generator in torch.cuda.default_generators]
    return found
