"""The rules of G1 to G3 on audits written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import ledger, load
from analysis.audits import COLUMNS, no_audits
from experiments.released_trainers import CLAIMS

FRAMEWORKS = {"G1": "accelerate", "G2": "lightning", "G3": "keras-tensorflow"}


def write(results: Path, name: str, verdicts: dict[str, str]) -> None:
    arms = [
        {"function": function, "setting": function, "accumulation_steps": 4, "arithmetic": "as trained", "verdict": verdict,
         "causes": ["mean_of_means"] if verdict == "different" else [], "distance": 0.1, "scale": 1.0, "gate": 1e-6,
         "largest_distance": 0.1, "steps": 6, "reference_steps": 6}
        for function, verdict in verdicts.items()
    ]  # fmt: skip
    (results / "audits").mkdir(parents=True, exist_ok=True)
    record = {"name": name, "framework": name, "versions": {name: "1.2.3"}, "arms": arms, "findings": [], "problems": []}
    (results / "audits" / f"{name}.json").write_text(json.dumps(record))


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
@pytest.mark.parametrize(
    ("verdicts", "ruling"),
    [
        (("equivalent", "equivalent"), "confirmed"),
        (("equivalent", "different"), "conditional"),
        (("different", "different"), "refuted"),
        (("equivalent",), "needs the full grid"),
        (("equivalent", "inconclusive"), "needs the full grid"),
    ],
)
def test_rulings(tmp_path: Path, claim: object, verdicts: tuple[str, ...], ruling: str) -> None:
    name = claim.id  # type: ignore[attr-defined]
    write(tmp_path, FRAMEWORKS[name], {f"setting_{k}": verdict for k, verdict in enumerate(verdicts)})
    table = ledger.table(load.read(tmp_path)).set_index("id")
    assert table.loc[name, "verdict"] == ruling
    assert table.loc[name, "experiment"] == "released_trainers"
    if ruling == "conditional":
        assert "equivalent in setting 0; mean_of_means in setting 1" in table.loc[name, "explanation"]


def test_without_audits_there_is_no_data(tmp_path: Path) -> None:
    table = ledger.table(load.read(tmp_path)).set_index("id")
    assert set(table.loc[list(FRAMEWORKS), "verdict"]) == {"no data"}
    assert list(no_audits()) == list(COLUMNS) and load.read(tmp_path).is_empty
