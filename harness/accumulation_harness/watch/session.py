"""`watch`: follow a training loop through the calls that it makes anyway."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from accumulation_harness.audit.observe.patches import Patches
from accumulation_harness.audit.report.remedies import Status
from accumulation_harness.watch.calls import laid_out
from accumulation_harness.watch.conclusion import concluded
from accumulation_harness.watch.evidence import Call
from accumulation_harness.watch.heads import Heads
from accumulation_harness.watch.judge import Judge
from accumulation_harness.watch.replay import Batches, Loss, Replay, in_a_group, properties
from accumulation_harness.watch.report import Report
from accumulation_harness.watch.slopes import is_transforming
from accumulation_harness.watch.track import Hook, Sketched, Track, versions

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
    tell: TextIO | None = sys.stderr,
) -> Watch:
    """Watch the windows of a run, as a context manager or between `attach` and `detach`.

    Args:
        model: What is trained; where it is wrapped (DDP, `torch.compile`), either the wrapper or what is inside.
        optimizer: One, or several.
        every: Every how many windows one is replayed (the second of a run is, too); only with `loss`.
        loss: `loss(model, batch)`: the loss of a batch as training on it alone would take it, not divided by the number of
            micro-batches; or its sum and its number of terms, with which a window is replayed in halves of its micro-batches.
        accumulation_steps: What the run is set to; otherwise its most frequent number of micro-batches.
        log: Called after each window with `accumulation/*` metrics, as `wandb.log` takes them; or a TensorBoard writer, whose
            `add_scalar` is called with each of them and the number of the window.
        tell: Where a line goes as soon as something is wrong.

    Raises ValueError for arguments that cannot be watched.
    """
    if every < 1:
        raise ValueError(f"every: expected at least 1, got {every}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    return Watch(model, _optimizers(optimizer), every, loss, accumulation_steps, log, tell)


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
    ) -> None:
        self.model, self.every, self.log = model, every, log
        self.tracks = [Track(i, optimizer, model) for i, optimizer in enumerate(optimizers)]
        for track in self.tracks:
            track.detach()
        self._tell = tell
        self.judge = Judge(accumulation_steps, tell)
        self.heads, self.batches = Heads(), Batches(keep=loss is not None)
        self.replay = Replay(model, loss) if loss is not None else None
        self._patches: Patches | None = None
        self._depth = self._buffers = 0
        self._paused = False
        self._scale: Tensor | None = None
        self._stepping: Track | None = None
        self._closed: Counter[int] = Counter()
        self._loaders: WeakSet[DataLoader[Any]] = WeakSet()  # that have begun before
        self._state: list[Any] | None = None  # of the generators, before the forward under way
        self._draws = False  # whether a forward has drawn random numbers
        self._held: dict[int, tuple[Sketched, Sketched | None]] = {}

    # -- the outside -------------------------------------------------------------------------------------------------

    def attach(self) -> Watch:
        """Begin to watch."""
        if self._patches is not None:
            return self
        patches = self._patches = Patches(own_thread=True)
        patches.replace(
            {
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
        )
        for track in self.tracks:
            track.refresh()
            patches.removing(track.optimizer.register_step_pre_hook(Hook(self._before_step)))
            patches.removing(track.optimizer.register_step_post_hook(Hook(self._after_step)))
        patches.removing(self.model.register_forward_pre_hook(Hook(self._before_forward)))
        patches.removing(self.model.register_forward_hook(Hook(self._after_forward), with_kwargs=True))
        if (layer := _first_layer(self.model)) is not None:
            patches.removing(layer.register_forward_pre_hook(Hook(self._inside)))
        return self

    def detach(self) -> None:
        """Stop watching; the report stays."""
        if self._patches is None:
            return
        self._patches.restore()
        self._patches = None
        for track in self.tracks:
            if track.window.backwards:
                self.judge.left_over = len(track.window.backwards)
            track.detach()
        self.judge.finish()
        found = self.report()
        if self._tell is not None and found.verdict is not Status.different:
            print(found.headline, file=self._tell, flush=True)

    def __enter__(self) -> Watch:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.detach()

    def batch(self, batch: Any) -> Any:
        """Hand over the batch of the next micro-batch, for the replay; returns it."""
        self.batches.hand_over(batch)
        return batch

    def report(self, path: str | Path | None = None) -> Report:
        """What is known now; also written to `path`, as JSON or, where it ends in `.md`, as a page for an issue."""
        found = concluded(self.judge)
        if path is not None:
            found.save(path)
        return found

    def to_json(self) -> str:
        """The report as JSON."""
        return self.report().to_json()

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._differentiate(original, args, kwargs, args[0] if args else kwargs.get("tensors"))

    def _grad(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs")
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs or ())
        if not any(track.holds(wanted) for track in self.tracks):  # a gradient penalty, say: no part of the sum
            return original(*args, **kwargs)
        return self._differentiate(original, args, kwargs, args[0] if args else kwargs.get("outputs"))

    def _differentiate(self, original: Callable[..., Any], args: Any, kwargs: Any, root: Any) -> Any:
        if self._depth or self._paused:  # checkpointing runs backward inside backward
            return original(*args, **kwargs)
        self._depth += 1
        for track in self.tracks:
            track.before_backward()
        try:
            result = original(*args, **kwargs)
        except BaseException:
            for track in self.tracks:
                track.abort()
            raise
        finally:
            self._depth -= 1
        heads, fed, forwards = self.heads.taken()
        scale, self._scale = self._scale, None
        loss = root.detach().clone() if isinstance(root, Tensor) and root.numel() == 1 else None
        reached = [track for track in self.tracks if track.after_backward(heads, scale, loss, fed=fed, forwards=forwards)]
        for track in reached:
            track.window.inside += self._stepping is track
            track.window.closure = track.window.closure or self._stepping is track
        self.batches.end(reached=bool(reached))
        return result

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("parameters")
        members = [given] if isinstance(given, Tensor) else list(given or ())
        touched = [track for track in self.tracks if track.holds(members)]
        for track in touched:
            track.before_clip()
            scaled = Call.unscale not in track.window.calls and any(b.scale is not None for b in track.window.backwards)
            track.window.calls.append(Call.clip_scaled if scaled else Call.clip)
        result = original(*args, **kwargs)
        for track in touched:
            track.after_clip()
        return result

    def _noting(self, call: Call, concerns: Callable[..., bool]) -> Callable[..., Any]:
        """Note a call in the windows of the optimizers that it `concerns`, of which it is told with the call's own arguments."""

        def wrap(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            for track in self.tracks:
                if concerns(track, *args, **kwargs):
                    track.window.calls.append(call)
            return result

        return wrap

    def _is_of(self, track: Track, scheduler: Any, *_: Any, **__: Any) -> bool:
        concerned = getattr(scheduler, "optimizer", None) is track.optimizer
        if concerned and (steps := laid_out(scheduler)) is not None:
            self.judge.laid_out.add(steps)
        return concerned

    def _epoch(self, original: Callable[..., Any], loader: Any) -> Any:
        if self.model.training and torch.is_grad_enabled():  # not an evaluation
            for track in self.tracks:
                if track.window.backwards and loader in self._loaders:
                    track.window.calls.append(Call.epoch)
            self._loaders.add(loader)
        return original(loader)

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

    def _scaled(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled() and not self._paused:
            self._scale = scaler._scale.detach().clone()
        return result

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        mine = [track for track in self.tracks if track.optimizer is optimizer]
        taken = [self._closed[track.index] for track in mine]
        result = original(scaler, optimizer, *args, **kwargs)
        for track, count in zip(mine, taken, strict=True):
            if self._closed[track.index] == count and track.window.backwards:
                self._close(track, skipped=True)
        return result

    # -- the step ----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        track = self._track(optimizer)
        if track is None or self._paused:
            return
        self._stepping = track
        if self._patches is not None:
            self._patches.follow()
        if self._depth:  # an optimizer in the backward: the last micro-batch is not complete
            track.window.closure = track.stepped_inside = True
        track.refresh()
        track.look_at_format()
        gradients = track.gradients()
        factor = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales inside its step
        if isinstance(factor, Tensor):
            gradients = [None if g is None else g / factor.to(g.device) for g in gradients]
        parameters = track.sketches.of(track.parameters) if track.detail else None
        self._held[track.index] = (gradients, parameters)
        if not any(map(callable, (*args, *kwargs.values()))):  # a closure may have a backward to come
            self._replay(track, gradients)

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
        buffers, self._buffers = self._buffers, versions(list(self.model.buffers()))
        track.window.buffers_moved = bool(track.num_windows) and buffers != self._buffers
        window = track.close(skipped=skipped, gradients=gradients, parameters=parameters, alone=not in_a_group())
        self.batches.forget()
        if window is None:
            return
        if track.detail:
            self.judge.properties = {**self.judge.properties, **properties(self.model, draws=self._draws)}
        suspicious = self.judge.see(window)
        if suspicious and not in_a_group():
            self._close_until = window.index + FIRST
        nearest = window.index + 1
        track.detail = nearest < FIRST or nearest <= self._close_until or nearest % EVERY == 0
        track.whole = track.detail or (self.replay is not None and self._is_replayed(track))
        self.heads.detail = any(t.detail for t in self.tracks)
        self._write()

    _close_until = -1

    def _write(self) -> None:
        """Log the metrics of the last window."""
        if isinstance(self.log, Writer):
            for name, value in self.judge.metrics().items():
                self.log.add_scalar(name, value, self.judge.windows)
        elif self.log is not None:
            self.log(self.judge.metrics())

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
            self.judge.replayed(self.replay.run(track, given, self.batches, self.heads, told))
        finally:
            self._paused = self.heads.paused = self.batches.paused = False

    def _track(self, optimizer: Any) -> Track | None:
        return next((track for track in self.tracks if track.optimizer is optimizer), None)


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
