"""Between the root of a backward and the losses that it adds up: what they are multiplied by, and whether all are known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from accumulation_harness.compare.readings import Constant
from accumulation_harness.observe.tensors import is_plain

MARK = "accumulation_harness"  # of the node of a known loss
MOST = 2048  # nodes that are looked at
ADDS = ("Add", "Sub", "Stack", "Cat")
VIEWS = (
    "View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T", "ToCopy", "Clone",
    "Alias",
)  # fmt: skip
PASSES = ("Sum", "Expand", "Neg", "_DDPSink", *VIEWS)


class Way(NamedTuple):
    """From a root to a known loss."""

    number: int  # of the loss
    constants: tuple[Constant, ...]  # divisors as they are written, and factors that may still be tensors on a device


def mark(tensor: Tensor, number: int, name: str = MARK) -> None:
    """Let `ways` recognise a loss, and `marked` a tensor. Nothing is kept alive."""
    node: Any = tensor.grad_fn
    node.metadata[name] = number


def marked(node: Any, name: str) -> int | None:
    """The mark of a node, or of the first one that it is a view or a copy of."""
    for _ in range(MOST):
        number = None if node is None else node.metadata.get(name)
        if node is None or number is not None or operation(node) not in VIEWS:
            return number
        node = next(iter(parents(node)), None)
    return None


def ways(root: Any) -> tuple[list[Way], bool]:
    """The known losses that a root adds up, and whether it has other terms beside them."""
    roots = [t for t in (root if isinstance(root, (tuple, list)) else [root]) if is_plain(t)]
    waiting: list[tuple[Any, tuple[Constant, ...]]] = [(t.grad_fn, ()) for t in roots if t.grad_fn is not None]
    found, others, looked = [], False, 0
    while waiting:
        node, constants = waiting.pop()
        looked += 1
        number = node.metadata.get(MARK)
        if isinstance(number, int):
            found.append(Way(number, constants))
            continue
        further = list(below(node, constants)) if looked < MOST else []
        others = others or not further
        waiting += further
    return found, others


def operation(node: Any) -> str:
    """`Mul` of `MulBackward0`."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def parents(node: Any) -> list[Any]:
    """What its gradients go to."""
    return [parent for parent, _ in node.next_functions if parent is not None]


def below(node: Any, constants: tuple[Constant, ...]) -> Iterator[tuple[Any, tuple[Constant, ...]]]:
    """What a node adds up or multiplies by a constant; nothing where it does something else."""
    kind, further = operation(node), parents(node)
    more: tuple[Constant, ...] = ()
    if kind == "Mean":
        more = (Constant(float(node._saved_self_sym_numel), divides=True),)
    elif kind in ("Mul", "Div"):
        if len(further) != 1:  # both operands are trained
            return
        other = _saved(node, "_saved_other")
        other = _saved(node, "_saved_self") if other is None and kind == "Mul" else other
        if is_plain(other) and other.numel() == 1:
            more = (Constant(_number(other), divides=kind == "Div"),)
    elif kind not in ADDS and kind not in PASSES:
        return
    yield from ((parent, constants + more) for parent in further)


def _saved(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError:  # changed in place, or freed
        return None


def _number(tensor: Tensor) -> Any:
    """On the host where that takes no waiting for a device. A mode of the run's (one that counts operations) is not asked."""
    if tensor.device.type != "cpu":
        return tensor.detach().reshape(1)
    with _disable_current_modes():
        return float(tensor)
