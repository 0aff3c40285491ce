"""MNIST: files in the true format are read back exactly, and damaged ones are named."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from accumulation_harness.config import ConfigError, Data, DataConfig, Model, TrialConfig, WorkloadConfig
from accumulation_harness.workloads import Workload
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.mnist import read_mnist

RNG = np.random.default_rng(0)
TRAIN, TEST = (RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (12, 5))
TRAIN_LABELS, TEST_LABELS = (RNG.integers(0, 10, n, dtype=np.uint8) for n in (12, 5))


def idx(array: np.ndarray) -> bytes:
    """Magic (two zeros, type 8 = unsigned byte, dimensions), sizes, content: http://yann.lecun.com/exdb/mnist"""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def files() -> dict[str, bytes]:
    return {
        "train-images-idx3-ubyte": idx(TRAIN),
        "train-labels-idx1-ubyte": idx(TRAIN_LABELS),
        "t10k-images-idx3-ubyte": idx(TEST),
        "t10k-labels-idx1-ubyte": idx(TEST_LABELS),
    }


def write(folder: Path, content: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)


def mnist(root: Path, dtype: torch.dtype = torch.float32, model: Model = Model.conv) -> Workload:
    workload = WorkloadConfig(data=Data.mnist, model=model)
    return make_workload(TrialConfig(workload=workload, data=DataConfig(root=str(root))), device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize("below", ["", "MNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_was_written_is_read(below: str, packed: bool, tmp_path: Path) -> None:
    content = {f"{name}.gz": gzip.compress(data) for name, data in files().items()} if packed else files()
    write(tmp_path / below, content)
    data = read_mnist(str(tmp_path))
    for read, written in (
        (data.images[:, 0], TRAIN),
        (data.labels, TRAIN_LABELS),
        (data.held_out_images[:, 0], TEST),
        (data.held_out_labels, TEST_LABELS),
    ):
        assert np.array_equal(read.numpy(), written)


def test_workload_normalises_and_trains(tmp_path: Path) -> None:
    write(tmp_path, files())
    workload = mnist(tmp_path)
    batch = workload.batch(torch.tensor([3, 0]))
    assert workload.num_samples == 12
    assert torch.allclose(batch.inputs[:, 0], torch.from_numpy((TRAIN[[3, 0]] / 255 - 0.1307) / 0.3081).float(), atol=1e-6)
    assert torch.equal(mnist(tmp_path, torch.float64).batch(torch.tensor([3, 0])).inputs, batch.inputs.double())
    for model in (Model.conv, Model.mlp):
        workload = mnist(tmp_path, model=model)
        torch.autograd.backward(workload.losses(workload.make_model()(batch.inputs), batch).sum())


def without(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda content: content.__delitem__(name)


def replaced(name: str, data: bytes) -> Callable[[dict[str, bytes]], None]:
    return lambda content: content.update({name: data})


def packed(name: str, keep: slice) -> Callable[[dict[str, bytes]], None]:
    def change(content: dict[str, bytes]) -> None:
        content[f"{name}.gz"] = gzip.compress(content.pop(name))[keep]

    return change


DAMAGED: dict[str, tuple[Callable[[dict[str, bytes]], None], str]] = {
    "missing images": (without("train-images-idx3-ubyte"), "train-images-idx3-ubyte"),
    "missing labels": (without("t10k-labels-idx1-ubyte"), "t10k-labels-idx1-ubyte"),
    "bad magic": (replaced("train-images-idx3-ubyte", b"\0\0\x09\x03" + idx(TRAIN)[4:]), "magic.*train-images"),
    "labels where images belong": (replaced("train-images-idx3-ubyte", idx(TRAIN_LABELS)), "magic.*train-images"),
    "cut short": (replaced("t10k-images-idx3-ubyte", idx(TEST)[:-1]), "3936 bytes in t10k-images.*got 3935"),
    "too long": (replaced("t10k-labels-idx1-ubyte", idx(TEST_LABELS) + b"\0"), "t10k-labels.*got 14"),
    "no header": (replaced("train-labels-idx1-ubyte", b"\0\0"), "header.*train-labels"),
    "absurd size": (replaced("train-images-idx3-ubyte", idx(TRAIN)[:4] + b"\xff" * 12), "train-images.*got"),
    "other image size": (replaced("train-images-idx3-ubyte", idx(TRAIN[:, :, :27])), "28x28 images in train-images"),
    "fewer labels": (replaced("train-labels-idx1-ubyte", idx(TRAIN_LABELS[:-1])), "as many images as labels"),
    "no samples": (
        lambda content: content.update(
            {"t10k-images-idx3-ubyte": idx(TEST[:0]), "t10k-labels-idx1-ubyte": idx(TEST_LABELS[:0])},
        ),
        "t10k-images",
    ),
    "label of 10": (replaced("t10k-labels-idx1-ubyte", idx(TEST_LABELS + 10)), "labels 0 to 9 in t10k-labels"),
    "truncated gzip": (packed("train-images-idx3-ubyte", slice(0, 2000)), "readable train-images-idx3-ubyte.gz"),
    "not gzip": (packed("train-images-idx3-ubyte", slice(5, None)), "readable train-images-idx3-ubyte.gz"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    damage, message = DAMAGED[case]
    content = files()
    damage(content)
    write(tmp_path, content)
    with pytest.raises(ConfigError, match=message) as caught:
        mnist(tmp_path)
    assert caught.value.field == "data.root"
    assert str(tmp_path) in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train-images-idx3-ubyte"):
        mnist(tmp_path / "absent")
