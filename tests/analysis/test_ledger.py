import dataclasses

import pandas as pd
import pytest

from accumulation_harness.analysis import ledger, load
from accumulation_harness.analysis.question import Claim, ClaimResult, Experiment, Ruling, registered, undecided
from tests.commands import ROOT


def finding(verdict, measured=1.0, n=3):
    condition = "in spring" if verdict == Ruling.conditional else ""
    return ClaimResult(verdict=verdict, condition=condition, measured=measured, threshold="< 2", n=n, explanation="Because.")


def claim(name, verdict, expects=Ruling.confirmed):
    return Claim(id=name, expects=expects, rule="", decide=lambda results: finding(verdict))


def experiment(*claims):
    return Experiment(name="equivalence", title="", question="", prediction="", rule="", claims=claims, sections=())


def rulings(results):
    table = ledger.table(load.read(results))
    return dict(zip(table["id"], table["verdict"], strict=True))


def test_without_results_nothing_has_a_verdict(results, make_trial):
    make_trial(experiment="something_else")
    recorded = {claim.id for one in registered().values() for claim in one.claims if claim.is_recorded}
    assert {verdict for name, verdict in rulings(results).items() if name not in recorded} <= {"no data", "pending"}


def test_every_claim_of_an_experiment_is_in_the_ledger():
    known = ledger.claims()
    assert known["id"].is_unique and len(known) == 64
    for one in registered().values():
        assert {claim.id for claim in one.claims} <= set(known["id"])
        assert all(claim.expects in ledger.DECIDED for claim in one.claims)


def test_every_source_of_a_claim_is_a_text_with_a_title():
    texts = pd.read_csv(ROOT / "experiments" / "sources.csv", dtype=str)
    assert texts["id"].is_unique and texts.notna().all(axis=None)
    named = set(ledger.claims()["source"].str.findall(r"S\d").explode().dropna())
    assert named == set(texts["id"])


def test_claims_on_one_id_go_together():
    together = ledger._together
    assert together([]).verdict == Ruling.pending
    assert together([finding(Ruling.refuted), finding(Ruling.refuted)]).n == 6
    assert together([finding(Ruling.refuted), finding(Ruling.confirmed)]).verdict == Ruling.conditional
    assert together([finding(Ruling.refuted), undecided("Too few.", 1)]).verdict == Ruling.needs_full_grid
    assert together([finding(Ruling.undecided), finding(Ruling.refuted, n=5)]).verdict == Ruling.refuted, "who could not tell"
    assert together([finding(Ruling.undecided), finding(Ruling.refuted, n=5)]).n == 5
    assert together([finding(Ruling.refuted, 1.0), finding(Ruling.refuted, 3.0), finding(Ruling.refuted, 2.0)]).measured == 3.0
    assert together([finding(Ruling.conditional), finding(Ruling.conditional)]).condition == "in spring"
    assert together([finding(Ruling.confirmed), finding(Ruling.refuted)]).condition == "in some experiments, not in others"


@pytest.mark.parametrize("holds", [True, False, None])
def test_whether_a_prediction_held_is_its_own_comparison_or_is_not_said(results, make_trial, holds):
    make_trial()
    own = experiment(claim("A1", Ruling.confirmed), claim("A2", Ruling.refuted))
    plain = ledger.answer(own, load.read(results))
    assert not plain.compared and "1 of 2 claims fell as theory expects." in plain.sentences
    compared = ledger.answer(dataclasses.replace(own, predicted=lambda results: holds), load.read(results))
    assert compared.compared and compared.holds is holds
