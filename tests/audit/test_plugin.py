"""The pytest plugin: its marker and its JSON; and findings that are allowed."""

import json

import pytest
import torch

from accumulation_harness.audit.request import causes_of
from accumulation_harness.config import ConfigError, TrialConfig
from accumulation_harness.measure.trial import judge_loop
from tests.audit.asked import audited
from tests.audit.loops import wrong_loops
from tests.audit.report.audited import FILE, RIGHT, WRONG

pytest_plugins = ["pytester"]
PLUGIN = ("-p", "accumulation_harness.audit.pytest_plugin", "-p", "no:cacheprovider")
USES_IT = """
import pytest
import right, wrong

@pytest.mark.accumulation(batch_size=8, accumulation_steps=(4,))
def test_right(audit_accumulation):
    report = audit_accumulation(right.train, accumulation_steps=(2,))
    assert [result.accumulation_steps for result in report.results] == [2]

@pytest.mark.accumulation(batch_size=8, accumulation_steps=(4,), allow={"stochastic_layers"})
def test_wrong(audit_accumulation):
    audit_accumulation(wrong.train)

def test_of_something_else():
    raise RuntimeError("not selected")
"""


def test_marker_and_json(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_it=USES_IT, right=FILE.format(divisor=RIGHT), wrong=FILE.format(divisor=WRONG))
    result = pytester.runpytest_subprocess(*PLUGIN, "-m", "accumulation", "--strict-markers", "--audit-json=found")
    result.assert_outcomes(passed=1, failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*AccumulationChanged*", "*loss_not_divided*"])
    found = {path.name: json.loads(path.read_text())["verdict"] for path in (pytester.path / "found").iterdir()}
    assert found == {"test_it.py_test_right.json": "equivalent", "test_it.py_test_wrong.json": "different"}


@pytest.mark.parametrize(
    ("names", "told"),
    [("stochastic_layers", "a set of causes"), ({"stochastic_layer"}, "as stochastic_layers, got 'stochastic_layer'")],
)
def test_what_cannot_be_allowed(names, told):
    with pytest.raises(ValueError, match=told):
        causes_of(names)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_number_of_threads_is_the_callers_afterwards():
    seen = []

    def train(batch_size, accumulation_steps):
        torch.set_num_threads(1)
        wrong_loops.not_divided(batch_size, accumulation_steps)

    def loop(arm, window):
        seen.append(torch.get_num_threads())
        raise KeyError("stop")

    audited(train)
    assert torch.get_num_threads() == 2
    with pytest.raises(ConfigError, match="KeyError"):
        judge_loop(TrialConfig(steps=1, algebra_steps=1, accumulation_steps=(4,)), loop)
    assert (seen, torch.get_num_threads()) == ([1], 2)
