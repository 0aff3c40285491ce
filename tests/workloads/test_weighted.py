import pytest
import torch
import torch.nn.functional as F

from accumulation_harness.workloads.build import make_workload
from tests.toy import CPU
from tests.trials import trial

IDS = torch.arange(40, 75)


@pytest.mark.parametrize("data", ["digits", "class_weights", "ignored_labels"])
def test_the_mean_loss_is_that_of_cross_entropy_with_the_same_weights(data):
    workload = make_workload(trial(f"workload.data={data} workload.model=mlp"), device=CPU, dtype=torch.float64)
    batch = workload.batch(IDS)
    outputs = torch.randn(len(IDS), 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = workload.losses(outputs, batch).sum() / workload.num_terms(batch).sum()
    targets, weights = batch.targets.clone(), torch.arange(1, 11).double() if data == "class_weights" else None
    if data == "ignored_labels":
        targets[IDS % 3 == 0] = -100
    torch.testing.assert_close(own, F.cross_entropy(outputs, targets, weight=weights, ignore_index=-100), rtol=1e-14, atol=0)
