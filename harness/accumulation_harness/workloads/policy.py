"""Policy gradient on logged actions: a digit has an action and a reward, and the advantage is the window's normalised reward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accumulation_harness.judge.cause import Cause
from accumulation_harness.workloads import Batch, wide
from accumulation_harness.workloads.images import NUM_CLASSES, ImageWorkload

LOG_SEED = 20240601  # of actions and rewards; never a trial's seed: all trials train on the same log
RIGHT = 0.5  # share of logged actions that are the label
NOISE = 0.1  # standard deviation of the reward's noise
SMALLEST_DEVIATION = 1e-6


class PolicyWorkload(ImageWorkload):
    """Offline contextual bandit; one loss term per image.

    targets [n, 3] in the workload's dtype: logged action, reward (1 for the label, plus noise), label. `prepared` puts the
    advantage A = (r - mean r) / (std r + 1e-6) over the window's samples in place of the reward, as GRPO and PPO trainers do.
    """

    coupling = Cause.normaliser_depends_on_split

    def __init__(self, *data: Any, **where: Any) -> None:
        super().__init__(*data, **where)
        generator = torch.Generator().manual_seed(LOG_SEED)
        drawn = torch.rand(3, self.num_samples + len(self.held_out), dtype=torch.float64, generator=generator)
        self._draws = drawn.clamp(1e-9, 1 - 1e-9)  # [3, samples], in (0, 1)
        self.held_out = self._with_log(self.held_out)

    def batch(self, ids: Tensor) -> Batch:
        """The samples of these ids; their targets are [n, 3]: logged action, reward, label."""
        return self._with_log(super().batch(ids))

    def prepared(self, window: Batch) -> Batch:
        """Rewards normalised over the samples given; in float64, so that every precision sees the same advantages."""
        action, reward, label = window.targets.double().unbind(1)
        advantage = (reward - reward.mean()) / (reward.std(correction=0) + SMALLEST_DEVIATION)
        return replace(window, targets=torch.stack([action, advantage, label], 1).to(window.targets))

    def losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] -A log softmax(outputs)[action] of `outputs` [n, 10], in float32 or float64."""
        action, advantage, _ = batch.targets.unbind(1)
        scores = wide(outputs)
        return advantage.to(scores) * F.cross_entropy(scores, action.long(), reduction="none")

    def correct(self, outputs: Tensor, batch: Batch) -> Tensor:
        """[n] whether the most likely action is the label."""
        return (outputs.argmax(1) == batch.targets[:, 2].long()).long()

    def _with_log(self, images: Batch) -> Batch:
        """The log's action and reward beside the label."""
        labels = images.targets
        follow, other, noise = self._draws[:, images.ids].to(labels.device, non_blocking=True).unbind(0)
        action = torch.where(follow < RIGHT, labels, (other * NUM_CLASSES).long())
        reward = (action == labels).double() + NOISE * torch.special.ndtri(noise)
        return replace(images, targets=torch.stack([action, reward.float(), labels], 1).to(self._dtype))
