"""Records of audits: written, read back, and laid out; and the committed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accumulation_harness.analysis.audits import COLUMNS, read_audits, released_trainers
from accumulation_harness.analysis.content import Table
from accumulation_harness.audit import audit
from accumulation_harness.audit.released import record
from tests.audit.loops import right_loops, wrong_loops

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"
SETTINGS = {"batch_size": 16, "accumulation_steps": (4,), "processes": 1}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("results")
    for train in (
        wrong_loops.mean_of_means,
        right_loops.sgd_divided_by_n,
        wrong_loops.mean_of_means,
    ):  # the last replaces the first
        report = audit(train, batch_size=16, accumulation_steps=(4,))
        record(folder / "audits" / "loops.json", train, report, packages=["torch", "numpy"], settings=SETTINGS)
    return folder


def test_a_record_is_read_as_it_was_written(results: Path) -> None:
    frame = read_audits(results)
    assert tuple(frame.columns) == COLUMNS and len(frame) == 2
    wrong, right = (frame[frame.function == name].iloc[0] for name in ("mean_of_means", "sgd_divided_by_n"))
    assert wrong.verdict == "different" and wrong.causes == "mean_of_means" and wrong.detail.startswith("micro-batches count")
    assert wrong.distance > 0.01 > wrong.gate and right.verdict == "equivalent" and right.distance <= right.gate
    assert set(frame.framework) == {"torch"} and frame.versions.str.contains("numpy").all()


def test_the_section_says_what_was_found(results: Path) -> None:
    section = released_trainers(read_audits(results))
    assert section is not None
    table = section.blocks[1]
    assert isinstance(table, Table)
    assert {row[-1] for row in table.rows} == {"mean_of_means", "equivalent"}
    assert released_trainers(read_audits(results / "nothing here")) is None


def test_other_versions_are_not_mixed_and_other_files_are_refused(results: Path, tmp_path: Path) -> None:
    report = audit(right_loops.sgd_divided_by_n, batch_size=16, accumulation_steps=(4,))
    with pytest.raises(ValueError, match="remove it first"):
        record(results / "audits" / "loops.json", right_loops.sgd_divided_by_n, report, packages=["numpy"], settings=SETTINGS)
    (tmp_path / "audits").mkdir()
    (tmp_path / "audits" / "x.json").write_text(json.dumps({"arms": []}))
    with pytest.raises(ValueError, match=r"record of an audit in .*x\.json"):
        read_audits(tmp_path)


def test_the_committed_records_are_readable() -> None:
    frame = read_audits(FINDINGS)
    assert {"accelerate", "lightning", "keras", "transformers"} <= set(frame.framework)
    assert set(frame.verdict) == {"equivalent", "different"} and not frame.problem.any()
    assert released_trainers(frame) is not None
