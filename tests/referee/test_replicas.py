"""The diagnosis of replicas, on gradients made in numpy: no process, no recipe."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from accumulation_harness.judge.rank_diagnosis import diagnose_ranks
from accumulation_harness.referee.oracle import Referee, snapshot
from accumulation_harness.referee.replicas import observe
from tests.reference import softmax_regression_gradients
from tests.toy import Toy

Array = NDArray[np.float64]
CUTS = [[2, 4, 1], [3, 1, 5]]
IDS = torch.tensor([3, 8, 1, 20, 11, 6, 17, 0, 22, 5, 9, 13, 2, 15, 7, 19])


class Window:
    """One window of the toy at its first weights; gradients by rank and micro-batch, in numpy."""

    def __init__(self, cuts):
        torch.manual_seed(1)
        self.cuts, self.toy = cuts, Toy()
        self.model = self.toy.make_model().double()
        weight, bias = (p.detach().numpy() for p in self.model.parameters())
        ids = IDS.numpy()
        terms = 1 + ids % 4
        each = terms[:, None] * softmax_regression_gradients(weight, bias, self.toy.x.numpy()[ids], self.toy.y.numpy()[ids])
        edges = np.cumsum([0, *(size for cut in cuts for size in cut)])
        flat = [each[a:b].sum(0) for a, b in pairwise(edges)]
        self.sums = [flat[: len(cuts[0])], flat[len(cuts[0]) :]]
        self.terms = [int(terms[: sum(cuts[0])].sum()), int(terms[sum(cuts[0]) :].sum())]
        self.total = sum(self.terms)
        self.right = (sum(self.sums[0]) + sum(self.sums[1])) / self.total

    def evidence(self, first, second, apart=0.0):
        """`apart`: added to the second rank's parameters after the step."""
        consumed = [torch.from_numpy(np.asarray(a)) for a in (first, second)]
        after = [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64) + apart]
        return observe(Referee(self.toy, self.model), snapshot(self.model), self.toy.batch(IDS), self.cuts, consumed, after)

    def cause(self, first, second, apart=0.0):
        return diagnose_ranks(self.evidence(first, second, apart)).cause


@pytest.fixture
def window():
    return Window(CUTS)


def test_two_faults_are_never_one_confident_answer(window):
    assert window.cause(6 * window.right, 6 * window.right) == "unexplained"  # summed, and not divided by N = 3
    cleared = (window.sums[0][-1] + window.sums[1][-1]) / window.total  # only the last micro-batch
    assert window.cause(cleared, cleared) == "unexplained"
    lonely = [3 * sum(s) / n for s, n in zip(window.sums, window.terms, strict=True)]  # no exchange, and not divided by N
    assert window.cause(*lonely) == "replicas_not_synchronised+unexplained"
    assert window.cause(3 * window.right, 3 * window.right) == "loss_not_divided"
    assert window.cause(window.right / 3, window.right / 3) == "loss_divided_twice"


def test_as_many_micro_batches_as_ranks_cannot_be_told_from_ranks():
    two = Window([[3, 4], [4, 5]])
    finding = diagnose_ranks(two.evidence(2 * two.right, 2 * two.right))
    assert finding.cause == "unexplained"
    assert "loss_not_divided and replica_scale explain it equally well" in finding.sentence
