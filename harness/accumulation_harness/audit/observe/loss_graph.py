"""What the graph of a loss shows before its backward: which rows it couples, and what each of its terms gives. Reads only."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumulation_harness.audit.evidence import Matrix, Term
from accumulation_harness.audit.observe.sample import by_position, sample_of
from accumulation_harness.observe.graph import ADDS, MOST, PASSES, Way, below, operation, parents, shape

LINEAR = ("Mul", "Div", "Mean", *PASSES)  # of one operand
LEAF = "torch::autograd::AccumulateGrad"
MOST_ROWS = 4  # of an output, whose slopes are asked what bends them: a row may have chosen another of its own micro-batch
MOST_TERMS = 64  # or as many as forwards made the loss, whose losses it may add up


class Couplings(NamedTuple):
    """What the second derivatives of a loss by a model's outputs are other than zero for."""

    rows: frozenset[tuple[str, str]] = frozenset()  # pairs of rows i = 0 or 1 and j, by their names
    elementwise: bool = False  # each element of an output with itself alone, as far as rows 0 show


def couplings(loss: Any, outputs: Sequence[tuple[Sequence[str], Tensor]]) -> Couplings:
    """Find the pairs of rows with d^2 loss / d out_i d out_j other than zero, and those that share a part of the loss.

    Both rows may be of one output or of two (towers). Rows without a name of their own (an output with another number of
    them) are called by their number in the output, and are coupled within it alone. Second derivatives may not exist, and are
    0 where a row chooses another one (the hardest negative): the parts then show it, where the loss is a sum over rows.

    Args:
        loss: A 0-dim tensor with its graph.
        outputs: Names of the rows, and the output [n, ...], of each forward.

    Returns:
        The pairs, and whether each row is alone.
    """
    if not isinstance(loss, Tensor) or not outputs:
        return Couplings()
    tensors = [output for _, output in outputs]
    try:
        slopes: tuple[Tensor | None, ...] = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
        found = {(touched[0], other) for touched in _in_parts(loss, outputs) for other in touched}
    except RuntimeError:
        return Couplings()
    alone: list[bool] = []
    for (names, output), slope in zip(outputs, slopes, strict=True):
        if slope is None:
            continue
        rows, named = output.shape[0], len(names) == output.shape[0]
        called = names if named else [f"row {place} of {rows}" for place in range(rows)]
        try:
            some = _rows_of(slope) if slope.requires_grad and rows > 1 else []
            for row in some[:: -(-len(some) // MOST_ROWS) or 1]:
                bends = torch.autograd.grad(slope[row].square().sum(), tensors, retain_graph=True, allow_unused=True)
                for (others, other), bend in zip(outputs, bends, strict=True):
                    of_other = called if other is output else others if named and len(others) == other.shape[0] else ()
                    found |= {(called[row], of_other[place]) for place in _rows_of(bend) if of_other}
            alone.append(_by_element(slope, output))
        except RuntimeError:  # no second derivative: nothing is known
            alone.append(False)
    found = {(a, b) for a, b in found if a != b}
    return Couplings(frozenset(found), bool(alone) and all(alone) and not found)


def _in_parts(loss: Tensor, outputs: Sequence[tuple[Sequence[str], Tensor]]) -> Iterator[list[str]]:
    """The rows of outputs that one row of an addend of the loss is made of, where the addend is a sum over rows."""
    named = [(names, output) for names, output in outputs if len(names) == output.shape[0] > 1]
    addends, made = _terms(loss) or [loss.grad_fn], {output.grad_fn for _, output in named}
    for addend in addends:
        rest = dict.fromkeys((node for node in addends if node is not addend), _nothing)
        for count in dict.fromkeys(len(names) for names, _ in named):
            for row in range(0, count, -(-count // MOST_ROWS)):
                one = {_below_reductions(addend, made): partial(_one_row, row, count)}
                slopes = _changed(loss, [output for _, output in named], rest | one)
                yield [names[place] for (names, _), slope in zip(named, slopes, strict=True) for place in _rows_of(slope)]


def _below_reductions(node: Any, made: Container[Any] = ()) -> Any:
    """The first operation below multiplications by constants and reductions, and above those that have made outputs."""
    below = parents(node)
    further = operation(node) in LINEAR and len(below) == 1 and below[0].name() != LEAF and below[0] not in made
    return _below_reductions(below[0], made) if further else node


def _one_row(row: int, count: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Of what has so many rows one alone, of anything else nothing."""
    kept = [None if g is None else torch.zeros_like(g) for g in gradients]
    for to, g in zip(kept, gradients, strict=True):
        if to is not None and g is not None and g.ndim and g.shape[0] == count:
            to[row] = g[row]
    return tuple(kept)


def _by_element(slope: Tensor, output: Tensor) -> bool:
    """Whether the slope by the element of the first row where it is largest depends on that element alone."""
    if not slope.requires_grad:
        return True
    place = int(slope[0].detach().abs().argmax())
    (bend,) = torch.autograd.grad(slope[0].reshape(-1)[place], output, retain_graph=True, allow_unused=True)
    return bend is None or bend.reshape(-1).nonzero().flatten().tolist() in ([], [place])


def coupled_copies(loss: Any, parameters: Container[int]) -> int:
    """Count the rows whose copies bend the slope of the first.

    That is for a loss that is differentiated by copies of representations alone, as cached losses are: what is
    differentiated by the parameters afterwards is linear in the model's outputs.

    Args:
        loss: A 0-dim tensor with its graph.
        parameters: The ids of the model's parameters.

    Returns:
        The number of rows; 0 where nothing is known.
    """
    copies = _leaves(loss.grad_fn) if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    if not copies or any(id(copy) in parameters or not copy.ndim for copy in copies):
        return 0
    try:
        (slope,) = torch.autograd.grad(loss, copies[:1], create_graph=True)
        if not slope.requires_grad:
            return 0
        bends = torch.autograd.grad(slope[0].square().sum(), copies, retain_graph=True, allow_unused=True)
    except RuntimeError:  # no second derivative: nothing is known
        return 0
    return sum(len([row for row in _rows_of(bend) if place or row]) for place, bend in enumerate(bends))


def _rows_of(bend: Tensor | None) -> list[int]:
    """The rows that are not zero."""
    return [] if bend is None else (bend.reshape(len(bend), -1).abs().amax(1) > 0).nonzero().flatten().tolist()


def _leaves(root: Any) -> list[Tensor]:
    """The tensors that the graph of a loss begins with, in the order in which they are met."""
    waiting, seen, found = [root], {root}, []
    while waiting:
        node = waiting.pop(0)
        found += [node.variable] if node.name() == LEAF else []
        new = [parent for parent in dict.fromkeys(parents(node)) if parent not in seen]
        waiting += new
        seen.update(new)
    return found


def mixes_rows(outputs: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether out_i, for some row i = 0 or 1 of an output, depends on another row of what other modules made.

    Args:
        outputs: Outputs of modules, [n, ...].
        made: What other modules gave, [n, ...].

    Returns:
        True where one does.
    """
    for output in outputs:
        inside = [t for t in made if t is not output and t.shape[0] == output.shape[0] > 1]
        for row in range(2 if inside else 0):
            try:
                slopes = torch.autograd.grad(output[row].square().sum(), inside, retain_graph=True, allow_unused=True)
            except RuntimeError:  # changed in place, or freed: nothing is known
                break
            others = torch.arange(output.shape[0]) != row
            if any(slope is not None and bool(slope[others].abs().max() > 0) for slope in slopes):
                return True
    return False


def gradients_by_term(loss: Any, parameters: Sequence[Tensor], forwards: int = 1) -> Iterator[Term]:
    """Differentiate each addend of a loss, in order, by cutting the graph at all others.

    Args:
        loss: A 0-dim tensor with its graph.
        parameters: By what it is differentiated.
        forwards: How many forwards have made it.

    Yields:
        Name, gradient and coefficient of an addend; nothing where the loss is not a sum.
    """
    sample, nodes = sample_of(parameters), _terms(loss, forwards)
    for node, name, found in zip(nodes, term_names(loss, forwards), _each_alone(loss, parameters, forwards), strict=True):
        yield Term(name, sample.take(found), *_way(loss.grad_fn, _below_reductions(node)))


def _way(root: Any, term: Any) -> tuple[float, float, str]:
    """The product of the constants between a loss and a term of it, and the operations there; NaN where no way leads there.

    The first product is NaN, too, where a sum of elements is divided: the same number at every N is then that of the window, by
    which each part is divided.

    Returns:
        The product where it can be compared, the product, and the operations with their numbers.
    """
    waiting = [(root, 1.0, False, True, "")]
    for _ in range(MOST):
        if not waiting:
            break
        node, factor, divided, comparable, path = waiting.pop()
        path += operation(node)
        if node is term:
            return factor if comparable else math.nan, factor, path
        elements = operation(node) == "Sum" and any(shape(parent).numel() > 1 for parent in parents(node))
        for way in below(Way(node, None, ())):
            some = way.constants if operation(node) != "Mean" else ()  # that divides by a number of elements: the term's own
            product = factor * math.prod(_times(float(c.factor), divides=c.divides) for c in some)
            by_number = divided or any(c.divides and c.factor != 1 for c in some)
            numbers = "".join(f" by {float(c.factor):.4g}" for c in some)
            waiting.append((way.leaf, product, by_number, comparable and not (divided and elements), f"{path}{numbers} > "))
    return math.nan, math.nan, ""


def _times(number: float, *, divides: bool) -> float:
    """By what it multiplies: a loss of no terms at all may be divided by 0 of them."""
    return number if not divides else 1 / number if number else math.inf


def _each_alone(loss: Any, tensors: Sequence[Tensor], forwards: int) -> Iterator[list[Tensor | None]]:
    """What each addend of the loss gives to these tensors."""
    nodes = _terms(loss, forwards)
    return (_changed(loss, tensors, dict.fromkeys((node for node in nodes if node is not kept), _nothing)) for kept in nodes)


def term_names(loss: Any, forwards: int = 1) -> tuple[str, ...]:
    """What autograd calls the addends of the loss, in order; empty where it is not a sum.

    Args:
        loss: The loss, a scalar tensor.
        forwards: Forwards of the window so far.

    Returns:
        Names of operations.
    """
    return tuple(operation(_below_reductions(node)) for node in _terms(loss, forwards))


def _terms(loss: Any, forwards: int = 1) -> list[Any]:
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return []
    most = max(MOST_TERMS, forwards)
    nodes = list(dict.fromkeys(_addends(loss.grad_fn, most)))
    return nodes if 1 < len(nodes) <= most else []


def slopes_by_term(
    loss: Any, outputs: Sequence[tuple[Sequence[str], Tensor]], forwards: int = 1
) -> list[dict[tuple[int, str], Matrix]]:
    """Take each addend's slope by every row of the outputs: (number of the output, name of the row) -> [positions, features].

    Args:
        loss: The loss, a scalar tensor.
        outputs: Names of rows, and the output [n, ...] that holds them.
        forwards: Forwards of the window so far.

    Returns:
        One mapping for each addend.
    """
    named = [(names, output) for names, output in outputs if len(names) == output.shape[0]]
    slopes = _each_alone(loss, [output for _, output in named], forwards) if named else ()
    return [
        {
            (place, name): by_position(torch.zeros_like(row) if slope is None else slope[index])
            for place, ((names, output), slope) in enumerate(zip(named, of_one, strict=True))
            for index, (name, row) in enumerate(zip(names, output, strict=True))
        }
        for of_one in slopes
    ]


def _addends(node: Any, most: int) -> list[Any]:
    """The nodes below additions and multiplications by constants, none of which another one of them needs."""
    below, kind = parents(node), operation(node)
    if not below or any(parent.name() == LEAF for parent in below):  # cut at a parameter, all terms would lose it
        return [node]
    if kind in ADDS or (kind in LINEAR and len(below) == 1):
        found = list(dict.fromkeys(addend for parent in below for addend in _addends(parent, most)))
        if len(found) > 1 and (len(found) > most or not _share(found)):
            return found
    return [node]


def _share(nodes: Sequence[Any]) -> bool:
    """Whether one of these nodes is needed by another one: cutting the graph at it would cut both."""
    waiting, seen = [parent for node in nodes for parent in parents(node)], set()
    while waiting:
        node = waiting.pop()
        if node in nodes:
            return True
        if node not in seen:
            seen.add(node)
            waiting += parents(node)
    return False


def _changed(loss: Tensor, parameters: Sequence[Tensor], changes: Mapping[Any, Callable[..., Any]]) -> list[Tensor | None]:
    """Gradients by the parameters, where what comes to some nodes is made something else."""
    asked = [p for p in parameters if p.requires_grad]
    handles = [node.register_prehook(change) for node, change in changes.items()]
    try:
        found = torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    given = {id(p): gradient for p, gradient in zip(asked, found, strict=True)}
    return [given.get(id(p)) for p in parameters]


def _nothing(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)
