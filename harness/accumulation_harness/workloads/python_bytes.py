"""Next-byte prediction on the Python sources of the installed torch: tens of megabytes that are there anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from accumulation_harness.workloads import Batch
from accumulation_harness.workloads.text import TextWorkload

LENGTH = 129  # bytes of a sample, of which 128 are predicted
TEST_SHARE = 0.03  # of the files, whole
MOST_TEST = 1000  # samples
GENERATED = "version.py"  # differs from build to build of one version


@cache
def read_sources() -> tuple[bytes, ...]:
    """The files of the installed torch in the order of their names, without bytes that are zero: trainings compare by build.

    Returns:
        The content of each file.
    """
    paths = sorted(path for path in Path(torch.__file__).parent.glob("**/*.py") if path.name != GENERATED)
    return tuple(path.read_bytes().replace(b"\0", b"") for path in paths)


class BytesWorkload(TextWorkload):
    """Samples of 129 bytes in a row, none across two files; whole files are tested on, and `seed` draws which.

    inputs [n, 128] int64 are bytes 1 to 128 and targets [n, 128] bytes 2 to 129; byte 0, which no source has, is the padding's.
    """

    def __init__(
        self, files: Sequence[bytes], make_model: Callable[[int], nn.Module], *, seed: int, device: torch.device
    ) -> None:
        self.vocabulary_size, self._make_model = 256, make_model
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
        num_test = max(1, round(TEST_SHARE * len(order)))
        test = _blocks([files[i] for i in order[:num_test]])
        training = _blocks([files[i] for i in sorted(order[num_test:])])
        test = test[torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))[:MOST_TEST]]
        self.num_samples = len(training)
        self._bytes = torch.cat([training, test]).to(device)
        self.held_out = self.batch(torch.arange(self.num_samples, len(self._bytes)))

    def batch(self, ids: Tensor) -> Batch:
        """The samples `ids`."""
        rows = self._bytes[ids.to(self._bytes.device, non_blocking=True)].long()
        return Batch(ids=ids, inputs=rows[:, :-1], targets=rows[:, 1:])


def _blocks(files: list[bytes]) -> Tensor:
    """[n, 129] uint8: each file cut into whole samples, its end left out."""
    whole = [content[: len(content) // LENGTH * LENGTH] for content in files]
    return torch.frombuffer(bytearray(b"".join(whole)), dtype=torch.uint8).view(-1, LENGTH)
