"""The whole path on a device that is not the CPU, in a process of its own (`device.py` says why): every question and way in."""

import json
from functools import cache

import pytest

from accumulation_harness.config.questions import studies
from tests.commands import python
from tests.simgpu.cases import CASES, QUICK, STUDIES
from tests.slow import few

# For what a recipe's steps may wait: float16's scaler; a count that torch's moving average copies; rows, terms and notes by hand;
# and where the weights of each forward are looked at, whether they have moved.
WAITS = {
    "equal in lock_step._see_outputs",
    *("_local_scalar_dense in recipe.step", "copy of [] in recipe.update_ema", "_to_copy in hand_written.<genexpr>"),
    *("_local_scalar_dense in custom.num_terms", "_local_scalar_dense in custom.forward"),
    *("_local_scalar_dense in batch_sizes.note", "_local_scalar_dense in training.evaluations"),
    "_to_copy in widening.__torch_function__",  # what a loop by hand moves itself, in the float64 runs
}


@cache
def run(*names):
    """What each case found, by its name."""
    done = python("-m", "tests.simgpu.cases", *names, code=None)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["case"] for row in rows] == list(names), done.stderr
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize("name", few(QUICK, CASES))
def test_what_comes_of_it_on_the_device(name):
    row = run(*(QUICK if name in QUICK else [other for other in CASES if other not in QUICK]))[name]
    assert row["found"] == CASES[name][1]
    assert {*row["waits"]} <= WAITS


def test_every_question_has_a_case():
    """But those that refuse the device, or cannot run on a stand-in: it loads from no checkpoint."""
    assert STUDIES.keys() == studies().keys() - {"verdicts", "replicas", "resumption"}
