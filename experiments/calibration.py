"""How often does a correct trial fail?"""

from __future__ import annotations

import pandas as pd

from accumulation_harness.analysis import faults, tables
from accumulation_harness.analysis.content import Section, Table, Text
from accumulation_harness.analysis.question import Answer, Experiment, Material
from accumulation_harness.analysis.rates import percent, rate
from accumulation_harness.analysis.watched import watched_runs
from accumulation_harness.config import Precision
from accumulation_harness.judge.cause import INHERENT
from accumulation_harness.judge.verdict import Doubt, Outcome

ENOUGH = 3000  # trials
TOLERATED = 0.02  # of the trials, inconclusive for a reason that REGIONS does not name
REGIONS = {
    Doubt.diverged: "the training diverges",
    Doubt.diverged_at_once: "the training diverges at its first step",
    Doubt.overflowed: "the gradients overflow in float16",
    Doubt.vanished: "the gradients vanish in float16",
}
LEVELS = {
    "L0": ("gradient", "state", "reported", "trajectory"),
    "L1": ("rounding",),
    "L2": ("counted",),
}
CASES = {
    "clipping": ("clipping_active", "a window was clipped"),
    "short windows": ("short_windows", "a window was shorter than B"),
    "unequal terms": ("unequal_terms", "micro-batches had different numbers of loss terms"),
}


def correct(arms: pd.DataFrame) -> pd.DataFrame:
    """The correct arms: `alarm` where one is blamed, `inherent`, `region` of those not judged, and a flag per level that rejects.

    An arm that differs by what its model or loss computes within micro-batches (`inherent`: BatchNorm, dropout, in-batch
    negatives) is rightly called different, if nothing else is named beside it and the difference is reproduced exactly.
    """
    right = arms[arms["arm"].isin(["accumulated", "permuted"])].reset_index(drop=True)
    causes = right["cause"].map(faults.causes_of)
    by_model = pd.Series([bool(own) and own <= INHERENT for own in causes], index=right.index, dtype=bool)
    inherent = by_model & (right["verdict"] == Outcome.different) & right["explained"].astype(bool)
    passes = right["verdict"].isin([Outcome.equivalent, Outcome.inconclusive]) | inherent
    checks = faults.by_check(right)
    levels = {level: checks[list(names)].any(axis=1) & ~inherent for level, names in LEVELS.items()}
    region = right["reasons"].map(lambda told: next((name for doubt, name in REGIONS.items() if told.startswith(doubt)), ""))
    return right.assign(
        alarm=~passes, inherent=inherent, region=region.where(right["verdict"] == Outcome.inconclusive, ""), **levels
    )


def judged(arms: pd.DataFrame) -> pd.DataFrame:
    """The `correct` arms of which something is said."""
    right = correct(arms)
    return right[right["verdict"] != Outcome.inconclusive].reset_index(drop=True)


def answer(arms: pd.DataFrame) -> Answer:
    """Refuted by one alarm, or by too many trials that are inconclusive without a known reason; open with too few trials."""
    right = correct(arms)
    if right.empty:
        return Answer(("No correct arm was judged.",), None)
    doubtful = right["verdict"] == Outcome.inconclusive
    alarms, unnamed = rate(_any(right, right["alarm"])), rate(_any(right, doubtful & (right["region"] == "")))
    measured = right[(right["precision"] != Precision.float64) & ~doubtful & ~right["inherent"]]
    regions = {name: int(_any(right, right["region"] == name).sum()) for name in REGIONS.values()}
    named = ", ".join(f"{name}: {num}" for name, num in regions.items() if num) or "none"
    sentences = (
        f"{alarms.n} correct trials, {int((~doubtful).sum())} arms judged, {int(right['inherent'].sum())} of them rightly "
        "different.",
        f"False alarms: {alarms} trials.",
        f"Inconclusive arms in trials of known regions: {named}; outside them: {unnamed} trials.",
        f"L1 rejects {rate(measured['rounding_windows'] > 1)} arms in one window, and {rate(measured['L1'])} in three; in "
        f"{int(_any(right, right['parted_at'].notna()).sum())} trials the training amplifies rounding.",
    )
    if alarms.k or unnamed.share > TOLERATED:
        return Answer(sentences, False)
    return Answer(sentences, True if alarms.n >= ENOUGH else None)


def _any(arms: pd.DataFrame, flags: pd.Series[bool]) -> pd.Series[bool]:
    """By trial, whether the flag of any of its arms is set: trials, unlike their arms, are independent."""
    return flags.groupby(arms["trial"]).any()


def levels(material: Material) -> Section | None:
    """False alarms by precision and level."""
    right = judged(material.arms)
    if right.empty:
        return None
    rows = []
    for precision in [name for name in tables.PRECISIONS if name in set(right["precision"])]:
        own = right[right["precision"] == precision]
        counts = [str(int(own[level].sum())) if precision != "float64" or level != "L1" else "-" for level in LEVELS]
        alarms = rate(_any(own, own["alarm"]))
        rows.append((precision, str(alarms.n), str(len(own)), *counts, str(alarms.k), percent(alarms.high)))
    head = ("precision", "trials", "arms", *LEVELS, "trials with an alarm", "95% interval up to")
    caption = (
        "Correct arms (accumulated, and the permuted full batch) that a level rejects, but for those that differ by their "
        "model's BatchNorm, dropout or in-batch negatives. L0: algebra in float64; L1: rounding in the precision of the run, "
        "confirmed in three windows (for float64, L0 is that); L2: counters. The interval is the exact one (Clopper and Pearson) "
        "of trials with an alarm in any arm."
    )
    odd = right[right["alarm"]]
    text = "; ".join(f"{row.trial} {row.arm} N={row.accumulation_steps}: {row.reasons}" for row in odd.head(10).itertuples())
    table = Table(head, tuple(rows), caption)
    return Section("False alarms by level", (table, Text(f"The first of them: {text}.")) if text else (table,))


def vacuity(material: Material) -> Section | None:
    """How many trials could have raised an alarm at all: one that never met a case does not count for it."""
    right = judged(material.arms)
    right = right[right["arm"] == "accumulated"]
    if right.empty:
        return None
    rows = []
    for name, (column, meaning) in CASES.items():
        met = right[column].astype(bool)
        tried = right[met]
        trials = tried["trial"].nunique()
        alarms = rate(tried["alarm"])
        vacuous = right["trial"].nunique() - trials
        rows.append(
            (name, meaning, str(trials), str(vacuous), str(alarms.n), str(alarms.k), percent(alarms.high) if alarms.n else "-")
        )
    head = ("case", "counts when", "trials", "vacuous trials", "accumulated arms", "false alarms", "95% interval up to")
    caption = (
        "A trial that never clipped, that met no short window, or whose micro-batches all had the same number of loss terms is "
        "vacuous for that case and does not count."
    )
    return Section("Could these trials have failed?", (Table(head, tuple(rows), caption),))


EXPERIMENT = Experiment(
    name="calibration",
    title="How often is a correct loop called wrong?",
    question="Over settings drawn at random from all that is accepted (model, data, optimizer, normalisation, precision, sizes, "
    "clipping, schedule, moving average, penalty, loss scale): how often is a correct loop blamed, and at which level?",
    prediction="In at least 3,000 correct trials none is blamed, in any precision, and at most 2% cannot be judged although "
    "their training neither diverges nor leaves the range of float16.",
    rule="An alarm is an arm judged different or degraded, unless its difference is the model's own (BatchNorm, dropout, "
    "in-batch negatives) and reproduced exactly; every arm of these trials is correct. One alarm refutes the prediction, as do "
    "more than 2% of the trials inconclusive for another reason than those named. "
    f"Fewer than {ENOUGH} trials leave it open.",
    answer=answer,
    sections=(levels, vacuity, watched_runs),
)
