import pytest

from accumulation_harness.experiments.contrastive.method_memory import of_sizes, peak
from accumulation_harness.experiments.contrastive.retrieval import make_methods
from tests.small_corpus import config, corpus
from tests.trials import measured, setting_of

__all__ = ["corpus"]


@pytest.fixture(scope="module")
def trial(corpus):
    return config(corpus, "study=method_memory methods=[grad_cache,dual_bank@8,momentum_bank@8] steps=2 effective_batch=16")


@pytest.fixture(scope="module")
def peaks(trial):
    rows = measured(trial)
    assert {row["micro_batch"] for row in rows} == {4} and all(row["window"] == 4 * row["accumulation_steps"] for row in rows)
    return {(row["arm"], row["window"]): row["peak_bytes"] for row in rows}


def test_a_method_is_weighed_as_where_it_is_alone(trial, peaks):
    """In fresh arms, so that what is counted is the method's own and not its neighbours'."""
    largest = list(of_sizes(trial))[-1]
    for place in range(len(make_methods(setting_of(largest)))):
        setting = setting_of(largest)
        method = make_methods(setting)[place]
        first, second = (method.arm.workload.batch(ids) for ids in setting.windows(2))
        method.take(first)
        assert peak(method, second) == peaks[method.name.name, 16]


def test_what_grows_with_the_window_and_what_does_not(peaks):
    def grown(arm):
        return peaks[arm, 16] - peaks[arm, 8]

    window = peaks["accumulated", 16] - peaks["accumulated", 8]  # its pairs themselves, which every method is given
    for flat in ("small", "dual_bank@8", "momentum_bank@8"):
        assert grown(flat) == pytest.approx(window, abs=100), "8 more pairs; numbers of samples take a few bytes"
    assert grown("full") > 4 * window
    assert window < grown("grad_cache") < grown("full"), "the representations of the window, and their gradients"
    assert peaks["momentum_bank@8", 16] > peaks["dual_bank@8", 16] > peaks["accumulated", 16]
