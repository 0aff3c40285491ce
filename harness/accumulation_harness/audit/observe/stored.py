"""Whole tensors of a run that other runs follow, in a temporary file: too many to be held, and needed one set at a time."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import torch
from torch import Tensor

from accumulation_harness.audit.observe.tensors import dense, write


@dataclass(frozen=True)
class Stored:
    """A set of tensors, in their own formats, from a byte of the store's file on."""

    store: Store
    start: int
    formats: tuple[torch.dtype, ...]

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Write the values into tensors of the same sizes."""
        file = self.store.file
        file.seek(self.start)
        for tensor, dtype in zip(tensors, self.formats, strict=True):
            values = bytearray(file.read(tensor.numel() * dtype.itemsize))
            if values:
                write(tensor, torch.frombuffer(values, dtype=dtype))


class Store:
    """A file, made when something is kept, and gone with the last set of tensors in it."""

    @cached_property
    def file(self) -> IO[bytes]:
        """It has no name."""
        file = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open as long as something is kept in it
        weakref.finalize(self, file.close)
        return file

    def add(self, tensors: Sequence[Tensor]) -> Stored:
        """Write these tensors behind those that are there. Raises OSError where there is no room."""
        try:
            kept = Stored(self, self.file.seek(0, 2), tuple(tensor.dtype for tensor in tensors))
            for tensor in tensors:
                self.file.write(_bytes(dense(tensor)))
            self.file.flush()
        except OSError as error:
            message = f"the audit cannot keep the weights of N=1 in {tempfile.gettempdir()} (TMPDIR): {error.strerror}"
            raise OSError(error.errno, message) from error
        return kept


def _bytes(tensor: Tensor) -> Any:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
