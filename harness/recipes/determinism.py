"""Randomness: seeded, and put back where measuring has drawn from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.config import ConfigError, Device, Precision

RandomState = tuple[Tensor, ...]  # of torch's generators, the CPU's first


def choose_device(device: Device) -> torch.device:
    """`auto` is the GPU where there is one. Raises `ConfigError` for `cuda` without a GPU."""
    if device == Device.cuda and not torch.cuda.is_available():
        raise ConfigError("device", device, "cpu or auto: this machine shows no CUDA device")
    if device == Device.cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def deterministic(precision: Precision = Precision.float32) -> Iterator[None]:
    """Deterministic algorithms and IEEE float32 products (no TF32) inside; the caller's settings afterwards.

    In float16 without oneDNN, whose convolutions take 2.5 times as long on a CPU as PyTorch's own (measured, torch 2.13).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when its handle is made
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    # What `use_deterministic_algorithms` sets, without its import of the compiler.
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kernels: Any = torch.backends.mkldnn  # `flags`, its context manager, warns where there is no TF32
    onednn = kernels.enabled
    kernels.enabled = onednn and precision != Precision.float16
    try:
        yield
    finally:
        kernels.enabled = onednn
        torch.set_deterministic_debug_mode(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """That many threads for torch inside, or those that there are; the caller's number afterwards, whatever happened inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fixed_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Draws inside start from `seed`; the generators are put back afterwards, whatever happened inside."""
    with kept_randomness(device):
        start_randomness(seed, device)
        yield


def kept_randomness(device: torch.device) -> AbstractContextManager[None]:
    """The generators are put back afterwards, whatever happened inside."""
    context: AbstractContextManager[None] = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    return context


def start_randomness(seed: int, device: torch.device) -> None:
    """The next draws start from `seed`."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack trace for every absent accelerator
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def random_state(device: torch.device) -> RandomState:
    """Where torch's generators stand now."""
    return torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def set_random_state(state: RandomState, device: torch.device) -> None:
    """The next draws are those that followed `random_state`."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
