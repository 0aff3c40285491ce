"""Whole tensors of a run that other runs follow, in a temporary file: too many to be held, and needed one set at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor

from harness.audit.observe.tensors import dense, write


@dataclass(frozen=True)
class Stored:
    """A set of tensors, in their own formats, from a byte of the file on."""

    file: IO[bytes]
    start: int
    formats: tuple[torch.dtype, ...]

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Write the values into tensors of the same sizes."""
        self.file.seek(self.start)
        for tensor, dtype in zip(tensors, self.formats, strict=True):
            values = bytearray(self.file.read(tensor.numel() * dtype.itemsize))
            if values:
                write(tensor, torch.frombuffer(values, dtype=dtype))


@dataclass(frozen=True)
class Store:
    """A file, which is gone with the last set of tensors in it."""

    file: IO[bytes] = field(default_factory=tempfile.TemporaryFile)

    def add(self, tensors: Sequence[Tensor]) -> Stored:
        """Write these tensors behind those that are there. Raises OSError where there is no room."""
        kept = Stored(self.file, self.file.seek(0, 2), tuple(tensor.dtype for tensor in tensors))
        try:
            for tensor in tensors:
                self.file.write(_bytes(dense(tensor)))
            self.file.flush()
        except OSError as error:
            message = f"the audit cannot keep the weights of N=1 in {tempfile.gettempdir()} (TMPDIR): {error.strerror}"
            raise OSError(error.errno, message) from error
        return kept


def _bytes(tensor: Tensor) -> Any:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
