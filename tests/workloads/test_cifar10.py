"""CIFAR-10: files in the true format are read back exactly; damaged and malicious ones are named and do nothing."""

from __future__ import annotations

import math
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accumulation_harness.config import ConfigError, Data, DataConfig, Model, TrialConfig, WorkloadConfig
from accumulation_harness.workloads import Workload
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.cifar10 import read_cifar10

NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 4, 3, 32, 32), dtype=np.uint8)  # four images in each of the six files
LABELS = RNG.integers(0, 10, (6, 4))


def python2_string(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text


def python2_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes of the published files, which Python 2's cPickle wrote with protocol 2."""
    s, rows = python2_string, images.reshape(len(images), math.prod(images.shape[1:]))
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85" + s(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + s(b"u1") + b"K\x00K\x01\x87R(K\x03" + s(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"".join(b"J" + struct.pack("<i", size) for size in rows.shape) + b"\x86"
    return b"".join(
        [
            b"\x80\x02}q\x01(",
            s(b"batch_label") + s(b"training batch 1 of 5"),
            s(b"labels") + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e",
            s(b"data") + array + b"(K\x01" + shape + dtype + b"\x89" + s(rows.tobytes()) + b"tb",
            s(b"filenames") + b"](" + b"".join(s(b"leptodactylus_pentadactylus_s_000004.png") for _ in labels) + b"e",
            b"u.",
        ]
    )


def files() -> dict[str, bytes]:
    return {name: python2_pickle(IMAGES[i], LABELS[i].tolist()) for i, name in enumerate(NAMES)}


def resaved(protocol: int) -> dict[str, bytes]:
    """The same content saved again by Python 3."""
    rows = IMAGES.reshape(6, 4, -1)
    return {name: pickle.dumps({b"data": rows[i], b"labels": LABELS[i].tolist()}, protocol) for i, name in enumerate(NAMES)}


def write(folder: Path, content: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)


def cifar10(root: Path, dtype: torch.dtype = torch.float32) -> Workload:
    workload = WorkloadConfig(data=Data.cifar10, model=Model.conv)
    return make_workload(TrialConfig(workload=workload, data=DataConfig(root=str(root))), device=torch.device("cpu"), dtype=dtype)


CONTENTS: dict[str, Callable[[], dict[str, bytes]]] = {
    "published": files,
    "resaved, protocol 2": lambda: resaved(2),
    "resaved, protocol 4": lambda: resaved(4),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_what_was_written_is_read(content: str, below: str, tmp_path: Path) -> None:
    write(tmp_path / below, CONTENTS[content]())
    data = read_cifar10(str(tmp_path))
    assert np.array_equal(data.images.numpy(), IMAGES[:5].reshape(20, 3, 32, 32))
    assert np.array_equal(data.labels.numpy(), LABELS[:5].ravel())
    assert np.array_equal(data.held_out_images.numpy(), IMAGES[5])
    assert np.array_equal(data.held_out_labels.numpy(), LABELS[5])


def test_the_hand_written_pickle_is_one_that_numpy_reads() -> None:
    content = pickle.loads(files()["test_batch"], encoding="bytes")
    assert np.array_equal(content[b"data"], IMAGES[5].reshape(4, -1))
    assert content[b"labels"] == LABELS[5].tolist()


def test_workload_normalises_per_channel_and_trains(tmp_path: Path) -> None:
    write(tmp_path, files())
    workload = cifar10(tmp_path)
    batch = workload.batch(torch.tensor([5, 0]))
    mean, std = (np.array(c).reshape(3, 1, 1) for c in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
    pixels = IMAGES[:5].reshape(20, 3, 32, 32)[[5, 0]]
    assert torch.allclose(batch.inputs, torch.from_numpy((pixels / 255 - mean) / std).float(), atol=1e-5)
    assert torch.equal(cifar10(tmp_path, torch.float64).batch(torch.tensor([5, 0])).inputs, batch.inputs.double())
    torch.autograd.backward(workload.losses(workload.make_model()(batch.inputs), batch).sum())


class Command:
    """Unpickled by the ordinary loader, it would run a shell command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


GOOD = python2_pickle(IMAGES[0], LABELS[0].tolist())
DAMAGED: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "data_batch_3"),
    "empty": (b"", "data_batch_3"),
    "truncated": (GOOD[:5000], "undamaged CIFAR-10 pickle in data_batch_3"),
    "not a pickle": (b"<html>404 not found</html>", "data_batch_3"),
    "a global beyond the admitted": (b"\x80\x02cbuiltins\neval\nU\x011\x85R.", "builtins.eval has no place"),
    "a numpy global beyond the admitted": (b"\x80\x02cnumpy\nload\nU\x01x\x85R.", "numpy.load has no place"),
    "a dotted name": (b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.mro()\x93.", "has no place"),
    "no dictionary": (pickle.dumps([1, 2], 2), "a dictionary in data_batch_3, got list"),
    "no data": (pickle.dumps({"labels": [1]}, 2), "array `data`"),
    "no labels": (pickle.dumps({"data": np.zeros((1, 3072), np.uint8)}, 2), "list `labels`"),
    "grey images": (python2_pickle(IMAGES[0][:, :1], LABELS[0].tolist()), "rows of 3072 bytes in data_batch_3"),
    "shape larger than its content": (GOOD.replace(struct.pack("<i", 4), struct.pack("<i", 5), 1), "rows of 3072"),
    "float images": (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}, 4), "unsigned bytes"),
    "fewer labels": (python2_pickle(IMAGES[0], LABELS[0, :3].tolist()), "as many images as labels in data_batch_3, got 4 and 3"),
    "no samples": (python2_pickle(IMAGES[0, :0], []), "data_batch_3"),
    "label of 10": (python2_pickle(IMAGES[0], [1, 2, 3, 10]), "labels 0 to 9 in data_batch_3"),
    "labels that are no numbers": (pickle.dumps({"data": IMAGES[0, :1].reshape(1, -1), "labels": ["cat"]}, 4), "labels 0 to 9"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    data, message = DAMAGED[case]
    content = files()
    del content["data_batch_3"]
    write(tmp_path, content if data is None else content | {"data_batch_3": data})
    with pytest.raises(ConfigError, match=message) as caught:
        cifar10(tmp_path)
    assert caught.value.field == "data.root"
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_runs_nothing(protocol: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    evil = pickle.dumps({"data": Command(f"touch {trace}"), "labels": [1]}, protocol)
    write(tmp_path, files() | {"data_batch_2": evil})
    with pytest.raises(ConfigError, match=r"system has no place"):
        cifar10(tmp_path)
    assert not trace.exists()
    pickle.loads(evil)  # must differ: the ordinary loader does run it
    assert trace.exists()
