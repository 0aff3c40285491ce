"""Do released trainers accumulate rightly? Decided by the audits that `make audit-<name>` writes beside the results."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from analysis.audits import released_trainers
from analysis.content import Section
from analysis.load import Results
from analysis.question import Claim, ClaimResult, Experiment, Material, Ruling, undecided


def of(results: Results, *frameworks: str) -> pd.DataFrame:
    """The audited arms of these frameworks that were judged."""
    audits = results.audits
    return audits[audits["name"].isin(frameworks) & audits["verdict"].isin(["equivalent", "different", "degraded"])]


def handles(*frameworks: str, remark: str = "") -> Callable[[Results], ClaimResult]:
    """The rule of G1 to G3: confirmed when all audited settings are equivalent, refuted when none is, else conditional."""

    def decide(results: Results) -> ClaimResult:
        arms = of(results, *frameworks)
        if arms["function"].nunique() < 2:
            return undecided(f"It takes the audits of {', '.join(frameworks)}: make audit-<name>.", len(arms))
        right = arms["verdict"].eq("equivalent")
        share = float(right.mean())
        verdict = Ruling.confirmed if share == 1 else Ruling.refuted if share == 0 else Ruling.conditional
        return ClaimResult(
            verdict=verdict,
            measured=share,
            threshold="share of arms that are equivalent: 1",
            n=len(arms),
            explanation=f"{_versions(arms)}: equivalent in {_settings(arms[right])}; {_wrong(arms[~right])}.{remark}",
        )

    return decide


def _versions(arms: pd.DataFrame) -> str:
    return ", ".join(sorted({f"{row.name_} {row.version}" for row in arms.rename(columns={"name": "name_"}).itertuples()}))


def _settings(arms: pd.DataFrame) -> str:
    """The audited functions, by their names."""
    return ", ".join(str(name).replace("_", " ") for name in dict.fromkeys(arms["function"])) or "no setting"


def _wrong(arms: pd.DataFrame) -> str:
    """The settings of each cause, in words."""
    found = {str(causes): _settings(own) for causes, own in arms.groupby("causes", sort=False)}
    return "; ".join(f"{causes.replace('; ', ' and ')} in {names}" for causes, names in found.items()) or "different in none"


RULE = "Confirmed when every audited setting is equivalent to the full batch, refuted when none is, conditional otherwise."
CLAIMS = (
    Claim(id="G1", expects=Ruling.conditional, rule=RULE, decide=handles("accelerate")),
    Claim(
        id="G2",
        expects=Ruling.conditional,
        rule=RULE,
        decide=handles("lightning", remark=" It is not on by default: accumulate_grad_batches is 1 unless set."),
    ),
    Claim(id="G3", expects=Ruling.conditional, rule=RULE, decide=handles("keras-tensorflow")),
)


def table(material: Material) -> Section | None:
    """The audits, one line per release and setting."""
    return released_trainers(material.results.audits)


EXPERIMENT = Experiment(
    name="released_trainers",
    title="Do released trainers accumulate rightly?",
    question="Which released trainers compute with accumulation what they compute with the full batch, and in which settings?",
    prediction="Each is right with equal lengths and full windows, and wrong in some setting with unequal lengths, a remainder, "
    "or a moving average.",
    rule="The audit's verdict decides, per release and setting: the same training function at N = 1, 4 and 16 (docs/audit.md). "
    "It holds for that release and setting. Run an audit with make audit-<name>: each has an environment of its own.",
    claims=CLAIMS,
    sections=(table,),
)
