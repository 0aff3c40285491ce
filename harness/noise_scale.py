"""The gradient noise scale as a by-product of accumulation: a window's micro-batches are samples of smaller batches.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: squared gradient norms at two batch sizes b < B give unbiased estimates
of |G|^2 and S = tr(Sigma). With the shares w_k = n_k / n of the micro-batches in the window's loss terms, sum_k w_k |g_k|^2 has
the expectation |G|^2 + S N / B whatever their sizes: it stands for the smaller batch, of b = B / N samples. Exact where all
samples have as many loss terms, else to first order in 1/b. Under BatchNorm S is no sample's: a g_k depends on its micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.recipe import Arm

Row = dict[str, float]


class NoiseWatch:
    """Sees the squared norms of an arm's micro-batch gradients and of their sum; the arm's recipe is a right one.

    A tensor hook of each parameter is handed what a backward adds to `.grad`. Nothing is changed, nothing is read back.
    """

    def __init__(self, arm: Arm) -> None:
        self._arm, self._normalise = arm, arm.recipe.normalise
        self._added: list[Tensor] = []
        self._norms: list[Sequence[Tensor]] = []  # by parameter, of what each micro-batch added; the window's sum last
        self._terms: Sequence[Tensor] = ()
        self._one = self._scale = torch.ones((), device=arm.device)
        for parameter in arm.model.parameters():
            parameter.register_hook(self._added.append)
        arm.recipe = dataclasses.replace(
            arm.recipe,
            normalise=self._start_window,
            after_backward=(self._see_micro_batch, *arm.recipe.after_backward),
            at_boundary=(self._see_window, *arm.recipe.at_boundary),
        )

    def squared_norms(self) -> Tensor:
        """[2] float64 on the device, of the last window: sum_k w_k |g_k|^2 and |g_B|^2, before clipping, without loss scale."""
        flat = torch.stack([norm for norms in self._norms for norm in norms])
        squares = (flat.double() / self._scale).square().view(len(self._norms), -1).sum(1)
        terms = torch.stack(list(self._terms)).double()
        # what a micro-batch adds is w_k g_k
        return torch.stack([(squares[:-1] * terms.sum() / terms).sum(), squares[-1]])

    @property
    def sizes(self) -> tuple[int, int]:
        """Micro-batches and samples of the last window: N and B."""
        return len(self._arm.seen), sum(len(ids) for ids in self._arm.seen)

    def _start_window(self, terms: Sequence[Tensor], accumulation_steps: int) -> Sequence[Tensor]:
        self._norms.clear()
        self._terms = terms
        return self._normalise(terms, accumulation_steps)

    def _see_micro_batch(self, _arm: Arm) -> None:
        self._norms.append(torch._foreach_norm(self._added))
        self._added.clear()

    def _see_window(self, arm: Arm) -> None:
        self._norms.append(torch._foreach_norm([p.grad for p in arm.model.parameters() if p.grad is not None]))
        self._scale = arm.scaler.scale(self._one)  # before the scaler updates it


def watch(arms: Mapping[str, Arm]) -> dict[str, NoiseWatch]:
    """A watch for each arm that accumulates; the arms' recipes are right ones."""
    return {label: NoiseWatch(arm) for label, arm in arms.items() if arm.recipe.accumulation_steps > 1}


def read(watches: Mapping[str, NoiseWatch]) -> dict[str, Row]:
    """What a step row says of each arm's last window; one transfer from the device for all of them."""
    if not watches:
        return {}
    table = torch.stack([watch.squared_norms() for watch in watches.values()]).tolist()
    rows = {}
    for (label, watch), (small, large) in zip(watches.items(), table, strict=True):
        num, samples = watch.sizes
        rows[label] = {"micro_batches": num, "window_samples": samples, "micro_batch_square": small, "window_square": large}
    return rows
