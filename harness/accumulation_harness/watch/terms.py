"""Loss terms that no loss function has told: the elements of a tensor that the graph of a loss shows to be added up.

A loss L = c * sum_i m_i t_i is linear in its terms t: c is the gradient that the summed tensor receives, and the factors m are
in the graph. A mask's factors say which elements are terms, of weight c each; where unequal rows are averaged first, the terms
are the rows, and the factors of each row add up to the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accumulation_harness.compare.readings import Constant
from accumulation_harness.observe.graph import Way
from accumulation_harness.watch.slopes import Loss, Slope


def spread(base: Slope, weights: Tensor, rows: int) -> Iterator[Slope]:
    """Find what may be the terms of a loss where elements have weights of their own.

    Those elements that weigh anything, or the rows that do: means of their elements, or sums.

    Args:
        base: The loss as it was read.
        weights: Weight of each element, [n] or [n, ...].
        rows: How many rows there are, where the elements of all are in one.

    Yields:
        The loss with elements as terms, then twice with rows as terms where there are several elements in each.
    """
    elements, rows = weights.reshape(-1).double(), len(weights) if weights.dim() > 1 else rows
    yield (every := _alike(base, elements))
    if 0 < rows < elements.numel() and elements.numel() % rows == 0:
        of_rows = elements.reshape(rows, -1)
        yield _alike(base, of_rows.sum(-1))
        yield every._replace(terms=(there := (of_rows != 0).any(-1).double()).sum(), share=there.mean())


def _alike(base: Slope, weights: Tensor) -> Slope:
    there = weights != 0
    terms = there.sum(dtype=torch.float64)
    weight = weights.sum() / terms
    residual = ((weights - weight) * there).norm() / weights.norm()
    share = terms / weights.numel()
    found = {"weight": weight.abs(), "residual": residual, "terms": terms, "share": share}
    return base._replace(value=None, picked=True, **found)


def _of_places(elements: Slope, size: torch.Size, constants: Sequence[Constant]) -> Slope:
    """Terms may be all places, used or not: of a sum that is divided by a whole number for each row, and no smaller one."""
    numbers = [c.factor for c in constants if c.divides and isinstance(c.factor, float) and c.factor >= size.numel()]
    number = next((one for one in numbers if len(size) > 1 and one % size[0] == 0), None)
    residual = elements.residual if number is not None else torch.full_like(elements.residual, torch.inf)
    return elements._replace(terms=torch.full_like(elements.terms, number or 1), residual=residual, share=None, fixed=True)


class Said(NamedTuple):
    """What the loop says of the next loss."""

    terms: float
    summed: bool  # and not averaged over them

    def number(self, beside: Tensor) -> Tensor:
        """On the device of a tensor."""
        return torch.tensor(self.terms, dtype=torch.float64, device=beside.device)

    def counted(self, form: Slope) -> Slope:
        """A form that fits only with so many terms."""
        return form._replace(residual=form.residual.where(form.terms == self.number(form.terms), torch.inf))


def of_its_own(received: Tensor, way: Way, rows: int, said: Said | None) -> list[Slope]:
    """List what the terms of a loss of the run's own may be.

    Args:
        received: The gradient of what is summed, the same for all its elements.
        way: From the root of the backward to what is summed.
        rows: How many rows the loss has.
        said: What the run has said of its terms (`seen.terms`).

    Returns:
        The possible forms.
    """
    with torch.no_grad():
        u = received.detach().reshape(-1).double()
        size = way.levels[-1].size if way.levels else torch.Size()
        of_all: dict[str, Any] = {"dtype": received.dtype, "constants": way.constants, "rows": size[0] if size else rows}
        base = Slope(Loss.own, *(None,) * 5, **of_all, classes=size[-1] if said is None and len(size) > 2 else 1)
        unequal = (u.amax() - u.amin()) / u.abs().amax()  # something else hangs on it as well
        off = unequal + torch.finfo(received.dtype).eps / 4  # of what a tolerance is four times
        levels = [u.mean() * torch.ones(of, device=u.device) * (1.0 if f is None else f) for of, f in way.levels]
        if said is None:
            forms = [form for level in reversed(levels) for form in spread(base, level, rows)]
            forms.append(_of_places(forms[0], size, way.constants))
            return [form._replace(residual=form.residual + off) for form in forms]
        number = said.number(u)
        forms = [
            form._replace(residual=form.residual + off) for form in (_alike(base, weights.reshape(-1)) for weights in levels)
        ]
        counted = [said.counted(form) for form in forms]
        whole = base._replace(weight=u.abs().sum() / (1.0 if said.summed else number), residual=off, terms=number)
        return [*counted, *(form._replace(terms=number) for form in forms), whole]
