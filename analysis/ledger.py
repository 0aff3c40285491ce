"""The ledger of claims: each id of `experiments/claims.csv`, and what the results say of it by the rule of its experiment."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from importlib.resources import files

import pandas as pd

from analysis.content import number
from analysis.load import Results
from analysis.question import FOLDER, Answer, Claim, ClaimResult, Experiment, Ruling, made_of, registered, undecided

COLUMNS = ("id", "source", "claim", "verdict", "measured", "threshold", "n", "experiment", "explanation")
COLOURED = ("confirmed", "refuted", "conditional")
DECIDED = (Ruling.confirmed, Ruling.refuted, Ruling.conditional, Ruling.not_testable)


def claims() -> pd.DataFrame:
    """Every claim, in the order of the ledger: `id`, `source`, `claim`."""
    return pd.read_csv(str(files(FOLDER) / "claims.csv"), dtype=str)


def findings(experiment: Experiment, own: Results) -> dict[str, ClaimResult]:
    """What an experiment's results say of its claims; `no data` where it has no finished trial."""
    return {claim.id: _decide(claim, own) for claim in experiment.claims}


def _decide(claim: Claim, own: Results) -> ClaimResult:
    if own.is_empty:
        return ClaimResult(
            verdict=Ruling.no_data, measured=math.nan, threshold="", n=0, explanation="None of its trials is finished."
        )
    return made_of(
        lambda: claim.decide(own),
        f"the finding on claim {claim.id}",
        lambda reason: undecided(f"The results that are there do not suffice ({reason}).", len(own.trials)),
    )


def table(results: Results) -> pd.DataFrame:
    """`claims.csv`: one row per claim. A claim that no experiment decides is `pending`; two experiments have one row together."""
    deciding = list(registered().values())
    found = [(experiment.name, findings(experiment, results.of(experiment.name))) for experiment in deciding]
    rows = []
    for row in claims().to_dict("records"):
        own = {name: by_id[row["id"]] for name, by_id in found if row["id"] in by_id}
        one = _together(list(own.values()))
        rows.append(row | dataclasses.asdict(one) | {"verdict": str(one.verdict), "experiment": ", ".join(own)})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _together(found: list[ClaimResult]) -> ClaimResult:
    """One finding of several on the same claim: theirs where they agree, undecided where one is, else `conditional`.

    An experiment that has not run says nothing beside one that has.
    """
    found = [one for one in found if one.verdict != Ruling.no_data] or found
    if not found:
        text = "No experiment of this project decides it yet."
        return ClaimResult(verdict=Ruling.pending, measured=math.nan, threshold="", n=0, explanation=text)
    verdicts = {one.verdict for one in found}
    undecided = [one.verdict for one in found if one.verdict not in DECIDED]
    verdict = verdicts.pop() if len(verdicts) == 1 else next(iter(undecided), Ruling.conditional)
    return ClaimResult(
        verdict=verdict,
        measured=found[0].measured,
        threshold=found[0].threshold,
        n=sum(one.n for one in found),
        explanation=" ".join(one.explanation for one in found),
    )


def answer(experiment: Experiment, own: Results) -> Answer:
    """The answer of an experiment that is decided by its claims: held when every one of them fell as expected."""
    found = findings(experiment, own)
    sentences = tuple(f"{name}: {one.verdict}. {one.explanation}" for name, one in found.items())
    fell = [(one.verdict, claim.expects) for claim, one in zip(experiment.claims, found.values(), strict=True)]
    if any(verdict in DECIDED and verdict != expected for verdict, expected in fell):
        return Answer(sentences, False)
    return Answer(sentences, True if fell and all(verdict in DECIDED for verdict, _ in fell) else None)


@dataclass(frozen=True)
class Row:
    """A claim as the page shows it."""

    id: str
    source: str
    claim: str
    verdict: str
    measured: str
    threshold: str
    n: str
    experiment: str
    explanation: str

    @property
    def state(self) -> str:
        """The colour of its verdict."""
        return self.verdict if self.verdict in COLOURED else "open"


@dataclass(frozen=True)
class Ledger:
    """The section of the page."""

    rows: tuple[Row, ...]
    summary: str
    title: str = "What the texts claim, and what was measured"
    head: tuple[str, ...] = ("id", "claim (source)", "verdict", "measured", "held against", "n", "experiment")


def ledger(claims: pd.DataFrame) -> Ledger:
    """From the table to the page."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in claims["verdict"].value_counts().items())
    rows = tuple(
        Row(
            **{
                **{name: str(row[name]) for name in COLUMNS},
                "measured": number(row["measured"]),
                "n": str(row["n"]) if row["n"] else "-",
                "experiment": row["experiment"] or "-",
            }
        )
        for row in claims.to_dict("records")
    )
    return Ledger(
        rows, f"{len(claims)} claims: {counts}. Every verdict is computed from the stored results by the rule of its experiment."
    )
