"""The objectives of reinforcement learning in scoreboard/rl_objectives.py, audited."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accumulation_harness.audit import audit
from scoreboard import rl_objectives

RIGHT = (rl_objectives.grpo, rl_objectives.dr_grpo, rl_objectives.dapo, rl_objectives.ppo)
WRONG = {
    rl_objectives.grpo_added: {"loss_not_divided"},
    rl_objectives.grpo_cut_groups: {"normaliser_depends_on_split"},
    rl_objectives.dr_grpo_padded: {"normaliser_depends_on_split"},
    rl_objectives.bnpo: {"mean_of_means"},
    rl_objectives.dapo_by_completions: {"mean_of_means"},
    rl_objectives.ppo_entropy: {"mean_of_means"},
    rl_objectives.ppo_whitened: {"non_separable_loss"},
}
Objective = Callable[..., Any]


def named(function):
    return str(function.__name__)


def test_rollouts_hold_what_the_objectives_are_audited_on():
    held = rl_objectives.rollouts()
    lengths = held.mask.sum(1)
    assert (lengths == 0).any() and lengths.max() == rl_objectives.LONGEST and len(lengths.unique()) > 5
    assert ((held.tokens[:, rl_objectives.PROMPT :] != 0) == held.mask.bool()).all()
    assert (held.tokens[:: rl_objectives.GROUP, : rl_objectives.PROMPT].unique(dim=0).shape[0]) == 5
    with torch.no_grad():
        ratio = (rl_objectives.Policy()(held.tokens)[0] - held.old).exp()[held.mask.bool()]
    assert (ratio > 1 + rl_objectives.HIGHER).any() and (ratio < 1 - rl_objectives.LOWER).any(), "no ratio is clipped"


@pytest.mark.slow
@pytest.mark.parametrize("objective", RIGHT, ids=named)
def test_a_normaliser_of_the_window_is_equivalent(objective):
    report = audit(objective, batch_size=16, accumulation_steps=(4, 16))
    assert report.equivalent, str(report)


@pytest.mark.parametrize("objective", (rl_objectives.grpo, rl_objectives.bnpo), ids=named)
def test_one_right_and_one_wrong_normaliser(objective):
    report = audit(objective, batch_size=16, accumulation_steps=(4,))
    assert {f.cause for f in report.findings} == WRONG.get(objective, set()), str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "causes"), WRONG.items(), ids=[named(objective) for objective in WRONG])
def test_a_normaliser_of_the_micro_batch_is_named(objective, causes):
    report = audit(objective, batch_size=16, accumulation_steps=(4, 16))
    assert {(f.accumulation_steps, f.cause) for f in report.findings} == {(n, c) for n in (4, 16) for c in causes}, str(report)
