"""The weight of every loss term, read from the slope of the loss at the logits: no labels and no second pass are needed.

For cross-entropy the slope of row i is g_i = c_i (softmax(z_i) - e_y), with y = argmin g_i. Where all rows of a micro-batch weigh
alike, c = <g, p> / ||p||^2 with p_i = softmax(z_i) - e_y, and the residual ||g - c p|| / ||g|| says whether it was such a loss.
Likewise for label smoothing (which adds one unknown) and binary cross-entropy (g = c (sigmoid(z) - y), y from the sign of g).
Where one of PyTorch's loss functions was called, the gradient that its result receives says the same, at no cost: c = u / n of a
mean over n terms, c = u of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accumulation_harness.compare.readings import Constant
from accumulation_harness.system.enums import StrEnum

PIECE = 1 << 22  # logits that are looked at together
FEWEST = 4  # degrees of freedom that are left when a form has been fitted: below, anything fits
FITS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}  # residual by the dtype of the slope


class Loss(StrEnum):
    """The losses whose slopes are known."""

    cross_entropy = "cross-entropy"
    smoothed = "cross-entropy, label smoothing"
    binary = "binary cross-entropy"
    squared = "squared error"
    absolute = "absolute error"
    smooth = "smooth absolute error"
    huber = "Huber loss"
    divergence = "Kullback-Leibler divergence"
    gaussian = "Gaussian likelihood"
    poisson = "Poisson likelihood"
    soft_margin = "soft margin"
    margin = "margin loss"
    sequences = "CTC"
    own = "a loss of the run's own, whose terms the graph shows"


class Bend(NamedTuple):
    """What hooks make of the gradient of a tensor between the losses and the parameters: numbers as those of a `Slope`."""

    factor: Any
    off: Any  # ||after - factor before|| / ||after||, in what the format explains


class Slope(NamedTuple):
    """A loss in one backward, as its gradient shows it: tensors on their device, later numbers; None, later NaN: not known."""

    kind: Loss | None  # None: not a known one
    weight: Any  # of each loss term
    residual: Any
    terms: Any  # how many
    positions: Any  # rows of logits, padding included
    value: Any  # of the sum of the terms
    freedom: Any = None  # degrees that are left when the form has been fitted
    apart: Any = None  # the residual where each row has a weight of its own
    diagonal: Any = None  # whether row i has the class i, of as many as there are rows
    labels: Any = None  # a number that other labels, or another order of them, change, or that all targets are; NaN: neither
    bend: Any = None  # by hooks on the logits: its number, then what it is, later what it multiplies the weight by
    rows: int = 0  # samples
    dtype: torch.dtype | None = None  # of the logits and their slope; None: a loss function was called
    classes: int = 1  # of the logits
    constants: tuple[Constant, ...] | None = None  # on the way from the root of the backward; None: not seen
    calls: int = 1  # of the loss function
    form: int = 0  # which of those that the graph shows
    share: Any = None  # of the elements that are terms, where a mean may be taken over all of them
    picked: bool = False  # what its terms are is read from weights that are zero elsewhere
    counted: bool = False  # and the graph divides by their number
    fixed: bool = False  # its terms are places, used or not, as many for every row
    ragged: bool = False  # a known loss, whose terms weigh unequally within the micro-batch

    def joined(self, other: Slope) -> Slope:
        """Both as one loss: its terms weigh alike."""
        added = {name: getattr(self, name) + getattr(other, name) for name in ("terms", "positions", "rows", "value", "calls")}
        return self._replace(**added, residual=max(self.residual, other.residual), labels=math.nan)

    @property
    def multipliers(self) -> tuple[Constant, ...] | None:
        """All that the loss may have been multiplied by."""
        of_share = () if self.share in (None, 1.0) or math.isnan(self.share) else (Constant(self.share),)
        return None if self.constants is None else (*self.constants, *of_share)

    def on_host(self, scale: float) -> Slope:
        """The same in numbers, of vectors of one; `scale`: of the loss, which is no constant of its own."""
        found: dict[str, Any] = {name: number(getattr(self, name)) for name in NUMBERS}
        bend = 1.0 if self.bend is None else number(self.bend.factor)
        constants = None if self.constants is None else tuple(_constants(self.constants, scale))
        if self.kind is Loss.own and constants is not None:  # whose sign is its own
            constants = tuple(constant._replace(factor=abs(constant.factor)) for constant in constants)
        return self._replace(**found, diagonal=number(self.diagonal) == 1, bend=bend, constants=constants)


NUMBERS = ("weight", "residual", "terms", "positions", "value", "freedom", "apart", "labels", "share")
Forms = Sequence[Slope]  # that one loss may have


def number(found: Any) -> float:
    """Read a number that was copied to the host.

    Args:
        found: A vector of one, or None.

    Returns:
        NaN of None.
    """
    return math.nan if found is None else float(found[0])


def _constants(found: Sequence[Constant], scale: float) -> Iterator[Constant]:
    for factor, divides in found:
        factor = factor if isinstance(factor, float) else number(factor)
        if factor and factor not in (1.0, scale):
            yield Constant(1 / factor if divides else factor, divides)


class Taken(NamedTuple):
    """What a backward has shown of its losses."""

    slopes: Sequence[Forms] | None  # None where none was looked at
    fed: bool  # whether inputs were made of parameters
    forwards: int
    others: bool  # terms beside those that are known
    bends: Sequence[Bend]  # their factors where no head has them
    own: Sequence[Forms] = ()  # of losses of the run's own, where the graph shows all that the loss adds up
    said: bool = False  # whether the loop has said how many terms they have


def bent(before: Tensor, after: Tensor) -> Bend:
    """Find the factor f that is best in after = f before, by least squares.

    Args:
        before: A gradient of any shape.
        after: The same after a hook.

    Returns:
        f = <before, after> / ||before||^2, and ||after - f before|| / ||after|| over what the format resolves.
    """
    with torch.no_grad():
        a, b = before.reshape(-1).float(), after.reshape(-1).float()
        factor = torch.dot(a, b) / torch.dot(a, a)
        return Bend(factor.reshape(1), ((b - factor * a).norm() / b.norm() / FITS.get(after.dtype, 1e-3)).reshape(1))


def measured(z: Tensor, g: Tensor) -> Forms:
    """List the losses that a gradient at logits may belong to.

    Args:
        z: [..., classes] logits.
        g: [..., classes] the gradient of the loss by them.

    Returns:
        The forms, on their device; `chosen` chooses on the host.
    """
    with torch.no_grad():
        classes = z.shape[-1] if z.dim() > 1 else 1  # with two, neither form can be excluded from few rows
        found = _classes(z.reshape(-1, classes), g.reshape(-1, classes)) if classes > 1 else ()
        return [*found, _binary(z.reshape(-1), g.reshape(-1))]


class Pieces:
    """What is computed of logits and their slope, so many rows at once that copies of all of them are never there together."""

    def __init__(self, of: Callable[[Tensor, Tensor], Sequence[Tensor]], z: Tensor, g: Tensor) -> None:
        rows = max(1, PIECE * len(z) // max(1, z.numel()))
        self.of, self.pairs = of, list(zip(z.split(rows), g.split(rows), strict=True))
        self.kept = [self._taken(*self.pairs[0])] if len(self.pairs) == 1 else None

    def _taken(self, z: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return (g.float(), *self.of(z.float(), g.float()))

    def sums(self, terms: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        """Of each of the tensors that `terms` makes of a piece, in double precision."""
        pieces = self.kept or (self._taken(*pair) for pair in self.pairs)
        found = [torch.stack([t.sum(dtype=torch.float64) for t in terms(*piece)]) for piece in pieces]
        return torch.stack(found).sum(0).unbind()


def _classes(z: Tensor, g: Tensor) -> Forms:
    """`z` and `g` [rows, classes]."""
    classes, labels = z.shape[-1], list[Tensor]()

    def of(z: Tensor, g: Tensor) -> Sequence[Tensor]:
        logs, y = torch.log_softmax(z, -1), g.argmin(-1, keepdim=True)
        kept = (g.abs().amax(-1, keepdim=True) > 0).to(g.dtype)
        target = torch.zeros_like(g).scatter(-1, y, kept)
        return logs, y, kept, target

    def plain(logs: Tensor, kept: Tensor, target: Tensor) -> Tensor:
        return logs.exp() * kept - target

    def first(g: Tensor, logs: Tensor, y: Tensor, kept: Tensor, target: Tensor) -> Sequence[Tensor]:
        p, off, even = plain(logs, kept, target), kept - target, kept / classes - target
        own = (g * p).sum(-1, keepdim=True) / p.square().sum(-1, keepdim=True)  # each row by itself
        labels.append(y.squeeze(-1))
        unlike = (g - own.nan_to_num() * p).square()
        return (
            kept, off, off * logs.exp(), off * g, g * p, p.square(), g * even, p * even, even.square(), g.square(), unlike,
            -target * logs, -kept * logs / classes,
        )  # fmt: skip

    pieces = Pieces(of, z, g)
    num, n, mp, mg, gp, pp, ge, pe, ee, gg, unlike, hit, evenly = pieces.sums(first)
    mp, mg, c = mp / n, mg / n, gp / pp

    # label smoothing: g = c (p - eps / C) off the target, a line through two unknowns; one without smoothing goes through 0
    def second(g: Tensor, logs: Tensor, y: Tensor, kept: Tensor, target: Tensor) -> Sequence[Tensor]:
        off, far = kept - target, logs.exp() - mp.float()
        return off * far * (g - mg.float()), off * far.square(), (g - c.float() * plain(logs, kept, target)).square()

    cov, var, left = pieces.sums(second)
    slope = cov / var
    smoothing = ((slope * mp - mg) * classes / slope).clamp(0, 0.999)
    smooth = (gp - smoothing * ge) / (pp - 2 * smoothing * pe + smoothing.square() * ee)

    def third(g: Tensor, logs: Tensor, y: Tensor, kept: Tensor, target: Tensor) -> Sequence[Tensor]:
        p = plain(logs, kept, target) - smoothing.float() * (kept / classes - target)
        return ((g - smooth.float() * p).square(),)

    (left_smooth,) = pieces.sums(third)
    of_both: dict[str, Any] = {
        "terms": num,
        "positions": torch.tensor(z.shape[0]),
        "freedom": num * (classes - 1) - 1,
        "apart": (unlike / gg).sqrt(),
        "diagonal": _diagonal(torch.cat(labels), classes),
    }
    smoothed = (1 - smoothing) * hit + smoothing * evenly
    return [
        Slope(Loss.cross_entropy, c, (left / gg).sqrt(), value=hit, **of_both),
        Slope(Loss.smoothed, smooth, (left_smooth / gg).sqrt(), value=smoothed, **of_both),
    ]


def _binary(z: Tensor, g: Tensor) -> Slope:
    """`z` and `g` [numbers]."""

    def of(z: Tensor, g: Tensor) -> Sequence[Tensor]:
        target, there = (g < 0).float(), (g != 0).float()
        losses = functional.binary_cross_entropy_with_logits(z, target, reduction="none")
        return (torch.sigmoid(z) - target) * there, there, losses * there

    pieces = Pieces(of, z, g)
    gp, pp, gg, num, value = pieces.sums(lambda g, p, there, losses: (g * p, p.square(), g.square(), there, losses))
    c = gp / pp
    (left,) = pieces.sums(lambda g, p, *_: ((g - c.float() * p).square(),))
    return Slope(Loss.binary, c, (left / gg).sqrt(), num, torch.tensor(z.numel()), value, freedom=num - 1)


def _diagonal(y: Tensor, classes: int) -> Tensor:
    if len(y) not in (classes, classes // 2) or classes < 3:
        return torch.tensor(0.0)
    return (y == torch.arange(len(y), device=y.device)).all().float()


def received(kind: Loss, u: Tensor, loss: Tensor, reduction: str, own: Tensor | int) -> Slope:
    """Read from the gradient of a loss function's result how its terms are weighed.

    Unreduced losses of which a mask takes some have a residual: whether that is padding or a choice of rows is not known.

    Args:
        kind: Which loss it is.
        u: The gradient of the result: 0-dim, or [n] if unreduced.
        loss: The result, of the same shape.
        reduction: As the loss function was given it.
        own: What each term counts, [n], or the number of terms.

    Returns:
        Weight, value and number of the terms.
    """
    with torch.no_grad():
        u, loss = u.detach().reshape(-1).double(), loss.reshape(-1).double()
        residual = torch.zeros((), dtype=torch.float64, device=u.device)
        total = own.sum(dtype=torch.float64) if isinstance(own, Tensor) else torch.tensor(float(own), device=u.device)
        if reduction == "none":
            counted = own if isinstance(own, Tensor) else torch.ones_like(u)
            weight, value = (u * counted).sum() / total, loss.sum()
            residual = ((u - weight) * counted).norm() / (u * counted).norm()
        else:
            weight, value = (u / total, loss * total) if reduction == "mean" else (u, loss)
        positions = torch.tensor(len(own) if isinstance(own, Tensor) else own)
        return Slope(kind, weight, residual, total, positions, value)


def constantly(slope: Slope, target: Tensor | None) -> Slope:
    """Note the number that all targets are, where they are one.

    Args:
        slope: A loss.
        target: Its targets; None if unknown.

    Returns:
        The loss, with `labels`.
    """
    if target is None or not target.numel():
        return slope
    with torch.no_grad():
        least, most = target.aminmax()
        return slope._replace(labels=least.double().where(least == most, math.nan))


def labelled(slope: Slope, target: Tensor, classes: int) -> Slope:
    """Note of class indices whether row i has the class i, and a number that stands for all of them in their order.

    Args:
        slope: A loss.
        target: [n] class indices.
        classes: How many classes there are.

    Returns:
        The loss, with `diagonal` and `labels`.
    """
    with torch.no_grad():
        y = target.reshape(-1)
        marks = torch.cos(12.9898 * torch.arange(1, len(y) + 1, device=y.device, dtype=torch.float64))
        varied = len(y) >= FEWEST and classes > 2 and y.amin() != y.amax()
        labels = (y * marks).sum().where(torch.as_tensor(varied, device=y.device), math.nan)
        return slope._replace(diagonal=_diagonal(y, classes), labels=labels)


def chosen(window: Sequence[Sequence[Forms] | None], scales: Sequence[float]) -> list[list[Slope] | None]:
    """Choose which losses the micro-batches of a window have.

    Of the forms that the graph shows, the first that fits in all micro-batches: elements that happen to weigh alike in one of
    them are no terms where they do not in another. One whose terms the graph shows to be counted comes before.

    Args:
        window: For each micro-batch the possible forms of each of its losses; None where nothing is known.
        scales: The loss scale of each micro-batch.

    Returns:
        For each micro-batch one form of each loss; None where nothing is known.
    """
    heads = [of_one for of_one in window if of_one is not None]
    alike = len({tuple(map(len, of_one)) for of_one in heads}) == 1
    places = zip(*heads, strict=True) if alike else ()
    known = [scale for of_one, scale in zip(window, scales, strict=True) if of_one is not None]
    of_all = [_of_all([*zip(*each, strict=True)], known) for each in places]
    return [
        None if of_one is None else [_chosen(forms, *of_all[k] if alike else (0, False)) for k, forms in enumerate(of_one)]
        for of_one in window
    ]


def _of_all(forms: Sequence[Forms], scales: Sequence[float]) -> tuple[int, bool]:
    """The form that fits in all micro-batches, -1 where none does, and whether its terms are counted; `forms`: each in all."""
    fitting = [k for k, each in enumerate(forms) if all(map(_fits, each))]
    counted = [k for k in fitting if forms[k][0].picked and _is_counted(forms[k], scales)]
    first = next((k for k in fitting if not forms[k][0].picked or not counted or k in counted), -1)
    return first, first in counted


def _is_counted(each: Forms, scales: Sequence[float]) -> bool:
    """Decide whether every micro-batch's loss is divided by the number of its terms, of the window's, or of their mean.

    Args:
        each: One form of a loss, in each micro-batch.
        scales: The loss scale of each micro-batch.

    Returns:
        True if so many terms together weigh what the other constants multiply the loss by.
    """
    if len({one.terms / one.rows for one in each if one.fixed}) > 1:
        return False
    parts = [abs(one.weight * one.terms) / scale for one, scale in zip(each, scales, strict=True)]
    total = sum(parts)

    def divided(part: float, one: Slope) -> bool:
        factors = [abs(constant.factor) for constant in one.constants or ()]
        others = [
            math.prod(factors) / factor for factor, (_, divides) in zip(factors, one.constants or (), strict=True) if divides
        ]
        weights = (total,) if one.rows == 1 else (part, total, total / len(parts))  # one row may have a mean of its own
        return any(abs(weight - other) <= _width(one) * other for other in others for weight in weights)

    return all(one.terms and divided(part, one) for part, one in zip(parts, each, strict=True))


def _width(form: Slope) -> float:
    """The residual that its format explains."""
    return FITS.get(form.dtype or torch.float32, 1e-3)


def _fits(form: Slope) -> bool:
    return form.residual <= _width(form) or not form.terms


def _chosen(forms: Forms, of_all: int, counted: bool) -> Slope:
    """Of the forms that the dtype explains the plain one, else that with the smallest residual; of the graph's, that `of_all`."""
    first = forms[0]
    if math.isnan(first.freedom):
        form = of_all if len(forms) > 1 else 0
        if form < 0 or not _fits(forms[form]):
            return first._replace(kind=None, ragged=True, picked=len(forms) > 1)
        return forms[form]._replace(form=form, counted=counted)
    wide = _width(first)
    fitting = [form for form in forms if form.freedom >= FEWEST and form.residual <= wide]
    if fitting:
        return min(fitting, key=lambda form: (form.kind is not Loss.cross_entropy, form.residual))
    least, ragged = min(form.residual for form in forms), first.apart <= wide and first.freedom >= FEWEST
    return first._replace(kind=None, weight=math.nan, value=0.0, diagonal=False, residual=least, ragged=ragged)
