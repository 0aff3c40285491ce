"""How often the watch of a training run is right: the counts that `accumulation_harness.watch.calibration` wrote, on the page."""

from __future__ import annotations

from importlib.resources import files

import pandas as pd

from accumulation_harness.analysis.content import Section, Table, Text
from accumulation_harness.analysis.question import Material
from accumulation_harness.analysis.rates import Rate, percent

RIGHT = "none"  # the fault of a right loop
RUNGS = ("ledger", "sketch", "replay")


def recorded() -> pd.DataFrame:
    """The counts that are kept with the project: `experiments/recorded/watch.csv`, one row for each group of loops."""
    return pd.read_csv(str(files("accumulation_harness.experiments") / "recorded" / "watch.csv"), keep_default_na=False)


def watched_runs(material: Material) -> Section | None:
    """What a watch says of right loops and of wrong ones, by fault and by rung."""
    return section(recorded())


def section(counts: pd.DataFrame) -> Section | None:
    """The section of such counts; None where nothing was counted."""
    right, wrong = counts[counts["fault"] == RIGHT], counts[counts["fault"] != RIGHT]
    if right.empty or wrong.empty:
        return None
    alarms, seen, named = _rate(right, "different"), _rate(wrong, "different"), _rate(wrong, "named")
    commits, windows = ", ".join(str(one)[:7] for one in counts["commit"].unique()), int(right["windows"].sum())
    text = (
        f"The watch of a real run (`accumulation_harness.watch`) was attached to {alarms.n} random right loops of "
        f"{windows} windows. It calls {alarms} of them different. Of {seen.n} loops with a planted fault it sees {seen.k}, "
        f"and names {named.k} with nothing else beside them ({percent(named.share)}, 95% interval {named.interval}). "
        f"Measured at commit {commits}, with torch {', '.join(map(str, counts['torch'].unique()))}, by "
        "`python -m accumulation_harness.watch.calibration`."
    )
    return Section("The watch of a run", (Text(text), _of_faults(wrong), _of_right_loops(right)))


def _of_faults(wrong: pd.DataFrame) -> Table:
    rows = []
    for fault, own in wrong.groupby("fault", sort=False):
        named = _rate(own, "named")
        with_replay = _rate(own[own["replayed"] == 1], "named")
        counts = [str(int(own[name].sum())) for name in ("loops", "different", *RUNGS)]
        rows.append((str(fault), *counts, f"{named.k} ({named.interval})", f"{with_replay.k} of {with_replay.n}"))
    head = ("fault", "loops", "seen", *(f"by the {rung}" for rung in RUNGS), "named alone (95% interval)", "of those replayed")
    caption = (
        "Loops with a planted fault. A rung is counted where it was the first to say what is wrong; several may say something "
        "of one loop. Named alone: the fault and no other cause."
    )
    return Table(head, tuple(rows), caption)


def _of_right_loops(right: pd.DataFrame) -> Table:
    rows = []
    for _, own in right.groupby(["precision", "parameters"]):
        alarms, replayed = _rate(own, "different"), own[own["replayed"] == 1]
        rows.append(
            (
                str(own["precision"].iloc[0]),
                f"{own['parameters'].iloc[0]:,}",
                str(alarms.n),
                str(int(own["windows"].sum())),
                str(int(replayed["loops"].sum())),
                str(int(own["equivalent"].sum())),
                str(int(own["inconclusive"].sum())),
                f"{alarms.k} (up to {percent(alarms.high)})",
            )
        )
    head = ("precision", "parameters", "right loops", "windows", "replayed", "equivalent", "inconclusive", "false alarms")
    return Table(head, tuple(rows), "Right loops: a false alarm is one that is called different; 95% interval.")


def _rate(counts: pd.DataFrame, name: str) -> Rate:
    return Rate(int(counts[name].sum()), int(counts["loops"].sum()))
