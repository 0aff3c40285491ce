"""Where the tensors of a trial lie while nobody computes with them: in memory, or in files that the system can page out.

A trial compares about a dozen arms, each a model with its optimizer. Offloaded to files, one arm at a time is in memory, and as
many others as leave room for it: a tensor keeps its values and is used as any other, but its pages are read when it is touched,
and given back by `settle` and `put`. The files have no name from the moment they are opened, so nothing is left of them, however
the process ends.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from accumulation_harness.config import Arms, ConfigError, TrialConfig

M_MMAP_THRESHOLD = -3  # of malloc.h
LEAST_BYTES = 2**18  # smaller tensors stay in memory
BYTES_OF_AN_ARM = 48  # for each parameter, in float64: weights, gradient, two moments, and two vectors that measuring keeps
BYTES_AT_WORK = 80  # the same of the arm that is measured, counted as 57, and of what its forward keeps


class Offload:
    """In memory: tensors stay where they are."""

    def put(self, tensor: Tensor) -> Tensor:
        """The same values, to be read later."""
        return tensor

    def put_all(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`put`, by name."""
        return {name: self.put(tensor) for name, tensor in named.items()}

    def settle(self, tensors: Iterable[Tensor]) -> None:
        """Nobody computes with these tensors for a while; they stay the same objects."""

    def release(self) -> None:
        """Nobody computes with anything that was put or settled here for a while."""


class FileOffload(Offload):
    """In files of a folder; CPU tensors alone. Every value stays the same to the bit.

    While more than `room` bytes of memory are available, tensors stay in it.
    """

    def __init__(self, folder: Path | None = None, *, room: float = math.inf) -> None:
        self._folder, self._room = folder, room
        if room == math.inf:
            return_freed_memory()
        self._maps: dict[int, weakref.ref[mmap.mmap]] = {}  # by address; of a tensor that is gone the reference is dead

    def put(self, tensor: Tensor) -> Tensor:
        """A copy in a file; no file keeps pages in memory."""
        copy = self._in_file(tensor)
        self.release()
        return copy

    def put_all(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`put`, by name."""
        copies = {name: self._in_file(tensor) for name, tensor in named.items()}
        self.release()
        return copies

    def settle(self, tensors: Iterable[Tensor]) -> None:
        """Move what is not in a file yet into one, in place; no file keeps pages in memory."""
        for tensor in tensors:
            if self._map(tensor) is None:
                tensor.data = self._in_file(tensor.data)
        self.release()

    def _in_file(self, tensor: Tensor) -> Tensor:
        """A copy in a file, its pages given back; the tensor itself where it is small, in a file already, or memory has room."""
        if tensor.nbytes < LEAST_BYTES or tensor.device.type != "cpu" or tensor.layout != torch.strided or self._map(tensor):
            self._give_back(tensor)
            return tensor
        if psutil.virtual_memory().available > self._room:
            return tensor
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.truncate(tensor.nbytes)
            pages = mmap.mmap(file.fileno(), tensor.nbytes)
        copy = torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
        copy.copy_(tensor.detach())
        self._maps[copy.data_ptr()] = weakref.ref(pages)
        self._give_back(copy)
        return copy

    def release(self) -> None:
        """Give back the pages of all files there are."""
        self._maps = {address: found for address, found in self._maps.items() if found() is not None}
        for found in self._maps.values():
            if (pages := found()) is not None:
                pages.madvise(mmap.MADV_DONTNEED)

    def _map(self, tensor: Tensor) -> mmap.mmap | None:
        found = self._maps.get(tensor.data_ptr())
        return None if found is None else found()

    def _give_back(self, tensor: Tensor) -> None:
        pages = self._map(tensor)
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)


def choose_offload(config: TrialConfig, model: nn.Module, device: torch.device) -> Offload:
    """In files as asked for; what memory has no room for, where the arms may take more than half of what is available.

    Args:
        config: The trial.
        model: The model of one arm.
        device: Device of the training.

    Returns:
        Where arms lie while others train.

    Raises:
        ConfigError: Arms shall lie in files and train on a GPU.
    """
    if config.arms == Arms.one_by_one and device.type != "cpu":
        raise ConfigError("arms", config.arms, f"together or auto on device={device}: files hold tensors of the CPU")
    if device.type != "cpu" or config.arms == Arms.together:
        return Offload()
    if config.arms == Arms.one_by_one:
        return FileOffload()
    num_arms = 2 + len(config.accumulation_steps) * (1 + len(config.faults) + len(config.methods)) + config.nulls
    parameters = sum(p.numel() for p in model.parameters())
    is_large = num_arms * BYTES_OF_AN_ARM * parameters > psutil.virtual_memory().available / 2
    return FileOffload(room=BYTES_AT_WORK * parameters) if is_large else Offload()


def return_freed_memory() -> None:
    """Have glibc give large blocks back to the system as soon as they are freed, for the rest of this process.

    It otherwise keeps blocks of up to 32 MiB in its heap, where those that stay hold up those that went. Each block is then
    faulted in page by page, which takes as long as all else.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LEAST_BYTES)
        ctypes.CDLL(None).malloc_trim(0)
