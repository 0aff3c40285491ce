"""Two ranks on one machine."""

import pytest

from tests.audit.asked import audited, named
from tests.audit.loops import replicas
from tests.audit.loops.replicas import one_process, tokens_on_one_process

AT_EVERY_N = {(1, "replica_scale"), (4, "replica_scale")}


OF_TWO = {"batch_size": 8, "processes": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("train", "causes"), replicas.CASES.items(), ids=[f.__name__ for f in replicas.CASES])
def test_two_ranks(train, causes):
    named(train, *causes, **OF_TWO)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "reference", "causes"),
    [
        (replicas.ddp_summed, one_process, AT_EVERY_N),
        (replicas.ddp_every_backward, one_process, set()),
        (replicas.ddp_tokens_per_rank, tokens_on_one_process, AT_EVERY_N),
        (replicas.ddp_tokens, tokens_on_one_process, set()),
        (replicas.ddp_mean_of_means, tokens_on_one_process, AT_EVERY_N | {(4, "mean_of_means")}),
    ],
)
def test_what_is_the_same_at_every_n_shows_against_one_process(train, reference, causes):
    """Sums over replicas in place of means, and unequal tokens per rank."""
    report = audited(train, reference=reference, **OF_TWO)
    assert {(f.accumulation_steps, f.cause) for f in report.findings} == causes, str(report)
    assert report.equivalent == (not causes)


def test_a_function_that_ranks_cannot_import_is_refused():
    with pytest.raises(ValueError, match="top of a file"):
        audited(lambda batch_size, accumulation_steps: None, **OF_TWO)
