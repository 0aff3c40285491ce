"""Real processes on the toy: what ranks consume against numpy, what they send, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from accumulation_harness.config import Split
from accumulation_harness.measure import lock_step, ranks
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.measure.ranks import (
    RIGHT,
    SCALED,
    UNSYNCHRONISED,
    RankFailed,
    Ranks,
    sizes,
)
from accumulation_harness.recipes.recipe import Recipe
from tests.commands import ENVIRONMENT, ROOT, eventually, is_alive
from tests.reference import softmax_regression_gradients
from tests.toy import CPU, Toy
from tests.trials import trial

N, WORLD = 3, 2
CONFIG = trial("effective_batch=13 accumulation_steps=[3] split=ragged steps=1 seed=4 optimizer.lr=0.5")
PARAMETERS = 18


@pytest.fixture(scope="module")
def setting():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock_step, "make_workload", lambda config, *, device, dtype: Toy(dtype))
        yield Setting(CONFIG, CPU)


@pytest.fixture(scope="module")
def pair(setting):
    with Ranks(setting, WORLD) as two:
        yield two
    assert not any(process.is_alive() for process in two.processes)
    assert not Path(two.folder.name).exists()


def start_of(setting):
    return torch.cat([p.detach().double().reshape(-1) for p in setting.initial.parameters()]).numpy()


def sums(setting):
    """Numpy: summed gradients by rank and micro-batch, loss terms by rank, and of the window. Ragged: 4 + 9 samples."""
    toy = Toy()
    ids = ranks.whole_windows(setting)[0].numpy()
    theta = start_of(setting)
    each = softmax_regression_gradients(theta[:15].reshape(3, 5), theta[15:], toy.x.numpy()[ids], toy.y.numpy()[ids])
    terms = 1 + ids % 4
    each = terms[:, None] * each
    assert sizes(WORLD, Split.ragged, 13) == [4, 9]
    edges = [[0, *np.cumsum(sizes(N, Split.ragged, 4))], [4, *(4 + np.cumsum(sizes(N, Split.ragged, 9)))]]
    parts = [[each[own[k] : own[k + 1]].sum(0) for k in range(N)] for own in edges]
    return parts, [int(terms[:4].sum()), int(terms[4:].sum())], int(terms.sum())


def consumed(traces):
    return [trace.gradients[0] for trace in traces]


@pytest.mark.parametrize("name", RIGHT)
def test_right_ways_take_the_step_of_the_mean_over_all_loss_terms(pair, setting, name):
    parts, own, total = sums(setting)
    assert own[0] != own[1]
    right = sum(sum(rank) for rank in parts) / total
    traces = pair.run(RIGHT[name], N)
    for gradient in consumed(traces):
        np.testing.assert_allclose(gradient, right, rtol=0, atol=1e-14)
    start = start_of(setting)
    np.testing.assert_allclose(traces[0].parameters[0], start - 0.5 * right, rtol=0, atol=1e-14)
    assert np.array_equal(traces[0].parameters[0], traces[1].parameters[0])


@pytest.mark.parametrize("name", {**SCALED, **UNSYNCHRONISED})
def test_wrong_ways_are_wrong_as_described(pair, setting, name):
    parts, own, total = sums(setting)
    full = [np.sum(rank, axis=0) for rank in parts]
    right = (full[0] + full[1]) / total
    local = (full[0] / own[0] + full[1] / own[1]) / 2
    early = (parts[0][0] + parts[1][0]) / total  # half of three micro-batches is one
    halfway = [early + WORLD * np.sum(rank[1:], axis=0) / total for rank in parts]
    expected = {
        "summed_not_averaged": [2 * right] * 2,
        "averaged_twice": [right / 2] * 2,
        "mean_of_local_means": [local] * 2,
        "never_synchronised": [full[0] / own[0], full[1] / own[1]],
        "synchronised_halfway": halfway,
        "ddp_synchronised_halfway": halfway,
    }[name]
    for gradient, wanted in zip(consumed(pair.run({**SCALED, **UNSYNCHRONISED}[name], N)), expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=1e-14)
        assert np.linalg.norm(gradient - right) > 1e-3 * np.linalg.norm(right)


@pytest.mark.parametrize(
    ("name", "num", "reductions", "count_bytes"),
    [
        ("sum_over_window_terms", N, 1, 8),
        ("mean_every_micro_batch", N, N, 8),
        ("ddp", N, 1, 8),
        ("ddp_every_backward", N, N, 8),
        ("ddp_every_backward", 1, 1, 8),
        ("mean_of_local_means", N, 1, 0),
        ("never_synchronised", N, 0, 0),
    ],
)
def test_what_goes_over_the_wire(pair, name, num, reductions, count_bytes):
    for trace in pair.run({**RIGHT, **SCALED, **UNSYNCHRONISED}[name], num):
        wire = trace.wire
        assert (wire.gradient_reductions, wire.gradient_bytes) == (reductions, 8 * PARAMETERS * reductions)
        assert wire.count_bytes == count_bytes


# Processes that fail ----------------------------------------------------------------------------------------------------------


def rank_one_raises(wire, num, split):
    def raise_in_one(arm):
        if torch.distributed.get_rank() == 1:
            raise ArithmeticError("no such luck")
        wire.sum_gradients(torch.zeros(1))  # waits for the other

    return Recipe(accumulation_steps=num, split=partial(sizes, num, split), after_backward=(raise_in_one,))


def test_a_rank_that_raises_ends_all_at_once_and_is_quoted(setting):
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1: (.|\n)*ArithmeticError: no such luck"), Ranks(setting, WORLD) as two:
        two.run(rank_one_raises, N)
    assert time.monotonic() - started < ranks.TIMEOUT_S / 2
    assert not any(process.is_alive() for process in two.processes)


PROGRAM = """
import sys, time
from accumulation_harness.measure import lock_step
from accumulation_harness.measure.ranks import RIGHT, Ranks
from accumulation_harness.measure.lock_step import Setting
from tests.measure.test_ranks import CONFIG, N
from tests.toy import CPU, Toy
if __name__ == "__main__":
    lock_step.make_workload = lambda config, *, device, dtype: Toy(dtype)
    with Ranks(Setting(CONFIG, CPU), 2) as two:
        two.run(RIGHT["sum_over_window_terms"], N)
        print(two.folder.name, *(process.pid for process in two.processes), flush=True)
        time.sleep(100)
"""


@pytest.mark.slow
def test_ranks_die_with_a_killed_parent():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | ENVIRONMENT
    ) as parent:
        folder, *pids = parent.stdout.readline().split()
        assert len(pids) == 2 and all(is_alive(int(pid)) for pid in pids) and Path(folder).exists()
        parent.send_signal(signal.SIGKILL)
        parent.wait(20)
    assert eventually(lambda: not any(is_alive(int(pid)) for pid in pids), 30)
