"""One thread for every test: the suite runs on small machines, several tests side by side."""

import gc
import os

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure(config):
    """Every test is about the CPU, also on a machine that has a GPU: what is claimed of one is asked by `make gpu`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def own_objects():
    """An audit looks at every object for averaged copies of the weights: those of the test session need not be looked through."""
    gc.freeze()
    yield
    gc.unfreeze()
