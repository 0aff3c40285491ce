"""A watched run that is killed inside a window and resumed, as processes."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.commands import ENVIRONMENT

RUN = """
import os, signal, sys
import torch
from torch.nn import functional
from accumulation_harness.watch import watch

folder, watched, dies_at = sys.argv[1], sys.argv[2] == "watched", int(sys.argv[3])
torch.manual_seed(0)
x, y = torch.randn(128, 10), torch.randint(0, 5, (128,))
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
saved = f"{folder}/saved.pt"
start = 0
if os.path.exists(saved):
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
seen = watch(model, optimizer, tell=None, loss=lambda model, rows: functional.cross_entropy(model(x[rows]), y[rows]))
if watched:
    seen.attach()
for step in range(start, 8):
    for k in range(4):
        rows = seen.batch(torch.arange(16 * step + 4 * k, 16 * step + 4 * k + 4))
        (functional.cross_entropy(model(x[rows]), y[rows]) / 4).backward()
        if 4 * step + k == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, saved)
if watched:
    seen.detach()
    seen.report(f"{folder}/run.json")
    print(seen.report())
"""


def run(folder, watched, dies_at=-1):
    folder.mkdir(exist_ok=True)
    environment = os.environ | ENVIRONMENT
    arguments = [sys.executable, "-c", RUN, str(folder), watched, str(dies_at)]
    return subprocess.run(arguments, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_a_watched_run_that_is_killed_inside_a_window_goes_on_as_an_unwatched_one_that_is_not(tmp_path):
    assert run(tmp_path / "whole", "unwatched").returncode == 0
    assert run(tmp_path / "killed", "watched", dies_at=14).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "run.json").exists()
    resumed = run(tmp_path / "killed", "watched")
    assert resumed.stdout.startswith("accumulation: equivalent; 5 windows (5 with 4 micro-batches)"), resumed
    assert "replays in 1" in resumed.stdout
    whole, killed = (torch.load(tmp_path / name / "saved.pt", weights_only=True) for name in ("whole", "killed"))
    assert all(torch.equal(whole["model"][name], killed["model"][name]) for name in whole["model"])
    other = run(tmp_path / "other", "unwatched", dies_at=14)  # and a run that lost its last windows is another
    assert other.returncode == -signal.SIGKILL
    lost = torch.load(tmp_path / "other" / "saved.pt", weights_only=True)
    assert not all(torch.equal(whole["model"][name], lost["model"][name]) for name in whole["model"])
