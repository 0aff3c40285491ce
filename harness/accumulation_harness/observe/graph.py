"""Between the root of a backward and the losses that it adds up: what they are multiplied by, and whether all are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import _disable_current_modes

from accumulation_harness.compare.readings import Constant
from accumulation_harness.observe.tensors import is_plain

MARK = "accumulation_harness"  # of the node of a known loss
MOST = 2048  # nodes that are looked at
JOINS = ("Stack", "Cat")
ADDS = ("Add", "Sub", *JOINS)
TURNS = ("Transpose", "Permute", "T")
VIEWS = ("View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", *TURNS)
PASSES = ("Sum", "Expand", "Neg", "_DDPSink", *VIEWS)


class Level(NamedTuple):
    """A tensor of which a multiple of each element is added up."""

    size: torch.Size
    factors: Tensor | None = None  # of each element, without those of its own below it that are no scalars; None: 1


class Way(NamedTuple):
    """From a root to something that it adds up: a known loss, or another value."""

    leaf: Any  # the node whose result it is
    number: int | None  # of the known loss
    constants: tuple[Constant, ...]  # divisors as they are written, and factors that may still be tensors on a device
    summed: Any = None  # the node whose elements are added; None: the leaf is a scalar
    levels: tuple[Level, ...] = ()  # from what is summed to the leaf; none where that is a scalar


def mark(tensor: Tensor, number: int, name: str = MARK) -> None:
    """Leave a number in a tensor's node of the graph, for `ways` and `marked` to find. Nothing is kept alive by it.

    Args:
        tensor: A tensor with a `grad_fn`.
        number: The number of a loss or a forward.
        name: The key; the default is that of losses.
    """
    node: Any = tensor.grad_fn
    node.metadata[name] = number


def marked(node: Any, name: str) -> int | None:
    """Read the mark of a node.

    Args:
        node: A node of the graph; None has no mark.
        name: The key that `mark` was given.

    Returns:
        The number at this node, or at the first node that it is a view or a copy of; None where there is none.
    """
    for _ in range(MOST):
        number = None if node is None else node.metadata.get(name)
        if node is None or number is not None or operation(node) not in VIEWS:
            return number
        node = next(iter(parents(node)), None)
    return None


def roots_of(root: Any) -> Sequence[Any]:
    """List what a backward begins at.

    Args:
        root: The argument of `backward`: a tensor, or several.

    Returns:
        The tensors.
    """
    return root if isinstance(root, (tuple, list)) else [root]


def ways(root: Any) -> list[Way]:
    """Follow a root through sums and products with constants down to the losses that it adds up.

    Args:
        root: The argument of `backward`: a tensor, or several.

    Returns:
        A way for each addend: to a marked loss (`number`), or to the first node that is anything else (`number` None).
    """
    waiting = [Way(t.grad_fn, None, ()) for t in roots_of(root) if is_plain(t) and t.grad_fn is not None]
    found: list[Way] = []
    while waiting:
        way = waiting.pop()
        number = way.leaf.metadata.get(MARK)
        further = list(below(way)) if number is None and len(found) + len(waiting) < MOST else []
        waiting += further
        if not further:
            found.append(way._replace(number=number))
    return found


def operation(node: Any) -> str:
    """Name the operation of a node.

    Args:
        node: A node of the graph.

    Returns:
        `Mul` of `MulBackward0`.
    """
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def parents(node: Any) -> list[Any]:
    """List the nodes that a node's gradients go to.

    Args:
        node: A node of the graph.

    Returns:
        One node for each operand that needs a gradient.
    """
    return [parent for parent, _ in node.next_functions if parent is not None]


def shape(node: Any) -> torch.Size:
    """Read the shape of a node's result.

    Args:
        node: A node of the graph.

    Returns:
        The shape of its first result.
    """
    return torch.Size(node._input_metadata[0].shape)


def are_apart(leaf: Any, name: str) -> bool | None:
    """Decide whether the elements of a result each depend on rows of their own of the marked tensors, as losses per sample do.

    The slopes of the two halves of its elements are then zero where the other half's are not. Only what PyTorch's own
    functions made, without hooks of the run's, is differentiated: nothing else of the run is called.

    Args:
        leaf: The node whose result, [n, ...], is asked about.
        name: The key of the marked tensors, see `mark`.

    Returns:
        True if no row of a marked tensor moves both halves, False if one does, None where that cannot be found out.
    """
    waiting, seen, reached = [leaf], set[Any](), []
    while waiting:
        node = waiting.pop()
        if name in node.metadata and node is not leaf:
            reached.append(node)
        elif isinstance(node, torch.autograd.function.BackwardCFunction) or node.metadata.keys() - {name} or len(seen) > MOST:
            return None
        else:
            new = set(parents(node)) - seen
            seen |= new
            waiting += new
    if not reached:
        return None
    number = shape(leaf).numel()
    half = number // shape(leaf)[0] * (shape(leaf)[0] // 2) or number // 2
    first = (torch.arange(number, device=leaf._input_metadata[0].device) < half).reshape(shape(leaf))
    try:
        slopes = [
            torch.autograd.grad(
                [GradientEdge(leaf, 0)], [GradientEdge(node, 0) for node in reached], [part.to(leaf._input_metadata[0].dtype)],
                retain_graph=True, allow_unused=True,
            )
            for part in (first, ~first)
        ]  # fmt: skip
    except RuntimeError:  # changed in place since
        return None
    touched = [[t.reshape(len(t), -1).any(-1) for t in pair] for pair in zip(*slopes, strict=True) if None not in pair]
    if not any(bool(rows.any()) for pair in touched for rows in pair):
        return None
    return all(len(one) == 1 or not bool((one & other).any()) for one, other in touched)


def leads_to(node: Any, name: str) -> bool:
    """Decide whether a node, or one that it was made of, is marked.

    Args:
        node: A node of the graph.
        name: The key of the mark, see `mark`.

    Returns:
        False if none is; True also where that is not known, since there are too many.
    """
    waiting, seen = [node], {node}
    while waiting:
        one = waiting.pop()
        if name in one.metadata or len(seen) > MOST:
            return True
        new = set(parents(one)) - seen
        seen |= new
        waiting += new
    return False


def below(way: Way) -> Iterator[Way]:
    """Take one step from a way's leaf towards the losses.

    Args:
        way: A way, see `ways`.

    Yields:
        The way prolonged to each operand that the leaf adds up or multiplies by a constant; nothing where it does something
        else.
    """
    kind, further = operation(way.leaf), parents(way.leaf)
    if kind in ADDS:
        plain = way.summed is None or way.levels[-1].factors is None or not way.levels[-1].factors.dim()
        if plain and (way.summed is None or kind in JOINS or any(map(_is_known, further))):
            yield from (_begun(way._replace(leaf=p), summed=way.summed is not None) for p in further)
        return
    if len(further) == 1:  # not both operands are trained
        (parent,) = further
        reaching = _above(way, kind, parent) if way.summed is None else _among_terms(way, kind, parent)
        if reaching is not None:
            yield reaching


def _above(way: Way, kind: str, parent: Any) -> Way | None:
    """A scalar is made of `parent`; None: in another way than by sums and constants."""
    constants = way.constants
    if kind == "Mean":
        constants += (Constant(float(way.leaf._saved_self_sym_numel), divides=True),)
    elif kind in ("Mul", "Div"):
        other = _other(way.leaf)
        if is_plain(other) and other.numel() == 1:
            constants += (Constant(_number(other), divides=kind == "Div"),)
    elif kind not in PASSES:
        return None
    return _begun(way._replace(leaf=parent, constants=constants), summed=kind in ("Mean", "Sum"))


def _begun(way: Way, *, summed: bool) -> Way:
    """`summed`: whether the elements of the leaf are, if it has several."""
    size = shape(way.leaf)
    return way._replace(summed=way.leaf, levels=(Level(size),)) if summed and size else way._replace(summed=None, levels=())


def _among_terms(way: Way, kind: str, parent: Any) -> Way | None:
    """Elements of a sum are made of those of `parent`; None: in another way than by constants, of each its own, and sums."""
    node, factors = way.leaf, way.levels[-1].factors
    if kind in ("Mean", "Sum"):
        sizes, dims = shape(parent), [dim % len(shape(parent)) for dim in map(_signed, getattr(node, "_saved_dim", ()))]
        if not dims or 0 in dims:  # rows are put together
            return None
        if kind == "Mean":
            factors = (1.0 if factors is None else factors) / math.prod(sizes[dim] for dim in dims) * torch.ones(())
        if factors is not None and factors.dim():
            for dim in () if node._saved_keepdim else sorted(dims):
                factors = factors.unsqueeze(dim)
            factors = factors.expand(sizes)
    elif kind in VIEWS and factors is not None and factors.dim():
        if kind in TURNS:
            return None
        factors = factors.reshape(shape(parent))
    elif kind == "Neg" or kind in VIEWS:
        pass
    elif shape(parent) != shape(node):  # it is made larger
        return None
    elif kind in ("Mul", "Div"):
        other = _other(node)
        if not is_plain(other):
            return None
        own = other.detach().double().reciprocal() if kind == "Div" else other.detach().double()
        if other.numel() == 1:
            constant = Constant(_number(other), divides=kind == "Div")
            scaled = [own.reshape(()) * (1.0 if level.factors is None else level.factors) for level in way.levels]
            levels = tuple(level._replace(factors=new) for level, new in zip(way.levels, scaled, strict=True))
            return way._replace(leaf=parent, constants=(*way.constants, constant), levels=levels)
        factors = _times(factors, own)
    elif kind == "Where":
        first = node.next_functions[0][0] is not None
        factors = _times(factors, (node._saved_condition if first else ~node._saved_condition).double())
    elif kind == "MaskedFill":
        factors = _times(factors, (~node._saved_mask).double())
    else:
        return None
    level = Level(shape(parent), factors)
    levels = (*way.levels, level) if factors is not way.levels[-1].factors or kind in ("Sum", "Mean") else way.levels
    return way._replace(leaf=parent, levels=levels)


def _times(factors: Tensor | None, own: Tensor) -> Tensor:
    """What elements are multiplied by. Factors of both signs are no weights of terms (advantages, say), but a part of them."""
    of_both = (own.amin() < 0) & (own.amax() > 0)
    first = factors is None or not factors.dim()
    weights = own.where(~of_both, (own != 0).double() if first else torch.ones_like(own))
    return weights if factors is None else factors * weights


def _is_known(node: Any) -> bool:
    """Whether it is a known loss, or a multiple of one."""
    while MARK not in node.metadata and operation(node) in (*PASSES, "Mul", "Div") and len(parents(node)) == 1:
        (node,) = parents(node)
    return MARK in node.metadata


def _other(node: Any) -> Any:
    other = _saved(node, "_saved_other")
    return _saved(node, "_saved_self") if other is None and operation(node) == "Mul" else other


def _signed(dim: int) -> int:
    return dim - 2**64 if dim >= 2**63 else dim


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
