"""Every rule on the trials that are kept, with one thing otherwise: what would change its verdict, and what would leave it open.

What the rules say of the trials as they are is in `tests/test_findings.py`.
"""

import csv
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from accumulation_harness.analysis import ledger
from accumulation_harness.analysis.question import registered
from accumulation_harness.experiments.convergence import trainings, wastefulness
from accumulation_harness.experiments.groupnorm.answers import predicted
from tests.golden import kept_results
from tests.slow import few

# rule, changes ("rows: column = expression", or "rows" to leave them out; several with "; " between), what is then said
ROWS = [*csv.DictReader(Path(__file__).with_name("rules.csv").read_text().splitlines())]


def by_claim(claim):
    return lambda results: (
        str((found := ledger._decide(claim, results)).verdict) + (f": {found.condition}" if found.condition else "")
    )


def by_answer(name):
    decide = registered()[name].answer
    return lambda results: str(decide(results.arms).holds)


def of_convergence(results):
    rows = trainings.trainings(results)
    judged = trainings.judged(rows)
    beside = [f"{' '.join(map(str, one.key))}: {one.pairs.verdict}" for one in trainings.beside_full(judged)]
    wasteful = Counter(wastefulness.verdicts(wastefulness.instead_of_accumulating(rows, judged)))
    return f"{wasteful['yes']} wasteful, {wasteful['no']} not, {wasteful['undecided']} undecided, {', '.join(beside)}"


RULES = {f"{name} {claim.id}": by_claim(claim) for name, one in registered().items() for claim in one.claims} | {
    "convergence": of_convergence,
    **{name: by_answer(name) for name in ("equivalence", "fault_matrix", "sensitivity")},
    "groupnorm": lambda results: str(predicted(results)),
}


@cache
def kept(question):
    return kept_results().of(question)


def changed(frame, where, change):
    """The frame without the rows `where` (a query of pandas), or with new values of a column in them."""
    chosen = frame[[name for name in frame if name in where]].query(where, engine="python").index
    assert len(chosen), f"no row is {where}"
    if not change:
        return frame.drop(chosen)
    name, _, expression = change.partition(" = ")
    rows, column = frame.loc[chosen].infer_objects(), frame[name].astype(object)
    column.loc[chosen] = eval(expression, {"np": np}, {name: rows[name] for name in rows})
    return frame.assign(**{name: column.infer_objects()})


@pytest.mark.parametrize("row", few(ROWS[::3], ROWS), ids=lambda row: " ".join(row.values()))
def test_what_would_change_what_is_said(row):
    own = kept(row["rule"].partition(" ")[0])
    for step in row["changes"].split("; "):
        where, _, change = step.partition(": ")
        table = "measurements" if own.arms.empty or "study" in where else "arms"
        own = replace(own, **{table: changed(getattr(own, table), where, change)})
    told = RULES[row["rule"]](own)
    assert told.startswith(row["said"]) if " " in row["rule"] else row["said"] in told, told


def test_every_rule_that_reads_results_has_a_row():
    assert {*RULES} - {row["rule"] for row in ROWS} == {
        "equivalence A5", *(f"accounting {id}" for id in ("D3", "D8", "G5", "G6", "G7", "G8", "G9")),
        *(f"released_trainers {id}" for id in ("G1", "G2", "G3")),
    }  # fmt: skip
