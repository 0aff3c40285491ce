"""Single operations of a device beside float64: how far they are off at B and at b samples, and whether they repeat to the bit.

Where a convolution is less accurate at b than at B, an accumulated gradient is, and no loop is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accumulation_harness.config import Precision
from accumulation_harness.recipes.determinism import deterministic

Operation = Callable[[Tensor, Tensor], Tensor]  # inputs [n, 16, 8, 8] and weights [16, 16, 3, 3] -> n rows
SIZES = (64, 8)  # B and b
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def _product(x: Tensor, w: Tensor) -> Tensor:
    return x.flatten(1)[:, :144] @ w.reshape(16, 144).T


def _batch_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight=w[:, 0, 0, 0], training=True)


def _group_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.group_norm(x, 4, weight=w[:, 0, 0, 0])


def _layer_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:]) * w[:, 0, 0, 0].reshape(1, 16, 1, 1)


OPERATIONS: dict[str, Operation] = {
    "convolution": _convolution,
    "matrix product": _product,
    "BatchNorm": _batch_norm,
    "GroupNorm": _group_norm,
    "LayerNorm": _layer_norm,
}


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each operation and format; `error` where it cannot be run there."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZES[0], 16, 8, 8, generator=generator, dtype=torch.float64)
    w = torch.randn(16, 16, 3, 3, generator=generator, dtype=torch.float64)
    for name, operation in OPERATIONS.items():
        for dtype in DTYPES:
            row: dict[str, Any] = {"operation": name, "dtype": str(dtype).removeprefix("torch.")}
            try:
                with deterministic(Precision.float32, device) as named:
                    row |= _row(operation, x.to(dtype).double(), w.to(dtype).double(), dtype, device)
                    row |= {"not_deterministic": list(named)} if named else {}
            except RuntimeError as error:
                row["error"] = next(iter(str(error).splitlines()), type(error).__name__)
            yield row


def _row(operation: Operation, x: Tensor, w: Tensor, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Relative errors of the weights' gradient (`error_64`, `error_8`), and whether two runs are the same to the bit."""
    found: dict[str, Any] = {}
    repeats = True
    for size in SIZES:
        exact = _gradient(operation, x[:size], w)
        own = [_gradient(operation, x[:size].to(device, dtype), w.to(device, dtype)).cpu() for _ in range(2)]
        found[f"error_{size}"] = float(torch.linalg.vector_norm(own[0].double() - exact) / torch.linalg.vector_norm(exact))
        repeats &= torch.equal(*own)
    return {**found, "same_bits_twice": repeats}


def _gradient(operation: Operation, x: Tensor, w: Tensor) -> Tensor:
    weights = w.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(operation(x, weights).double().pow(3).mean(), weights)
    return gradient
