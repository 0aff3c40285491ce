"""Next-byte prediction on the Python sources of the installed torch: tens of megabytes that are there anyway."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from accumulation_harness.config import ConfigError
from accumulation_harness.workloads import Batch
from accumulation_harness.workloads.text import TextWorkload

LENGTH = 129  # bytes of a sample, of which 128 are predicted
TEST_SHARE = 0.03  # of the files, whole
MOST_TEST = 1000  # samples
PATTERN = "**/*.py"
GENERATED = "version.py"  # differs from build to build of one version
KNOWN = {"2.13.0+cpu": "4d52c191d4bce65386c94d0e4c281de9cd01db2d4e3aa23d258dd6b1de608e04"}  # fingerprints by build


@dataclass(frozen=True)
class Sources:
    """Files in the order of their names, without bytes that are zero."""

    files: tuple[bytes, ...]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over every file's length and content."""
        digest = hashlib.sha256()
        for content in self.files:
            digest.update(len(content).to_bytes(8, "big") + content)
        return digest.hexdigest()


@cache
def read_sources() -> Sources:
    """The sources of the installed torch; `ConfigError` where the build is a known one and they are not its.

    Of another build they are taken as they are: trainings of two builds compare only where their fingerprints are equal.
    """
    package = find_spec("torch")
    assert package is not None and package.origin is not None, "torch is a requirement of this project"
    root = Path(package.origin).parent
    paths = sorted(path for path in root.glob(PATTERN) if path.name != GENERATED)
    sources = Sources(tuple(path.read_bytes().replace(b"\0", b"") for path in paths))
    build, found = version("torch"), sources.fingerprint
    expected = KNOWN.get(build, found)
    if found != expected:
        raise ConfigError(
            "workload.data", "python_bytes", f"torch {build} with sources of SHA-256 {expected[:12]}, not {found[:12]}"
        )
    return sources


class BytesWorkload(TextWorkload):
    """Samples of 129 bytes in a row, none across two files; whole files are tested on, and `seed` draws which.

    inputs [n, 128] int64 are bytes 1 to 128 and targets [n, 128] bytes 2 to 129; byte 0, which no source has, is the padding's.
    """

    def __init__(self, sources: Sources, make_model: Callable[[int], nn.Module], *, seed: int, device: torch.device) -> None:
        self.vocabulary_size, self._make_model = 256, make_model
        order = torch.randperm(len(sources.files), generator=torch.Generator().manual_seed(seed)).tolist()
        num_test = max(1, round(TEST_SHARE * len(order)))
        test = blocks([sources.files[i] for i in order[:num_test]])
        training = blocks([sources.files[i] for i in sorted(order[num_test:])])
        test = test[torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))[:MOST_TEST]]
        self.num_samples = len(training)
        self._bytes = torch.cat([training, test]).to(device)
        self.held_out = self.batch(torch.arange(self.num_samples, len(self._bytes)))

    def batch(self, ids: Tensor) -> Batch:
        """The samples `ids`."""
        rows = self._bytes[ids.to(self._bytes.device, non_blocking=True)].long()
        return Batch(ids=ids, inputs=rows[:, :-1], targets=rows[:, 1:])


def blocks(files: list[bytes]) -> Tensor:
    """[n, 129] uint8: each file cut into whole samples, its end left out."""
    whole = [content[: len(content) // LENGTH * LENGTH] for content in files]
    return torch.frombuffer(bytearray(b"".join(whole)), dtype=torch.uint8).view(-1, LENGTH)
