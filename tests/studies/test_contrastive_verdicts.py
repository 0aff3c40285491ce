"""The methods for in-batch negatives, judged as any loop is."""

import pytest

from accumulation_harness.measure import studies
from accumulation_harness.measure.trial import Candidate, accumulated
from accumulation_harness.recipes import contrastive
from tests.small_corpus import config, corpus

__all__ = ["corpus"]
# Five windows: the fifth begins the second epoch.
SHORT = "steps=3 algebra_steps=5 methods=[grad_cache,temperature_repeated,dual_bank@12]"


@pytest.mark.parametrize(
    "changes",
    [
        "norm=none",
        "clip_norm=0.5 workload.penalty=0.1 effective_batch=10 accumulation_steps=[5]",
        "precision=float16 loss_scale=64",
    ],
)
@pytest.mark.slow
def test_grad_cache_is_equivalent_and_the_others_are_not(changes, corpus):
    arms = {arm["arm"]: arm for arm in studies.run(config(corpus, SHORT, changes), lambda step, rows: None)["arms"]}
    assert arms["grad_cache"]["verdict"] == arms["permuted"]["verdict"] == "equivalent"
    plain, repeated, bank = (arms[name] for name in ("accumulated", "temperature_repeated", "dual_bank@12"))
    assert (plain["verdict"], plain["cause"], plain["explained"]) == ("different", "non_separable_loss", True)
    assert repeated["verdict"] == bank["verdict"] == "different"
    # Clipped, a temperature that is too large shrinks the towers too; a window is told that no clip has touched.
    assert "in log_scale of the" in str(repeated["reasons"])
    # The oracle is of the loss alone: with a penalty the bank has its name, and no proof.
    assert (bank["cause"], bank["explained"]) == ("memory_bank", "penalty" not in changes)
    assert "by design, " in str(bank["reasons"])


def test_a_bank_that_is_not_what_it_says_has_no_name(corpus):
    """One bank under the name of two is not what the oracle says, and keeps its `unexplained`."""
    trial = config(corpus, "methods=[dual_bank@12] algebra_steps=3")

    def judged(name, method):
        return studies.by_design(trial, Candidate(name, contrastive.named(method)(accumulated(trial, 4))), "seen")

    for name in ("dual_bank@12", "momentum_bank@12"):
        right = judged(name, name)
        assert (right["cause"], right["explained"]) == ("memory_bank", True) and right["reasons"].endswith("; seen")
    for method in ("passage_bank@12", "momentum_bank@12"):  # of which the average of the towers is another encoder
        wrong = judged("dual_bank@12", method)
        assert "cause" not in wrong and "from the loss beside past representations" in wrong["reasons"]
