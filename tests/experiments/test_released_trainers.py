"""The rules of G1 to G3 on audits written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accumulation_harness.analysis import ledger, load
from accumulation_harness.analysis.audits import COLUMNS, no_audits
from accumulation_harness.experiments.released_trainers import lightning_handles

FRAMEWORKS = {"G1": "accelerate", "G2": "lightning", "G3": "keras-by-hand"}


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


E, D = "equivalent", "different"


@pytest.mark.parametrize(
    ("name", "verdicts", "ruling"),
    [
        ("G1", {"naive": D, "documented": E, "documented_without_factor": D}, "conditional"),
        ("G1", {"naive": E, "documented": E, "documented_without_factor": D}, "confirmed"),  # misuse counts for nothing
        ("G1", {"naive": D, "documented": D}, "refuted"),
        ("G1", {"naive": D}, "needs the full grid"),
        ("G2", {"a": E, "b": D}, "refuted"),  # its default is 1
        ("G2", {"a": E}, "needs the full grid"),
        ("G3", {"divided": E, "undivided": D, "divided_remainder": D}, "conditional"),
        ("G3", {"divided": E, "undivided": E, "divided_remainder": E}, "confirmed"),
        ("G3", {"divided": D, "undivided": E, "divided_remainder": E}, "refuted"),
        ("G3", {"sgd_divisible": E, "sgd_remainder": D}, "needs the full grid"),  # Keras' own option
    ],
)
def test_rulings(tmp_path: Path, name: str, verdicts: dict[str, str], ruling: str) -> None:
    write(tmp_path, FRAMEWORKS[name], verdicts)
    table = ledger.table(load.read(tmp_path)).set_index("id")
    assert table.loc[name, "verdict"] == ruling
    assert table.loc[name, "experiment"] == "released_trainers"
    assert bool(table.loc[name, "condition"]) == (ruling == "conditional")


@pytest.mark.parametrize(
    ("verdicts", "ruling"), [({"a": E, "b": E}, "confirmed"), ({"a": E, "b": D}, "conditional"), ({"a": D, "b": D}, "refuted")]
)
def test_g2_where_the_default_were_4(tmp_path: Path, verdicts: dict[str, str], ruling: str) -> None:
    write(tmp_path, "lightning", verdicts)
    assert lightning_handles(load.read(tmp_path).of("released_trainers"), default=4).verdict == ruling


def test_without_audits_there_is_no_data(tmp_path: Path) -> None:
    table = ledger.table(load.read(tmp_path)).set_index("id")
    assert set(table.loc[list(FRAMEWORKS), "verdict"]) == {"no data"}
    assert list(no_audits()) == list(COLUMNS) and load.read(tmp_path).is_empty
