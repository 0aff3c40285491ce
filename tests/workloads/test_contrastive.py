"""Losses with in-batch negatives, against the oracle that is checked against loops in numpy."""

import pytest
import torch

from accumulation_harness.config import Contrast
from accumulation_harness.referee.negatives import gradient_of, within_blocks
from accumulation_harness.workloads.contrastive import Representations, losses, ranks
from tests.referee.test_negatives import Linear, inputs


@pytest.mark.parametrize("contrast", Contrast)
def test_losses_are_the_formulas(contrast):
    model, x = Linear(), inputs()
    found = losses(Representations(*model(x)), contrast)
    assert float(found.detach().mean()) == pytest.approx(gradient_of(model, x, within_blocks([8], contrast))[0], rel=1e-13)
    assert not torch.allclose(losses(Representations(*model(x[:3])), contrast), found[:3]), "they hang on each other"


def test_a_model_that_cannot_tell_passages_apart_ranks_them_last():
    of = Representations(*Linear()(inputs()))
    assert ranks(of._replace(passages=of.passages[:1].expand(8, -1))).tolist() == [8] * 8
