"""Losses with in-batch negatives, against the oracle that is checked against loops in numpy."""

from accumulation_harness.workloads.contrastive import Representations, ranks
from tests.referee.test_negatives import Linear, inputs


def test_a_model_that_cannot_tell_passages_apart_ranks_them_last():
    of = Representations(*Linear()(inputs()))
    assert ranks(of._replace(passages=of.passages[:1].expand(8, -1))).tolist() == [8] * 8
