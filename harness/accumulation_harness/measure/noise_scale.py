"""The gradient noise scale as a by-product of accumulation: a window's micro-batches are samples of smaller batches.

McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1: squared gradient norms at two batch sizes b < B give unbiased estimates
of |G|^2 and S = tr(Sigma). With the shares w_k = n_k / n of the micro-batches in the window's loss terms, sum_k w_k |g_k|^2 has
the expectation |G|^2 + S N / B whatever their sizes: it stands for the smaller batch, of b = B / N samples. Exact where all
samples have as many loss terms, else to first order in 1/b. Under BatchNorm S is no sample's: a g_k depends on its micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from accumulation_harness.recipes.recipe import Arm
from accumulation_harness.referee.gradients import Elements, gradients, norm

Row = dict[str, float]


class NoiseWatch:
    """Sees the squared norms of an arm's micro-batch gradients and of their sum; the arm's recipe is a right one.

    What a backward adds is seen on its way to the `.grad`s. Nothing is changed, nothing is read back.
    """

    def __init__(self, arm: Arm, every: int = 1) -> None:
        self.arm, self._normalise, self._every = arm, arm.recipe.normalise, every
        self.is_seen = False  # the present or last window
        self._parameters = [p for p in arm.model.parameters() if p.requires_grad]
        self._hooks: list[RemovableHandle] = []  # of the parameters, while a window is seen: a hook costs each backward a call
        self._added: dict[int, Tensor] = {}  # by the last backward, one gradient for each parameter that has a part in it
        self.norms: list[Tensor] = []  # of what each micro-batch added; the window's sum last
        self.terms: Sequence[Tensor] = ()
        self._one = self.scale = torch.ones((), device=arm.device)
        arm.recipe = dataclasses.replace(
            arm.recipe,
            normalise=self._start_window,
            after_backward=(self._see_micro_batch, *arm.recipe.after_backward),
            at_boundary=(self._see_window, *arm.recipe.at_boundary),
        )

    def _start_window(self, terms: Sequence[Tensor], accumulation_steps: int) -> Sequence[Tensor]:
        self.norms, self.terms, self.is_seen = [], terms, self.arm.windows % self._every == 0
        if self.is_seen:
            self._hooks = [p.register_hook(partial(self._added.__setitem__, k)) for k, p in enumerate(self._parameters)]
        return self._normalise(terms, accumulation_steps)

    def _see_micro_batch(self, arm: Arm) -> None:
        if self.is_seen:
            self.norms.append(norm(Elements(self._added.values())))
            self._added.clear()

    def _see_window(self, arm: Arm) -> None:
        if not self.is_seen:
            return
        self.norms.append(norm(Elements(gradients(self._parameters))))
        for hook in self._hooks:
            hook.remove()
        self.scale = arm.scaler.scale(self._one)  # before the scaler updates it


def watch(arms: Mapping[str, Arm], every: int) -> dict[str, NoiseWatch]:
    """Observe the gradient norms of micro-batches.

    Args:
        arms: The arms, by label.
        every: Every how many windows to observe one.

    Returns:
        By label, an observer for each arm that accumulates.
    """
    return {label: NoiseWatch(arm, every) for label, arm in arms.items() if arm.recipe.accumulation_steps > 1}


def read(watches: Mapping[str, NoiseWatch]) -> dict[str, Row]:
    """Return the squared gradient norms of each arm's last window, before clipping and without the loss scale.

    All arms share one transfer from the device.

    Args:
        watches: By label, as `watch` has made them.

    Returns:
        By label, `micro_batch_square` = sum_k w_k |g_k|^2 with w_k the share of the window's loss terms, `window_square` =
        |g_B|^2, `micro_batches` = N and `window_samples` = B; windows that were not observed are left out.
    """
    seen = {label: watch for label, watch in watches.items() if watch.is_seen}
    if not seen:
        return {}
    numbers = [(*watch.norms, *watch.terms, watch.scale) for watch in seen.values()]
    values = iter(torch.stack([one.double().reshape(()) for own in numbers for one in own]).tolist())
    rows = {}
    for label, watch in seen.items():
        lengths, share = ([next(values) for _ in own] for own in (watch.norms, watch.terms))
        scale = next(values)
        num, samples = len(watch.arm.seen), sum(map(len, watch.arm.seen))
        *parts, window = [(length / scale) ** 2 for length in lengths]
        # what a micro-batch adds is w_k g_k: nothing where it has no loss term
        small = sum(part * sum(share) / own for part, own in zip(parts, share, strict=True) if own)
        rows[label] = {"micro_batches": num, "window_samples": samples, "micro_batch_square": small, "window_square": window}
    return rows
