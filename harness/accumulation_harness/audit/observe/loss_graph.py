"""What the graph of a loss shows before its backward: which rows it couples, and what each of its terms gives. Reads only."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumulation_harness.audit.evidence import Matrix, Vector
from accumulation_harness.audit.observe.sample import by_position, sample_of
from accumulation_harness.observe.graph import ADDS, PASSES, operation, parents

LINEAR = ("Mul", "Div", "Mean", *PASSES)  # of one operand
LEAF = "torch::autograd::AccumulateGrad"
MOST_TERMS = 64  # or as many as forwards made the loss, whose losses it may add up


class Couplings(NamedTuple):
    """What the second derivatives of a loss by a model's outputs are other than zero for."""

    rows: frozenset[tuple[str, str]] = frozenset()  # pairs of rows i = 0 or 1 and j, by their names
    elementwise: bool = False  # each element of an output with itself alone, as far as rows 0 show


def couplings(loss: Any, outputs: Sequence[tuple[Sequence[str], Tensor]]) -> Couplings:
    """The pairs of rows with d^2 loss / d out_i d out_j other than zero; nothing is known where that cannot be taken.

    Rows without a name of their own (an output with another number of them) are called by their number in the output.
    """
    found: set[tuple[str, str]] = set()
    alone: list[bool] = []
    for names, output in outputs if isinstance(loss, Tensor) else ():
        rows = output.shape[0]
        called = names if len(names) == rows else [f"row {place} of {rows}" for place in range(rows)]
        try:
            (slope,) = torch.autograd.grad(loss, output, create_graph=True, allow_unused=True)
            for row in range(min(2, rows)):
                if slope is None or not slope.requires_grad or rows < 2:
                    break
                (bend,) = torch.autograd.grad(slope[row].square().sum(), output, retain_graph=True, allow_unused=True)
                found |= {(called[row], called[other]) for other in _rows_of(bend) if other != row}
            alone += [_by_element(slope, output)] if slope is not None else []
        except RuntimeError:  # no second derivative: nothing is known
            alone.append(False)
    return Couplings(frozenset(found), bool(alone) and all(alone) and not found)


def _by_element(slope: Tensor, output: Tensor) -> bool:
    """Whether the slope by the element of the first row where it is largest depends on that element alone."""
    if not slope.requires_grad:
        return True
    place = int(slope[0].detach().abs().argmax())
    (bend,) = torch.autograd.grad(slope[0].reshape(-1)[place], output, retain_graph=True, allow_unused=True)
    return bend is None or bend.reshape(-1).nonzero().flatten().tolist() in ([], [place])


def coupled_copies(loss: Any, parameters: Container[int]) -> int:
    """Rows whose copies bend the slope of the first, where a loss is differentiated by copies of representations alone.

    Cached losses do that: what is differentiated by `parameters` (ids) afterwards is linear in the model's outputs.
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
    return [] if bend is None else bend.reshape(len(bend), -1).abs().amax(1).nonzero().flatten().tolist()


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
    """Whether out_i, for some row i = 0 or 1 of an output, depends on another row of what modules inside the model made."""
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


def gradients_by_term(loss: Any, parameters: Sequence[Tensor], forwards: int = 1) -> list[Vector]:
    """[P] of each addend of a loss, in order, by cutting the graph at all others; empty where it is not a sum.

    `forwards`: how many have made it.
    """
    sample = sample_of(parameters)
    return [sample.take(found) for found in _each_alone(loss, parameters, forwards)]


def _each_alone(loss: Any, tensors: Sequence[Tensor], forwards: int) -> Iterator[list[Tensor | None]]:
    """What each addend of the loss gives to these tensors."""
    nodes = _terms(loss, forwards)
    return (_with_only(loss, tensors, [node for node in nodes if node is not kept]) for kept in nodes)


def term_names(loss: Any) -> tuple[str, ...]:
    """What autograd calls the addends of the loss, in order; empty where it is not a sum."""
    return tuple(_called(node) for node in _terms(loss))


def _called(node: Any) -> str:
    """The first operation below multiplications by constants and reductions."""
    below = parents(node)
    return _called(below[0]) if operation(node) in LINEAR and len(below) == 1 and below[0].name() != LEAF else operation(node)


def _terms(loss: Any, forwards: int = 1) -> list[Any]:
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        return []
    most = max(MOST_TERMS, forwards)
    nodes = list(dict.fromkeys(_addends(loss.grad_fn, most)))
    return nodes if 1 < len(nodes) <= most else []


def slopes_by_term(
    loss: Any, outputs: Sequence[tuple[Sequence[str], Tensor]], forwards: int = 1
) -> list[dict[tuple[int, str], Matrix]]:
    """Of each addend by every row of the outputs: (number of the output, name of the row) -> slope [positions, features]."""
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


def _with_only(loss: Tensor, parameters: Sequence[Tensor], cut: Sequence[Any]) -> list[Tensor | None]:
    asked = [p for p in parameters if p.requires_grad]
    handles = [node.register_prehook(_nothing) for node in cut]
    try:
        found = torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    given = {id(p): gradient for p, gradient in zip(asked, found, strict=True)}
    return [given.get(id(p)) for p in parameters]


def _nothing(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else torch.zeros_like(g) for g in gradients)
