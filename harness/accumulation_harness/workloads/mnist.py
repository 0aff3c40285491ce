"""MNIST from its IDX files in a local folder, plain or gzipped; nothing is ever downloaded."""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from accumulation_harness.config import ConfigError
from accumulation_harness.workloads.files import read_data
from accumulation_harness.workloads.images import NUM_CLASSES, ImageSet

SIDE = 28
MAX_HELD_OUT = 1000  # of the 10,000 test images, the first: enough to compare arms, quick enough to do it often
IMAGES_MAGIC, LABELS_MAGIC = 0x0803, 0x0801  # unsigned bytes in three and in one dimension
MAX_IMAGES = 200_000  # of a file, three times MNIST's; a gzipped file is not unpacked beyond


def read_mnist(root: str) -> ImageSet:
    """All training and the first 1,000 test images [1, 28, 28], scaled to mean 0 and standard deviation 1 of the training set.

    Looks in `root`, `root/MNIST/raw` and `root/raw`. Raises `ConfigError` where a file is missing or damaged.
    """
    images, labels = _read_part(root, "train")
    held_out_images, held_out_labels = _read_part(root, "t10k")
    return ImageSet(
        images=images,
        labels=labels,
        held_out_images=held_out_images[:MAX_HELD_OUT],
        held_out_labels=held_out_labels[:MAX_HELD_OUT],
        peak=255.0,
        mean=(0.1307,),
        std=(0.3081,),
    )


def _read_part(root: str, part: str) -> tuple[Tensor, Tensor]:
    images_file, labels_file = _find(root, f"{part}-images", 3), _find(root, f"{part}-labels", 1)
    images = _read_idx(root, images_file, IMAGES_MAGIC)
    labels = _read_idx(root, labels_file, LABELS_MAGIC)
    if images.shape[1:] != (SIDE, SIDE):
        raise ConfigError(
            "data.root", root, f"{SIDE}x{SIDE} images in {images_file.name}, got {images.shape[2]}x{images.shape[1]}"
        )
    if len(images) != len(labels) or not len(images):
        raise ConfigError(
            "data.root",
            root,
            f"as many images as labels, got {len(images)} in {images_file.name} and {len(labels)} in {labels_file.name}",
        )
    if labels.max() >= NUM_CLASSES:
        raise ConfigError("data.root", root, f"labels 0 to {NUM_CLASSES - 1} in {labels_file.name}, got {labels.max()}")
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()


def _find(root: str, stem: str, dimensions: int) -> Path:
    """The file `stem`-idxD-ubyte, also with a dot before idx and gzipped."""
    names = [f"{stem}{dot}idx{dimensions}-ubyte{ending}" for dot in "-." for ending in ("", ".gz")]
    for folder in (Path(root), Path(root, "MNIST", "raw"), Path(root, "raw")):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise ConfigError("data.root", root, f"MNIST's file {names[0]} or {names[1]} there or in MNIST/raw below")


def _read_idx(root: str, file: Path, magic: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Unsigned bytes in the shape that the header gives: magic number, one size per dimension (big-endian int32), bytes."""
    most = 16 + MAX_IMAGES * (SIDE * SIDE if magic == IMAGES_MAGIC else 1)
    content = read_data(root, file, most)
    if file.suffix == ".gz":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
                content = stream.read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError("data.root", root, f"a readable {file.name} ({error})") from error
    if len(content) > most:
        raise ConfigError("data.root", root, f"at most {most:,} bytes in {file.name} when unpacked")
    dimensions = magic & 0xFF
    header = 4 * (1 + dimensions)
    if len(content) < header:
        raise ConfigError("data.root", root, f"an IDX header of {header} bytes in {file.name}, got {len(content)} bytes")
    found, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    if found != magic:
        raise ConfigError("data.root", root, f"the magic number {magic:#06x} at the start of {file.name}, got {found:#06x}")
    size = int(np.prod(shape, dtype=object))
    if len(content) != header + size:
        raise ConfigError("data.root", root, f"{header + size} bytes in {file.name} by its header, got {len(content)}")
    # A copy: torch wants writable memory.
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()
