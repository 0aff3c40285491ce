"""Muon's update under accumulation against numpy: what is the full batch's and what is not."""

import dataclasses

import numpy as np
import pytest
import torch

from accumulation_harness.experiments.muon import muon
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.trial import accumulated, full_batch
from accumulation_harness.recipes import muon as recipes
from accumulation_harness.recipes.recipe import take_step
from accumulation_harness.referee.oracle import snapshot
from tests.studies.by_hand import trial

CONFIG = trial(
    "study=muon precision=float64 effective_batch=32 accumulation_steps=[4] steps=2 workload.model=mlp workload.width=1",
    f"data.last_window=drop optimizer.name=custom optimizer.target={recipes.TARGET} optimizer.lr=0.02",
)


@pytest.fixture(scope="module")
def setting():
    return Setting(dataclasses.replace(CONFIG, permutations=4), torch.device("cpu"))


def newton_schulz(gradient):
    """Muon's quintic iteration in float64, on the wide side."""
    x = (gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T) / np.linalg.norm(gradient)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if x.shape == gradient.shape else x.T


def test_the_updates_of_one_window(setting):
    """The accumulated one is the full batch's; per micro-batch it points along the mean of the parts' own."""
    rows = muon._updates(setting, muon._recipes(setting), snapshot(setting.arm(full_batch(CONFIG)).model), 0)
    found = {row["arm"]: row for row in rows}
    assert found["accumulated"]["same"] == found["permuted"]["same"] == 4
    assert found["accumulated"]["orthogonalisations"] == found["bfloat16_sum"]["orthogonalisations"] == 1
    assert found["per_micro_batch"]["orthogonalisations"] == 4
    assert found["per_micro_batch"]["update_error"] > 0.1 and found["per_micro_batch"]["gradient_error"] < 1e-14
    assert found["per_micro_batch"]["length"] < 0.9
    assert found["bfloat16_sum"]["update_error"] > 2 * found["bfloat16_sum"]["gradient_error"] > 1e-3


def test_orthogonalised_per_micro_batch_against_numpy(setting):
    right = accumulated(CONFIG, 4)
    ids = next(setting.windows())
    parts = []
    for own in ids.chunk(4):
        arm = setting.arm(full_batch(CONFIG))
        arm.workload.losses(arm.workload.forward(arm.model, arm.workload.batch(own)), arm.workload.batch(own)).mean().backward()
        parts.append([p.grad.numpy() for p in recipes.matrices(arm) if p.grad is not None])
    each, whole = setting.arm(recipes.orthogonalised_per_micro_batch(right)), setting.arm(right)
    start = [p.detach().clone() for p in recipes.matrices(each)]
    for arm in (each, whole):
        take_step(arm, arm.workload.batch(ids))
    moved = {name: [a - p.detach() for a, p in zip(start, recipes.matrices(arm), strict=True)]
             for name, arm in (("each", each), ("whole", whole))}  # fmt: skip
    for k, p in enumerate(recipes.matrices(each)):
        mean = np.mean([own[k] for own in parts], 0)
        expected = {"each": np.mean([newton_schulz(own[k]) for own in parts], 0), "whole": newton_schulz(mean)}
        for name, update in moved.items():
            nearness = {other: cosine(update[k].numpy(), value) for other, value in expected.items()}
            assert nearness[name] > 0.99 > 0.98 > min(nearness.values()), (k, name, nearness)
        buffers = [recipes.held(arm).state[q]["momentum_buffer"].numpy() for arm, q in
                   ((each, p), (whole, recipes.matrices(whole)[k]))]  # fmt: skip
        assert np.allclose(buffers[0], buffers[1], rtol=1e-12, atol=0), "momentum is linear, and is right"
    others = [[p.detach() for p in arm.model.parameters() if p.dim() != 2] for arm in (each, whole)]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*others, strict=True)), "Adam's part is the full batch's"


def cosine(a, b):
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
