"""Which check sees which fault of accumulation, and is it called by its name?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis import faults, tables
from accumulation_harness.analysis.answering import (
    BLUE,
    GREY,
    INHERENT,
    INK,
    MEANINGS,
    ON_RANKS,
    WIDTH,
    Advice,
    Answer,
    Experiment,
    Material,
    Picture,
    Rate,
    Results,
    Section,
    counted,
    needed,
    new_figure,
    of_trials,
    percent,
    rate,
    section,
    share,
    style,
    table,
    table_by,
)
from accumulation_harness.experiments.fault_matrix.watched import random_settings

NAMED = 0.97  # of the detected, at least
CONFIDENTLY_WRONG = 0.01  # of the detected, at most
IN_TRIALS = 0.10  # share of trials with a failure that has to be excluded where none failed
ENOUGH = 36  # trials: with fewer, the interval of none failed reaches beyond (0.025 ** (1 / 35) < 0.90)
MAX_LISTED = 40
SETTING = ["norm", "precision", "clipping", "lengths"]
SHADES = LinearSegmentedColormap.from_list("shares", ["#f1f5f9", "#9ec9e6", BLUE])
HEAD = 100  # points between the cells and the titles, for the slanted names of the columns


def active(arms: DataFrame) -> DataFrame:
    """The arms whose fault changes the computation of their trial: there missing it is a miss."""
    rows = faults.catalogue(arms)
    return rows[rows["changes"]].reset_index(drop=True)


def answer(arms: DataFrame) -> Answer:
    """Decided by the measured shares of arms; the intervals are over trials, since arms of one trial are no separate draws."""
    rows = active(arms)
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
    """Who sees which fault: verdict, checks and loss curve."""
    rows = active(material.arms)
    needed(rows)
    known = rows.query("visible_at.notna()")
    seen = faults.shown(known).groupby(known["arm"]).mean()
    order = seen.reindex(sorted(set(rows["arm"])), fill_value=0.0).sort_values(ascending=False, kind="stable").index
    outcome = rows.groupby("arm")[["detected", "named"]].mean().reindex(order)
    free = rows.query("verdict_correct == 'equivalent'")
    checks = faults.by_check(free).groupby(free["arm"]).mean().reindex(order).rename(columns=faults.CHECKS)
    loss_curve = [("loss curve: steps until it shows", *curves(known, order))] if len(known) else []
    picture = Picture(
        "matrix",
        figure_matrix(
            [
                ("verdict", outcome, _percents(outcome)),
                ("which check rejects it", checks, _percents(checks)),
                *loss_curve,
            ]
        ),
        "Table of faults: share detected and named, share rejected by each check, and the median step at which the loss curve "
        "shows the fault, per optimizer and clipping.",
        "Shade: share of the trials that the fault changes; white: in no trial of these settings. Left and middle, in percent; "
        f"the checks in the {free['trial'].nunique()} trials whose correct arm passes them all (without BatchNorm). Right: the "
        "median of the optimizer steps until the reported loss leaves the correct arm's by more than "
        f"{percent(faults.VISIBLE)} for {faults.IN_A_ROW} steps, where it does; never: in no trial, within "
        f"{rows['steps'].max()} steps; missing where no step rows can be read.",
    )
    return section("Who sees which fault", _hiding(known), picture)


def figure_matrix(panels: Sequence[tuple[str, DataFrame, DataFrame]]) -> Figure:
    """Panels that share their rows (faults): title, shares as shades (NaN: not run), and what is written into the cells."""
    first = panels[0][1]
    widths = [shares.shape[1] for _, shares, _ in panels]
    with style():
        figure = new_figure(WIDTH, 2.0 + 0.265 * len(first))
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
        for axes, (title, shares, words) in zip(grid, panels, strict=True):
            values = shares.to_numpy(dtype=float)
            axes.pcolormesh(np.ma.masked_invalid(values), cmap=SHADES, vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
            for (row, column), value in np.ndenumerate(values):
                if np.isfinite(value):
                    ink, text = "white" if value > 0.7 else GREY if value == 0 else INK, words.iat[row, column]
                    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=7.5)
            axes.set_xticks(np.arange(values.shape[1]) + 0.5, list(map(str, shares.columns)), rotation=55, ha="left")
            axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
            axes.set_frame_on(False)
            axes.grid(visible=False)
            axes.annotate(title, (0, 1), xycoords="axes fraction", xytext=(0, HEAD), textcoords="offset points", fontsize=9.5)
        grid[0].set_yticks(np.arange(len(first)) + 0.5, list(map(str, first.index)))
        grid[0].set_ylim(len(first), 0)
    return figure


def curves(rows: DataFrame, order: pd.Index[str]) -> tuple[DataFrame, DataFrame]:
    """Fault x setting: the share of trials in which the loss curve shows it (NaN: not run), and the median step in words."""
    rows = rows.assign(
        setting=rows["optimizer"] + rows["clipping"].map({"off": "", "sometimes": ", some clipped", "always": ", all clipped"})
    )
    pairs = sorted(
        set(zip(rows["optimizer"], rows["clipping"], rows["setting"], strict=True)),
        key=lambda pair: (faults.CLIPPINGS.index(pair[1]), tables.place_of(pair[0])),
    )
    columns, shown = [setting for *_, setting in pairs], faults.shown(rows)
    shares = shown.groupby([rows["arm"], rows["setting"]]).mean().unstack().reindex(index=order, columns=columns)
    medians = rows[shown].groupby(["arm", "setting"])["visible_at"].median().unstack().reindex(index=order, columns=columns)
    return shares, medians.map(lambda step: "never" if np.isnan(step) else f"{step:g}")


def _percents(shares: DataFrame) -> DataFrame:
    return shares.map(lambda value: "" if np.isnan(value) else percent(value).removesuffix("%") if value else "0")


def _hiding(rows: DataFrame) -> str:
    """Which optimizer hides what from the loss curve, without clipping."""
    plain = rows.query("clipping == 'off'")
    seen = faults.shown(plain)
    optimizers = tables.optimizers_of(plain)
    counts = {name: seen[plain["optimizer"] == name].groupby(plain["arm"]).sum() for name in optimizers}
    hidden = {name: set(count.index[count == 0]) for name, count in counts.items()}
    shown = set().union(*(count.index[count > 0] for count in counts.values()))
    if not optimizers:
        return ""
    text = ", ".join(f"under {name} {share(len(hidden[name]), len(counts[name]))}" for name in optimizers)
    text = f"Faults that the loss curve shows in no trial, without clipping: {text}."
    for name in optimizers:
        others = set().union(*(hidden[other] for other in optimizers if other != name))
        if alone := sorted((hidden[name] & shown) - others):
            text += f" {name} alone hides {', '.join(alone)}."
    return text


def misses(material: Material) -> Section:
    """Every arm that was missed, not named, or called by a wrong name."""
    rows = active(material.arms)
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
    """Detection by setting."""
    rows = active(material.arms)
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


def elsewhere(_material: Material) -> Section:
    """Faults of the catalogue that are not arms of the matrix."""
    rows = [(MEANINGS[cause].fault, cause, "inherent: a setting of the trial, diagnosed as its cause") for cause in INHERENT]
    rows += [(MEANINGS[cause].fault, cause, "on two processes: the experiment replicas") for cause in ON_RANKS]
    caption = f"{len(rows)} of the catalogue's faults have no arm here. Nothing above says anything of them."
    return section("Faults that are not here", table("id | cause | why", sorted(rows), caption))


def is_my_trainer_right(results: Results) -> Advice:
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
    rule="Detected: the arm is judged different or degraded, and otherwise than the correct arm of the same trial and N, in "
    "its verdict or its causes. Confidently wrong: a cause is named that is neither the fault's nor the correct arm's, "
    "without “unexplained” beside it. The measured shares decide: one missed arm refutes the prediction, and fewer than "
    f"{ENOUGH} trials leave it open: without any failure, the exact 95% interval of the share of trials that have one then "
    f"reaches beyond {percent(IN_TRIALS)}. Intervals are over trials, whose arms share data and weights.",
    answer=answer,
    advice=is_my_trainer_right,
    sections=(matrix, misses, settings, elsewhere, random_settings),
)
