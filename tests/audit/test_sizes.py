"""Models of which a sample is kept: the same findings as of small ones, faults outside the sample, and what is held in memory."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from accumulation_harness.audit.evidence import Intervention
from accumulation_harness.audit.observe import places, sample
from accumulation_harness.audit.observe.runs import Job, watch
from scoreboard import data
from tests.audit.asked import audited, named
from tests.audit.loops import right_loops, wrong_loops
from tests.audit.loops.frame import train
from tests.slow import few

WIDTH, WORDS = 400, 300


class Wide(data.LanguageModel):
    def __init__(self):
        nn.Module.__init__(self)
        self.embedding = nn.Embedding(data.VOCABULARY, 8)
        self.hidden = nn.Linear(8, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, data.VOCABULARY)


def model(dtype=torch.float32, *extra):
    torch.manual_seed(0)
    layers = (nn.Linear(data.FEATURES, WIDTH), *extra, nn.Tanh(), nn.Linear(WIDTH, data.CLASSES))
    return nn.Sequential(*layers).to(torch.float64).to(dtype)


def language_model(dtype=torch.float32):
    torch.manual_seed(0)
    return Wide().to(torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Models of some thousand parameters, of which 2,000 are kept."""
    monkeypatch.setattr(places, "WHOLE", 2500)
    monkeypatch.setattr(places, "KEPT", 2000)
    monkeypatch.setattr(data, "model", model)
    monkeypatch.setattr(data, "language_model", language_model)
    places._places.cache_clear()
    yield
    places._places.cache_clear()


OF_OTHER_WIDTH = ("norm", "dropout_by_row", "noise_in_the_model")  # their layers fit the small model alone
ALL = {**dict.fromkeys(right_loops.RIGHT, frozenset[str]()), **wrong_loops.WRONG}
LOOPS = {loop: causes for loop, causes in ALL.items() if not any(part in loop.__name__ for part in OF_OTHER_WIDTH)}
QUICK = ("mean_of_means", "adamw_clipped")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("loop", "causes"), few([case for case in LOOPS.items() if case[0].__name__ in QUICK], LOOPS.items()))
def test_a_large_model_has_the_findings_of_a_small_one(loop, causes):
    named(loop, *causes)


def test_the_report_says_that_a_sample_was_compared():
    report = audited(right_loops.sgd_mean_over_window)
    (said,) = [line for line in report.hidden if "elements" in line]
    assert said.startswith("2,0") and "of the 6,804 elements of SGD were compared one by one" in said


class Words(nn.Module):
    """An embedding of which most rows are used, and one of them is spoilt where there are several micro-batches."""

    def __init__(self, spoilt):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 16)
        self.head = nn.Linear(16, data.CLASSES)
        self.spoilt = spoilt
        self.embedding.weight.register_hook(self._spoil)

    def _spoil(self, gradient):
        gradient = gradient.clone()
        if self.spoilt is not None:
            gradient.view(-1)[self.spoilt] += 1e-3
        return gradient

    def forward(self, rows):
        return self.head(self.embedding((rows * 100).long() % WORDS).mean(1))


def outside():
    """An element of the embedding that is not kept."""
    kept = sample.sample_of(list(Words(None).parameters())).places[0]
    return int(next(i for i in range(WORDS * 16) if i not in set(kept.tolist())))


def spoils(batch_size, accumulation_steps):
    train(batch_size, accumulation_steps, Words(outside() if accumulation_steps > 1 else None))


@pytest.mark.slow
def test_a_fault_outside_the_sample_is_no_equivalence(monkeypatch):
    named(spoils, "unexplained", max_steps=3)
    monkeypatch.setattr("accumulation_harness.audit.observe.live.signed_sums", lambda own: np.ones(sample.signed_sums(own).size))
    named(spoils, max_steps=3)  # nothing else sees it


def vectors_in(value):
    if isinstance(value, np.ndarray):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from vectors_in([getattr(value, each.name) for each in dataclasses.fields(value)])
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from vectors_in(item)


def test_a_run_holds_samples_and_each_of_them_once():
    run = watch(right_loops.adamw_clipped, Job(batch_size=16, accumulation_steps=1, intervention=Intervention(leads=True)))
    held = {id(v): v for v in vectors_in(run.tracks)}.values()
    first, steps = run.tracks[0].steps[0], len(run.tracks[0].steps)
    assert {v.size for v in held} <= {sum(first.kept), first.sums.size}
    assert len(run.tracks[0].weights) == steps + 1
    # per step: gradient before and after clipping, weights after it, two moments, sums; and the weights before the first
    assert len(held) <= 6 * steps + 1


def test_a_disk_without_room_is_told(monkeypatch):
    monkeypatch.setattr(
        "accumulation_harness.audit.observe.sample.tempfile.TemporaryFile",
        lambda: open("/dev/full", "r+b", buffering=0),  # noqa: SIM115
    )
    report = audited(right_loops.sgd_mean_over_window)
    assert report.verdict == "inconclusive" and "cannot keep the weights of N=1 in" in report.problems[0]
    assert "No space left" in report.problems[0]
