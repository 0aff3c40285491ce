"""Which relative error in the accumulated gradient is the smallest that is found?"""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis import faults, tables
from accumulation_harness.analysis.answering import (
    Answer,
    Experiment,
    Material,
    Picture,
    Rate,
    Section,
    curves,
    lines,
    mean_curve,
    needed,
    percent,
    section,
)

WANTED = 0.95  # share of planted errors that has to be found
ENOUGH = 20  # trials of every size: fewer cannot distinguish 95% from much less
TARGETS = {"float64": 1e-11, "float32": 1e-5}
KINDS = ("scale", "direction", "tensor")


def rates(arms: DataFrame) -> DataFrame:
    """One row per precision, kind and planted size: `k` of `n` found; sorted.

    Args:
        arms: Judged arms, a row each.

    Returns:
        The rows.
    """
    rows = faults.judged(arms)
    rows = rows[faults.planted(rows)]
    if rows.empty:
        return DataFrame(columns=["precision", "kind", "size", "k", "n"])
    parts = rows["arm"].str.partition("@")
    rows = rows.assign(kind=parts[0], size=pd.to_numeric(parts[2]))
    counted = rows.groupby(["precision", "kind", "size"], as_index=False).agg(k=("detected", "sum"), n=("detected", "size"))
    customary = {"precision": [*tables.PRECISIONS], "kind": [*KINDS]}
    places = counted.assign(**{name: counted[name].map(order.index) for name, order in customary.items()})
    return counted.loc[places.sort_values(["precision", "kind", "size"]).index].reset_index(drop=True)


def smallest(own: DataFrame) -> float:
    """The smallest size of one precision and kind such that it and all larger ones are found in at least WANTED; NaN if none.

    Args:
        own: From `rates`, of one precision and kind.

    Returns:
        A relative error.
    """
    found = math.nan
    for size, k, n in own.sort_values("size", ascending=False)[["size", "k", "n"]].itertuples(index=False):
        if k < WANTED * n:
            break
        found = size
    return found


def answer(arms: DataFrame) -> Answer:
    """Held when every kind is found at the target's size, in both precisions that have a target.

    Args:
        arms: Judged arms, a row each.

    Returns:
        The answer.
    """
    table = rates(arms)
    if table.empty:
        return Answer(("No error was planted in these trials.",), None)
    sentences, decided = [], {}
    for precision, own in table.groupby("precision", sort=False):
        sizes = {str(kind): smallest(rows) for kind, rows in own.groupby("kind", sort=False)}
        words = _words(sizes, own)
        target = TARGETS.get(str(precision))
        sentences.append(
            f"{precision}: found in at least {percent(WANTED)} of the trials from {words}"
            + (f" (target {_plain(target)})." if target else ".")
        )
        if target is not None:
            decided[precision] = len(sizes) == len(KINDS) and all(size <= target for size in sizes.values())
    least = table["n"].min()
    sentences.append(f"Each size was planted in {least} trials or more: {Rate(least, least)} is the most that so many can show.")
    if not all(decided.values()):
        return Answer(tuple(sentences), False)
    return Answer(tuple(sentences), True if len(decided) == len(TARGETS) and least >= ENOUGH else None)


def _words(sizes: dict[str, float], own: DataFrame) -> str:
    """The smallest sizes found, in words."""
    none = f"no size up to {_plain(own['size'].max())}"
    return ", ".join(f"{none if math.isnan(size) else _plain(size)} in {kind}" for kind, size in sizes.items())


def _plain(size: float) -> str:
    return f"{size:.0e}".replace("e-0", "e-").replace("-", "\u2011")  # a hyphen at which no line breaks


def shares(material: Material) -> Section:
    """The share of planted errors that are found, over their size.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    table = rates(material.arms)
    needed(table)
    picture = Picture(
        "rates",
        _figure_sensitivity(table),
        "Share of planted errors found over their relative size, one panel per precision, one line per kind of error.",
        "A relative error was planted in the accumulated gradient, in the precision of the run alone: in its scale, in a random "
        "direction, or in the first tensor. Found: judged different or degraded, and differently from the correct arm. "
        "Bars: exact 95% intervals. Targets: "
        f"{', '.join(f'{precision} {_plain(size)}' for precision, size in TARGETS.items())}.",
    )
    return section("What is found", picture)


def _figure_sensitivity(table: DataFrame) -> Figure:
    """Share of planted errors that are found over their relative size, a panel per precision, with exact 95 % intervals."""
    found = [Rate(*pair) for pair in zip(table["k"], table["n"], strict=True)]
    table = table.assign(mean=[one.share for one in found], low=[one.low for one in found], high=[one.high for one in found])
    panels = {
        f"{precision} (n = {own['n'].max()} a point)": lines(own, "kind", "size", of=mean_curve)
        for precision, own in table.groupby("precision", sort=False)
    }
    level = (WANTED, percent(WANTED))
    return curves(panels, "planted relative error", "share that is found", axes=("log", "linear"), level=level)


EXPERIMENT = Experiment(
    title="How small an error is found?",
    question="Which relative error of the accumulated gradient is the smallest that the verdict finds in 95% of the trials?",
    prediction="In float64 one of 1e-11 is found, in float32 one of 1e-5, whether it lies in the scale of the gradient, in "
    "its direction, or in one tensor alone. In 16-bit formats the sizes are measured, without a target.",
    rule="The smallest planted size from which on every larger one is found in at least 95% of the trials, per precision and"
    " kind. The prediction holds when it is at most the target for all three kinds in both precisions; "
    f"fewer than {ENOUGH} trials of a size leave it open.",
    answer=answer,
    sections=(shares,),
)
