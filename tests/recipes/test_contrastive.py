"""Methods for in-batch negatives: one window of each in float64, beside autograd on one forward of the whole window."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from accumulation_harness.config import ConfigError, Precision
from accumulation_harness.measure.trial import accumulated
from accumulation_harness.recipes import contrastive
from accumulation_harness.recipes.recipe import clear, take_step
from accumulation_harness.referee.gradients import flatten, gradients, relative_distance
from tests.trials import setting_of, trial

EXACT, APART = 1e-12, 1e-3


def gradient(setting, recipe, window):
    """[P] what the optimizer would have consumed, at the initial weights."""
    held = []

    def read(own):
        held.append(flatten(gradients(own.model.parameters())))

    arm = setting.arm(recipe, precision=Precision.float64)
    arm.recipe = dataclasses.replace(recipe, at_boundary=(read, clear))
    with setting.randomness(0):
        take_step(arm, window)
    return held[0]


PAIRS = "workload.data=pairs workload.model=mlp workload.width=3 workload.penalty=0.3"
OWN = f"workload.data=custom workload.target={__file__}:Task norm=as_is"


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


@pytest.mark.parametrize("task", [PAIRS, OWN])
@pytest.mark.parametrize("num", [2, 4, 12])
def test_grad_cache_is_the_full_batch(task, num):
    """The referee: one forward of the whole window and `torch.autograd.grad`, which no recipe runs."""
    config = trial(task, "effective_batch=12 accumulation_steps=[4]")
    setting = setting_of(config)
    window, right = setting.exact.batch(next(setting.windows(1))), accumulated(config, num)
    full = setting.referee().gradient(dict(setting.initial.double().state_dict()), window)
    assert relative_distance(gradient(setting, contrastive.grad_cache(right), window), full) <= EXACT
    assert relative_distance(gradient(setting, right, window), full) > APART
    if task == OWN:
        with pytest.raises(ConfigError, match="Representations, got dict"):
            gradient(setting, contrastive.named("dual_bank@4")(right), window)
