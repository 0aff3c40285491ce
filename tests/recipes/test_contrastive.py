"""Methods for in-batch negatives: one window of each in float64, beside autograd on one forward of the whole window."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accumulation_harness.config import ConfigError, Contrast, Data, Model, Precision, TrialConfig, WorkloadConfig
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.trial import accumulated
from accumulation_harness.recipes import contrastive
from accumulation_harness.recipes.recipe import clear, take_step
from accumulation_harness.referee.gradients import flatten, gradients, relative_distance
from tests.small_corpus import config, corpus

__all__ = ["corpus"]
CPU = torch.device("cpu")
EXACT, APART = 1e-12, 1e-3


def gradient(setting, recipe, window, arm=None):
    """[P] what the optimizer would have consumed, at the initial weights."""
    held: list[Tensor] = []

    def read(own):
        held.append(flatten(gradients(own.model.parameters())))

    arm = arm or setting.arm(recipe, precision=Precision.float64)
    arm.recipe = dataclasses.replace(recipe, at_boundary=(read, clear))
    with setting.randomness(0):
        take_step(arm, window)
    return held[0]


def setting_of(trial):
    setting = Setting(trial, CPU)
    return setting, setting.exact.batch(next(setting.windows(1)))


PAIRS = TrialConfig(
    workload=WorkloadConfig(data=Data.pairs, model=Model.mlp, width=3, penalty=0.3), effective_batch=12, accumulation_steps=(4,)
)


@pytest.mark.parametrize("contrast", [*Contrast, "pairs of digits"])
@pytest.mark.parametrize("num", [2, 4, 12])
def test_grad_cache_is_the_full_batch(contrast, num, corpus):
    """The referee: one forward of the whole window and `torch.autograd.grad`, which no recipe runs."""
    trial = PAIRS if contrast == "pairs of digits" else config(corpus, contrast=Contrast(contrast), penalty=0.2)
    setting, window = setting_of(trial)
    referee = setting.referee()
    right = referee.gradient(dict(setting.initial.double().state_dict()), window)
    own = gradient(setting, contrastive.grad_cache(accumulated(trial, num)), window)
    assert relative_distance(own, right) <= EXACT
    assert relative_distance(gradient(setting, accumulated(trial, num), window), right) > APART


class Task:
    """Towers, a temperature and a loss that are none of this repository's: a margin over in-batch negatives, squared."""

    def model(self, norm):
        class Towers(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right = nn.Linear(6, 4), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
                self.scale = nn.Parameter(torch.tensor(0.3))

            def forward(self, pair):
                return {"scale": self.scale, "left": self.left(pair[:, 0]), "right": self.right(pair[:, 1]), "name": "none"}

        return Towers()

    def train(self):
        return list(torch.randn(40, 2, 6, generator=torch.Generator().manual_seed(1)))

    held_out = train

    def losses(self, outputs, batch):
        scores = outputs["scale"].exp() * outputs["left"] @ outputs["right"].T
        return F.relu(1 + scores - scores.diagonal().unsqueeze(1)).square().sum(1) / len(scores)

    def forward(self, model, batch):
        return model(batch)


def test_grad_cache_on_towers_and_a_loss_of_ones_own():
    trial = TrialConfig(
        workload=WorkloadConfig(data=Data.custom, target=f"{__file__}:Task"), norm="as_is",  # type: ignore[arg-type]
        effective_batch=12, accumulation_steps=(4,),
    )  # fmt: skip
    setting, window = setting_of(trial)
    full = setting.referee().gradient(dict(setting.initial.double().state_dict()), window)
    assert relative_distance(gradient(setting, contrastive.grad_cache(accumulated(trial, 4)), window), full) <= EXACT
    assert relative_distance(gradient(setting, accumulated(trial, 4), window), full) > APART
    with pytest.raises(ConfigError, match="Representations, got dict"):
        gradient(setting, contrastive.named("dual_bank@4")(accumulated(trial, 4)), window)
