"""The objectives of reinforcement learning in scoreboard/rl_objectives.py, audited."""

import pytest

from accumulation_harness.audit import audit
from scoreboard import rl_objectives
from tests.slow import few

CAUSES = {
    **dict.fromkeys((rl_objectives.grpo, rl_objectives.dr_grpo, rl_objectives.dapo, rl_objectives.ppo), ""),
    rl_objectives.bnpo: "mean_of_means",
    rl_objectives.grpo_added: "loss_not_divided",
    rl_objectives.grpo_cut_groups: "normaliser_depends_on_split",
    rl_objectives.dr_grpo_padded: "normaliser_depends_on_split",
    rl_objectives.dapo_by_completions: "mean_of_means",
    rl_objectives.ppo_entropy: "mean_of_means",
    rl_objectives.ppo_whitened: "normaliser_depends_on_split",
}
FAST = (rl_objectives.bnpo,)


@pytest.mark.parametrize(
    "objective",
    few(FAST, CAUSES),
)
def test_a_normaliser_of_the_window_is_equivalent_and_another_is_named(objective):
    steps, cause = (4,) if objective in FAST else (4, 16), CAUSES[objective]
    report = audit(objective, batch_size=16, accumulation_steps=steps)
    found = {(finding.accumulation_steps, finding.cause) for finding in report.findings}
    assert report.equivalent == (not cause) and found == {(num, cause) for num in steps if cause}, str(report)
