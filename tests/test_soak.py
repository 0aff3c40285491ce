"""A part of the campaign `python -m tests.soak`."""

import sys

import pytest

from tests import soak


@pytest.mark.slow
@pytest.mark.parametrize(("trials", "kills", "computing"), [(12, 3, False), (3, 2, True)])
def test_a_sweep_that_is_killed_and_resumed_is_the_undisturbed_one(trials, kills, computing):
    answer = soak.campaign(trials, kills, seed=1, computing=computing)
    assert answer is not None, "the campaign cannot start"
    assert not answer[1], answer


def test_a_campaign_that_cannot_start_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert soak.main(["--trials", "1"]) == 3
    assert "cannot start" in capsys.readouterr().err
