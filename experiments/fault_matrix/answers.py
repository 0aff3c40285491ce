"""Which check sees which fault of accumulation, and is it called by its name?"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis import faults, tables
from accumulation_harness.analysis.answering import (
    Advice,
    Answer,
    Experiment,
    Material,
    Picture,
    Rate,
    Results,
    Section,
    Table,
    counted,
    needed,
    of_trials,
    percent,
    rate,
    section,
    share,
    table,
    table_by,
)
from accumulation_harness.analysis.figures.style import new_figure, style
from accumulation_harness.experiments.fault_matrix.watched import random_settings

NAMED = 0.97  # of the detected, at least
CONFIDENTLY_WRONG = 0.01  # of the detected, at most
IN_TRIALS = 0.10  # share of trials with a failure that has to be excluded where none failed
ENOUGH = 36  # trials: with fewer, the interval of none failed reaches beyond (0.025 ** (1 / 35) < 0.90)
MAX_LISTED = 40
SETTING = ["norm", "precision", "clipping", "lengths"]


def _active(arms: DataFrame) -> DataFrame:
    """The arms whose fault changes the computation of their trial: there missing it is a miss."""
    rows = faults.catalogue(arms)
    return rows[rows["changes"]].reset_index(drop=True)


def answer(arms: DataFrame) -> Answer:
    """Decided by the measured shares of arms; the intervals are over trials, since arms of one trial are no separate draws.

    Args:
        arms: Judged arms, a row each.

    Returns:
        The answer.
    """
    rows = _active(arms)
    if rows.empty:
        return Answer(("No arm of these trials has a fault that changes its computation.",), None)
    found = rows[rows["detected"]]
    detected, named, wrong = rate(rows["detected"]), rate(found["named"]), rate(found["confidently_wrong"])
    num = rows["trial"].nunique()
    sentences = (
        f"{rows['arm'].nunique()} faults in {num} trials: {_arms(detected)} arms whose computation a fault changes are detected; "
        f"every one in {of_trials(rows['detected'], rows['trial'])} trials.",
        f"Of the detected, {_arms(named)} are called by the right name, every one in {of_trials(found['named'], found['trial'])} "
        f"trials; {_arms(wrong)} by a wrong one with confidence, none in "
        f"{of_trials(~found['confidently_wrong'], found['trial'])} trials.",
        *_hidden(rows),
        *_at_rest(arms),
    )
    if detected.k < detected.n or named.share < NAMED or wrong.share > CONFIDENTLY_WRONG:
        return Answer(sentences, False)
    return Answer(sentences, True if num >= ENOUGH else None)


def _hidden(rows: DataFrame) -> list[str]:
    shown = faults.shown(rows)
    if shown.empty:
        return []
    never = set(rows.loc[shown.index, "arm"]) - set(rows.loc[shown.index[shown], "arm"])
    text = f"The loss curve shows {_arms(rate(shown))} of the same arms within the run"
    return [text + (f"; it shows {len(never)} of the faults in no trial." if never else ".")]


def _arms(one: Rate) -> str:
    """A share of arms, without an interval: that would take them for separate draws."""
    return f"{share(one.k, one.n)} ({percent(one.share)})" if one.n else share(0, 0)


def _at_rest(arms: DataFrame) -> list[str]:
    """Faults that change nothing in their trial have to be judged as its correct arm."""
    rest = faults.catalogue(arms).query("not changes")
    same = (rest["verdict"] == rest["verdict_correct"]) & (rest["cause"] == rest["cause_correct"])
    return [f"Where a fault changes nothing, {counted(same)} arms are judged as the correct arm is."] * bool(len(rest))


def matrix(material: Material) -> Section:
    """Who sees which fault: verdict, checks and loss curve.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = _active(material.arms)
    needed(rows)
    known = rows.query("visible_at.notna()")
    seen = faults.shown(known).groupby(known["arm"]).mean()
    order = seen.reindex(sorted(set(rows["arm"])), fill_value=0.0).sort_values(ascending=False, kind="stable").index
    free = rows.query("verdict_correct == 'equivalent'")
    checks = faults.by_check(free).groupby(free["arm"]).mean().rename(columns=faults.CHECKS)
    shares = rows.groupby("arm")[["detected", "named"]].mean().join(checks).reindex(order)
    picture = Picture(
        "matrix",
        _figure_shares(shares),
        "Faults in rows; the share detected and named, and the share rejected by each check, in columns.",
        "Share of the trials that the fault changes, in percent; the checks in the "
        f"{free['trial'].nunique()} trials whose correct arm passes them all (without BatchNorm).",
    )
    blocks: list[Table | Picture] = [picture]
    if len(known):
        curve = (
            "The loss curve: the median of the optimizer steps until the reported loss leaves the correct arm's by more than "
            f"{percent(faults.VISIBLE)} for {faults.IN_A_ROW} steps, where it does, and in which share of the trials; never: in "
            f"no trial, within {rows['steps'].max()} steps. Trials without readable step rows are left out."
        )
        cells = _until_visible(known).reindex(order).fillna("-")
        blocks.append(table(" | ".join(["fault", *cells]), cells.reset_index().to_numpy().tolist(), curve))
    return section("Who sees which fault", *blocks)


def _figure_shares(shares: DataFrame) -> Figure:
    """Shares as shades, in percent; empty: not run."""
    with style():
        figure = new_figure(6.2, 1.4 + 0.25 * len(shares))
        axes = figure.subplots()
        axes.pcolormesh(shares, cmap="Blues", vmin=0, vmax=1.5, edgecolors="white", linewidth=1.5)
        for (row, column), value in np.ndenumerate(shares):
            axes.text(column + 0.5, row + 0.5, "" if np.isnan(value) else f"{100 * value:.3g}", ha="center", va="center")
        axes.set_xticks(np.arange(shares.shape[1]) + 0.5, shares.columns.tolist(), rotation=40, ha="left")
        axes.set_yticks(np.arange(len(shares)) + 0.5, shares.index.tolist())
        axes.xaxis.tick_top()
        axes.invert_yaxis()
        axes.grid(visible=False)
    return figure


def _until_visible(rows: DataFrame) -> DataFrame:
    """Fault x optimizer and clipping: the median step at which the loss curve shows it, and in which share of the trials."""
    rows = rows.assign(
        optimizer=pd.Categorical(rows["optimizer"], tables.optimizers_of(rows), ordered=True),
        clipping=pd.Categorical(rows["clipping"], faults.CLIPPINGS, ordered=True),
        shown=faults.shown(rows),
    )
    cells = rows.groupby(["arm", "clipping", "optimizer"], observed=True)[["visible_at", "shown"]].apply(_visible)
    wide: DataFrame = cells.unstack(["clipping", "optimizer"]).sort_index(axis=1)
    return wide.set_axis([f"{key[1]}, clipping {key[0]}" for key in wide.columns.to_flat_index()], axis=1)


def _visible(own: DataFrame) -> str:
    shown = own[own["shown"]]
    return f"{shown['visible_at'].median():g} ({percent(own['shown'].mean())})" if len(shown) else "never"


def _misses(material: Material) -> Section:
    """Every arm that was missed, not named, or called by a wrong name."""
    rows = _active(material.arms)
    needed(rows)
    odd = rows.query("not detected or not named or confidently_wrong")
    title = "What was missed or called by a wrong name"
    if odd.empty:
        return section(title, f"Nothing: all {len(rows)} arms are detected and named, and no other cause beside theirs.")
    more = f" The first {MAX_LISTED} are listed; faults.csv has all." if len(odd) > MAX_LISTED else ""
    named = ("wrong name: " + odd["wrong"]).where(odd["confidently_wrong"], "not named").where(odd["detected"], "missed")
    listed = odd.assign(what=named, judged=odd["verdict"] + " " + odd["cause"]).head(MAX_LISTED)
    head, columns = "trial | fault |  | verdict | evidence", ("trial", "arm", "what", "judged", "reasons")
    return section(title, table_by(listed, "", head, columns, f"{len(odd)} of {len(rows)} arms.{more}"))


def settings(material: Material) -> Section:
    """Show the detection by setting.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = _active(material.arms)
    needed(rows)
    head = f"{' | '.join(SETTING)} | trials | detected | of trials, at least (95%) | named | wrong name | shown by the loss"
    caption = (
        "Arms whose computation the fault changes. At least: lower end of the exact 95% interval of the share of trials in which "
        "every fault is detected."
    )
    columns = (
        *SETTING, "trial nunique", lambda own: _together(own["detected"]),
        lambda own: percent(of_trials(own["detected"], own["trial"]).low), lambda own: _together(own[own["detected"]]["named"]),
        lambda own: own["confidently_wrong"].sum(), lambda own: percent(rate(faults.shown(own)).share),
    )  # fmt: skip
    cells = table_by(tables.in_order(rows), " ".join(SETTING), head, columns, caption, sort=False)
    return section("By setting", cells)


def _together(flags: Series[bool]) -> str:
    """In one line, also in a narrow column."""
    return counted(flags).replace(" ", "\u00a0")


def _is_my_trainer_right(results: Results) -> Advice:
    """Of all faults planted anywhere."""
    wrong = faults.catalogue(results.arms)
    wrong = wrong[wrong["changes"]] if len(wrong) else wrong
    needed(wrong)
    trials = wrong.groupby("trial")["detected"].all()
    return Advice(
        "Is my trainer right?",
        "Audit it: one command",
        f"{counted(wrong['detected'])} planted faults that change the computation were found, in {counted(trials)} trials all of "
        "them",
        "accumulation-harness audit, on a script or FILE.py:FUNCTION, names the cause and the fix, also with Hugging Face.",
        "fault_matrix",
    )


EXPERIMENT = Experiment(
    title="Is every fault found, and called by its name?",
    question="If an accumulation loop is wrong in one of the known ways, does a verdict show it, does the diagnosis name it,"
    " and would the loss curve have shown it?",
    prediction="Every fault is detected in every setting in which it changes the computation. The cause is named in at least"
    " 97% of the detected cases, and a wrong cause is named with confidence in at most 1%.",
    rule="Detected: the arm is judged different or degraded, and differently from the correct arm of the same trial and N, in "
    "its verdict or its causes. Confidently wrong: a cause is named that is neither the fault's nor the correct arm's, "
    "without “unexplained” beside it. The measured shares decide: one missed arm refutes the prediction, and fewer than "
    f"{ENOUGH} trials leave it open: without any failure, the exact 95% interval of the share of trials that have one then "
    f"reaches beyond {percent(IN_TRIALS)}. Intervals are over trials, whose arms share data and weights.",
    answer=answer,
    advice=_is_my_trainer_right,
    sections=(matrix, _misses, settings, random_settings),
)
