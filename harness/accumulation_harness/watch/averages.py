"""Averages of the weights that a loop keeps by hand: found among all tensors, and known by how they move inside a window."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from accumulation_harness.system.state import PLAIN, readable

LOOKED_AT = 512  # entries of each tensor
FEWEST = 8  # entries of a tensor that is looked at
MOST = 4096  # tensors
OFF = 1e-2  # ||move - f (weights - average)|| / ||move||, unless rounding explains more
AS_MUCH = 0.5  # of the weights must have an average; also the most that rounding may explain
ALIKE = 0.05  # relative difference of two rates that are one


class Averages:
    """The tensors that may be averages of `weights`, as they are after the first backward of a window."""

    def __init__(self, weights: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """`known`: gradients, the optimizer's state: what is no average."""
        self.weights = [p for p in weights if readable(p) and p.is_floating_point() and p.requires_grad and p.numel() >= FEWEST]
        shapes = {(p.shape, p.device) for p in self.weights}
        own = {id(t) for t in (*weights, *known)}
        self._before: list[tuple[weakref.ref[Tensor], Tensor]] = []
        for item in reversed(gc.get_objects()):  # in a process that keeps very many tensors, the newest ones
            if type(item) not in PLAIN or id(item) in own or not readable(item):
                continue
            if item.is_floating_point() and (item.shape, item.device) in shapes:
                self._before.append((weakref.ref(item), _sample(item).clone()))
                if len(self._before) == MOST:
                    break

    @torch.no_grad()
    def rate(self) -> float | None:
        """The rate f at which averages have moved by f (weights - average) since; None where none has."""
        rates: dict[int, float] = {}
        for shape in {p.shape for p in self.weights}:
            places = [i for i, p in enumerate(self.weights) if p.shape == shape]
            weights = torch.stack([_sample(self.weights[i]).double() for i in places])
            for reference, before in self._before:
                tensor = reference()
                if tensor is not None and readable(tensor) and tensor.shape == shape:
                    rates |= _rates(weights, places, before, _sample(tensor))
        if not rates or len(rates) < AS_MUCH * len(self.weights):
            return None
        middle = sorted(rates.values())[len(rates) // 2]
        alike = sum(abs(rate - middle) <= ALIKE * middle for rate in rates.values())
        return middle if alike >= AS_MUCH * len(self.weights) else None


def _rates(weights: Tensor, places: Sequence[int], before: Tensor, now: Tensor) -> dict[int, float]:
    """Place -> rate, for the weights [k, entries] towards which a tensor has moved."""
    moved = now.double() - before.double()
    size = float(moved.norm())
    if not size:
        return {}
    rounding = 8 * torch.finfo(before.dtype).eps * float(before.double().norm()) / size
    towards = weights - before.double()
    rates = (towards @ moved) / towards.square().sum(-1)
    off = (moved - rates[:, None] * towards).norm(dim=-1) / size
    within = (off <= min(max(OFF, rounding), AS_MUCH)) & (rates > 0) & (rates < 1 - OFF)
    return {place: float(rate) for place, rate, hit in zip(places, rates, within, strict=True) if hit}


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:LOOKED_AT]
