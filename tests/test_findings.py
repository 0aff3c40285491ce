"""Stale findings fail: the stored table is what today's rules say of the trials that are stored with it."""

import io
import json
import re
import tarfile

import pandas as pd
import pytest

from accumulation_harness.analysis import faults, report, tables
from accumulation_harness.analysis.ledger import RECORDED
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.config.questions import grids
from docs import numbers
from tests import golden
from tests.golden import FINDINGS, kept_archive, kept_claims, kept_results

EXACT = (Ruling.confirmed, Ruling.refuted, Ruling.conditional)


def test_what_the_quick_grids_found_does_not_contradict_the_full_ones():
    """One may leave open what the other decides."""
    newest = max(FINDINGS.glob("*-quick/claims.csv")), kept_archive().with_name("claims.csv")
    quick, full = (pd.read_csv(path, keep_default_na=False).set_index("id")["verdict"] for path in newest)
    both = pd.DataFrame({"quick": quick, "full": full}).dropna()
    decided = both[both.isin(EXACT).all(axis=1)]
    assert len(decided) and decided[decided["quick"] != decided["full"]].empty


def test_the_table_is_what_the_rules_say_of_the_trials_kept_beside_it():
    written = io.BytesIO(tables.to_csv(kept_claims()))
    now, kept = (pd.read_csv(source, index_col="id") for source in (written, kept_archive().with_name("claims.csv")))
    now = now.drop(columns=RECORDED)  # nothing is, where every trial is there
    known = {*kept_results().experiments}
    decided = [id for id, names in now["experiment"].dropna().items() if {*names.split(", ")} <= known]
    assert decided
    # Another version of a library may round the measured numbers otherwise.
    pd.testing.assert_frame_equal(kept.loc[decided], now.loc[decided, kept.columns], rtol=1e-9, atol=1e-12)
    (group,) = golden.SOURCES["archive"]()
    assert golden.moved(group, group.measure()) == []


# Step rows are not kept: their sections are made of tiny trials in `tests/experiments`.
WITH_STEPS = {"momentum": 2, "adam": 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::accumulation_harness.analysis.question.ReportWarning")
def test_every_section_of_every_question_is_made_of_the_trials_that_are_kept(tmp_path):
    with tarfile.open(kept_archive()) as file:
        file.extractall(tmp_path / "kept", filter="data")
    page = report.write(tmp_path / "kept", tmp_path / "out")
    pages = {path.stem: path.read_text() for path in (page.parent / "pages").glob("*.html")}
    assert pages.keys() >= set(grids())
    assert {name: page.count("A section that is missing") for name, page in pages.items() if name not in WITH_STEPS} == (
        dict.fromkeys(pages.keys() - WITH_STEPS.keys(), 0)
    )
    assert {name: pages[name].count("A section that is missing") for name in WITH_STEPS} == WITH_STEPS


def test_the_faults_are_those_of_the_trials_kept_beside_them():
    now = faults.to_table(kept_results().arms)
    known = list(faults.COLUMNS[:-1])  # the loss curves are not kept
    kept = pd.read_csv(kept_archive().with_name("faults.csv"))
    pd.testing.assert_frame_equal(kept[known], now[known].reset_index(drop=True))


def test_the_trials_that_are_kept_are_of_commits_that_the_page_names():
    said = (FINDINGS / "README.md").read_text()
    commits = set()
    with tarfile.open(kept_archive()) as file:
        for member in file:
            if member.name.endswith("/trial.json") and (stored := file.extractfile(member)):
                commits.add(json.load(stored)["environment"]["commit"])
    assert commits and all(commit[:7] in said for commit in commits)


MARKED = [page for page in numbers.PAGES if numbers.MARKED.search(page.read_text())]
# Numbers that a reader sets or a page defines: versions, tolerances, sizes of an example.
DEFINED = {*["3.10", "3.11", "3.12", "2.11", "2.13", "0.8", "0.45", "2.5", "1.5", "1.03", "10,000", "0.3", "3.2", "1.3", "1e-15"]}


@pytest.mark.parametrize("page", MARKED, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_every_number_of_a_page_is_that_of_its_source(page):
    text = page.read_text()
    assert numbers.written(text) == text, "python -m docs.numbers"
    own = re.sub(r"`[^`]*`|\]\([^)]*\)", "", re.sub(r"^```.*?^```$", "", numbers.MARKED.sub("", text), flags=re.M | re.S))
    measured = re.findall(r"(?<![\w.-])\d+\.\d+\b|\d+,\d{3}\b|\b\d+e-\d+", own)
    assert page.parent.name == "findings" or {*measured} <= DEFINED, "a measured number without its source"


def test_every_source_is_used_and_another_number_is_overwritten():
    assert len(MARKED) > 5
    used = {name for page in MARKED for _, name in numbers.MARKED.findall(page.read_text())}
    assert used == numbers.sources().keys()
    known = numbers.sources()
    assert numbers.written("All 1,199<!--=planted-->, 3 (1 to 4)<!--=digits-none.float32--> each.") == (
        f"All {known['planted']}<!--=planted-->, {known['digits-none.float32']}<!--=digits-none.float32--> each."
    )
    for wrong in ("1<!--=no.such-->", "none<!--=planted-->"):
        with pytest.raises(KeyError):
            numbers.written(wrong)
