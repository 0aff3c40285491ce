"""Losses that take something from the other samples: in-batch negatives and normalised advantages, against numpy."""

import numpy as np
import pytest
import torch

from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.pairs import TEMPERATURE
from tests.toy import CPU
from tests.trials import trial

POLICY = "workload.data=policy workload.penalty=0.3"
ROUNDING = 1e-13


def workload(settings, dtype=torch.float64):
    return make_workload(trial(settings), device=CPU, dtype=dtype)


def test_pairs_loss_is_info_nce_in_both_directions():
    pairs, z = (
        workload("workload.data=pairs workload.model=mlp"),
        torch.randn(7, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    unit = z.numpy() / np.linalg.norm(z.numpy(), axis=2, keepdims=True)
    scores = unit[:, 0] @ unit[:, 1].T / TEMPERATURE
    exps = np.exp(scores)
    expected = -0.5 * (np.log(np.diag(exps) / exps.sum(1)) + np.log(np.diag(exps) / exps.sum(0)))
    batch = pairs.batch(torch.arange(7))
    assert pairs.losses(z, batch).numpy() == pytest.approx(expected, rel=ROUNDING)
    assert pairs.correct(z, batch).tolist() == (scores.argmax(1) == np.arange(7)).tolist()
    assert not torch.allclose(pairs.losses(z[:3], batch.rows(slice(0, 3))), pairs.losses(z, batch)[:3]), "they hang on each other"


def test_advantages_are_the_windows_normalised_rewards():
    policy, ids = workload(POLICY), torch.arange(40, 57)
    window = policy.batch(ids)
    action, reward, label = window.targets.numpy().T
    assert 0.3 < np.mean(action == label) < 0.9 and np.std(reward) > 0.1
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    assert policy.prepared(window).targets[:, 1].numpy() == pytest.approx(advantage, rel=ROUNDING)
    outputs = torch.randn(17, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logs = outputs.numpy() - np.log(np.exp(outputs.numpy()).sum(1, keepdims=True))
    expected = -advantage * logs[np.arange(17), action.astype(int)]
    assert policy.losses(outputs, policy.prepared(window)).numpy() == pytest.approx(expected, rel=1e-12)
    apart = policy.prepared(window.rows(slice(0, 5))).targets[:, 1]
    assert not torch.allclose(apart, policy.prepared(window).targets[:5, 1]), "a micro-batch has another mean"
    narrow = workload(POLICY, torch.float32).batch(ids)
    assert torch.equal(narrow.targets.double(), window.targets), "both widths read the same log"
