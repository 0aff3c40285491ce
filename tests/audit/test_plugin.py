"""The pytest plugin: what it costs a session that does not use it, its marker, its JSON; and findings that are allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accumulation_harness.audit import audit
from accumulation_harness.audit.request import causes_of
from accumulation_harness.config import TrialConfig
from accumulation_harness.judge.cause import Cause
from accumulation_harness.trial import judge_loop
from tests.audit.loops import wrong_loops

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
PLUGIN = ["-p", "accumulation_harness.audit.pytest_plugin"]
USES_IT = """
import sys
import pytest
from tests.audit.loops import wrong_loops

@pytest.mark.accumulation(batch_size=16, accumulation_steps=(4,), allow={"loss_report_differs"})
def test_allowed(audit_accumulation):
    assert audit_accumulation(wrong_loops.report_wrong).allowed

@pytest.mark.accumulation(batch_size=16, accumulation_steps=(4,), allow={"stochastic_layers"})
def test_another_is_allowed(audit_accumulation):
    audit_accumulation(wrong_loops.mean_of_means)

def test_of_something_else():
    raise RuntimeError("not selected")
"""


def pytest_in(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A session of its own, with the plugin as an installation registers it."""
    (folder / "test_it.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/harness", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGIN, *options, "test_it.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_session_that_does_not_use_it_imports_nothing(tmp_path: Path) -> None:
    names = ("torch", "numpy", "pandas", "rich", "jinja2", "accumulation_harness.audit.session")
    done = pytest_in(tmp_path, f"import sys\ndef test_nothing():\n    assert not {set(names)} & sys.modules.keys()\n")
    assert done.returncode == 0, done.stdout
    assert (
        pytest_in(tmp_path, "import sys\ndef test_it():\n    import json\n    assert 'json' not in sys.modules\n").returncode == 1
    )


@pytest.mark.slow
def test_marker_and_json(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, USES_IT, "-m", "accumulation", "--strict-markers", "--audit-json=found")
    assert "1 failed, 1 passed, 1 deselected" in done.stdout, done.stdout
    assert "AccumulationChanged" in done.stdout and "mean_of_means" in done.stdout
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "found").iterdir()}
    assert {name: one["status"] for name, one in found.items()} == {
        "test_it.py_test_allowed.json": "equivalent",
        "test_it.py_test_another_is_allowed.json": "different",
    }


def test_allowed_findings_are_told() -> None:
    report = audit(wrong_loops.mean_of_means, batch_size=16, accumulation_steps=(4,), allow={Cause.mean_of_means})
    assert (report.status, report.exit_code, report.findings) == ("inconclusive", 2, ())
    assert [finding.cause for finding in report.allowed] == ["mean_of_means"]
    assert "mean_of_means (allowed)" in str(report) and "\nallowed: N=4" in str(report)
    assert report.to_dict()["allowed"][0]["cause"] == "mean_of_means"
    assert "mean_of_means" in report.told("markdown") and "found and allowed" in report.to_html()
    other = audit(wrong_loops.mean_of_means, batch_size=16, accumulation_steps=(4,), allow={"stochastic_layers"})
    assert other.status == "different" and not other.allowed
    assert '<a href="#mean_of_means">' in other.to_html() and 'id="mean_of_means"' in other.to_html()


@pytest.mark.parametrize(
    ("names", "told"),
    [("stochastic_layers", "a set of causes"), ({"stochastic_layer"}, "as stochastic_layers, got 'stochastic_layer'")],
)
def test_what_cannot_be_allowed(names: set[str] | str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        causes_of(names)


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_number_of_threads_is_the_callers_afterwards() -> None:
    seen = []

    def train(batch_size: int, accumulation_steps: int) -> None:
        torch.set_num_threads(1)
        wrong_loops.mean_of_means(batch_size, accumulation_steps)

    def loop(arm, window):  # type: ignore[no-untyped-def]
        seen.append(torch.get_num_threads())
        raise KeyError("stop")

    audit(train, batch_size=16, accumulation_steps=(4,))
    assert torch.get_num_threads() == 2
    with pytest.raises(KeyError, match="stop"):
        judge_loop(TrialConfig(steps=1, algebra_steps=1, accumulation_steps=(4,)), loop)
    assert (seen, torch.get_num_threads()) == ([1], 2)
