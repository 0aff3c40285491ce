"""MNIST and CIFAR-10: files in the true formats are read back exactly; damaged, endless and malicious ones are named."""

import gzip
import math
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from accumulation_harness.config import ConfigError, Data, DataConfig, Model, TrialConfig, WorkloadConfig
from accumulation_harness.config.validation import validate
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.files import read_cifar10, read_mnist
from accumulation_harness.workloads.text import read_corpus

RNG = np.random.default_rng(0)
GREY, COLOURS = RNG.integers(0, 256, (5, 28, 28), dtype=np.uint8), RNG.integers(0, 256, (6, 5, 3, 32, 32), dtype=np.uint8)
LABELS = RNG.integers(0, 10, (6, 5), dtype=np.uint8)
Files = dict[str, bytes]
CIFAR10 = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def idx(array):
    """Magic (two zeros, type 8 = unsigned byte, dimensions), sizes, content: http://yann.lecun.com/exdb/mnist"""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def mnist():
    images, labels = idx(GREY), idx(LABELS[0])
    names = [f"{part}-{what}" for part in ("train", "t10k") for what in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    return dict(zip(names, (images, labels, images, labels), strict=True))


def packed():
    return {f"{name}.gz": gzip.compress(data) for name, data in mnist().items()}


def python2_pickle(images, labels):
    """The opcodes of the published files, which Python 2's cPickle wrote with protocol 2."""

    def s(text):
        return b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text

    rows = images.reshape(len(images), math.prod(images.shape[1:]))
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85" + s(b"b") + b"\x87R"
    dtype = b"cnumpy\ndtype\n" + s(b"u1") + b"K\x00K\x01\x87R(K\x03" + s(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"".join(b"J" + struct.pack("<i", size) for size in rows.shape) + b"\x86"
    listed = s(b"labels") + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}q\x01(" + listed + s(b"data") + array + b"(K\x01" + shape + dtype + b"\x89" + s(rows.tobytes()) + b"tbu."


def cifar10():
    return {name: python2_pickle(images, own.tolist()) for name, images, own in zip(CIFAR10, COLOURS, LABELS, strict=True)}


def resaved():
    """The same content saved again by Python 3."""
    saved = [{b"data": x.reshape(5, -1), b"labels": own.tolist()} for x, own in zip(COLOURS, LABELS, strict=True)]
    return {name: pickle.dumps(content, 2 + 2 * (k % 2)) for k, (name, content) in enumerate(zip(CIFAR10, saved, strict=True))}


def write(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("content", "below", "read"),
    [
        (mnist, "", read_mnist),
        (packed, "MNIST/raw", read_mnist),
        (cifar10, "cifar-10-batches-py", read_cifar10),
        (resaved, "", read_cifar10),
    ],
)
def test_what_was_written_is_read(content, below, read, tmp_path):
    write(tmp_path / below, content())
    data = read(str(tmp_path))
    images = [GREY[:, None]] * 2 if read is read_mnist else [np.concatenate(COLOURS[:5]), COLOURS[5]]
    labels = [LABELS[0]] * 2 if read is read_mnist else [LABELS[:5].ravel(), LABELS[5]]
    for read_back, written in zip(
        (data.images, data.held_out_images, data.labels, data.held_out_labels), images + labels, strict=True
    ):
        assert np.array_equal(read_back.numpy(), written)


def test_pixels_are_normalised_by_channel_and_a_model_trains_on_them(tmp_path):
    write(tmp_path, cifar10())
    config = TrialConfig(workload=WorkloadConfig(data=Data.cifar10, model=Model.conv), data=DataConfig(root=str(tmp_path)))
    narrow, wide = (make_workload(config, device=torch.device("cpu"), dtype=dtype) for dtype in (torch.float32, torch.float64))
    batch = narrow.batch(torch.tensor([2, 0]))
    mean, std = (np.array(c).reshape(3, 1, 1) for c in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
    assert torch.allclose(batch.inputs, torch.from_numpy((COLOURS[0, [2, 0]] / 255 - mean) / std).float(), atol=1e-5)
    assert torch.equal(wide.batch(torch.tensor([2, 0])).inputs, batch.inputs.double())
    torch.autograd.backward(narrow.losses(narrow.make_model()(batch.inputs), batch).sum())


GOOD = python2_pickle(COLOURS[0], LABELS[0].tolist())
IMAGES, LABELLED, BATCH = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte", "data_batch_3"
DAMAGED: dict[str, tuple[str, bytes | None]] = {
    "missing images": (IMAGES, None),
    "bad magic": (IMAGES, b"\0\0\x09\x03" + idx(GREY)[4:]),
    "cut short": (IMAGES, idx(GREY)[:-1]),
    "absurd size": (IMAGES, idx(GREY)[:4] + b"\xff" * 12),
    "fewer labels": (LABELLED, idx(LABELS[0, :-1])),
    "truncated gzip": (f"{IMAGES}.gz", gzip.compress(idx(GREY))[:2000]),
    "a bomb of zeros": (f"{IMAGES}.gz", gzip.compress(struct.pack(">4I", 0x0803, 400_000, 28, 28) + bytes(313_600_000), 1)),
    "truncated pickle": (BATCH, GOOD[:5000]),
    "a global beyond the admitted": (BATCH, b"\x80\x02cbuiltins\neval\nU\x011\x85R."),
    "a dotted name": (BATCH, b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.mro()\x93."),
    "no labels": (BATCH, pickle.dumps({"data": np.zeros((1, 3072), np.uint8)}, 2)),
    "shape larger than its content": (BATCH, GOOD.replace(struct.pack("<i", 5), struct.pack("<i", 6), 1)),
    "float images": (BATCH, pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}, 4)),
    "an index that asks for 32 GB": (BATCH, b"\x80\x02}r\xff\xff\xff\x7f."),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_named(case, tmp_path):
    name, data = DAMAGED[case]
    content, read = (cifar10(), read_cifar10) if name == BATCH else (mnist(), read_mnist)
    del content[name.removesuffix(".gz")]
    write(tmp_path, content if data is None else content | {name: data})
    with pytest.raises(ConfigError, match=name.split("-idx")[0].replace("labels", "(labels|images)")) as caught:
        read(str(tmp_path))
    assert caught.value.field == "data.root" and str(tmp_path) in str(caught.value)


class Command:
    """Unpickled by the ordinary loader, it would run a shell command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_runs_nothing(protocol, tmp_path):
    trace = tmp_path / "trace"
    evil = pickle.dumps({"data": Command(f"touch {trace}"), "labels": [1]}, protocol)
    write(tmp_path, cifar10() | {"data_batch_2": evil})
    with pytest.raises(ConfigError, match=r"system has no place"):
        read_cifar10(str(tmp_path))
    assert not trace.exists()
    pickle.loads(evil)  # must differ: the ordinary loader does run it
    assert trace.exists()


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_has_no_end_is_no_text(what, tmp_path):
    (tmp_path / "a.txt").write_text("one line\nand another\n")
    if what == "pipe":
        os.mkfifo(tmp_path / "b.txt")
    else:
        (tmp_path / "b.txt").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"a readable b\.txt \(Not a regular file\)"):
        read_corpus(str(tmp_path))


def test_an_address_is_refused_and_its_password_told_to_nobody():
    workload = WorkloadConfig(data=Data.mnist, model=Model.conv)
    with pytest.raises(ConfigError, match="expected a local folder") as caught:
        validate(TrialConfig(workload=workload, data=DataConfig(root="https://me:s3cret@host/mnist")))
    assert "s3cret" not in repr(caught.value)
