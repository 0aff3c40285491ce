"""The weight of every loss term, read from the slope of the loss at the logits: no labels and no second pass are needed.

For cross-entropy the slope of row i is g_i = c_i (softmax(z_i) - e_y), with y = argmin g_i. Where all rows of a micro-batch weigh
alike, c = <g, p> / ||p||^2 with p_i = softmax(z_i) - e_y, and the residual ||g - c p|| / ||g|| says whether it was such a loss.
Likewise for label smoothing (which adds one unknown), binary cross-entropy (g = c (sigmoid(z) - y), y from the sign of g) and,
where the targets are known, the squared error (g = 2 c (z - y)).
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


Numbers = Mapping[str, Tensor]


def measured(z: Tensor, g: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
    """Numbers on the device of the logits; `concluded` reads them on the host. `target`: of a squared error, if it is known."""
    with torch.no_grad():
        if target is not None and target.shape == z.shape and target.is_floating_point():
            return _squared(z.double(), g.double(), target.double())
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


def _squared(z: Tensor, g: Tensor, target: Tensor) -> dict[str, Tensor]:
    weight, residual = _fitted(2 * (z - target), g)
    num = torch.tensor(z.numel())
    return {"se": weight, "se_residual": residual, "se_terms": num, "se_freedom": torch.tensor(FEWEST), "se_positions": num,
            "se_value": (z - target).square().sum()}  # fmt: skip


def _diagonal(y: Tensor, classes: int) -> Tensor:
    if len(y) not in (classes, classes // 2) or classes < 3:
        return torch.tensor(0.0)
    return (y == torch.arange(len(y), device=y.device)).all().float()


def _fitted(p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """c = <g, p> / ||p||^2 and ||g - c p|| / ||g||."""
    c = (g * p).sum(dtype=torch.float64) / p.square().sum(dtype=torch.float64)
    return c, (g - c.to(g.dtype) * p).norm().double() / g.norm().double()


def class_weighted(z: Tensor, g: Tensor, target: Tensor, weight: Tensor | None, ignore: int, smoothing: float) -> Numbers:
    """The same for `functional.cross_entropy`, whose targets (class indices) and class weights are known; [n, C, ...]."""
    with torch.no_grad():
        if z.dim() > 2:
            z, g = z.movedim(1, -1), g.movedim(1, -1)
        classes = z.shape[-1]
        z, g, y = z.reshape(-1, classes).float(), g.reshape(-1, classes).float(), target.reshape(-1)
        valid = y != ignore
        hot = functional.one_hot(y.where(valid, 0), classes).float()
        logs = torch.log_softmax(z, -1)
        wanted = (1 - smoothing) * hot + smoothing / classes
        p = logs.exp() - wanted
        own = valid.float() if weight is None else weight.float()[y.where(valid, 0)] * valid
        if weight is not None and smoothing:  # the smoothed part is weighted class by class
            return {}
        c, residual = _fitted(p * own[:, None], g)
        return {"ce": c, "ce_residual": residual, "ce_terms": own.sum(), "ce_positions": torch.tensor(len(y)),
                "ce_freedom": torch.tensor(FEWEST), "diagonal": _diagonal(y, classes),
                "ce_value": -((wanted * logs).sum(-1) * own).sum()}  # fmt: skip


def concluded(found: Mapping[str, float], rows: int, dtype: torch.dtype) -> Slope:
    """Which loss it was: the form with the smallest residual, if that is what the dtype explains."""
    wide = FITS.get(dtype, 1e-3)
    names = {"ce": "cross-entropy", "ls": "cross-entropy, label smoothing", "bce": "binary cross-entropy", "se": "squared error"}
    fits = []
    for key in names:
        base = "ce" if key == "ls" else key
        if key not in found or not found[f"{base}_freedom"] >= FEWEST:
            continue
        if (residual := found[f"{key}_residual"]) <= wide:
            fits.append((key != "ce" and found.get("ce_residual", math.inf) <= wide, residual, key))
    positions = int(found.get("ce_positions", found.get("bce_positions", found.get("se_positions", 0))))
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


def log_probabilities(z: Tensor, g: Tensor, target: Tensor, ignore: int) -> Numbers:
    """The same for `functional.nll_loss`, where g_i = -c_i e_y."""
    with torch.no_grad():
        valid = target != ignore
        hot = functional.one_hot(target.where(valid, 0), z.shape[-1]).float() * valid[:, None]
        c, residual = _fitted(-hot, g.float())
        return {"ce": c, "ce_residual": residual, "ce_terms": valid.sum(), "ce_positions": torch.tensor(len(target)),
                "ce_freedom": torch.tensor(FEWEST), "diagonal": _diagonal(target, z.shape[-1]),
                "ce_value": -(hot * z).sum()}  # fmt: skip


def is_transformed(tensor: Tensor) -> bool:
    """Whether it is inside `torch.func`'s transformations, where numbers cannot be taken out."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
