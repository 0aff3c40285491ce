"""What is trained: data, model and per-sample loss, behind one small interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accumulation_harness.judge.cause import Cause
from accumulation_harness.system import pytree


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples that go through the model together; row i of every tensor is the same sample, unless it is `collated` anew."""

    ids: Tensor  # [n] int64, position in the training set, on the CPU
    inputs: Any  # a tensor [n, ...]; of a task of the user's own the nest of tensors that its `collate` gives
    targets: Tensor  # [n, ...]; of such a task the ids
    collated: Callable[[Tensor], Batch] | None = None  # [m] places -> a batch of those samples, where tensors cannot be cut

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, index: Tensor | slice) -> Batch:
        """The chosen rows, in the order of `index` (a CPU index tensor or a slice)."""
        if self.collated is not None:
            return self.collated(torch.arange(len(self))[index])
        there = index if isinstance(index, slice) else index.to(self.targets.device, non_blocking=True)
        return Batch(ids=self.ids[index], inputs=pytree.rows(self.inputs, index), targets=self.targets[there])

    def holds(self, ids: Tensor) -> bool:
        """Whether `ids` are exactly this batch's samples, in any order."""
        return torch.equal(ids, self.ids) or torch.equal(ids.sort().values, self._sorted_ids)

    @cached_property
    def _sorted_ids(self) -> Tensor:
        return self.ids.sort().values

    def in_order(self, ids: Tensor) -> Batch:
        """The rows in the order of `ids`, a permutation of this batch's."""
        assert self.holds(ids)
        return self.rows(self.ids.argsort()[ids.argsort().argsort()])


class Workload(Protocol):
    """Data, model and loss of one problem.

    A window's objective is `losses(...).sum() / num_terms(...).sum() + auxiliary(...)` of its prepared batch: the mean over its
    loss terms (samples or tokens), and a penalty where there is one. What a problem does not have keeps its default here.
    """

    num_samples: int
    held_out: Batch
    penalty: float = 0.0  # coefficient of `auxiliary`
    coupling: Cause | None = None  # of computing the loss within micro-batches; None: each term depends on its own sample alone
    smallest_micro_batch: int = 1  # samples; a model may need two, for its BatchNorm
    widens: bool = False  # whether a task's code computes in narrower formats unless it is widened: of the float64 workload
    is_stateful: bool = False  # whether a training forward moves buffers that the next one's outputs depend on
    moves_state: bool = False  # whether a training forward moves any state of the model, beside BatchNorm's
    pools_rows: bool = False  # whether its outputs have a part that is of the whole batch (a balance loss, say)
    orders_rows: bool = False  # whether a sample's loss depends on the order of its batch (experts of limited capacity)
    mixes_rows: bool = False  # whether the model's outputs for a sample depend on the others, beside by BatchNorm layers

    def make_model(self) -> nn.Module:
        """Make the model, drawn from torch's global generator.

        Returns:
            A fresh float32 model on the CPU.
        """
        ...

    def batch(self, ids: Tensor) -> Batch:
        """Choose samples.

        Args:
            ids: [n] int64.

        Returns:
            The samples on the workload's device; floating inputs in the workload's dtype.
        """
        ...

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Compute the model's outputs.

        Args:
            model: The model.
            batch: n samples.

        Returns:
            A tensor [n, ...], or a nest of such tensors.
        """
        return model(batch.inputs)

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """Cut the held-out samples.

        Args:
            size: Samples in a batch; the last one may have fewer.

        Yields:
            The batches in order.
        """
        yield from (self.held_out.rows(slice(start, start + size)) for start in range(0, len(self.held_out), size))

    def prepared(self, window: Batch) -> Batch:
        """Add to a window what its losses take from all of its samples, but from no parameter (normalised advantages).

        Args:
            window: The window, before it is cut into micro-batches.

        Returns:
            The window that is cut.
        """
        return window

    def auxiliary(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Compute a term of the objective that depends on no sample: penalty / 2 * ||W||^2 of the last weight matrix W.

        Args:
            parameters: Name -> parameter, in the model's order.

        Returns:
            0-dim.
        """
        last = [value for value in parameters.values() if value.dim() > 1][-1]
        return 0.5 * self.penalty * last.square().sum()

    def losses(self, outputs: Any, batch: Batch) -> Tensor:
        """Compute the loss of every sample, *summed* over the sample's terms.

        Args:
            outputs: What `forward` gave.
            batch: n samples.

        Returns:
            [n], float32 or wider.
        """
        ...

    def num_terms(self, batch: Batch) -> Tensor:
        """Count the loss terms of every sample: one, unless a problem counts otherwise (characters of text) or weighs them.

        Args:
            batch: n samples.

        Returns:
            [n]; a window's objective is the sum of its losses over the sum of these.
        """
        return torch.ones(len(batch), dtype=torch.long, device=batch.targets.device)

    def required(self, window: Batch, seen: Tensor) -> Batch:
        """The window but for rows without any loss term that are not `seen` ([m] ids): nothing is lost with those."""
        unseen = ~torch.isin(window.ids, seen)
        if not bool(unseen.any()):
            return window
        return window.rows((~unseen | (self.num_terms(window).cpu() != 0)).nonzero().flatten())

    def correct(self, outputs: Any, batch: Batch) -> Tensor:
        """Count the loss terms whose most likely class is the target.

        Args:
            outputs: What `forward` gave.
            batch: n samples.

        Returns:
            [n]; NaN where nobody says what is correct.
        """
        ...

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Measure what else is asked of a trained model.

        Args:
            model: The model in evaluation mode.

        Returns:
            Name -> value.
        """
        return {}


def wide(outputs: Tensor) -> Tensor:
    """Outputs in the format of their losses: float32 or wider.

    Args:
        outputs: [n, ...] outputs of a model, in any format.

    Returns:
        The same in float64 where they are float64, else float32.
    """
    return outputs if outputs.dtype == torch.float64 else outputs.float()


class Forward(nn.Module):
    """A workload's forward as a module around its model, whose weights `torch.func` can then exchange."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.model, self._workload = model, workload

    def forward(self, batch: Batch) -> Any:
        """The model's outputs."""
        return self._workload.forward(self.model, batch)
