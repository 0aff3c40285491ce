"""Data from files of a local folder, `data.root`: MNIST and CIFAR-10. Nothing is ever downloaded, and no pickle runs code."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accumulation_harness.config import ConfigError
from accumulation_harness.system.files import read_file
from accumulation_harness.workloads.images import NUM_CLASSES, ImageSet

MAX_BYTES = 200_000_000  # of a file, also of a gzipped one when unpacked; CIFAR-10's have 31 million, MNIST's 47 million
MAX_HELD_OUT = 1000  # of the 10,000 test images, the first: enough to compare arms, quick enough to do it often
IMAGES_MAGIC, LABELS_MAGIC = 0x0803, 0x0801  # of IDX files: unsigned bytes in three and in one dimension
MNIST_SHAPE, CIFAR10_SHAPE = (1, 28, 28), (3, 32, 32)
CIFAR10_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def _refuse(root: str, expected: str, cause: Exception | None = None) -> NoReturn:
    """Raise the `ConfigError` of data below `root` that are not what is expected."""
    raise ConfigError("data.root", root, expected) from cause


def read_data(root: str, file: Path, most: int) -> bytes:
    """Content of a regular file of at most `most` bytes.

    Args:
        root: The folder, for the message.
        file: A file in it.
        most: Bytes that it may have.

    Returns:
        Its bytes.

    Raises:
        ConfigError: It is no regular file, cannot be read or is too long.
    """
    try:
        content = read_file(file, most + 1)
    except OSError as error:
        _refuse(root, f"a readable {file.name} ({error.strerror})", error)
    if len(content) > most:
        _refuse(root, f"at most {most:,} bytes in {file.name}")
    return content


def _find(root: str, folders: tuple[str, ...], names: list[str]) -> Path:
    """The first of these files that there is. Raises `ConfigError` without any."""
    for file in (Path(root, folder, name) for folder in ("", *folders) for name in names):
        if file.is_file():
            return file
    _refuse(root, f"a file {' or '.join(names)} there or in {' or '.join(folders)} below")


def _checked(root: str, name: str, images: NDArray[np.uint8], labels: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Images [n, C, H, W] uint8 and labels [n] int64 of the file `name`. Raises `ConfigError` where they do not fit."""
    if math.prod(images.shape[1:]) != math.prod(shape):
        _refuse(root, f"images of {'x'.join(map(str, shape))} bytes in {name}")
    if len(images) != len(labels) or not len(images):
        _refuse(root, f"as many images as labels in {name}, got {len(images)} and {len(labels)}")
    if not all(isinstance(label, int) and 0 <= label < NUM_CLASSES for label in labels):
        _refuse(root, f"labels 0 to {NUM_CLASSES - 1} beside {name}")
    return torch.from_numpy(images.reshape(-1, *shape).copy()), torch.tensor(labels)  # a copy: torch wants writable memory


# MNIST -----------------------------------------------------------------------------------------------------------------------


def read_mnist(root: str) -> ImageSet:
    """Read all training and the first 1,000 test images, scaled to mean 0 and standard deviation 1 of the training set.

    From IDX files, plain or gzipped, in `root`, `root/MNIST/raw` and `root/raw`.

    Args:
        root: A folder.

    Returns:
        Images [1, 28, 28] and labels.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    (images, labels), held_out = _read_part(root, "train"), _read_part(root, "t10k")
    return ImageSet(images, labels, held_out[0][:MAX_HELD_OUT], held_out[1][:MAX_HELD_OUT], 255.0, (0.1307,), (0.3081,))


def _read_part(root: str, part: str) -> tuple[Tensor, Tensor]:
    images, labels = _read_idx(root, f"{part}-images", IMAGES_MAGIC), _read_idx(root, f"{part}-labels", LABELS_MAGIC)
    return _checked(root, f"{part}-images", images, labels.tolist(), MNIST_SHAPE)


def _read_idx(root: str, stem: str, magic: int) -> NDArray[np.uint8]:
    """Unsigned bytes in the shape that the header gives: magic number, one size per dimension (big-endian int32), bytes."""
    dimensions = magic & 0xFF
    names = [f"{stem}{dot}idx{dimensions}-ubyte{ending}" for dot in "-." for ending in ("", ".gz")]
    file = _find(root, ("MNIST/raw", "raw"), names)
    content = read_data(root, file, MAX_BYTES)
    if file.suffix == ".gz":
        try:
            content = zlib.decompressobj(wbits=31).decompress(content, MAX_BYTES)
        except zlib.error as error:
            _refuse(root, f"a readable {file.name} ({error})", error)
    header = f">{1 + dimensions}I"
    start = struct.calcsize(header)
    found, *shape = struct.unpack(header, content[:start].ljust(start, b"\0"))
    if found != magic or len(content) != start + math.prod(shape):
        _refuse(root, f"an IDX file with the magic number {magic:#06x} and as many bytes as its header says in {file.name}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


# CIFAR-10 --------------------------------------------------------------------------------------------------------------------


def read_cifar10(root: str) -> ImageSet:
    """Read all training and the first 1,000 test images, scaled to mean 0 and standard deviation 1 per channel.

    From the Python pickles in `root/cifar-10-batches-py` or `root`.

    Args:
        root: A folder.

    Returns:
        Images [3, 32, 32] and labels.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    *parts, held_out = [_read_pickle(root, name) for name in CIFAR10_FILES]
    images, labels = (torch.cat(own) for own in zip(*parts, strict=True))
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return ImageSet(images, labels, held_out[0][:MAX_HELD_OUT], held_out[1][:MAX_HELD_OUT], 255.0, mean, std)


def _read_pickle(root: str, name: str) -> tuple[Tensor, Tensor]:
    """A dictionary of `data` (n rows of 3,072 bytes) and `labels`."""
    stored = read_data(root, _find(root, ("cifar-10-batches-py",), [name]), MAX_BYTES)
    try:
        content = RestrictedUnpickler(io.BytesIO(stored), encoding="bytes").load()
        data, labels = (content[key] if key in content else content[key.decode()] for key in (b"data", b"labels"))
        images = np.frombuffer(data.content, np.uint8).reshape(data.shape)
    # A damaged pickle can raise nearly anything: opcodes work on whatever lies on the stack.
    except Exception as error:
        _refuse(root, f"an undamaged CIFAR-10 pickle, of an array `data` and a list `labels`, in {name} ({error})", error)
    return _checked(root, name, images, labels, CIFAR10_SHAPE)


class PickledType:
    """Stands for `numpy.dtype`: remembers its name and takes no other state."""

    def __init__(self, name: bytes | str, *_: object) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        pass


class PickledBytes:
    """Stands for a `numpy.ndarray` of unsigned bytes in C order: keeps its shape and content, and calls nothing of numpy."""

    def __setstate__(self, state: tuple[int, tuple[int, ...], PickledType, bool, bytes]) -> None:
        _, self.shape, kind, column_major, self.content = state
        if kind.name not in ("u1", "uint8") or column_major or not isinstance(self.content, bytes):
            raise pickle.UnpicklingError("expected an array of unsigned bytes in C order")


def _encode(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, by which Python 3 writes bytes where a pickle is to be read by Python 2."""
    return text.encode("latin1")


ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: PickledBytes(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: PickledBytes(),  # numpy 2
    ("numpy", "ndarray"): PickledBytes,
    ("numpy", "dtype"): PickledType,
    ("_codecs", "encode"): _encode,
}


class RestrictedUnpickler(pickle._Unpickler):
    """Admits what a pickled byte array needs, each name replaced by a stand-in above, so that no imported code runs.

    The one in Python: the one in C makes room up to the largest index of its memo, and 12 bytes can ask for 32 GB.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in of an admitted name; `UnpicklingError` for any other."""
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in such a file")
        return ADMITTED[module, name]
