"""Loops written by hand, judged as any recipe is: one function `loop(arm, window) -> loss` that takes one optimizer step.

    def loop(arm: Arm, window: Batch) -> Tensor:
        arm.optimizer.zero_grad()
        for rows in torch.arange(len(window)).chunk(4):
            part = window.rows(rows)
            loss = arm.workload.losses(arm.model(part.inputs), part).sum() / arm.workload.num_terms(window).sum()
            loss.backward()
        arm.optimizer.step()
        ...

What the workload computes over the window (`prepared`) and its penalty (`auxiliary`) are the loop's to use, where it has them.
The arm brings model, optimizer, schedule, scaler, `clip_norm`, `ema` and `workload`; `arm.memory` keeps what a loop wants to keep
from window to window (one loop drives many arms, so it must not keep it itself). What the loop did with the samples is seen at
the model's inputs, in forwards that record gradients.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from accumulation_harness.config import ConfigError, Precision
from accumulation_harness.recipes.micro_batch import SplitPlan
from accumulation_harness.recipes.recipe import Arm, Recipe
from accumulation_harness.system import pytree
from accumulation_harness.system.state import transforming
from accumulation_harness.workloads import Batch, Workload
from accumulation_harness.workloads.widening import SINGLE, kept_narrow, widened

Loop = Callable[[Arm, Batch], Tensor]
FOREIGN = -1  # the id of a row that is not in the window
NO_SAMPLE = -2  # and not in the training set either
CHUNK = 1024  # training samples that are compared at once


def hand_written(loop: Loop, *, accumulation_steps: int, split: SplitPlan) -> Recipe:
    """Make the recipe of a hand-written loop; N and the split are what it is meant to do, not what it does.

    Args:
        loop: Trains one window and returns its loss, which is the one that is reported. It may count `arm.samples`; where it
            does not, that is done for it.
        accumulation_steps: N.
        split: How its windows are meant to be cut.

    Returns:
        A recipe whose arm notes the rows of each forward and the optimizer's steps.

    Raises:
        ConfigError: While training: the loop did not return a loss, or has exchanged the arm's model or optimizer.
    """

    def take(arm: Arm, window: Batch) -> Tensor:
        rows, counted, own = Rows(window, arm.workload), (arm.samples, arm.windows), arm.workload
        given = {"model": arm.model, "optimizer": arm.optimizer}
        arm.workload = copy.copy(own)
        vars(arm.workload).update(losses=rows.losses, forward=rows.forward)
        handles = [
            arm.model.register_forward_hook(rows.see, with_kwargs=True),
            arm.optimizer.register_step_post_hook(rows.note_step),
        ]
        try:
            with _wide(arm) if arm.recipe.widens and arm.precision == Precision.float64 else nullcontext():
                loss = loop(arm, window)
        finally:
            for handle in handles:
                handle.remove()
            arm.workload = own
        for name, one in given.items():
            if getattr(arm, name) is not one:
                raise ConfigError("loop", "by hand", f"a loop that keeps arm.{name}, got one that puts another in its place")
        if not isinstance(loss, (Tensor, float, int)):
            raise ConfigError("loop", "by hand", f"a loop that returns the loss of its window, got {type(loss).__name__}")
        seen = rows.seen()
        arm.knows_rows, arm.seen, arm.strangers = seen is not None, [window.ids] if seen is None else seen, 0
        known = [part[part != NO_SAMPLE] for part in arm.seen]
        if window.holds(torch.cat(known)):  # rows beside them may be other views of theirs, or something else
            arm.strangers, arm.seen = sum(map(len, arm.seen)) - len(window), [part for part in known if len(part)]
        if arm.samples == counted[0]:
            arm.samples += len(window)
        arm.windows = counted[1] + 1
        # A sum rounds as a random walk does, and one of equal terms in one direction.
        arm.loss_resolution = _resolution(loss) * max(2 * math.sqrt(len(arm.seen)), len(arm.seen) / 4)
        return torch.as_tensor(loss, dtype=torch.float64, device=arm.device).detach()

    return Recipe(accumulation_steps=accumulation_steps, split=split, loop=take)


@contextmanager
def _wide(arm: Arm) -> Iterator[None]:
    """Inside, what the loop does in float32 is done in float64, but for the optimizer's steps."""
    with widened(SINGLE), kept_narrow(arm.optimizer, "step"):
        yield


class Rows:
    """The samples through which a window's backwards go: told by the model's inputs, else by what its losses are asked for."""

    def __init__(self, window: Batch, workload: Workload) -> None:
        self.window, self.workload, self._number = window, workload, count()
        # By number, what a backward has reached: which backward, and sample ids; None for rows of no known kind.
        self.forwards: dict[int, tuple[int, Tensor | None]] = {}
        self.asked: dict[int, tuple[int, Tensor | None]] = {}  # the same of calls of `losses`
        self.hidden = False  # whether a transform of torch.func has hidden some
        self.consumed = False  # whether a step found gradients although nothing of the model was seen
        self._batch: Batch | None = None  # of the workload's forward, while it runs
        self._met = defaultdict[int, set[int]](set)  # ids of rows, by the identity of `forwards` or `asked`
        self._place = 0  # of the tensor among the window's by which rows were recognised

    def __deepcopy__(self, _memo: object) -> Self:
        """The forwards of a copy of the model are watched as its own."""
        return self

    def note_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """See a step at its end, which only matters where no forward has been seen."""
        if not (self.forwards or self.asked):
            weights = (p for group in optimizer.param_groups for p in group["params"])
            self.consumed = any(p.grad is not None and bool(p.grad.any()) for p in weights)

    def see(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Watch a forward of the model."""
        batch = self._batch
        self._note(
            self.forwards,
            outputs,
            lambda: self._ids([*pytree.tensors(args), *pytree.tensors(kwargs)]) if batch is None else batch.ids,
        )

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The workload's, whose rows are its batch's, whatever it makes of them."""
        self._batch = batch
        try:
            return self.workload.forward(model, batch)
        finally:
            self._batch = None

    def losses(self, outputs: Any, batch: Batch) -> Tensor:
        """The workload's, watched."""
        found = self.workload.losses(outputs, batch)
        self._note(self.asked, found, lambda: batch.ids)
        return found

    def seen(self) -> list[Tensor] | None:
        """Sample ids of each micro-batch; None where nobody can tell."""
        forwards, asked = _by_backward(self.forwards), _by_backward(self.asked)
        told = [ids for number, own in forwards.items() for ids in _of_one_backward(own, asked.get(number, []))]
        hidden = self.hidden or any(ids is None for ids in told)
        if hidden or (not told and (asked or self.consumed)):
            told = [ids for own in asked.values() for ids in own]
            return [ids for ids in told if ids is not None] or None
        return self._apart([ids for ids in told if ids is not None]) or [torch.empty(0, dtype=torch.long)]

    def _apart(self, told: list[Tensor]) -> list[Tensor]:
        """Equal rows, which all have the id of the first of them, under an id each."""
        if not told or len(torch.cat(told).unique()) == sum(map(len, told)):
            return told
        known, waiting = dict(self._known)[self._place], defaultdict[int, list[int]](list)
        alike = sample_ids(known, known, self.window.ids).tolist()
        for sample, first in zip(self.window.ids.tolist(), alike, strict=True):
            waiting[first].append(sample)
        return [torch.tensor([waiting[i].pop(0) if waiting[i] else i for i in ids.tolist()]) for ids in told]

    def _note(self, found: dict[int, Any], outputs: Any, ids: Callable[[], Tensor | None]) -> None:
        if transforming():
            self.hidden = True
            return
        computed = [one for one in pytree.tensors(outputs) if one.grad_fn is not None]  # a parameter is of every backward
        if not computed:
            return
        number, own = next(self._number), ids()
        again = [] if own is None else self._again(own.tolist(), self._met[id(found)])

        def reached(gradient: Tensor) -> None:
            kept = own  # but for rows that are met again to fill up, which weigh nothing
            if own is not None and again and len(gradient) == len(own) and not bool(gradient[again].any()):
                kept = own[[k for k in range(len(own)) if k not in again]]
            found[number] = torch._C._current_graph_task_id(), kept

        for output in computed:
            output.register_hook(reached)

    def _again(self, own: Sequence[int], met: set[int]) -> list[int]:
        """The places of rows that were there before, in this window."""
        return [k for k, one in enumerate(own) if one >= 0 and (one in met or met.add(one))]  # type: ignore[func-returns-value]

    def _ids(self, inputs: Sequence[Tensor]) -> Tensor | None:
        """Of the rows of the first input that is of a kind with some part of the window."""
        for k, known in self._known:
            for own in inputs:
                if own.dim() == known.dim() and len(own) and own.shape[2:] == known.shape[2:]:
                    ids, self._place = sample_ids(own, known, self.window.ids), k
                    if own.dim() > 2 and bool((ids == FOREIGN).all()):  # a model that takes time first
                        turned = sample_ids(own.transpose(0, 1), known, self.window.ids)
                        ids = ids if bool((turned == FOREIGN).any()) else turned
                    if bool((ids == FOREIGN).any()) and not self._is_training_sample(own[ids == FOREIGN][:1], k):
                        ids = torch.where(ids == FOREIGN, NO_SAMPLE, ids)
                    return ids
        return None

    @cached_property
    def _known(self) -> list[tuple[int, Tensor]]:
        """The window's tensors that have a row for each sample, with their places."""
        found, window = [*enumerate(pytree.tensors(self.window.inputs))], self.window
        if window.collated is None:
            return found
        alone = [*pytree.tensors(window.rows(slice(0, 1)).inputs)]
        return [(k, one) for k, one in found if one.dim() and len(one) == len(window) and len(alone[k]) == 1]

    def _is_training_sample(self, row: Tensor, place: int) -> bool:
        """Whether `row` ([1, ...]) is some training sample's; looked for only where a row is not the window's."""
        for ids in torch.arange(self.workload.num_samples).split(CHUNK):
            known = [*pytree.tensors(self.workload.batch(ids).inputs)][place]
            if bool((sample_ids(row, known, ids) != FOREIGN).all()):
                return True
        return False


def _by_backward(reached: Mapping[int, tuple[int, Tensor | None]]) -> dict[int, list[Tensor | None]]:
    """What each backward has reached, in the order of the forwards."""
    found: dict[int, list[Tensor | None]] = {}
    for _, (backward, ids) in sorted(reached.items()):
        found.setdefault(backward, []).append(ids)
    return found


def _of_one_backward(forwards: Sequence[Tensor | None], asked: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The rows of one backward: those of its forwards, each once; those its losses were asked for where these are others."""
    own = [
        ids
        for k, ids in enumerate(forwards)
        if ids is None or not any(torch.equal(ids, one) for one in forwards[:k] if one is not None)
    ]
    told, wanted = ([ids for ids in some if ids is not None] for some in (own, asked))
    if not wanted or any(bool((ids == FOREIGN).any()) for ids in told):
        return own
    same = len(told) == len(own) and torch.equal(torch.cat(told).sort().values, torch.cat(wanted).sort().values)
    return own if same else asked


def _resolution(loss: object) -> float:
    """Relative resolution of the format a loss is returned in: `torch.tensor(total)` is float32, a number has float64's."""
    narrow = isinstance(loss, Tensor) and loss.is_floating_point() and loss.dtype != torch.float64
    return torch.finfo(loss.dtype).eps if isinstance(loss, Tensor) and narrow else 0.0


def sample_ids(inputs: Tensor, known: Tensor, ids: Tensor) -> Tensor:
    """Recognise samples by their numbers.

    Rows may have been trimmed in their second dimension (padding). Of equal rows the first is taken.

    Args:
        inputs: [n, ...] rows.
        known: [m, ...] rows of known samples.
        ids: [m] int64 ids of the known samples.

    Returns:
        [n] int64 ids; `FOREIGN` for rows that are not among the known ones.
    """
    length = min(inputs.shape[1], known.shape[1]) if inputs.dim() > 1 else 0
    mine, theirs = (
        (own.detach()[:, :length] if own.dim() > 1 else own.detach()[:, None])
        .flatten(1).to(inputs.dtype).contiguous().view(torch.uint8).cpu().numpy()
        for own in (inputs, known)
    )  # fmt: skip
    table = {row.tobytes(): sample for row, sample in zip(theirs[::-1], ids.flip(0).tolist(), strict=True)}
    return torch.tensor([table.get(row.tobytes(), FOREIGN) for row in mine])
