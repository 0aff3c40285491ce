import pytest

from accumulation_harness.config import Contrast
from tests.small_corpus import config, corpus
from tests.trials import measured

__all__ = ["corpus"]
BANKS = "dual_bank@12,passage_bank@12,momentum_bank@12,dual_bank@12+2,momentum_bank@12+1"
EXACT, APART = 1e-12, 1e-3


def rows(corpus, *settings):
    found = measured(config(corpus, "study=negatives precision=float64", *settings))
    return {(row["arm"], row["after_steps"]): row for row in found}


@pytest.mark.parametrize("contrast", Contrast)
def test_each_method_beside_the_full_batch_and_its_oracle(contrast, corpus):
    methods = f"methods=[grad_cache,temperature_repeated,{BANKS}]"
    found = rows(corpus, f"workload.contrast={contrast} steps=3 probe_every=2", methods)
    assert {step for _, step in found} == {0, 2}
    for step in (0, 2):
        plain, cached, repeated = (found[arm, step] for arm in ("accumulated", "grad_cache", "temperature_repeated"))
        assert cached["gradient_error"] <= EXACT and cached["oracle_error"] <= EXACT and cached["forwards"] == 2.0
        assert plain["gradient_error"] > APART and plain["oracle_error"] <= EXACT and plain["forwards"] == 1.0
        assert repeated["temperature_ratio"] == pytest.approx(4)
        for bank in BANKS.split(","):
            own = found[bank, step]
            assert own["oracle_error"] <= EXACT and own["gradient_error"] > APART and own["held_with_gradient"] == 0
        assert found["momentum_bank@12", step]["forwards"] == 2.0
    assert found["dual_bank@12", 0]["bank_entries"] == 0 and found["dual_bank@12", 2]["bank_entries"] == 12
    assert found["dual_bank@12", 2]["held_numbers_per_pair"] == 128, "two representations of 64"


def test_with_dropout_the_masks_belong_to_samples(corpus):
    found = rows(corpus, "workload.dropout=0.2 methods=[grad_cache,grad_cache_other_draws] steps=1")
    right, wrong = (found[name, 0] for name in ("grad_cache", "grad_cache_other_draws"))
    assert right["gradient_error"] <= EXACT and wrong["gradient_error"] > APART and "oracle_error" not in right
