"""Watch a DeepSpeed engine: `with watch(engine.module, inner(engine), gradient=gradient_of(engine)) as seen:`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def inner(engine: Any) -> Optimizer:
    """The optimizer of PyTorch's that steps in the end."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def gradient_of(engine: Any) -> Callable[[Tensor], Tensor | None]:
    """Where ZeRO has a parameter's gradient as the optimizer is about to step.

    With ZeRO-3 or offload DeepSpeed itself tells it; in ZeRO 1 and 2 it is a piece of the flat one that the optimizer takes.

    Args:
        engine: What `deepspeed.initialize` has returned, with ZeRO.

    Returns:
        A function of a parameter of the engine's module.
    """
    from deepspeed.utils import safe_get_full_grad

    zero = engine.optimizer
    if engine.zero_optimization_partition_weights() or zero.cpu_offload:
        return safe_get_full_grad
    groups = zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True)
    pieces = {p: (flat, p._hp_mapping.hp_fragment_address) for flat, own in groups for p in own}

    def gradient(p: Tensor) -> Tensor | None:
        flat, piece = pieces[p]
        return None if flat.grad is None else flat.grad[piece.start : piece.start + piece.numel].view_as(p)

    return gradient
