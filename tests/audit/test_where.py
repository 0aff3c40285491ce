"""A finding is at the line of the call that it is about; what a run could not have shown has its reason."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from accumulation_harness.audit.evidence import Finding, Run, Site
from accumulation_harness.audit.rules.location import located
from accumulation_harness.judge.cause import Cause
from tests.audit.asked import audited
from tests.audit.loops.frame import sgd

WRONG = {
    Cause.loss_not_divided: "undivided",
    Cause.gradients_cleared_in_window: "cleared",
    Cause.schedule_per_micro_batch: "scheduled",
    Cause.clip_per_micro_batch: "clipped",
    Cause.gradients_not_cleared: "kept",
    Cause.batch_statistics: "normalised",
}


def loop(fault, batch_size, n):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4) if fault == "normalised" else nn.Identity())
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for k, rows in enumerate(torch.arange(24).split(batch_size), 1):
        if fault == "cleared":
            optimizer.zero_grad()  # cleared
        outputs = model(torch.linspace(-1, 1, 144).reshape(24, 6)[rows].sin())  # normalised
        loss = cross_entropy(outputs, rows % 4) / (1 if fault == "undivided" else n)
        loss.backward()  # undivided
        if fault == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # clipped
        if fault == "scheduled":
            schedule.step()  # scheduled
        if k % n == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()  # kept
            if fault != "kept":
                optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Detected call of")  # of the wrong schedule
@pytest.mark.parametrize("cause", WRONG)
def test_it_is_the_call_inside_the_window(cause):
    report = audited(lambda batch_size, accumulation_steps: loop(WRONG[cause], batch_size, accumulation_steps), batch_size=8)
    (finding,) = (f for f in report.findings if f.cause is cause)
    assert finding.location is not None and finding.location.text.endswith(f"# {WRONG[cause]}"), str(report)
    place = f"{Path(__file__).name}:{finding.location.site.line}: "
    assert place in str(report) and place in report.told("markdown") and place in report.told("junit")
    assert report.to_dict()["findings"][0]["location"]["line"] == report.findings[0].location.site.line


def test_a_line_that_makes_the_call_goes_before_one_that_calls_a_package():
    finding = Finding(4, 0, Cause.loss_not_divided, {}, "", "predicted")
    own, train = Site("compute_loss.py", 3), Site("train.py", 9, "transformers")
    run = Run(batch_size=2, accumulation_steps=4, backwards=8)
    assert located(finding, run).location is None
    run.sites = {"backward": Counter({train: 8}), "forward": Counter({own: 8})}
    assert located(finding, run).location.site == own
    del run.sites["forward"]
    assert located(finding, run).location.site == train


def test_rows_that_were_cleared_away_are_no_fault_of_the_windows():
    """Micro-batches that fill no window at an epoch's end, and that N=1 leaves out."""

    def train(batch_size, accumulation_steps):
        model = nn.Linear(6, 4)
        optimizer = sgd(model)
        full = [rows for rows in torch.arange(20).split(batch_size) if len(rows) == batch_size]
        for _ in range(2):
            for k, rows in enumerate(full, 1):
                optimizer.zero_grad()
                (cross_entropy(model(torch.eye(20, 6)[rows]), rows % 4) / accumulation_steps).backward()
                if k % accumulation_steps == 0:
                    optimizer.step()

    report = audited(train, batch_size=8)
    assert {*report.causes} == {Cause.gradients_cleared_in_window}, str(report)


@pytest.mark.parametrize(("rows", "dropped"), [(20, True), (24, False)])
def test_a_loader_that_drops_the_rest_of_an_epoch_is_why_no_window_is_short(rows, dropped):
    def train(batch_size, accumulation_steps):
        model = nn.Linear(6, 4)
        optimizer = sgd(model)
        for k, batch in enumerate(DataLoader(torch.eye(rows, 6), batch_size, drop_last=True), 1):
            (model(batch).square().mean() / accumulation_steps).backward()
            if k % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = audited(train, batch_size=8)
    (unseen,) = (one for one in report.hidden if one.what == "short_windows")
    assert ("the loader drops" in unseen, "take data" in unseen) == (dropped, not dropped), str(report)
