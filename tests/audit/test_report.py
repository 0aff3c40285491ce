"""The three ways in and the four ways out: Python, shell, pytest; terminal, frame, JSON, page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from accumulation_harness.audit import Finding, Report, audit
from accumulation_harness.audit.__main__ import main
from accumulation_harness.audit.report import COLUMNS
from accumulation_harness.judge.cause import Cause
from tests.audit.loops import right_loops, wrong_loops

pytest_plugins = ["pytester"]
RIGHT, WRONG = f"{right_loops.__file__}:sgd_divided_by_n", f"{wrong_loops.__file__}:mean_of_means"
SIZES = ["--batch-size", "16", "--accumulation-steps", "4"]


@pytest.fixture(scope="module")
def different() -> Report:
    return audit(wrong_loops.mean_of_means, batch_size=16, accumulation_steps=(4,))


def test_frame_has_a_row_per_arm_step_and_tensor(different: Report) -> None:
    frame = different.frame
    assert isinstance(frame, pd.DataFrame) and tuple(frame.columns) == COLUMNS
    assert set(frame.tensor) > {"all", "embedding.weight", "head.bias"}
    assert len(frame[frame.tensor == "all"]) == 4 and not frame.equivalent.any()


def test_json_is_strict_and_complete(different: Report) -> None:
    read = json.loads(different.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read["status"] == "different" and read["findings"][0]["cause"] == "mean_of_means"
    assert len(read["findings"][0]["evidence"]["right_weights"]) == 4
    broken = Finding(4, 0, Cause.unexplained, {"distance": math.inf}, "", "gradient")
    assert json.loads(Report(batch_size=4, results=(), problems=("x",), hidden=()).to_json())["status"] == "inconclusive"
    assert broken.evidence["distance"] == math.inf


def test_terminal_names_the_cause_the_step_and_the_remedy(different: Report) -> None:
    text = str(different)
    assert "different" in text and "mean_of_means" in text and "docs/remedies.md#mean_of_means" in text


class Links(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name == "src" or (tag == "link" and name == "href")]


def test_page_is_self_contained(different: Report, tmp_path: Path) -> None:
    page = different.save(tmp_path / "audit.html").read_text()
    links = Links()
    links.feed(page)
    assert links.loads == [] and "mean_of_means" in page and page.count("<tr") == 2 + 5
    assert json.loads(different.save(tmp_path / "audit.json").read_text())["batch_size"] == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.html", "audit.json"]
    with pytest.raises(ValueError, match=r"\.html or \.json"):
        different.save(tmp_path / "audit.txt")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([RIGHT, *SIZES], 0),
        ([WRONG, *SIZES], 1),
        (["nothing.py:train", *SIZES], 2),
        ([f"{right_loops.__file__}:no_such", *SIZES], 2),
        (["right_loops", *SIZES], 2),
        ([RIGHT, "--batch-size", "16", "--accumulation-steps", "5"], 2),
        ([RIGHT, *SIZES, "--save", "audit.txt"], 2),
        ([RIGHT, "--batch-size", "16", "--accumulation-steps", "4;16"], 2),
        ([RIGHT, "--batch-size", "40"], 2),
    ],
)
def test_exit_codes(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        got = main(arguments)
    except SystemExit as stopped:  # argparse
        got = int(stopped.code or 0)
    output = capsys.readouterr()
    assert got == code, output.err
    assert ("audit of batches of 16" in output.out) == (code < 2)
    assert "expected" in output.err or "required" in output.err or code < 2


def test_a_file_that_cannot_be_read_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module_at_all\n")
    assert main([f"{file}:train", *SIZES]) == 2
    assert "ModuleNotFoundError" in capsys.readouterr().err


def test_command_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([WRONG, *SIZES, "--save", str(tmp_path / "a.html"), "--save", str(tmp_path / "a.json")]) == 1
    assert (tmp_path / "a.html").stat().st_size > 1000 and "a.json" in capsys.readouterr().out.replace("\n", "")


TEST_FILE = """
from tests.audit.loops import right_loops, wrong_loops

def test_right(audit_accumulation):
    assert audit_accumulation(right_loops.sgd_divided_by_n, batch_size=16, accumulation_steps=(4,)).equivalent

def test_wrong(audit_accumulation):
    audit_accumulation(wrong_loops.mean_of_means, batch_size=16, accumulation_steps=(4,))
"""


def test_fixture_fails_the_test_and_prints_the_findings(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST_FILE)
    loaded: Any = pytester.plugins
    plugins = [] if _registered() else ["-p", "accumulation_harness.audit.pytest_plugin"]
    result = pytester.runpytest(*plugins, "-p", "no:cacheprovider", *loaded)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*AccumulationChanged*", "*mean_of_means*"])


def _registered() -> bool:
    """Whether the package, as installed here, registers the plugin by itself."""
    from importlib.metadata import entry_points

    return any(point.value == "accumulation_harness.audit.pytest_plugin" for point in entry_points(group="pytest11"))


def test_options_reach_the_audit(audit_accumulation: Callable[..., Report]) -> None:
    report = audit_accumulation(
        right_loops.tokens_weighted, batch_size=16, accumulation_steps=(2,), reference=right_loops.tokens_weighted
    )
    assert {result.accumulation_steps for result in report.results} == {1, 2}


if not _registered():
    from accumulation_harness.audit.pytest_plugin import audit_accumulation  # noqa: F401
