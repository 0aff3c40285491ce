"""Two ranks on one machine."""

from typing import Any

import pytest

from accumulation_harness.audit import audit
from tests.audit.asked import causes_of
from tests.audit.loops import replicas


@pytest.mark.slow
@pytest.mark.parametrize(("train", "causes"), replicas.CASES.items(), ids=[f.__name__ for f in replicas.CASES])
def test_two_ranks(train, causes):
    report = audit(train, batch_size=8, accumulation_steps=(4,), processes=2)
    assert causes_of(report) == causes, str(report)
    assert report.equivalent == (not causes)


@pytest.mark.slow
def test_sum_over_replicas_shows_against_one_process():
    report = audit(replicas.ddp_summed, batch_size=8, accumulation_steps=(4,), processes=2, reference=replicas.one_process)
    assert {(f.accumulation_steps, f.cause) for f in report.findings} == {(1, "replica_scale"), (4, "replica_scale")}, str(report)
    assert audit(
        replicas.ddp_every_backward, batch_size=8, accumulation_steps=(4,), processes=2, reference=replicas.one_process
    ).equivalent


@pytest.mark.slow
def test_unequal_tokens_per_rank_show_against_one_process():
    options: dict[str, Any] = {
        "batch_size": 8,
        "accumulation_steps": (4,),
        "processes": 2,
        "reference": replicas.tokens_on_one_process,
    }
    report = audit(replicas.ddp_tokens_per_rank, **options)
    assert {(f.accumulation_steps, f.cause) for f in report.findings} == {(1, "replica_scale"), (4, "replica_scale")}, str(report)
    assert audit(replicas.ddp_tokens, **options).equivalent
    causes = {(f.accumulation_steps, f.cause) for f in audit(replicas.ddp_mean_of_means, **options).findings}
    assert causes == {(1, "replica_scale"), (4, "replica_scale"), (4, "mean_of_means")}


@pytest.mark.slow
def test_a_rank_that_raises_is_told():
    report = audit(replicas.one_rank_raises, batch_size=8, accumulation_steps=(4,), processes=2)
    assert report.status == "inconclusive" and "rank 1: RuntimeError: only here" in report.problems[0]


def test_a_function_that_ranks_cannot_import_is_refused():
    with pytest.raises(ValueError, match="top of a file"):
        audit(lambda batch_size, accumulation_steps: None, batch_size=8, accumulation_steps=(4,), processes=2)
