"""Blocks of bytes from whole files: none in two files, none in both halves."""

import torch

from accumulation_harness.workloads.build import _transformer
from accumulation_harness.workloads.python_bytes import LENGTH, BytesWorkload
from tests.toy import CPU
from tests.trials import trial

CONFIG = trial("workload.data=python_bytes workload.model=transformer norm=layer")
FILES = tuple(bytes([65 + i]) * (LENGTH * (i % 3 + 1) + i) for i in range(20))


def made(seed=0):
    return BytesWorkload(FILES, _transformer(CONFIG, LENGTH - 1), seed=seed, device=CPU)


def test_a_sample_lies_in_one_file_and_a_file_in_one_half():
    workload = made()
    everything = workload.batch(torch.arange(workload.num_samples + len(workload.held_out)))
    assert len(everything) == sum(len(content) // LENGTH for content in FILES)
    assert (everything.inputs == everything.inputs[:, :1]).all()  # every file has one letter

    def letters(inputs):
        return set(inputs[:, 0].tolist())

    test = letters(workload.held_out.inputs)
    assert test and not test & letters(everything.inputs[: workload.num_samples])
    assert test != letters(made(3).held_out.inputs) or test != letters(made(4).held_out.inputs)
