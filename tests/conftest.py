"""One thread for every test: the suite runs on small machines, several tests side by side."""

import gc
import os

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config):
    """Only `-m gpu` sees GPUs: every other test is about the CPU, also on a machine that has one."""
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def own_objects():
    """An audit looks at every object for averaged copies of the weights: those of the test session need not be looked through."""
    gc.freeze()
    yield
    gc.unfreeze()
