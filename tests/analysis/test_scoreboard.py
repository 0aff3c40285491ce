"""The scoreboard: what several releases say of one setting, what has changed, and the committed page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accumulation_harness.analysis.audits import read_audits
from accumulation_harness.analysis.scoreboard import changes, commands, lines, main, page

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "docs" / "findings"


def store(folder: Path, name: str, version: str, **causes: list[str]) -> None:
    """The record of one release: `function=[cause, ...]`."""
    arm: dict[str, Any] = {"accumulation_steps": 4, "arithmetic": "as trained", "distance": 0.5, "scale": 1.0, "gate": 1e-6}
    arm |= {"largest_distance": 0.5, "steps": 6, "reference_steps": 6}
    arms = [
        {
            **arm,
            "function": function,
            "setting": f"{function} | of",
            "verdict": "different" if said else "equivalent",
            "causes": said,
        }
        for function, said in causes.items()
    ]
    record = {"name": name, "framework": "tool", "versions": {"tool": version}, "settings": {}, "findings": [], "problems": []}
    (folder / "audits").mkdir(parents=True, exist_ok=True)
    (folder / "audits" / f"{name}.json").write_text(json.dumps(record | {"arms": arms}))


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    folder = tmp_path / "stored"
    store(folder, "tool-old", "1.9", loss=["mean_of_means"], tail=[])
    store(folder, "tool", "1.10", loss=["mean_of_means"], tail=["window_misplaced"])
    store(folder, "tool-new", "2.0", loss=[], tail=["window_misplaced"])
    store(folder, "tool-other-backend", "2.0", loss=["loss_not_divided"])
    return folder


def test_a_finding_is_dated_by_the_releases_that_were_audited(stored: Path) -> None:
    dated = {(line.function, line.name): (line.since, line.fixed_in) for line in lines(read_audits(stored))}
    assert dated["loss", "tool-old"] == ("1.9", "2.0")
    assert dated["loss", "tool"] == ("1.9", "2.0")  # 1.10 comes after 1.9
    assert dated["loss", "tool-new"] == ("2.0", "")
    assert dated["loss", "tool-other-backend"] == ("2.0", "")
    assert dated["tail", "tool-old"] == ("1.9", "")
    assert dated["tail", "tool-new"] == ("1.10", "")


def test_the_page_has_a_row_per_setting_and_escapes_cells(stored: Path) -> None:
    text = page(lines(read_audits(stored)), {"tool": "make audit-tool"})
    assert text.startswith("# Scoreboard") and "7 settings of 3 releases; 5 are another computation" in text
    row = next(row for row in text.splitlines() if row.startswith("| tool 1.10 | loss"))
    assert row == "| tool 1.10 | loss \\| of (`loss`) | `mean_of_means` | 0.5 (4) | 1.9 | 2.0 | `make audit-tool` |"


def test_what_a_new_record_says_otherwise_is_told(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    store(new, "tool-new", "2.1", loss=["loss_not_divided"], tail=["window_misplaced"], more=[])
    told = list(changes(read_audits(stored), read_audits(new)))
    assert told == [
        "tool 2.1, loss: equivalent in 2.0 -> loss_not_divided",
        "tool 2.1, more: equivalent (no stored record)",
    ]
    options = ["--stored", str(stored), "--out", str(tmp_path / "page.md"), "--new"]
    assert main([*options, str(tmp_path / "nothing")]) == 0 and (tmp_path / "page.md").is_file()
    assert main([*options, str(new)]) == 1 and told[0] in capsys.readouterr().out
    (new / "audits" / "broken.json").write_text("{")
    assert main([*options, str(new)]) == 2


def test_the_committed_page_is_made_of_the_committed_records() -> None:
    how = commands((ROOT / "scoreboard/trainers.mk").read_text())
    found = lines(read_audits(FINDINGS))
    assert {line.name for line in found} <= how.keys()
    assert (FINDINGS / "scoreboard.md").read_text() == page(found, how)
