"""A trial's memory and time before it is trained: what is counted, against torch's own tracker and the trial itself."""

import re

import pytest
from torch.distributed._tools.mem_tracker import MemTracker

from accumulation_harness.measure import lock_step, memory, plan, rehearsal
from accumulation_harness.measure.studies import candidates
from accumulation_harness.workloads.layers import copied
from tests.toy import CPU
from tests.trials import arms, setting_of, trial

CONFIG = trial("optimizer.name=adamw optimizer.lr=1e-3 accumulation_steps=[2,4] steps=2 algebra_steps=2 nulls=1")


@pytest.mark.parametrize("task", ["", "workload.data=text workload.model=transformer"])
def test_a_window_is_what_torch_tracks_of_it(task):
    setting = setting_of(trial(task, base=CONFIG))
    [ids] = setting.windows(1)
    window, model, tracker = setting.exact.batch(ids), copied(setting.initial).double(), MemTracker()
    tracker.track_external(model)
    with tracker:
        setting.exact.losses(setting.exact.forward(model, window), window).sum().backward()
    held = 2 * memory.num_bytes(model.parameters()) + memory.num_bytes(model.buffers())
    tracked = tracker.get_tracker_snapshot("peak")[CPU]["Total"] - held
    assert rehearsal.bytes_of_window(setting) == pytest.approx(tracked, rel=0.1) and tracked > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        "steps=2",
        "optimizer.name=sgd optimizer.lr=0.1 accumulation_steps=[8]",
        "norm=batch nulls=3",
        "faults=[mean_of_means] steps=14",
    ],
)
def test_the_stand_in_keeps_what_the_trial_keeps(changes, monkeypatch):
    """A stand-in of a sixth of the parameters; one more N is more.

    As of large models, what an earlier phase has left in cycles is collected before the next begins.
    """
    monkeypatch.setattr(lock_step, "LARGE", 0)
    config = trial("workload.model=mlp workload.width=60 effective_batch=16", changes, base=CONFIG)
    setting = setting_of(config)
    counted = rehearsal.rehearse(setting)
    with memory.Live() as live:
        arms(config, candidates(config))
    assert counted.per_parameter * setting.num_parameters == pytest.approx(live.most, rel=0.1)
    other = rehearsal.rehearse(setting, numbers=[*config.accumulation_steps, 16])
    assert other.per_parameter > 1.1 * counted.per_parameter


@pytest.mark.slow
def test_a_trial_that_does_not_fit_is_refused_with_what_does(capsys):
    settings = ["trial", "steps=1", "algebra_steps=1", "nulls=1", "workload.model=mlp", "workload.width=2"]
    assert plan.main([*settings, "memory=8GB", "accumulation_steps=[2]"]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"a trial of 0.00\d+ million parameters takes [\d.]+ [MG]B of 8 GB on cpu", shown)
    assert plan.main([*settings, "memory=1MB", "accumulation_steps=[2]"]) == 2
    assert "memory=1 MB: expected" in capsys.readouterr().err
