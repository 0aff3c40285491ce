"""Data that would take all memory or wait for ever is refused at once, by the name of its file."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import pytest

from accumulation_harness.config import ConfigError, Data, DataConfig, Model, TrialConfig, WorkloadConfig
from accumulation_harness.validation import validate
from accumulation_harness.workloads import cifar10, mnist, text
from accumulation_harness.workloads.cifar10 import read_cifar10
from accumulation_harness.workloads.mnist import read_mnist
from accumulation_harness.workloads.text import read_corpus

LINES = "one line\nand another\n"


def refused(read: object, folder: Path, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        read(str(folder))  # type: ignore[operator]
    assert caught.value.field == "data.root"


def test_a_bomb_of_zeros_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "MAX_IMAGES", 1000)
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
        file.write(struct.pack(">4I", 0x0803, 4_000_000, 28, 28))
        for _ in range(100):
            file.write(bytes(1_000_000))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x0801, 0))
    refused(read_mnist, tmp_path, "at most 784,016 bytes in train-images-idx3-ubyte.gz when unpacked")


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_what_has_no_end_is_no_text(what: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    if what == "pipe":
        os.mkfifo(tmp_path / "b.txt")
    else:
        (tmp_path / "b.txt").symlink_to("/dev/zero")
    refused(read_corpus, tmp_path, "a regular file b.txt")


def test_text_has_a_bound_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(LINES)
    assert len(read_corpus(str(tmp_path)).lines) == 2
    monkeypatch.setattr(text, "MAX_BYTES", 30)
    refused(read_corpus, tmp_path, "at most 9 bytes in b.txt")


def test_text_reads_as_a_file_opened_as_text_does(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\rthree and four\nfive\u2028six".encode())
    assert read_corpus(str(tmp_path)).text == (tmp_path / "a.txt").read_text(encoding="utf-8")


PICKLES = {
    "an index that asks for 32 GB": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a length of a terabyte": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "a byte for each container": b"\x80\x02" + b"\x8f" * 2_000_000 + b".",
    "marks": b"(" * 2_000_000 + b".",
    "too many digits": b"L" + b"9" * 1_000_000 + b"L\n.",
}


@pytest.mark.parametrize("bomb", PICKLES)
def test_a_pickle_takes_no_more_than_its_bound(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10.BoundedInstructions, "left", 10_000)
    (tmp_path / "data_batch_1").write_bytes(PICKLES[bomb])
    refused(read_cifar10, tmp_path, "data_batch_1")


def test_a_large_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "MAX_BYTES", 10)
    (tmp_path / "data_batch_1").write_bytes(bytes(11))
    refused(read_cifar10, tmp_path, "at most 10 bytes in data_batch_1")


def test_an_address_is_refused_and_its_password_told_to_nobody() -> None:
    workload = WorkloadConfig(data=Data.mnist, model=Model.conv)
    with pytest.raises(ConfigError, match=r"data\.root=https://\.\.\.: expected a local folder") as caught:
        validate(TrialConfig(workload=workload, data=DataConfig(root="https://me:s3cret@host/mnist")))
    assert "s3cret" not in repr(caught.value)
