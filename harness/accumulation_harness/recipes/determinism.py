"""Randomness: seeded, and put back where measuring has drawn from it; kernels whose results are the same again."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accumulation_harness.config import ConfigError, Device, NotReproducible, Precision
from accumulation_harness.system import accelerator

RandomState = tuple[Tensor, ...]  # of torch's generators, the CPU's first
NAMED = re.compile(r"(\S+) does not have a deterministic implementation")  # torch's words, in its error and in its warning

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it; read when its handle is made


def choose_device(device: Device) -> torch.device:
    """Choose the device of a trial: `auto` is the GPU where there is one.

    Args:
        device: The setting.

    Returns:
        The CPU or the current CUDA device.

    Raises:
        ConfigError: `cuda` is asked for, and no CUDA device can be used; the message says why.
    """
    if device == Device.cpu:
        return torch.device("cpu")
    reason = accelerator.why_unavailable()
    if reason is not None and device == Device.cuda:
        raise ConfigError("device", device, f"cpu or auto: this machine shows no CUDA device ({reason})")
    if reason is not None:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def deterministic(precision: Precision = Precision.float32, device: torch.device | None = None) -> Iterator[list[str]]:
    """Use deterministic algorithms and IEEE float32 products (no TF32) inside; the caller's settings come back afterwards.

    An operation without a deterministic kernel raises on the CPU. On another `device` it computes as it can and is named in
    the list given, once; a warning names them all at the end. What it does to gradients is then measured: the shuffled full
    batch differs from the referee by more than rounding, and where that is above the gate nothing is judged equivalent or
    different.

    In float16 without oneDNN, whose convolutions take 2.5 times as long on a CPU as PyTorch's own (measured, torch 2.13).

    Args:
        precision: What is computed in.
        device: Where; None is the CPU.

    Yields:
        Names of the operations without a deterministic kernel, which grows while the context is open.
    """
    products: Any = torch.backends.cuda.matmul
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    split = products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction
    is_cpu = device is None or device.type == "cpu"
    kernels: Any = torch.backends.mkldnn  # `flags`, its context manager, warns where there is no TF32
    onednn = kernels.enabled
    try:
        # What `use_deterministic_algorithms` sets, without its import of the compiler.
        torch.set_deterministic_debug_mode("error" if is_cpu else "warn")
        torch.backends.cudnn.benchmark = False
        products.allow_fp16_reduced_precision_reduction = products.allow_bf16_reduced_precision_reduction = False
        kernels.enabled = onednn and precision != Precision.float16
        with accelerator.ieee_float32(), _named_operations() as named:
            yield named
    finally:
        kernels.enabled = onednn
        torch.set_deterministic_debug_mode(before[0])
        torch.backends.cudnn.benchmark = before[1]
        products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction = split
    if named:
        told = f"no deterministic kernel for {', '.join(named)}: results differ from run to run, as the control shows"
        warnings.warn(told, NotReproducible, stacklevel=3)


@contextmanager
def _named_operations() -> Iterator[list[str]]:
    """The operations that torch warns of for want of a deterministic kernel, each once; other warnings go their way."""
    named: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", NAMED.pattern)
        show = warnings.showwarning

        def note(message: Warning | str, *rest: Any, **more: Any) -> None:
            if found := NAMED.search(str(message)):
                named.extend({found[1]} - set(named))
            else:
                show(message, *rest, **more)

        warnings.showwarning = note
        yield named


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Give torch a number of threads inside; the caller's number comes back afterwards.

    Args:
        number: Of intra-operation threads.

    Yields:
        Nothing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fixed_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a seed inside; the generators are put back afterwards, whatever happened inside.

    Args:
        seed: Of torch's generators of the CPU and of `device`.
        device: Whose generator is meant beside the CPU's.

    Yields:
        Nothing.
    """
    with kept_randomness(device):
        start_randomness(seed, device)
        yield


@contextmanager
def kept_randomness(device: torch.device) -> Iterator[None]:
    """Put the generators back afterwards, whatever happened inside.

    Args:
        device: Whose generator is meant beside the CPU's.

    Yields:
        Nothing.
    """
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def start_randomness(seed: int, device: torch.device) -> None:
    """Seed torch's generators.

    Args:
        seed: What the next draws start from.
        device: Whose generator is meant beside the CPU's.
    """
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack trace for every absent accelerator
    if device.type != "cpu":
        accelerator.module(device).manual_seed(seed)


def random_state(device: torch.device) -> RandomState:
    """Read where torch's generators stand.

    Args:
        device: Whose generator is meant beside the CPU's.

    Returns:
        What `set_random_state` takes.
    """
    return torch.get_rng_state(), *([accelerator.module(device).get_rng_state(device)] if device.type != "cpu" else [])


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put torch's generators back: the next draws are those that followed `random_state`.

    Args:
        state: What `random_state` gave.
        device: The device that it was asked for.
    """
    torch.set_rng_state(state[0])
    if device.type != "cpu":
        accelerator.module(device).set_rng_state(state[1], device)
