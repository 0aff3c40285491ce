"""Bytes that a training step takes: M = M_s + a b, a static part and what the backward of a micro-batch of b keeps.

On the CPU the activations are counted exactly: the storages that autograd saves for backward, each once, without parameters,
buffers and the data itself. Temporaries inside an operation are not among them. On a GPU the allocator's peaks have them as well:
one while micro-batches are computed, one while the optimizer steps. What else lies in its memory (data, other arms) is left out.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accumulation_harness.measure import optimizer_state
from accumulation_harness.measure.lock_step import tensors_of
from accumulation_harness.recipes.recipe import Arm, take_step
from accumulation_harness.system import accelerator, pytree
from accumulation_harness.workloads import Batch


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of one window's step, each part at its largest."""

    parameters: int  # and buffers
    gradients: int
    state: int  # the optimizer's
    activations: int  # of the largest micro-batch
    alive: int  # activations and gradients together, at the moment when they are most; less than both maxima where those part
    peak: int | None  # the allocator's, up to the end of the last backward; None on the CPU
    step_peak: int | None = None  # the allocator's, while the optimizer steps; None on the CPU

    @property
    def micro_batches(self) -> int:
        """While micro-batches are computed: the allocator's peak where there is one, else the sum of the parts."""
        return self.peak if self.peak is not None else self.parameters + self.gradients + self.state + self.activations

    @property
    def step(self) -> int:
        """While the optimizer steps: the allocator's peak where there is one, else the sum of what is there then."""
        return self.step_peak if self.step_peak is not None else self.parameters + self.gradients + self.state

    @property
    def total(self) -> int:
        """The larger of the two."""
        return max(self.micro_batches, self.step)


class Alive:
    """What lives at a time between forward and step: the storages that autograd holds, and the gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.held: dict[int, tuple[int, int]] = {}  # storage -> how many saved tensors hold it, and its bytes
        self.gradients = self.most = self.most_held = 0  # the gradients last, most of both together and of what autograd holds

    def look(self) -> None:
        """Note the bytes that live now, where they are the most so far."""
        self.gradients, held = num_bytes(gradients_of(self.parameters)), sum(size for _, size in self.held.values())
        self.most, self.most_held = max(self.most, self.gradients + held), max(self.most_held, held)


class Held:
    """A tensor that autograd saved: counted until backward lets go of it."""

    def __init__(self, tensor: Tensor, alive: Alive) -> None:
        self.tensor, self.alive, storage = tensor, alive, tensor.untyped_storage()
        self.key = storage._cdata
        count, size = alive.held.get(self.key, (0, storage.nbytes()))
        alive.held[self.key] = (count + 1, size)
        alive.look()

    def __del__(self) -> None:
        count, size = self.alive.held.pop(self.key)
        if count > 1:
            self.alive.held[self.key] = (count - 1, size)


def of_step(arm: Arm, window: Batch) -> Memory:
    """Take one step of an arm on a window, and count the bytes that it needs; the step itself is the same to the bit.

    On a GPU another step is taken before it, because the optimizer creates its state in the first step of an arm, after the
    activations are gone.

    Args:
        arm: The arm.
        window: The window.

    Returns:
        The bytes of each part.
    """
    device = None if arm.device.type == "cpu" else accelerator.module(arm.device)
    if device is not None:
        take_step(arm, window)
        gc.collect()
    own = [*arm.model.parameters(), *arm.model.buffers(), *pytree.tensors((window.inputs, window.targets))]
    known = {tensor.untyped_storage()._cdata for tensor in own}
    alive = Alive(list(arm.model.parameters()))

    def pack(tensor: Tensor) -> Held | Tensor:
        own = tensor.detach()
        return own if tensor.untyped_storage()._cdata in known else Held(own, alive)

    def unpack(held: Held | Tensor) -> Tensor:
        return held.tensor if isinstance(held, Held) else held

    def see_peak(arm: Arm) -> None:
        if device is not None:
            peaks.append(device.max_memory_allocated(arm.device))
            device.reset_peak_memory_stats(arm.device)

    recipe = arm.recipe
    arm.recipe = dataclasses.replace(recipe, at_boundary=(see_peak, *recipe.at_boundary))
    hooks = [p.register_post_accumulate_grad_hook(lambda _: alive.look()) for p in alive.parameters if p.requires_grad]
    peaks: list[int] = []
    foreign = 0
    if device is not None:
        foreign = device.memory_allocated(arm.device) - num_bytes(kept(arm))
        device.reset_peak_memory_stats(arm.device)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            take_step(arm, window)
    finally:
        arm.recipe = recipe
        for hook in hooks:
            hook.remove()
    if device is not None:
        peaks.append(device.max_memory_allocated(arm.device))
    return Memory(
        parameters=num_bytes([*arm.model.parameters(), *arm.model.buffers()]),
        gradients=alive.gradients,
        state=num_bytes(state_tensors(arm)),
        activations=alive.most_held,
        alive=alive.most,
        peak=peaks[0] - foreign if peaks else None,
        step_peak=peaks[-1] - foreign if peaks else None,
    )


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, including those between operations; `most` is the largest sum so far.

    Each storage counts once, from the operation that creates it until its last tensor is gone. Temporaries inside an operation
    are not seen. `held` are tensors that are there before.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._seen = 0  # bytes of these, of which some may be gone
        self._add(held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._add(leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        return made

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._seen += storage.nbytes()
        if self._seen <= self.most:
            return
        # A weak reference keeps the address of a storage from being given to another.
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        self._seen = sum(size for _, size in self._storages.values())
        self.most = max(self.most, self._seen)


def fit(micro_batches: Sequence[int], totals: Sequence[int]) -> tuple[float, float]:
    """(M_s, a) of M = M_s + a b by least squares, in bytes; a is per sample. One size alone has no fit.

    Args:
        micro_batches: Sizes b.
        totals: Bytes M of each.

    Returns:
        M_s and a.

    Raises:
        ValueError: There is only one size.
    """
    if len(set(micro_batches)) < 2:
        raise ValueError(f"expected two or more sizes of micro-batches, got {sorted(set(micro_batches))}")
    slope, static = np.polyfit(np.asarray(micro_batches, dtype=float), np.asarray(totals, dtype=float), 1)
    return float(static), float(slope)


def kept(arm: Arm) -> Iterator[Tensor]:
    """List the tensors that an arm holds on its device between two steps.

    Args:
        arm: The arm.

    Returns:
        Parameters, buffers, gradients, optimizer state and averaged weights.
    """
    each = (*tensors_of(arm), *gradients_of(arm.model.parameters()))
    return (one for one in each if one.device.type == arm.device.type)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes of tensors.

    Args:
        tensors: The tensors.

    Returns:
        The sum over all elements.
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_tensors(arm: Arm) -> Iterator[Tensor]:
    """Yield the tensors of the optimizer state that grow with the model.

    Args:
        arm: The arm.

    Returns:
        The tensors with at least one dimension; scalar counters are left out.
    """
    return (one for one in optimizer_state.state_tensors(arm.optimizer) if one.dim() > 0)


def gradients_of(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """List the gradients of parameters that have one.

    Args:
        parameters: Parameters of a model.

    Returns:
        Gradients.
    """
    return (p.grad for p in parameters if p.grad is not None)
