"""The ledger of claims: each id of the questions' `claims.csv`, and what the results say of it by the rule of its experiment."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pandas as pd
from pandas import DataFrame

from accumulation_harness.analysis.content import number
from accumulation_harness.analysis.load import Results
from accumulation_harness.analysis.question import (
    Answer,
    Claim,
    ClaimResult,
    Experiment,
    Ruling,
    TooFew,
    made_of,
    registered,
    undecided,
)
from accumulation_harness.config.questions import FOLDER, questions

COLUMNS = (*("id", "source", "claim", "verdict", "condition", "measured", "threshold", "n", "experiment", "rule", "explanation"),)
RECORDED = "recorded"  # the last column: of a row that these results leave open, when and at which commit it was measured
COLOURED = ("confirmed", "refuted", "conditional")
DECIDED = (
    *(Ruling.confirmed, Ruling.refuted, Ruling.conditional, Ruling.contradicted, Ruling.not_testable),
    *(Ruling.right_by_arithmetic, Ruling.wrong_by_arithmetic),
)


def claims() -> DataFrame:
    """Read every claim, in the order of the ledger.

    Returns:
        A row for each claim.
    """
    tables = [
        pd.read_csv(str(path), dtype=str) for name in questions() if (path := files(f"{FOLDER}.{name}") / "claims.csv").is_file()
    ]
    found: DataFrame = pd.concat(tables).sort_values("id", key=lambda ids: ids.map(_place), ignore_index=True)
    return found


def _place(id: str) -> tuple[str, int, str]:
    """B2 is before B10."""
    letter, number, rest = re.fullmatch(r"([A-Z])(\d+)(.*)", id).groups()  # type: ignore[union-attr]
    return letter, int(number), rest


def findings(experiment: Experiment, own: Results) -> dict[str, ClaimResult]:
    """What an experiment's results say of its claims; `no data` where it has no finished trial.

    Args:
        experiment: Its claims and their rules.
        own: Its results.

    Returns:
        Id of a claim -> what was found.
    """
    return {claim.id: _decide(claim, own) for claim in experiment.claims}


def _decide(claim: Claim, own: Results) -> ClaimResult:
    if own.is_empty and not claim.is_recorded:
        return ClaimResult(
            verdict=Ruling.no_data, measured=math.nan, threshold="", n=0, explanation="None of its trials is finished."
        )

    def decided() -> ClaimResult:
        try:
            return claim.decide(own)
        except TooFew as few:
            return undecided(*few.args)

    return made_of(
        decided,
        f"the finding on claim {claim.id}",
        lambda reason: undecided(f"The results that are there do not suffice ({reason}).", len(own.trials)),
    )


def table(results: Results) -> DataFrame:
    """`claims.csv`: one row per claim. A claim that no experiment decides is `pending`; two experiments have one row together.

    Args:
        results: What a store holds.

    Returns:
        Columns as in `claims.csv`.
    """
    deciding = [experiment for _, experiment in sorted(registered().items())]
    found = [(experiment, findings(experiment, results.of(experiment.name))) for experiment in deciding]
    rows = []
    for row in claims().to_dict("records"):
        own = {experiment.name: by_id[row["id"]] for experiment, by_id in found if row["id"] in by_id}
        rules = dict.fromkeys(claim.rule for experiment in deciding for claim in experiment.claims if claim.id == row["id"])
        one = _together(list(own.values()))
        said = {"verdict": str(one.verdict), "experiment": ", ".join(own), "rule": " ".join(rules)}
        rows.append(row | dataclasses.asdict(one) | said)
    return DataFrame(rows, columns=list(COLUMNS)).assign(**{RECORDED: ""})


def with_recorded(claims: DataFrame) -> DataFrame:
    """Fill in claims that these results leave open from the full grids, marked with date and commit.

    The recorded rows are those that today's rules give of the trials kept in docs/findings; a test decides them again.

    Args:
        claims: The table of claims.

    Returns:
        The table, with a column that says which rows are recorded.
    """
    (path,) = Path(str(files(FOLDER) / RECORDED)).glob("claims-*.csv")
    _, *date, commit = path.stem.split("-")
    kept = pd.read_csv(path).fillna({"condition": "", "threshold": "", "experiment": "", "rule": ""})
    kept[RECORDED] = f"{'-'.join(date)} at {commit}"
    is_open = ~claims["verdict"].isin([*DECIDED, Ruling.undecided]) & claims["id"].isin(kept["id"])
    both = pd.concat([claims[~is_open], kept[kept["id"].isin(claims.loc[is_open, "id"])]])
    return both.set_index("id").loc[claims["id"]].reset_index()[list(claims.columns)]


def _together(found: list[ClaimResult]) -> ClaimResult:
    """One finding of several on the same claim: theirs where they agree, open where one needs more trials, else `conditional`.

    An experiment that has not run says nothing beside one that has, nor does one that could not tell beside one that could. The
    number shown is the worst of those held against the same threshold.

    Returns:
        One finding; the number shown is the worst of those held against the same threshold.
    """
    found = [one for one in found if one.verdict != Ruling.no_data] or found
    if not found:
        text = "No experiment of this project decides it yet."
        return ClaimResult(verdict=Ruling.pending, measured=math.nan, threshold="", n=0, explanation=text)
    told = [one for one in found if one.verdict != Ruling.undecided] or found
    verdicts = {one.verdict for one in told}
    open_ones = [one.verdict for one in told if one.verdict not in DECIDED]
    verdict = verdicts.pop() if len(verdicts) == 1 else next(iter(open_ones), Ruling.conditional)
    comparable = [one for one in told if one.threshold == told[0].threshold and not math.isnan(one.measured)]
    conditions = dict.fromkeys(one.condition for one in told if one.condition)
    unnamed = "in some experiments, not in others" if verdict == Ruling.conditional else ""
    return ClaimResult(
        verdict=verdict,
        condition=("; ".join(conditions) or unnamed) if verdict == Ruling.conditional else "",
        measured=max((one.measured for one in comparable), default=told[0].measured),
        threshold=told[0].threshold,
        n=sum(one.n for one in told),
        explanation=" ".join(one.explanation for one in found),
    )


def answer(experiment: Experiment, own: Results) -> Answer:
    """Answer the question of an experiment that is decided by its claims.

    Whether the printed prediction held is said only where the experiment compares it (`Experiment.predicted`): the claims of
    others may fall as expected, and a sentence of the prediction fail.

    Args:
        experiment: The question.
        own: Its results.

    Returns:
        A sentence for each claim, and how many fell as theory expects.
    """
    found, texts = findings(experiment, own), claims().set_index("id")["claim"]
    sentences = tuple(
        f"{name}, “{texts[name]}”: {one.verdict}{f' ({one.condition})' if one.condition else ''}. {one.explanation}"
        for name, one in found.items()
    )
    fell = [one.verdict == claim.expects for claim, one in zip(experiment.claims, found.values(), strict=True)]
    counted = [f"{sum(fell)} of {len(fell)} claims fell as theory expects."] * bool(fell)
    predicted = experiment.predicted
    if predicted is None:
        return Answer((*sentences, *counted), None, compared=False)
    compare = predicted  # mypy forgets the narrowing inside the lambda
    return Answer(
        (*sentences, *counted), made_of(lambda: compare(own), f"the prediction of {experiment.name}", lambda reason: None)
    )


@dataclass(frozen=True)
class Ledger:
    """The section of the page."""

    rows: Sequence[Mapping[Hashable, str]]  # the columns of `claims.csv` as text, and `state`, the colour of the verdict
    summary: str
    title: str = "What the articles claim, and what was measured"
    head: tuple[str, ...] = ("id", "claim (source)", "verdict", "measured", "held against", "n", "experiment")


def ledger(claims: DataFrame) -> Ledger:
    """Make the page's ledger from the table of claims.

    Args:
        claims: Rows of `claims.csv`.

    Returns:
        Title, summary and rows.
    """
    verdicts = claims["verdict"]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.value_counts().items())
    num_recorded = int(claims[RECORDED].ne("").sum())
    recorded = f" {num_recorded} are recorded, from full grids at the commit that is named." if num_recorded else ""
    rows = claims.assign(
        state=verdicts.where(verdicts.isin(COLOURED), "open"),
        measured=claims["measured"].map(number),
        n=claims["n"].replace(0, "-"),
        experiment=claims["experiment"].replace("", "-"),
    )
    return Ledger(
        rows.astype(str).to_dict("records"),
        f"{len(claims)} claims: {counts}. Every verdict that says confirmed, refuted or conditional "
        "is computed from the stored results by the rule of its experiment; right or wrong by arithmetic was calculated, and not "
        f"measured.{recorded}",
    )
