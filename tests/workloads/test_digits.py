"""Digits: the split is fixed, the pixels are right, and float64 sees what float32 sees."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from accumulation_harness.config import Data, Model, TrialConfig, WorkloadConfig
from accumulation_harness.workloads.build import make_workload
from accumulation_harness.workloads.images import ImageWorkload

CPU = torch.device("cpu")


def digits(dtype: torch.dtype = torch.float32, *, seed: int = 0, model: Model = Model.conv) -> ImageWorkload:
    config = TrialConfig(workload=WorkloadConfig(data=Data.digits, model=model), seed=seed)
    workload = make_workload(config, device=CPU, dtype=dtype)
    assert isinstance(workload, ImageWorkload)
    return workload


def test_sizes_and_range() -> None:
    workload = digits()
    everything = workload.batch(torch.arange(workload.num_samples))
    assert workload.num_samples == 1500
    assert len(workload.held_out) == 297
    assert everything.inputs.shape == (1500, 1, 8, 8)
    assert (float(everything.inputs.min()), float(everything.inputs.max())) == (0, 1)
    assert everything.targets.bincount().min() > 100  # all ten classes


def test_training_and_held_out_samples_are_all_of_the_digits_once() -> None:
    workload = digits(torch.float64)
    train = workload.batch(torch.arange(workload.num_samples))
    images = torch.cat([train.inputs, workload.held_out.inputs]).flatten(1)
    labels = torch.cat([train.targets, workload.held_out.targets])
    source = load_digits()
    found = sorted((*row, label) for row, label in zip((images * 16).tolist(), labels.tolist(), strict=True))
    assert found == sorted((*row, label) for row, label in zip(source.data.tolist(), source.target.tolist(), strict=True))
    assert torch.equal(torch.cat([train.ids, workload.held_out.ids]), torch.arange(1797))


def test_the_split_depends_on_no_seed() -> None:
    torch.manual_seed(1)
    first = digits(seed=1)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = digits(seed=2)
    assert torch.equal(torch.get_rng_state(), state)  # and building draws nothing
    assert torch.equal(first.held_out.inputs, second.held_out.inputs)
    assert first.fingerprint == second.fingerprint


def test_float64_inputs_are_the_float32_ones() -> None:
    for model in (Model.conv, Model.resnet18):
        wide, narrow = digits(torch.float64, model=model).held_out.inputs, digits(model=model).held_out.inputs
        assert (wide.dtype, narrow.dtype) == (torch.float64, torch.float32)
        assert torch.equal(wide, narrow.double())


def test_resnet_sees_images_of_32_by_32_with_the_same_mean() -> None:
    small, large = digits().held_out.inputs, digits(model=Model.resnet18).held_out.inputs
    assert large.shape == (297, 1, 32, 32)
    # Bilinear by a factor of four: inner pixel (4r + 2, 4c + 2) lies 1/8 of a pixel beyond the centre of (r, c).
    r, c = 3, 4
    corner = small[:, 0, r : r + 2, c : c + 2]
    weights = torch.tensor([0.875, 0.125])
    assert torch.allclose(large[:, 0, 4 * r + 2, 4 * c + 2], torch.einsum("nij,i,j->n", corner, weights, weights), atol=1e-6)


def test_a_batch_is_its_samples_in_the_order_asked_for() -> None:
    workload = digits()
    ids = torch.tensor([7, 3, 1499, 3])
    batch = workload.batch(ids)
    for row, sample in enumerate(ids.tolist()):
        assert torch.equal(batch.inputs[row], workload.batch(torch.tensor([sample])).inputs[0])
    assert torch.equal(batch.rows(torch.tensor([2, 0])).ids, torch.tensor([1499, 7]))


def test_losses_terms_and_correct_against_a_plain_computation() -> None:
    workload = digits(torch.float64)
    batch = workload.batch(torch.arange(5))
    outputs = torch.randn(5, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    losses, correct = workload.losses(outputs, batch), workload.correct(outputs, batch)
    for row, target in enumerate(batch.targets.tolist()):
        assert torch.isclose(losses[row], outputs[row].exp().sum().log() - outputs[row, target], rtol=1e-13)
        assert correct[row] == (outputs[row].max() == outputs[row, target])
    assert workload.num_terms(batch).tolist() == [1] * 5
    assert workload.losses(outputs.half(), batch).dtype == torch.float32
