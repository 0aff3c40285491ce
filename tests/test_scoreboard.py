"""The scoreboard: its table of audits, a record, how releases are dated, the committed page, and the claims that rest on it."""

import ast
import csv
import io
from pathlib import Path

import pandas as pd
import pytest
import tomllib

from accumulation_harness.affected.__main__ import ADVISORIES as ADVISED
from accumulation_harness.affected.__main__ import read
from accumulation_harness.analysis import ledger, load
from accumulation_harness.audit import audit
from accumulation_harness.experiments.released_trainers import answers
from accumulation_harness.judge.cause import Cause
from scoreboard import museum, page, record, watched
from tests.audit.loops import wrong_loops

HERE = Path(__file__).parents[1] / "scoreboard"
TRAINERS = tomllib.loads((HERE / "trainers.toml").read_text())


@pytest.mark.parametrize("name", TRAINERS)
def test_an_audit_is_complete(name):
    """Its functions are there, and its environment is pinned."""
    asked = TRAINERS[name]
    tree = ast.parse((HERE / f"{asked['file']}.py").read_text())
    assert {*asked["functions"]} <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    environment = asked.get("environment", "torch")  # pins of an entry's own go above those of torch
    lines = (HERE / f"requirements/{environment}.txt").read_text().splitlines()
    pins = [line for line in lines if line[:1] not in "#"]
    assert all("==" in pin for pin in (*pins, *asked.get("pins", [])))
    assert any(pin.startswith("torch==") for pin in pins)


def test_every_record_is_of_an_audit():
    held = page.records(HERE / "records")
    assert len(held) > 30 and all(page.settings().values())
    for one in held:
        assert {row["function"] for row in (*one["arms"], *one["problems"])} <= {*TRAINERS[one["name"]]["functions"]}


def test_a_record_says_what_the_audit_said():
    part = record.part_of(wrong_loops.mean_of_means, audit(wrong_loops.mean_of_means, batch_size=16, accumulation_steps=(4,)))
    [arm] = part["arms"]
    assert (arm["function"], arm["verdict"], arm["causes"]) == ("mean_of_means", "different", ["mean_of_means"])
    assert arm["distance"] > 0.01 > arm["gate"] and part["findings"][0]["detail"].startswith("micro-batches count")


def test_a_record_keeps_what_was_not_run_again():
    old = release("tool", "1.0", loss=["mean_of_means"], tail=[]) | {"run": {"date": "then"}, "findings": []}
    new = release("tool", "1.0", loss=[]) | {"run": {"date": "now"}, "findings": []}
    made = record.joined(old, new, ["loss", "tail"])
    assert [(arm["function"], arm["causes"], arm.get("run")) for arm in made["arms"]] == [
        ("loss", [], None),
        ("tail", [], old["run"]),
    ]
    other = new | {"versions": {"tool": "1.1"}}
    assert record.joined(old, other, ["loss", "tail"]) == other


def test_the_record_of_watched_trainers_has_enough_runs_and_its_page_says_what_it_holds():
    rows = watched.held()
    assert watched.PAGE.read_text() == watched.page(rows)
    wrong = [row for row in rows if row["wrong"]]
    assert (
        len(wrong) >= 24
        and len(rows) - len(wrong) >= 24
        and {cause for row in wrong for cause in row["wrong"].split("+")} <= {*Cause}
    )
    assert [row["run"] for row in rows if not watched.is_told(row)] == ["multiplied by 1/N, as by a coefficient"]  # undecided
    assert not watched.is_told({**rows[0], "verdict": "inconclusive"}) and not watched.is_told({**wrong[0], "causes": ""})
    assert "wrongly" in watched.page([{**rows[0], "verdict": "different"}])


def release(name, version, **causes):
    """The record of one release: `function=[cause, ...]`."""
    arms = [
        {"function": function, "accumulation_steps": 4, "distance": 0.5, "scale": 1.5,
         "causes": said, "verdict": "different" if said else "equivalent"}
        for function, said in causes.items()
    ]  # fmt: skip
    return {"name": name, "framework": "tool", "versions": {"tool": version}, "arms": arms, "problems": []}


def test_a_finding_is_dated_by_the_releases_that_were_audited():
    found = page.lines([
        release("tool-old", "1.9", loss=["mean_of_means"], tail=[]),
        release("tool", "1.10", loss=["mean_of_means"], tail=["window_misplaced"]),  # comes after 1.9
        release("tool-new", "2.0", loss=[], tail=["window_misplaced"]),
        release("tool-other-backend", "2.0", loss=["loss_not_divided"]),
    ])  # fmt: skip
    dated = {(line.function, line.name): (line.since, line.fixed_in) for line in found}
    assert dated["loss", "tool-old"] == dated["loss", "tool"] == ("1.9", "2.0")
    assert dated["loss", "tool-new"] == dated["loss", "tool-other-backend"] == ("2.0", "")
    assert (dated["tail", "tool-old"], dated["tail", "tool-new"]) == (("1.9", ""), ("1.10", ""))
    row = "| tool 1.10 | loss \\| of (`loss`) | `mean_of_means` | 0.5 (4) | 1.5 (4) | 1.9 | 2.0 | `make trainer NAME=tool` |"
    said = {(line.name, line.function): f"{line.function} | of" for line in found}
    assert row in page.page(found, said).splitlines()


def test_what_is_committed_is_made_of_the_committed_records():
    held = page.records(HERE / "records")
    assert page.PAGE.read_text() == page.page(page.lines(held), page.settings())
    written = io.StringIO()
    csv.DictWriter(written, page.COLUMNS, lineterminator="\n").writerows(page.rows(held))
    assert page.ROWS.read_text().partition("\n")[2] == written.getvalue()


ADVISORIES = read(ADVISED)
SMOOTHED = ("transformers-5.14.1:smoothed_equal_lengths", "transformers-5.15.0:smoothed_equal_lengths")


def test_the_page_of_the_museum_is_made_of_the_committed_records():
    assert museum.PAGE.read_text() == museum.text(ADVISORIES, museum.held())


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda advisory: advisory["id"])
def test_an_advisory_is_borne_out_by_its_records(advisory):
    """Different with its finding in a release that is affected, equivalent where it is mended, and as large as is told."""
    assert list(museum.wrong(advisory, museum.held())) == []
    assert set(advisory["finding"]) <= {*Cause} and advisory["bounds"].endswith(".") and advisory["shows"].endswith(".")
    assert all(link.startswith("https://") for link in advisory["threads"])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"finding": ["loss_divided_twice"]}, "told loss_divided_twice"),
        ({"affected": "<5.14.1"}, "not among the affected"),
        ({"affected": ">=4.46.0"}, "5.15.0 was run as the release that has it right"),
        ({"fixed_in": "5.16.0"}, "5.16.0 is told"),
        ({"error": {}}, "size of the error"),
        ({"evidence": {"broken": SMOOTHED[1], "fixed": "nowhere:x"}}, "no record of nowhere:x"),
        ({"evidence": {"broken": SMOOTHED[1], "fixed": SMOOTHED[0]}}, "found loss_not_divided"),
    ],
)
def test_an_advisory_that_its_records_do_not_bear_out(change, told):
    [right] = [advisory for advisory in ADVISORIES if advisory["id"] == "transformers-label-smoothing"]
    assert told in "; ".join(museum.wrong(right | change, museum.held()))


RULINGS = """
accelerate_handles naive:different documented:equivalent documented_without_factor:different -> conditional
accelerate_handles naive:equivalent documented:equivalent documented_without_factor:different -> confirmed, misuse is left out
accelerate_handles naive:different documented:different -> refuted
accelerate_handles naive:different -> needs the full grid
lightning_handles a:equivalent b:different -> refuted, its default is 1
by_hand divided:equivalent undivided:different divided_remainder:different -> conditional
by_hand divided:equivalent undivided:equivalent divided_remainder:equivalent -> confirmed
by_hand divided:different undivided:equivalent divided_remainder:equivalent -> refuted
"""


@pytest.mark.parametrize("row", RULINGS.strip().splitlines())
def test_rulings(row):
    given, _, ruling = row.partition(" -> ")
    rule, *verdicts = given.split()
    of = {"name": "x", "framework": "x", "version": "1", "accumulation_steps": 4, "causes": "", "distance": 0.1}
    said = [dict(zip(("function", "verdict"), one.split(":"), strict=True)) for one in verdicts]
    arms = pd.DataFrame([of | one | {"largest_distance": 0.1} for one in said])
    assert getattr(answers, rule)(arms).verdict == ruling.partition(",")[0]


def test_the_ledger_has_them_without_any_trial(tmp_path):
    table = ledger.table(load.read(tmp_path)).set_index("id")["verdict"]
    assert dict(table[["G1", "G2", "G3"]]) == {"G1": "conditional", "G2": "refuted", "G3": "conditional"}
