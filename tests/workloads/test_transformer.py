"""The transformer on text: padding changes nothing, since no position sees a later one."""

import pytest
import torch

from accumulation_harness.config import Norm
from tests.workloads.test_text import text


@pytest.mark.parametrize("norm", [Norm.layer, Norm.none])
def test_padding_does_not_reach_the_line(norm):
    workload = text(norm=norm)
    torch.manual_seed(0)
    model = workload.make_model().double()
    batch = workload.batch(torch.arange(16))
    together, terms = model(batch.inputs), workload.num_terms(batch)
    losses = workload.losses(together, batch)
    for row, sample in enumerate(batch.ids.tolist()):
        alone = workload.batch(torch.tensor([sample]))
        length = int(terms[row])
        assert (model(alone.inputs)[0] - together[row, :length]).abs().max() < 1e-12
        assert abs(workload.losses(model(alone.inputs), alone)[0] - losses[row]) < 1e-12 * terms[row]
    # Must differ: the same comparison where padding comes first, so that it is in the past of every character.
    row = int(terms.argmin())
    length = int(terms[row])
    shifted = model(batch.inputs[row].roll(-length).view(1, -1))[0, -length:]
    assert (shifted - together[row, :length]).abs().max() > 1e-3
