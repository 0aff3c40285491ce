"""In-batch negatives, exactly: each method's gradient of a window beside the full batch's at the same weights, in float64.

The weights go through a training on the full batch; every method sees all of its windows, so that banks hold representations of
weights that were really passed. Dropout's masks belong to samples, so that all methods draw the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from accumulation_harness.config import LastWindow
from accumulation_harness.experiments.shared.measuring import (
    PERMUTED,
    Arm,
    Candidate,
    OnStep,
    Row,
    Setting,
    by_tensor,
    compare,
    full_batch,
    take_step,
    with_faults,
)
from accumulation_harness.measure.banks import WindowStep, oracle_row, past_of, reading, taken
from accumulation_harness.recipes import contrastive
from accumulation_harness.recipes.sample_masks import masks_of_samples
from accumulation_harness.workloads.docstrings import DocstringWorkload

TOWERS = ("query.", "passage.")  # whose parameters these names begin with; the others are a temperature and a bias


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per probed window, N and method: the first window, every `probe_every`-th and the last.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with `corpus`, `after_steps`, `arm`, `accumulation_steps`, `gradient_error` (relative), `cosine`,
        `temperature_ratio`, `loss` and `full_loss` (nats per pair), `forwards`, and what a bank holds.
    """
    config = setting.config
    reference = setting.arm(masks_of_samples(full_batch(config)), clip_norm=None)
    methods = {name: contrastive.named(name) for name in config.methods}
    chosen = [one for one in with_faults(config, methods) if one.arm != PERMUTED]
    arms = [setting.arm(reading(one.recipe), clip_norm=None) for one in chosen]
    pasts = [past_of(one.arm) for one in chosen]
    full = setting.arm(reading(full_batch(config)), clip_norm=None)
    rows = []
    for t, ids in enumerate(setting.windows(config.steps, last=LastWindow.drop)):
        window, is_probed = setting.exact.batch(ids), t % config.probe_every == 0 or t == config.steps - 1
        exact = taken(setting, full, reference, window, t) if is_probed else None
        for one, arm, past in zip(chosen, arms, pasts, strict=True):
            held = {} if past is None else _what_is_held(arm)
            if past is not None:
                past.see(reference.model, window.inputs)
            if exact is None and past is None:  # a bank has to see every window
                continue
            own = taken(setting, arm, reference, window, t)
            if exact is not None:
                row = {"corpus": corpus_of(setting), "after_steps": t, **_row(one, reference.model, own, exact)}
                if not setting.draws:
                    row |= oracle_row(reference.model, one.arm, one.recipe, window, own, past, setting) | held
                rows.append(row)
        with setting.randomness(t):
            take_step(reference, window)
    return rows


def _row(one: Candidate, model: nn.Module, own: WindowStep, full: WindowStep) -> Row:
    beside, scale = compare(own.gradient, full.gradient), by_tensor(model)["log_scale"]
    return {
        "arm": one.arm,
        "accumulation_steps": one.recipe.accumulation_steps,
        "gradient_error": beside.distance,
        "cosine": beside.cosine,
        "temperature_ratio": float(own.gradient[scale] / full.gradient[scale]),
        "loss": own.loss,
        "full_loss": full.loss,
        "forwards": own.forwards,
    }


def corpus_of(setting: Setting) -> str:
    """The first digits of the fingerprint of the pairs: rows of two corpora are of two experiments.

    Args:
        setting: The trial's task, initial weights and windows.

    Returns:
        Hex digits.
    """
    workload = setting.exact
    assert isinstance(workload, DocstringWorkload)
    return workload.pairs.fingerprint[:12]


def tower_ratio(model: nn.Module, gradient: Tensor) -> float:
    """||gradient of the query tower|| / ||gradient of the passage tower||.

    Args:
        model: Two towers.
        gradient: [P].

    Returns:
        The ratio.
    """
    query, passage = (
        sum(float(gradient[where].square().sum()) for name, where in by_tensor(model).items() if name.startswith(tower))
        for tower in TOWERS
    )
    return float((query / passage) ** 0.5) if passage else math.inf


def _what_is_held(arm: Arm) -> Row:
    """Of the tensors in a bank: how many require a gradient or have one, and whether any has the shape of the gradient's."""
    kept: Any = arm.memory.get("bank")
    tensors: Sequence[Tensor] = [] if kept is None else [one for one in kept if isinstance(one, Tensor)]
    return {
        "bank_entries": 0 if kept is None else len(kept.passages),
        "held_with_gradient": sum(one.requires_grad or one.grad is not None for one in tensors),
        "held_numbers_per_pair": sum(one[0].numel() for one in tensors if one.dim() and len(one)),
    }
