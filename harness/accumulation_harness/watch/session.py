"""`watch`: follow a training loop through the calls that it makes anyway."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol, TextIO, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.status import Status
from accumulation_harness.observe.fence import Fence, See, Seeing, entry
from accumulation_harness.observe.followed import versions
from accumulation_harness.observe.graph import roots_of
from accumulation_harness.observe.loop import Draws, Loop, draws
from accumulation_harness.observe.patches import Place
from accumulation_harness.observe.tensors import in_a_group, is_known, is_plain
from accumulation_harness.system.state import transforming
from accumulation_harness.watch.calls import laid_out
from accumulation_harness.watch.conclusion import concluded
from accumulation_harness.watch.costs import tabulate
from accumulation_harness.watch.evidence import Finding, Remark
from accumulation_harness.watch.heads import Heads
from accumulation_harness.watch.judge import Judge
from accumulation_harness.watch.replay import Batches, Loss, Replay, properties
from accumulation_harness.watch.report import Report, check
from accumulation_harness.watch.shards import Shards, is_sharded
from accumulation_harness.watch.terms import Said
from accumulation_harness.watch.together import Together, agreed
from accumulation_harness.watch.track import Gradient, Sketched, Track

FIRST = 4  # windows that are looked at closely when a watch begins, and after something was seen
EVERY = 16  # and how often then
REPLAYED_FIRST = 1  # index of the first window that is replayed


@runtime_checkable
class Writer(Protocol):
    """What TensorBoard's `SummaryWriter` offers."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> Any:
        """Add one number."""


Log = Callable[[Mapping[str, float]], Any] | Writer


def _itself(seen: Watch) -> Watch:
    return seen


class Watch(Loop[Track]):
    """Watches the windows of a training run, as a context manager or between `attach` and `detach`.

    The run trains as before, bit by bit. If the watch itself fails, it detaches, and its verdict is `inconclusive`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Any],
        *,
        every: int = 500,
        loss: Loss | None = None,
        accumulation_steps: int | None = None,
        gradient: Gradient | None = None,
        rows_apart: bool = False,
        log: Log | None = None,
        tell: TextIO | EllipsisType | None = ...,
        path: str | Path | None = None,
        table: str | Path | None = None,
    ) -> None:
        """Watch the training of a model.

        Args:
            model: The model that is trained; if it is wrapped (DDP, `torch.compile`), the wrapper or the module inside.
            optimizer: Its optimizer, or several.
            every: With `loss`: a window is replayed every so many windows, and the second one of the run as well.
            loss: `loss(model, batch)` returns the loss of one batch, not divided by the number of micro-batches; or its sum and
                its number of terms, with which a window is replayed in halves of its micro-batches.
            accumulation_steps: The number of micro-batches that the run is set to; by default the most frequent one.
            gradient: Where the optimizer holds other tensors than the model (master weights, flat partitions): `gradient(p)`
                returns the sum of a window's gradients for a parameter p of the model, as `lambda p: p.main_grad` does. It is
                asked when the optimizer is about to step.
            rows_apart: Whether each term of the run's own loss depends on its own row alone: nothing in it (advantages,
                negatives, a choice of rows) is computed from the rows of a micro-batch. The watch cannot see this; where it is
                said, and the graph of the loss counts its terms, the run can be `equivalent`.
            log: Called after each window with `accumulation/*` metrics. A function that takes `commit`, as `wandb.log` does,
                gets `commit=False`, so that the metrics go with the loop's own next row. A TensorBoard writer will do as well:
                its `add_scalar` is called with each metric and `accumulation/window`, the number of the window; in a resumed
                run it goes on from the steps that the optimizer's state has counted (Adam's does).
            tell: Where a line is written as soon as something is wrong; by default `sys.stderr`, with None nowhere.
            path: Where the report is kept while the run goes on, as JSON or, if it ends in `.md`, as a page for an issue. It is
                written whenever the verdict changes, every 16th window and at the end; of several ranks, by the first.
            table: A CSV file to which each window adds a line for every micro-batch: its loss, its number of loss terms and the
                norm of what it added to the gradient, where all tensors were looked at: an estimate, off by a quarter where one
                tensor has most of it, and by less where many have.

        Raises:
            ValueError: An argument cannot be watched. What fails later ends the watch, and not the run.
        """
        if every < 1:
            raise ValueError(f"every: expected at least 1, got {every}")
        if not isinstance(model, nn.Module):
            raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if path is not None:
            check(path)
        if table is not None:
            check(table, (".csv",))
        self.optimizers = _optimizers(optimizer)
        if gradient is not None and len(self.optimizers) > 1:
            raise ValueError(f"gradient: expected one optimizer, got {len(self.optimizers)}")
        self.fence = Fence(self._ended, "the watch", own_thread=True)
        self.model, self.every, self.loss, self.log, self.path, self.table = model, every, loss, log, path, table
        self._tell = sys.stderr if isinstance(tell, EllipsisType) else tell
        self._begin(accumulation_steps, gradient, rows_apart)

    @entry(lambda *_: None)
    def _begin(self, accumulation_steps: int | None, gradient: Gradient | None, rows_apart: bool) -> None:
        shards = self.shards = Shards(self.model)
        self.tracks = [Track(i, one, self.fence, self.model, shards, gradient) for i, one in enumerate(self.optimizers)]
        self.judge = Judge(accumulation_steps, self._tell, rows_apart=rows_apart)
        self.heads, self.batches = Heads(self.fence, rows_apart=rows_apart), Batches()
        self.replay = Replay(self.model, self.loss) if self.loss is not None else None
        self._options = {"commit": False} if _takes_commit(self.log) else {}
        self._buffers, self._buffers_written = list[Tensor](), (list[int](), 0)
        self._depth = 0
        self._stepped: set[int] = set()  # tracks that stepped during the last backward
        self._loss_scale: Tensor | None = None
        self._stepping: Track | None = None
        self._looks: list[RemovableHandle] = []  # at the gradients of a step
        self._loaders: WeakSet[DataLoader[Any]] = WeakSet()  # that have begun before
        self._state: Draws | None = None  # of the generators, before the forward under way
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
        self.judge.windows_before = max(map(_steps_before, self.optimizers))
        self.fence.open()
        for module in self.model.modules():
            if is_sharded(module):
                self.fence.hooked(module.register_forward_pre_hook, partial(self._gathered, _shards(module)))
        self.fence.patches.follow()
        self.fence.replace(self.calls())
        for track in self.tracks:
            track.attach()
            self._looks.append(self.fence.hooked(track.optimizer.register_step_pre_hook, self._before_step))
            self.fence.hooked(track.optimizer.register_step_post_hook, self._after_step)
        self.fence.hooked(self.model.register_forward_pre_hook, self._before_forward)
        self.fence.hooked(self.model.register_forward_hook, self._after_forward, with_kwargs=True)
        if (layer := _first_layer(self.model)) is not None:
            self.fence.hooked(layer.register_forward_pre_hook, self._inside)
        return self

    def _agree(self) -> None:
        """Whether this rank is watched with others."""
        if not in_a_group():
            return
        parameters = [p for track in self.tracks for p in track.now() if is_known(p)]
        members = self.shards.everyone(parameters)
        if len(members) < 2:
            self._alone = None
            self._unheard = "nothing declares several ranks to share parameters (DDP, FSDP, a mesh): this one is judged by itself"
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
            if track.window.micro_batches:
                self.judge.left_over = len(track.window.micro_batches)
                if track.window.moved or not track.are_still:  # another optimizer steps, which is not watched
                    self.judge.remarks[Remark.moved_inside] += 1
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
        """Hand over the batch of the next micro-batch, for a replay.

        Args:
            batch: The batch, as `loss(model, batch)` takes it.

        Returns:
            The same batch.
        """
        if self.replay is not None and not self.fence.paused:
            self.batches.handed.append(batch)
        return batch

    @entry(lambda *_, **__: None)
    def terms(self, number: float | Tensor, *, summed: bool = False) -> None:
        """State that each term of the next loss depends on its own row only, and how many terms this micro-batch has.

        Args:
            number: What the loss of this micro-batch alone is divided by: its labels, its sequences, the sum of its mask. The
                loss of one large batch is divided by the sum of these numbers.
            summed: For a loss whose terms the autograd graph does not show (a fused one): whether it is the sum of its terms
                and not their mean.
        """
        if not self.fence.paused:
            self.heads.said = Said(float(number), summed)

    @entry(lambda seen, *_: Report.ended(seen.fence.reason))
    def report(self, path: str | Path | None = None) -> Report:
        """Return the report so far.

        Args:
            path: Where to write it as well, as JSON or, if it ends in `.md`, as a page for an issue.

        Returns:
            The report.

        Raises:
            ValueError: The path has another ending.
        """
        found = concluded(self.judge)
        unlooked = [track.unlooked for track in self.tracks if track.unlooked]
        is_unknown = self.fence.reason or (unlooked and found.verdict is Status.equivalent)
        told = [line for line in (self.fence.reason, self._unheard, *unlooked) if line]
        found = replace(found, verdict=Status.inconclusive if is_unknown else found.verdict, reasons=(*told, *found.reasons))
        if path is not None:
            found.save(path)
        return found

    @entry(lambda seen: Report.ended(seen.fence.reason).to_json())
    def to_json(self) -> str:
        """Return the report so far as JSON text."""
        return self.report().to_json()

    @entry(lambda _: dict[str, float]())
    def metrics(self) -> dict[str, float]:
        """Return the `accumulation/*` metrics of the last window, as far as there are numbers."""
        return dict(self.judge.metrics())

    def _ended(self) -> None:
        """Something has failed."""
        if self._together is not None:
            self._together.leave()
        self._keep(last=True)
        if self._tell is not None:
            print(f"accumulation: {self.fence.reason}; the run goes on", file=self._tell, flush=True)

    # -- what the loop calls -----------------------------------------------------------------------------------------

    def calls(self) -> dict[Place, See]:
        """Say which functions are followed: those of any observer, averages, epochs and loss functions.

        Returns:
            Class or module and name -> the method that sees its calls.
        """
        return {
            **super().calls(),
            (AveragedModel, "update_parameters"): self._average,
            (SequentialLR, "step"): self._schedule,  # which is laid out in parts that advance by themselves
            (DataLoader, "__iter__"): self._epoch,
            **{(type(wrapper), "clip_grad_norm_"): self._clip_whole for wrapper in self.shards.flat_wrappers},
            **self.heads.functions(),
        }

    @property
    def followed(self) -> Sequence[Track]:
        """The tracks."""
        return self.tracks

    def differentiation(self, root: Any, inputs: list[Tensor] | None) -> Seeing:
        """A micro-batch, unless it is a gradient penalty, say, and no part of the sum."""
        if self._depth and inputs is not None:
            yield from self._aside()
            return
        if self._depth or (inputs is not None and not self.holding(inputs)):  # checkpointing runs one inside
            return
        self._depth += 1
        self._look_last()
        self.heads.before(root)
        for track in self.tracks:
            track.before_backward()
        try:
            yield
        except BaseException:
            for track in self.tracks:
                track.in_backward = False
            raise
        finally:
            self._depth -= 1
        self._look_at_steps_inside()
        taken = self.heads.taken()
        scale, self._loss_scale = self._loss_scale, None
        roots = roots_of(root)
        scalar = bool(roots) and all(is_plain(r) and r.numel() == 1 for r in roots)
        loss = torch.stack([r.detach().reshape(()) for r in roots]).sum() if scalar else None
        returned = inputs is not None
        reached = [track for track in self.tracks if track.after_backward(taken, scale, loss, returned=returned)]
        for track in reached:
            track.window.inside += self._stepping is track
            track.window.closure = track.window.closure or self._stepping is track
        self.batches.end(reached=bool(reached))

    def _look_last(self) -> None:
        """The run's own hooks of a step may change gradients: they come before the look at them."""
        for look in self._looks:
            hooks = look.hooks_dict_ref()
            if hooks and look.id in hooks and next(reversed(hooks)) != look.id:
                hooks.move_to_end(look.id)

    def _aside(self) -> Seeing:
        """A backward differentiates by itself (an adjoint, say): hooks of parameters run, and nothing is added to `.grad`."""
        listening = [track for track in self.tracks if track.in_backward]
        for track in listening:
            track.in_backward = False
        try:
            yield
        finally:
            for track in listening:
                track.in_backward = True

    def _look_at_steps_inside(self) -> None:
        """An optimizer that steps in two backwards, one after the other, accumulates nothing."""
        before, self._stepped = self._stepped, {track.index for track in self.tracks if track.stepped_inside}
        steps = self.judge.configured or 1
        if before & self._stepped and steps > 1:
            message = f"optimizers step during every backward, and {steps} micro-batches are configured"
            self.judge._add(Finding(cause=Cause.step_every_micro_batch, message=message, window=0, rung="ledger"))

    def clipped(self, one: Track, before: Any, limit: Any) -> None:
        """Note that the gradient was clipped, so that it may be another one at the step.

        Args:
            one: The optimizer's track.
            before: What the track noted before the clip.
            limit: The largest norm allowed.
        """
        one.after_clip()

    def scheduled(self, scheduler: Any) -> None:
        """Note that a schedule advanced, if it is that of a watched optimizer.

        Args:
            scheduler: The schedule.
        """
        for track in self.tracks:
            if getattr(scheduler, "optimizer", None) is track.optimizer:
                track.called("schedule", scheduler)
                if (steps := laid_out(scheduler)) is not None:
                    self.judge.laid_out.add(steps)

    def scaled(self, scaler: Any) -> None:
        """Note the loss scale, which stays on its device until the window ends.

        Args:
            scaler: The GradScaler.
        """
        self._loss_scale = scaler._scale.detach().clone()

    def scale_updated(self) -> None:
        """Note that the scaler was updated, which has its place after the step."""
        for track in self.tracks:
            track.window.waiting.append("update scale")

    def skipped(self, one: Track) -> None:
        """End the window of a step that the scaler left out, as with a step.

        Args:
            one: The optimizer's track.
        """
        if one.window.micro_batches:
            self._close(one, skipped=True)

    def _clip_whole(self, module: nn.Module, *args: Any, **kwargs: Any) -> Seeing:
        yield from self._clip("max_norm", list(module.parameters()), *args, **kwargs)

    def _average(self, averaged: AveragedModel, model: nn.Module, *_: Any, **__: Any) -> Seeing:
        yield
        for track in self.holding(model.parameters()):
            track.called("average", averaged)

    def _epoch(self, loader: Any) -> Seeing:
        if self.model.training and torch.is_grad_enabled():  # not an evaluation
            for track in self.tracks:
                if track.window.micro_batches and loader in self._loaders:
                    track.window.waiting.append("epoch")
            self._loaders.add(loader)
        yield

    def _gathered(self, shards: Sequence[tuple[nn.Module, str, Tensor]], module: nn.Module, args: Any) -> None:
        """FSDP2 has put whole parameters in the place of shards."""
        for owner, name, shard in shards:
            whole = owner._parameters.get(name)
            if whole is not None and whole is not shard:
                for track in self.tracks:
                    track.gathered(shard, whole)

    def _inside(self, layer: nn.Module, args: Any) -> None:
        if _is_training(layer):
            self.heads.inside()

    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if _is_training(model) and not transforming():
            self._state = draws() if self.heads.detail and not self._draws else None

    def _after_forward(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not _is_training(model):
            return
        if self._state is not None:
            self._draws, self._state = self._state != draws(), None
        self.heads.see(args, kwargs, output)
        if self.replay is not None:
            self.batches.see(args, kwargs)

    # -- the step ----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        track = self._track(optimizer)
        if track is None:
            return
        self._stepping = track
        self.fence.patches.follow()
        if self._depth:  # an optimizer in the backward: the last micro-batch is not complete
            track.window.closure = track.stepped_inside = True
        track.refresh()
        track.look_at_format()
        gradients = track.at_step()
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
            gradients = track.at_step()
            self._held[track.index] = (gradients, parameters)
        self._replay(track, gradients)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        track = self._track(optimizer)
        self._stepping = None
        if track is not None:
            track.after_step()
            found_inf = getattr(optimizer, "found_inf", None)
            self._close(track, skipped=isinstance(found_inf, Tensor) and bool(found_inf))

    def _close(self, track: Track, *, skipped: bool) -> None:
        gradients, parameters = self._held.pop(track.index, (None, None))
        if gradients is None:
            gradients = track.at_step()
        if track.window.inside:  # clipped by a trainer, inside its closure
            gradients = track.window.ends.get("clipped", gradients)
        track.num_steps += 1
        for other in self.tracks:
            if other is not track and other.window.micro_batches:
                other.window.waiting.append("other step")
        track.window.forwards += self.heads.forgotten()
        track.window.still, track.window.skipped = track.are_still, skipped
        track.window.values = self.heads.unused() if len(self.tracks) == 1 else ()
        buffers, written = self._buffers, self._buffers_written  # held, so that no other tensor has the place of one
        if track.detail:  # modules may have exchanged them
            self._buffers = list(self.model.buffers())
        self._buffers_written = [*map(id, self._buffers)], versions(self._buffers)
        track.window.buffers_moved |= bool(buffers) and written != self._buffers_written
        window = track.close(gradients, parameters, self._alone, self._together)
        self.batches.window = []
        before, track.stepped = track.stepped, time.perf_counter()
        if window is None:
            self.judge.closures += self._depth > 0
            return
        window.seconds = track.stepped - before
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
        if self.table is not None and self._is_first:
            tabulate(Path(self.table), window, self.judge.windows_before + self.judge.windows)
        self.fence.windows = max(t.num_windows for t in self.tracks)

    def _write(self) -> None:
        """Log the metrics of the last window."""
        if isinstance(self.log, Writer):
            metrics = self.judge.metrics()
            for name, value in metrics.items():
                self.log.add_scalar(name, value, int(metrics["accumulation/window"]))
        elif self.log is not None:
            self.log(self.judge.metrics(), **self._options)

    @property
    def _is_first(self) -> bool:
        """Of the ranks."""
        return not in_a_group() or torch.distributed.get_rank() == 0

    def _keep(self, *, last: bool = False) -> None:
        """Write the report where somebody will look for it if the run does not end by itself."""
        if self.path is not None and self._is_first:
            found = self.report()
            if last or found.verdict is not self._kept or self.judge.windows % EVERY == 0:
                found.save(self.path)
                self._kept = found.verdict

    # -- the replay --------------------------------------------------------------------------------------------------

    def _is_replayed(self, track: Track) -> bool:
        index = track.num_windows
        return track.index == 0 and (index == REPLAYED_FIRST or index % self.every == self.every - 1)

    def _replay(self, track: Track, gradients: Sketched) -> None:
        if self.replay is None or not track.window.micro_batches or not self._is_replayed(track):
            return
        given = track.window.ends.get("unclipped", gradients)
        told = properties(self.model, draws=self._draws)
        self.fence.paused = True
        try:
            found = self.replay.run(track, given, self.batches.window, self.heads.autocast, told, self._together)
        finally:
            self.fence.paused = False
        self.judge.replayed(found)

    def _track(self, optimizer: Any) -> Track | None:
        return next((track for track in self.tracks if track.optimizer is optimizer), None)


def _steps_before(optimizer: Optimizer) -> int:
    """How many steps an optimizer has taken before, as far as its state counts them."""
    state = next((one for one in optimizer.state.values() if isinstance(one, Mapping) and "step" in one), {"step": 0})
    return int(state["step"])


def _takes_commit(log: Log | None) -> bool:
    """Whether it is one of W&B's, which ends the loop's own step where it is not told to wait."""
    try:
        return log is not None and "commit" in inspect.signature(log).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no function, or one that says nothing of itself
        return False


def _is_training(module: nn.Module) -> bool:
    """Whether a forward is one that trains; inside a compiled one, outputs have no numbers yet."""
    return not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled()


def _shards(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """The parameters that a module gathers for its forward, and where they are."""
    inner = {own for child in module.modules() if child is not module and is_sharded(child) for own in child.modules()}
    owners = [own for own in module.modules() if own not in inner]
    return [(own, name, p) for own in owners for name, p in own._parameters.items() if p is not None]


def _first_layer(model: nn.Module) -> nn.Module | None:
    """A layer with weights of its own; None in a compiled model, which another hook would compile again."""
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        return None
    return next((m for m in model.modules() if m is not model and next(m.parameters(recurse=False), None) is not None), None)


def _optimizers(given: Any) -> list[Optimizer]:
    """Also out of wrappers that keep theirs in `.optimizer` (accelerate)."""
    listed = list(given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else [given])
    found = [getattr(one, "optimizer", one) for one in listed]
    if not found or not all(isinstance(one, Optimizer) for one in found):
        got = ", ".join(type(one).__name__ for one in listed) or "none"
        raise ValueError(f"optimizer: expected a torch.optim.Optimizer, or several, got {got}")
    return found


watch = Watch  # as it reads in a loop
