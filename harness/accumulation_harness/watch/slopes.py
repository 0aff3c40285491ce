"""The weight of every loss term, read from the slope of the loss at the logits: no labels and no second pass are needed.

For cross-entropy the slope of row i is g_i = c_i (softmax(z_i) - e_y), with y = argmin g_i. Where all rows of a micro-batch weigh
alike, c = <g, p> / ||p||^2 with p_i = softmax(z_i) - e_y, and the residual ||g - c p|| / ||g|| says whether it was such a loss.
Likewise for label smoothing (which adds one unknown) and binary cross-entropy (g = c (sigmoid(z) - y), y from the sign of g).
Where one of PyTorch's loss functions was called, the gradient that its result receives says the same, at no cost: c = u / n of a
mean over n terms, c = u of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

FEWEST = 4  # degrees of freedom that are left when a form has been fitted: below, anything fits
FITS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}  # residual by the dtype of the slope


@dataclass(frozen=True, kw_only=True)
class Slope:
    """One tensor of logits in one backward."""

    kind: str  # of loss; empty: not a known one
    weight: float  # of each loss term
    terms: float  # how many
    positions: int  # rows of logits, padding included
    rows: int  # samples
    residual: float
    wide: float  # the residual that the dtype explains
    value: float = 0.0  # of the sum of the terms
    diagonal: bool = False  # row i has the class i, of as many as there are rows
    ragged: bool = False  # a known loss, whose terms weigh unequally within the micro-batch
    labels: float = math.nan  # a number that other labels, or another order of them, change; nan: not known, or one class alone


Numbers = Mapping[str, Tensor]


def measured(z: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Numbers on the device of the logits; `concluded` reads them on the host."""
    with torch.no_grad():
        wide = (z.shape[-1] if z.dim() > 1 else 1) > 2
        if not wide:  # two classes: a binary loss and a cross-entropy cannot both be told from few rows, so try both
            return {**_binary(z.float(), g.float()), **(_classes(z, g) if z.dim() > 1 and z.shape[-1] == 2 else {})}
        return {**_classes(z, g), **_binary(z.float(), g.float())}


def _classes(z: Tensor, g: Tensor) -> dict[str, Tensor]:
    classes = z.shape[-1]
    z, g = z.reshape(-1, classes).float(), g.reshape(-1, classes).float()
    counted = g.abs().amax(-1) > 0
    logs = torch.log_softmax(z, -1)
    p = logs.exp()
    y = g.argmin(-1, keepdim=True)
    num = counted.sum()
    kept = counted[:, None].to(g.dtype)
    # label smoothing: g = c (p - eps / C) off the target, a line through two unknowns; one without smoothing goes through 0
    off = kept.expand_as(g).scatter(-1, y, 0.0)
    n = off.sum(dtype=torch.float64)
    mp, mg = (off * p).sum(dtype=torch.float64) / n, (off * g).sum(dtype=torch.float64) / n
    cov = (off * (p - mp.float()) * (g - mg.float())).sum(dtype=torch.float64)
    slope = cov / (off * (p - mp.float()).square()).sum(dtype=torch.float64)
    smoothing = ((slope * mp - mg) * classes / slope).clamp(0, 0.999)
    p = p - torch.zeros_like(p).scatter(-1, y, 1.0)
    plain, residual = _fitted(p * kept, g)
    smooth = p - smoothing.float() * (1 / classes - torch.zeros_like(p).scatter(-1, y, 1.0))
    smooth_weight, smooth_residual = _fitted(smooth * kept, g)
    hit = -(kept * logs.gather(-1, y)).sum(dtype=torch.float64)
    evenly = -(kept * logs.mean(-1, keepdim=True)).sum(dtype=torch.float64)
    own = (g * p).sum(-1) / p.square().sum(-1)  # each row by itself
    apart = ((g - own[:, None] * p) * kept).norm() / g.norm()
    return {
        "ce": plain, "ce_residual": residual, "ce_apart": apart, "ls": smooth_weight, "ls_residual": smooth_residual,
        "smoothing": smoothing, "ce_terms": num, "ce_positions": torch.tensor(z.shape[0]),
        "ce_freedom": num * (classes - 1) - 1, "diagonal": _diagonal(y.squeeze(-1), classes),
        "ce_value": hit, "ls_value": (1 - smoothing) * hit + smoothing * evenly,
    }  # fmt: skip


def _binary(z: Tensor, g: Tensor) -> dict[str, Tensor]:
    p = torch.sigmoid(z) - (g < 0).float()
    weight, residual = _fitted(p * (g != 0), g)
    num = (g != 0).sum()
    return {
        "bce": weight, "bce_residual": residual, "bce_terms": num, "bce_freedom": num - 1,
        "bce_positions": torch.tensor(z.numel()),
        "bce_value": (functional.binary_cross_entropy_with_logits(z, (g < 0).float(), reduction="none") * (g != 0)).sum(),
    }  # fmt: skip


def _diagonal(y: Tensor, classes: int) -> Tensor:
    if len(y) not in (classes, classes // 2) or classes < 3:
        return torch.tensor(0.0)
    return (y == torch.arange(len(y), device=y.device)).all().float()


def _fitted(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """c = <g, p> / ||p||^2 and ||g - c p|| / ||g||."""
    c = (g * p).sum(dtype=torch.float64) / p.square().sum(dtype=torch.float64)
    return c, (g - c.to(g.dtype) * p).norm().double() / g.norm().double()


def received(u: Tensor, loss: Tensor, reduction: str, own: Tensor | int) -> dict[str, Tensor]:
    """What the gradient `u` of a loss function's result says of its terms; `own`: what each counts [n], or their number.

    Unreduced losses of which a mask takes some have a residual: whether that is padding or a choice of rows is not known.
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
        return {"weight": weight, "residual": residual, "terms": total, "positions": positions, "value": value}


def labelled(target: Tensor, classes: int) -> dict[str, Tensor]:
    """Of class indices: whether row i has the class i, and a number that stands for all of them in their order."""
    with torch.no_grad():
        y = target.reshape(-1)
        marks = torch.cos(12.9898 * torch.arange(1, len(y) + 1, device=y.device, dtype=torch.float64))
        varied = len(y) >= FEWEST and classes > 2 and y.amin() != y.amax()
        labels = (y * marks).sum().where(torch.as_tensor(varied, device=y.device), math.nan)
        return {"diagonal": _diagonal(y, classes), "labels": labels}


def reported(found: Mapping[str, float], kind: str, rows: int) -> Slope:
    """The terms of a loss function that was called."""
    ragged = not found["residual"] <= FITS[torch.float32]
    return Slope(
        kind="" if ragged else kind, weight=found["weight"], terms=found["terms"], positions=int(found["positions"]), rows=rows,
        residual=found["residual"], wide=FITS[torch.float32], value=found["value"], diagonal=found.get("diagonal", 0) == 1,
        ragged=ragged, labels=found.get("labels", math.nan),
    )  # fmt: skip


def concluded(found: Mapping[str, float], rows: int, dtype: torch.dtype) -> Slope:
    """Which loss it was: the form with the smallest residual, if that is what the dtype explains."""
    wide = FITS.get(dtype, 1e-3)
    names = {"ce": "cross-entropy", "ls": "cross-entropy, label smoothing", "bce": "binary cross-entropy"}
    fits = []
    for key in names:
        base = "ce" if key == "ls" else key
        if key not in found or not found[f"{base}_freedom"] >= FEWEST:
            continue
        if (residual := found[f"{key}_residual"]) <= wide:
            fits.append((key != "ce" and found.get("ce_residual", math.inf) <= wide, residual, key))
    positions = int(found.get("ce_positions", found.get("bce_positions", 0)))
    if not fits:
        apart = found.get("ce_apart", math.inf)
        terms = found.get("ce_terms", found.get("bce_terms", math.nan))
        ragged = apart <= wide and found.get("ce_freedom", 0) >= FEWEST
        residual = min((found[k] for k in found if k.endswith("_residual")), default=math.nan)
        return Slope(kind="", weight=math.nan, terms=terms, positions=positions, rows=rows, residual=residual, wide=wide,
                     ragged=ragged)  # fmt: skip
    _, residual, key = min(fits)
    base = "ce" if key == "ls" else key
    return Slope(
        kind=names[key],
        weight=found[key],
        terms=found[f"{base}_terms"],
        positions=int(found[f"{base}_positions"]),
        rows=rows,
        residual=residual,
        wide=wide,
        value=found[f"{key}_value"],
        diagonal=found.get("diagonal", 0) == 1,
    )


def is_transformed(tensor: Tensor) -> bool:
    """Whether it is inside `torch.func`'s transformations, where numbers cannot be taken out."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_transforming() -> bool:
    """Whether one of `torch.func`'s transformations is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None
