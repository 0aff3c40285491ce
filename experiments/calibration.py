"""How often does a correct trial fail?"""

from __future__ import annotations

import pandas as pd

from analysis import faults, tables
from analysis.content import Section, Table, Text
from analysis.question import Answer, Experiment, Material
from analysis.rates import percent, rate

EXACT = ("float64", "float32")  # precisions of which no false alarm is tolerated
TOLERATED = 0.01  # of the arms in float16 and in bfloat16
ENOUGH = 1000  # trials, and arms in EXACT
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


def judged(arms: pd.DataFrame) -> pd.DataFrame:
    """The correct arms that were judged, with `alarm` (the verdict is not equivalent) and one flag per level that rejects."""
    right = arms[arms["arm"].isin(["accumulated", "permuted"]) & (arms["verdict"] != "inconclusive")].reset_index(drop=True)
    checks = faults.by_check(right)
    levels = {level: checks[list(names)].any(axis=1) for level, names in LEVELS.items()}
    return right.assign(alarm=right["verdict"] != "equivalent", exact=right["precision"].isin(EXACT), **levels)


def answer(arms: pd.DataFrame) -> Answer:
    """Refuted by one alarm in float64 or float32, or by more than TOLERATED in a 16-bit format; open with too few trials."""
    right = judged(arms)
    if right.empty:
        return Answer(("No correct arm was judged.",), None)
    num_trials = right["trial"].nunique()
    doubtful = int((arms["arm"].isin(["accumulated", "permuted"]) & (arms["verdict"] == "inconclusive")).sum())
    sentences = [
        f"{num_trials} correct trials, {len(right)} arms judged"
        + (f", {doubtful} more could not be judged." if doubtful else ".")
    ]
    exact, narrow = right[right["exact"]], right[~right["exact"]]
    if len(exact):
        sentences.append(f"False alarms in float64 and float32: {rate(exact['alarm'])} arms; in {_trials(exact)} trials.")
    shares = []
    for precision, own in narrow.groupby("precision"):
        sentences.append(f"In {precision}: {rate(own['alarm'])} arms; in {_trials(own)} trials.")
        shares.append(rate(own["alarm"]).share)
    if exact["alarm"].any() or any(value > TOLERATED for value in shares):
        return Answer(tuple(sentences), False)
    enough = num_trials >= ENOUGH and len(exact) >= ENOUGH and len(shares) == 2
    return Answer(tuple(sentences), True if enough else None)


def _trials(arms: pd.DataFrame) -> str:
    """The rate of trials with an alarm in any arm: trials, unlike their arms, are independent."""
    return str(rate(arms.groupby("trial")["alarm"].any()))


def levels(material: Material) -> Section | None:
    """False alarms by precision and level."""
    right = judged(material.arms)
    if right.empty:
        return None
    rows = []
    for precision in [name for name in tables.PRECISIONS if name in set(right["precision"])]:
        own = right[right["precision"] == precision]
        counts = [str(int(own[level].sum())) if precision != "float64" or level != "L1" else "-" for level in LEVELS]
        alarms = rate(own["alarm"])
        rows.append((precision, str(own["trial"].nunique()), str(alarms.n), *counts, str(alarms.k), percent(alarms.high)))
    head = ("precision", "trials", "arms", *LEVELS, "any level", "95% interval up to")
    caption = (
        "Correct arms (accumulated, and the permuted full batch) that a level rejects: all of them are false alarms. L0: algebra "
        "in float64; L1: rounding in the precision of the run (for float64, L0 is that); L2: counters. The interval is exact "
        "(Clopper and Pearson) and treats arms as independent, although those of a trial share its full batch."
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
    question="Over models, optimizers, normalisations, precisions, batch sizes and ragged splits: how often does a correct "
    "trial raise an alarm, and at which level?",
    prediction="In at least 1,000 correct trials there is no false alarm in float64 and float32, and at most 1% of the arms "
    "raise one in float16 and in bfloat16.",
    rule="An alarm is an arm judged different or degraded; every arm of these trials is correct. One in float64 or float32 "
    f"refutes the prediction, as do more than 1% in a 16-bit format. Fewer than {ENOUGH} trials, or than {ENOUGH} arms "
    "in float64 and float32, leave it open.",
    answer=answer,
    sections=(levels, vacuity),
)
