"""CIFAR-10 from its Python pickles in a local folder; nothing is ever downloaded, and nothing in a pickle is executed."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accumulation_harness.config import ConfigError
from accumulation_harness.workloads.files import read_data
from accumulation_harness.workloads.images import NUM_CLASSES, ImageSet

SHAPE = (3, 32, 32)
PIXELS = math.prod(SHAPE)
MAX_INSTRUCTIONS = 1_000_000  # of a pickle; CIFAR-10's have 50,000
MAX_BYTES = 100_000_000  # of a file, three times CIFAR-10's
MAX_HELD_OUT = 1000  # of the 10,000 test images, the first: enough to compare arms, quick enough to do it often
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILE = "test_batch"


def read_cifar10(root: str) -> ImageSet:
    """All training and the first 1,000 test images [3, 32, 32], scaled to mean 0 and standard deviation 1 per channel.

    Looks in `root/cifar-10-batches-py` and in `root`. Raises `ConfigError` where a file is missing or damaged.
    """
    parts = [_read_file(root, name) for name in TRAIN_FILES]
    held_out_images, held_out_labels = _read_file(root, TEST_FILE)
    return ImageSet(
        images=torch.cat([images for images, _ in parts]),
        labels=torch.cat([labels for _, labels in parts]),
        held_out_images=held_out_images[:MAX_HELD_OUT],
        held_out_labels=held_out_labels[:MAX_HELD_OUT],
        peak=255.0,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )


def _read_file(root: str, name: str) -> tuple[Tensor, Tensor]:
    """Images [n, 3, 32, 32] uint8 and labels [n] int64: a dictionary of `data` (n rows of 3,072 bytes) and `labels`."""
    file = next((path for path in (Path(root, "cifar-10-batches-py", name), Path(root, name)) if path.is_file()), None)
    if file is None:
        raise ConfigError("data.root", root, f"CIFAR-10's file {name} (Python version) there or in cifar-10-batches-py below")
    content = _unpickle(root, file)
    data, labels = content.get("data"), content.get("labels")
    if not isinstance(data, PickledBytes) or not isinstance(labels, list):
        raise ConfigError("data.root", root, f"an array `data` and a list `labels` in {name}")
    if len(data.shape) != 2 or data.shape[1] != PIXELS or len(data.content) != math.prod(data.shape):
        raise ConfigError("data.root", root, f"rows of {PIXELS} bytes in {name}, got {len(data.content)} bytes as {data.shape}")
    if len(labels) != data.shape[0] or not labels:
        raise ConfigError("data.root", root, f"as many images as labels in {name}, got {data.shape[0]} and {len(labels)}")
    if not all(type(label) is int and 0 <= label < NUM_CLASSES for label in labels):
        raise ConfigError("data.root", root, f"labels 0 to {NUM_CLASSES - 1} in {name}")
    # A copy: torch wants writable memory.
    images = np.frombuffer(data.content, np.uint8).reshape(-1, *SHAPE).copy()
    return torch.from_numpy(images), torch.tensor(labels)


def _unpickle(root: str, file: Path) -> dict[str, Any]:
    stored = io.BytesIO(read_data(root, file, MAX_BYTES))
    try:
        content = RestrictedUnpickler(stored).load()
    # A damaged pickle can raise nearly anything: opcodes work on whatever lies on the stack.
    except Exception as error:
        raise ConfigError("data.root", root, f"an undamaged CIFAR-10 pickle in {file.name} ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError("data.root", root, f"a dictionary in {file.name}, got {type(content).__name__}")
    return {key.decode() if isinstance(key, bytes) else str(key): value for key, value in content.items()}


class PickledType:
    """Stands for `numpy.dtype`: remembers its name and takes no other state."""

    def __init__(self, name: bytes | str, *_: object) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        pass


class PickledBytes:
    """Stands for a `numpy.ndarray` of unsigned bytes in C order: keeps its shape and content, and calls nothing of numpy."""

    shape: tuple[int, ...] = ()
    content: bytes = b""

    def __setstate__(self, state: tuple[int, tuple[int, ...], PickledType, bool, bytes]) -> None:
        _, shape, kind, column_major, content = state
        if kind.name not in ("u1", "uint8") or column_major or not isinstance(content, bytes):
            raise pickle.UnpicklingError("expected an array of unsigned bytes in C order")
        self.shape, self.content = tuple(int(size) for size in shape), content


def reconstruct(*_: object) -> PickledBytes:
    """Stands for numpy's function of that name: an empty array, filled by the state that follows."""
    return PickledBytes()


def encode(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, by which Python 3 writes bytes where a pickle is to be read by Python 2."""
    if encoding not in (b"latin1", "latin1"):
        raise pickle.UnpicklingError(f"expected latin1, got {encoding!r}")
    return text.encode("latin1")


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): reconstruct,  # numpy 2
    ("numpy", "ndarray"): PickledBytes,
    ("numpy", "dtype"): PickledType,
    ("_codecs", "encode"): encode,
}


class BoundedInstructions(dict[int, Callable[[Any], None]]):
    """The instructions of a pickle, of which MAX_INSTRUCTIONS can be looked up."""

    left = MAX_INSTRUCTIONS

    def __getitem__(self, code: int) -> Callable[[Any], None]:
        self.left -= 1
        if self.left < 0:
            raise pickle.UnpicklingError(f"more than {MAX_INSTRUCTIONS:,} instructions")
        return super().__getitem__(code)


class RestrictedUnpickler(pickle._Unpickler):
    """Admits what a pickled byte array needs, each name replaced by a stand-in above, so that no imported code runs.

    The one in Python: the one in C makes room up to the largest index of its memo, and 12 bytes can ask for 32 GB. A byte can
    also be an empty container of 200: so the number of instructions has a bound.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="bytes")
        self.dispatch = BoundedInstructions(pickle._Unpickler.dispatch)  # type: ignore[misc] # each its own count

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of an admitted name; `UnpicklingError` for any other."""
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in such a file")
        return ADMITTED[module, name]
