"""What goes into and comes out of the model: rows, broken values, random draws, the arithmetic in use."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accumulation_harness.audit.evidence import Row, Run
from accumulation_harness.audit.observe.generators import Generators, Standing, drawn
from accumulation_harness.audit.observe.rank_gradients import Unsharded
from accumulation_harness.audit.observe.sample import by_position, looked_at
from accumulation_harness.audit.observe.tensors import broken, dense, fingerprints, roundoff, tensors_in
from accumulation_harness.observe.fence import Fence
from accumulation_harness.observe.tensors import in_a_group
from accumulation_harness.system import accelerator


@dataclass(eq=False)
class RowsOfForward:
    """The rows that one outermost forward was given."""

    rows: list[tuple[str, int]]  # fingerprint and length
    module: int  # which it is of
    broken: bool = False  # whether a non-finite value went in or came out
    leads: bool = True  # whether it is one of the model that is called first
    computed: bool = False  # whether they were made from weights: other weights make other rows
    reached: bool = False  # whether a backward has come to its output

    def reach(self, slope: Tensor) -> None:
        """A backward has come to an output of this forward (a hook, which leaves the slope as it is)."""
        self.reached = True


class Forwards:
    """The outermost training forwards since the last backward."""

    def __init__(self, run: Run, fence: Fence) -> None:
        self.run, self.fence = run, fence
        self.generators = Generators()
        self.probing = False  # whether the window under way is the probed one
        # micro-batch, rows, whether these were made from weights, output, slopes
        self.watched: list[tuple[int, list[str], bool, Tensor, list[Tensor]]] = []
        self.inner: list[list[Tensor]] = []  # outputs by row inside each module under way; kept for a probe only
        self.depth = 0
        self.names: dict[int, str] = {}  # parameter id -> name
        self.paths: dict[int, str] = {}  # parameter id -> where the code's variables lead to it
        self.copied = 0.0  # roundoff of the models' narrowest parameter, which an optimizer may hold copies of
        self.outermost: dict[int, nn.Module] = {}
        self.micro_batch = 0  # of the window under way
        self.before: Standing | None = None  # generator state as the outermost forward began
        self.unsharded = Unsharded(fence)
        self.last: Standing | None = None  # as the last watched event ended; None before the first
        self.pending: list[RowsOfForward] = []  # forwards that no backward has come to yet
        self.reset()

    def reset(self) -> None:
        """A backward has ended: what was seen before it is forgotten."""
        self.count, self.draws, self.outside = 0, False, False
        self.seen: list[RowsOfForward] = []  # forwards since the last backward
        self.unsharded.clear()
        reached = any(forward.reached for forward in self.pending)
        self.pending = [forward for forward in self.pending if not forward.reached] if reached else []
        self.first: nn.Module | None = None
        self.outputs: list[tuple[list[str], Tensor]] = []  # rows and outputs of the outermost forwards, kept for a probe only
        self.made: list[Tensor] = []  # what modules inside them gave, kept for a probe only
        self.produced: dict[int, torch.UntypedStorage] = {}  # memory of these outputs: what a model made is no row of data

    @property
    def rows(self) -> list[tuple[str, int]]:
        """Fingerprint and length of the rows of the backward under way: of the forwards it came to; of all, if it came to none.

        Pipelines run the forwards of several micro-batches first, and some of zeros, for shapes, that no backward comes to.
        Several models may see the same rows: those of one of them count.
        """
        return [row for forward in self._chosen for row in forward.rows]

    @property
    def computed(self) -> bool:
        """Whether some of these rows were made from weights."""
        return any(forward.computed for forward in self._chosen)

    @property
    def _chosen(self) -> list[RowsOfForward]:
        reached = [forward for forward in self.pending if forward.reached]
        return [one for one in reached if one.module == reached[0].module] or [one for one in self.pending if one.leads]

    @property
    def broken(self) -> int:
        """Forwards with a non-finite value: of the model that is called first, and of others where a backward came to them.

        Later stages of a pipeline try their shapes on memory that nobody has written to.
        """
        return sum(forward.broken and (forward.leads or forward.reached) for forward in self.seen)

    @property
    def unreached(self) -> list[RowsOfForward]:
        """Forwards with a non-finite value that no backward has come to; a differentiation by inputs alone is none."""
        return [forward for forward in self.seen if forward.broken and not forward.reached]

    def end_window(self) -> None:
        """An optimizer step is over: forwards that no backward came to were none of its window."""
        self.pending = []

    def begin(self) -> None:
        """Training begins: forwards so far (of zeros, for shapes) were none of it."""
        self.pending = []
        self.reset()
        self.watched.clear()
        self.last = None

    def forget_models(self) -> None:
        """The run is over: what it trained must not be taken for an averaged copy by the next one."""
        self.reset()
        self.outermost.clear()
        self.watched.clear()
        self.inner.clear()

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module's forward begins."""
        self.depth += 1
        if self.depth == 1:
            self.inner.clear()
        self.inner.append([])
        self._note_arithmetic(args)
        if self.depth == 1 and torch.is_grad_enabled():
            self._note_parameters(module)
            if id(module) not in self.outermost:
                self.outermost[id(module)] = module
                if in_a_group():
                    self.unsharded.know(module)
            self.before = self.look_outside()
            self.first = self.first or module

    def look_outside(self) -> Standing:
        """Where generators stand, and whether they were drawn from since the last event."""
        now = self.generators.standing()
        self.outside |= self.last is not None and drawn(self.last, now)
        return now

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A module's forward ends with `output`."""
        self.depth = max(0, self.depth - 1)
        if torch.is_grad_enabled():
            self.unsharded.see(module)
        outputs = self._by_row(output)
        if self.depth or not torch.is_grad_enabled():
            return
        state = self.generators.standing()
        self.draws |= self.before is not None and drawn(self.before, state)
        self.last = state
        self.run.forwards += 1
        self.count += 1
        rows = fingerprints(args, kwargs, self.run.batch_size)
        given = list(tensors_in([*args, kwargs]))
        computed = any(t.grad_fn is not None for t in given)
        forward = RowsOfForward(rows, id(module), broken(output) or broken(list(args)), module is self.first, computed)
        self.seen.append(forward)
        of_data = not any(_memory(t) in self.produced for t in given)
        if self.probing:
            names = [row for row, _ in rows]
            self.outputs += [
                (names if of_data and forward.leads else self._of_the_same_samples(names, output), output) for output in outputs
            ]
            self._watch_slopes(forward, outputs)
        if of_data:
            self.pending.append(forward)
        for tensor in tensors_in(output) if of_data or forward.broken else ():
            if tensor.requires_grad:
                tensor.register_hook(self.fence.hook(forward.reach))
        handed_on = {_memory(t) for t in given if not t.requires_grad}  # a dict that the model adds to
        made = [t for t in tensors_in(output) if _memory(t) not in handed_on]
        self.produced |= {_memory(t): t.untyped_storage() for t in made if _memory(t)}

    def _of_the_same_samples(self, names: list[str], output: Tensor) -> list[str]:
        """The names of the rows of the first output, where there are as many: what was made of them comes in their order."""
        first = self.outputs[0][0] if self.outputs else []
        return first if len(first) == output.shape[0] else names

    def _by_row(self, output: Any) -> list[Tensor]:
        """What the module under way gives per row: its output, or what modules inside it gave where that is a loss."""
        inside = self.inner.pop() if self.inner else []
        if not self.probing:
            return []
        found = [t for t in tensors_in(output) if t.ndim and t.requires_grad] or inside
        if self.inner:
            self.inner[-1].extend(found)
            self.made += found
        return found

    def _watch_slopes(self, forward: RowsOfForward, outputs: list[Tensor]) -> None:
        rows = [row for row, _ in forward.rows]
        output = next((t for t in outputs if rows and t.shape[0] == len(rows)), None)
        if output is not None:
            slopes: list[Tensor] = []
            output.register_hook(self.fence.hook(lambda slope: slopes.append(slope.detach().clone())))
            self.watched.append((self.micro_batch, rows, forward.computed, output.detach().clone(), slopes))

    def probed(self, loss_scale: float) -> dict[str, Row]:
        """The rows watched so far; those that came more than once, or got no gradient, left out."""
        found: dict[str, list[Row]] = {}
        times: Counter[tuple[int, str]] = Counter()
        for micro_batch, rows, computed, output, slopes in self.watched:
            if not slopes:
                continue
            total = torch.stack([dense(slope).double() for slope in slopes]).sum(0) / loss_scale
            for index, row in enumerate(rows):
                times[micro_batch, row] += 1  # several models may see the same row
                key = f"{row} {times[micro_batch, row]}"
                row_seen = Row(micro_batch, looked_at([output[index]]), by_position(total[index]), computed)
                found.setdefault(key, []).append(row_seen)
        return {row: seen[0] for row, seen in found.items() if len(seen) == 1}

    def forget_slopes(self) -> None:
        """Those of the micro-batch under way were of another differentiation."""
        for micro_batch, _, _, _, slopes in self.watched:
            if micro_batch == self.micro_batch:
                slopes.clear()

    def _note_parameters(self, module: nn.Module) -> None:
        """A model may be narrower than the weights its optimizer holds (master weights), and shared out over ranks."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from torch.distributed.fsdp import FullyShardedDataParallel

            self.run.sharded |= any(isinstance(part, FullyShardedDataParallel) for part in module.modules())
        dtypes = set()
        for name, parameter in module.named_parameters():
            self.names.setdefault(id(parameter), name)
            dtypes.add(parameter.dtype)
        self.copied = max([self.copied, *map(roundoff, dtypes)])
        self.run.roundoff = max(self.run.roundoff, self.copied)
        self.run.float16 |= torch.float16 in dtypes

    def _note_arithmetic(self, args: tuple[Any, ...]) -> None:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                self.run.round_by(roundoff(torch.get_autocast_dtype(device)))
                self.run.float16 |= torch.get_autocast_dtype(device) == torch.float16
        if accelerator.uses_tf32() and any(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors_in(list(args))):
            self.run.round_by(accelerator.TF32_ROUNDOFF)


def _memory(tensor: Tensor) -> int:
    """Where its elements are; 0 for tensors without memory of their own."""
    return tensor.untyped_storage().data_ptr() if type(tensor) is Tensor and tensor.layout == torch.strided else 0
