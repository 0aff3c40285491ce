"""The methods for in-batch negatives, judged as any loop is."""

import pytest

from accumulation_harness.config import Precision
from accumulation_harness.measure import studies
from accumulation_harness.measure.trial import Candidate, accumulated
from accumulation_harness.recipes import contrastive
from tests.small_corpus import config, corpus

__all__ = ["corpus"]
METHODS = ("grad_cache", "temperature_repeated", "dual_bank@12")
SHORT = {"steps": 3, "algebra_steps": 5, "methods": METHODS}  # five windows: the fifth begins the second epoch


def judged(trial):
    return {arm["arm"]: arm for arm in studies.run(trial, lambda step, rows: None)["arms"]}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_norm": 0.5, "penalty": 0.1, "effective_batch": 10, "accumulation_steps": (5,)},
        {"precision": Precision.float16, "loss_scale": 64.0},
    ],
    ids=["plain", "clipped, penalised, short windows", "float16"],
)
@pytest.mark.slow
def test_grad_cache_is_equivalent_and_the_others_are_not(changes, corpus):
    arms = judged(config(corpus, **SHORT, **changes))
    assert arms["grad_cache"]["verdict"] == arms["permuted"]["verdict"] == "equivalent"
    plain, repeated, bank = (arms[name] for name in ("accumulated", *METHODS[1:]))
    assert (plain["verdict"], plain["cause"], plain["explained"]) == ("different", "non_separable_loss", True)
    assert repeated["verdict"] == bank["verdict"] == "different"
    # Where clipping is active, a temperature that is too large shrinks the towers too, and is no more alone.
    assert ("in log_scale of the" in str(repeated["reasons"])) == ("clip_norm" not in changes)
    # The oracle is of the loss alone: with a penalty the bank has its name, and no proof.
    assert (bank["cause"], bank["explained"]) == ("memory_bank", "penalty" not in changes)
    assert "by design, " in str(bank["reasons"])


def test_a_bank_that_is_not_what_it_says_has_no_name(corpus):
    """One bank under the name of two is not what the oracle says, and keeps its `unexplained`."""
    trial = config(corpus, methods=("dual_bank@12",), algebra_steps=3)
    candidate = Candidate("dual_bank@12", contrastive.named("dual_bank@12")(accumulated(trial, 4)))
    right = studies.by_design(trial, candidate, "seen")
    assert right["cause"] == "memory_bank" and right["explained"] and right["reasons"].endswith("; seen")
    other = Candidate("dual_bank@12", contrastive.named("passage_bank@12")(accumulated(trial, 4)))
    wrong = studies.by_design(trial, other, "seen")
    assert "cause" not in wrong and "from the loss beside past representations" in wrong["reasons"]
    momentum = Candidate("momentum_bank@12", contrastive.named("momentum_bank@12")(accumulated(trial, 4)))
    named = studies.by_design(trial, momentum, "seen")
    assert (named["cause"], named["explained"]) == ("memory_bank", True)
    without = studies.by_design(trial, Candidate("dual_bank@12", momentum.recipe), "seen")
    assert "cause" not in without, "the average of the towers is another encoder"
