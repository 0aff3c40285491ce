"""Causes that are allowed beforehand: they excuse what they are, and nothing is equivalent that was not compared."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from accumulation_harness.judge.cause import Cause
from tests.audit.asked import audited, named
from tests.audit.loops import frame
from tests.slow import few

FEATURES = 10  # 16 rows draw 48 numbers of noise and 4 rows draw 12: a CPU draws multiples of 16 alike however they are cut
# Change: (mean loss of a micro-batch, its rows, N) -> what is differentiated


class Noisy(nn.Module):
    """Draws of its own, as in a variational autoencoder."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, 6), nn.Linear(3, FEATURES)

    def forward(self, x):
        middle, spread = self.encode(x).chunk(2, -1)
        return self.decode(middle + spread.exp() * torch.randn_like(middle))


def plain(*layers):
    return nn.Sequential(nn.Linear(FEATURES, 6), *layers, nn.Linear(6, FEATURES))


MODELS = {  # how it is made, its cause, whether the rest can be compared
    "own draws": (Noisy, "stochastic_layers", False),
    "dropout": (lambda: plain(nn.Dropout(0.3)), "stochastic_layers", True),
    "batch norm": (lambda: plain(nn.BatchNorm1d(6)), "batch_statistics", True),
    "dropout and own draws": (lambda: nn.Sequential(nn.Dropout(0.3), Noisy()), "stochastic_layers", False),
}
CHANGES = {
    "not divided": lambda loss, rows, n: loss,
    "divided twice": lambda loss, rows, n: loss / n / n,
    "by the rows": lambda loss, rows, n: loss / rows,
    "nearly right": lambda loss, rows, n: loss / n * 1.01 ** (n - 1),
}


def right(loss, rows, n):
    return loss / n


def loop(make, change, *, inside=False):
    """`inside`: an average of the weights, which is none of the model's, is updated per micro-batch."""

    def train(batch_size, accumulation_steps):
        torch.manual_seed(0)
        model, x = make(), torch.randn(32, FEATURES)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

        def loss(model, rows, window):
            return change(functional.mse_loss(model(x[rows]), x[rows]), len(rows), accumulation_steps)

        stages = {"after_backward" if inside else "after_step": lambda: average.update_parameters(model)}
        optimizer, windows = frame.sgd(model, momentum=0.9), torch.arange(32).split
        frame.train(batch_size, accumulation_steps, model, loss, optimizer, windows=windows, **stages)

    return train


@pytest.mark.parametrize("model", few(("own draws", "batch norm"), MODELS))
def test_a_right_loop_is_equivalent_where_all_but_the_allowed_was_compared(model):
    make, cause, compared = MODELS[model]
    report = audited(loop(make, right), allow={cause, "non_separable_loss"})
    assert (report.verdict == "equivalent") == compared, str(report)
    if model == "own draws":
        assert report.exit_code == 2 and any("gradients were not compared" in line for line in report.problems), str(report)


QUICK = [("batch norm", "by the rows"), ("own draws", "not divided")]


@pytest.mark.parametrize(("model", "change"), few(QUICK, itertools.product(MODELS, CHANGES)))
def test_no_allowance_makes_a_wrong_loop_equivalent(model, change):
    make, cause, _ = MODELS[model]
    report = audited(loop(make, CHANGES[change]), allow={cause})
    assert report.verdict != "equivalent", str(report)


def test_an_average_is_excused_and_a_wrong_gradient_beside_it_is_not():
    allow = {Cause.ema_per_micro_batch}
    alone = audited(loop(plain, right, inside=True), allow=allow)
    assert alone.verdict == "equivalent" and {f.cause for f in alone.allowed} == allow, str(alone)
    named(loop(plain, CHANGES["not divided"], inside=True), "loss_not_divided", allow=allow)
