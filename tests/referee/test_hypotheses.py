"""Oracles against their textbook formulas, and what they must not be taken for."""

import dataclasses

import pytest
import torch

from accumulation_harness.referee.gradients import relative_distance
from accumulation_harness.referee.hypotheses import WindowFacts, hypotheses, partly
from accumulation_harness.referee.oracle import Parts

TERMS = (3, 20, 9, 32)
TENSORS = (1, 4, 6)


def random_facts(**changes):
    generator = torch.Generator().manual_seed(7)
    parts = tuple(torch.randn(sum(TENSORS), dtype=torch.float64, generator=generator) for _ in TERMS)
    facts = WindowFacts(
        parts=Parts(parts, TERMS), configured_steps=4, configured_terms=64.0, max_norm=None, loss_scale=1.0, left_over=None,
        consumed_before=None, tensors=TENSORS,
    )  # fmt: skip
    return dataclasses.replace(facts, **changes)  # type: ignore[arg-type]


def explained_by(consumed, facts, tell=hypotheses):
    found = partly(facts, consumed) if tell is partly else hypotheses(facts)
    return {str(cause) for cause, gradient in found if relative_distance(consumed, gradient) < 1e-12}


def weighted(facts, weights):
    return sum(w * part for w, part in zip(weights, facts.parts.parts, strict=True))  # type: ignore[return-value]


def test_left_over_gradients_are_the_last_windows_in_some_tensors_or_scaled():
    before = random_facts().parts.parts[2] * 0.3
    right = random_facts().parts.gradient
    telling = {}
    for name, left in {
        "scaled": 0.5 * before,
        "some tensors": torch.cat([before[:5], torch.zeros(6)]),
        "turned": before.flip(0),
        "negative": -before,
        "one entry": torch.cat([before[:1], torch.zeros(10)]),
    }.items():
        facts = random_facts(left_over=left.double(), consumed_before=before)
        telling[name] = explained_by(right + left, facts)
    either = {
        "gradients_not_cleared",
        "foreign_gradients",
    }  # other windows tell which
    assert telling["scaled"] == telling["some tensors"] == either
    assert telling["turned"] == telling["negative"] == telling["one entry"] == {"foreign_gradients"}


def test_a_fault_of_some_tensors_is_recognised_and_a_frozen_tensor_is_none():
    facts = random_facts()
    right, means = facts.parts.gradient, weighted(facts, (1.0, 1.0, 1.0, 1.0))
    biases = torch.cat([means[:1], right[1:5], means[5:]])
    assert not explained_by(biases, facts)
    assert explained_by(biases, facts, partly) == {"loss_not_divided"}
    frozen = torch.cat([right[:5], torch.zeros(6, dtype=torch.float64)])
    halved = torch.cat([right[:5], 0.4 * right[5:]])
    assert not explained_by(frozen, facts, partly) and not explained_by(halved, facts, partly)


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_clipping_inside_the_window(micro_batches):
    """After some micro-batches and at the end, at 0.8 of the smaller norm, so that both clips act."""
    facts = random_facts()
    shares = torch.stack(list(facts.parts.shares))
    early, late = shares[:micro_batches].sum(0), shares[micro_batches:].sum(0)
    norm = 0.8 * min(float(early.norm()), float(facts.parts.gradient.norm()))
    facts = dataclasses.replace(facts, max_norm=norm)

    def clip(g):
        return g * min(1.0, norm / (float(g.norm()) + 1e-6))

    assert explained_by(clip(clip(early) + late), facts) == {"clip_per_micro_batch"}
    undivided = clip(weighted(facts, (1.0, 1.0, 1.0, 1.0))) / 4
    assert explained_by(undivided, facts) == {"clip_before_unscale"}
    assert not explained_by(clip(facts.parts.gradient) * 1.001, facts)
