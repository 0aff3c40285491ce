import csv
import io
import math
import struct
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from accumulation_harness.analysis import load, tables
from accumulation_harness.judge import statistics
from accumulation_harness.results.judged_arm import VERDICT_COLUMNS
from accumulation_harness.results.store import Store

MARGIN = 0.02


def bits(value):
    return struct.pack("d", value)


def test_csv_gives_every_double_back(results, grid):
    arms = load.from_store(results)
    header, *rows = csv.reader(io.StringIO(tables.to_csv(tables.verdicts(arms)).decode()))
    assert tuple(header) == VERDICT_COLUMNS
    assert len(rows) == len(arms)
    for name in ("algebra_error", "rounding_ratio", "scale", "cosine", "residual"):
        at = header.index(name)
        assert [bits(float(row[at])) for row in rows] == [bits(value) for value in arms[name]]
    assert {row[header.index("explained")] for row in rows} == {"True", "False"}


def test_matrix_counts_what_the_trials_say(results, make_trial):
    for seed in range(3):
        wrong = {("accumulated", 4): {"verdict": "different", "cause": "unexplained", "explained": False}} if seed == 1 else {}
        make_trial(norm="group", seed=seed, change=wrong)
        make_trial(norm="batch", seed=seed)
    counts = Counter()
    for trial in Store(results).trials():  # independent of load and pandas
        counts.update((one["norm"], one["arm"], one["accumulation_steps"], one["verdict"]) for one in trial.arms)
    matrix = tables.matrix(load.from_store(results))
    cells = {(row.norm, row.arm, row.accumulation_steps): row for row in matrix.itertuples()}
    assert len(cells) == 6
    for key, row in cells.items():
        assert row.trials == sum(count for (*other, _), count in counts.items() if tuple(other) == key)
        assert row.agreeing == counts[(*key, row.verdict)]
    odd = cells["group", "accumulated", 4]
    assert (odd.verdict, odd.agreeing, odd.trials, odd.explained, odd.cause) == ("different", 1, 3, False, "unexplained")
    assert cells["group", "accumulated", 2].verdict == "equivalent"
    assert cells["batch", "accumulated", 2].explained
    assert cells["batch", "permuted", 1].verdict == "equivalent"


def test_convergence_against_numpy(results, make_trial):
    for seed in range(4):
        make_trial(seed=seed)
    losses = {
        (one["accumulation_steps"], trial.config["seed"]): one["held_out_loss"] - 0.5
        for trial in Store(results).trials()
        for one in trial.arms
    }
    difference = np.array([losses[2, seed] for seed in range(4)])
    null = np.array([losses[1, seed] for seed in range(4)])
    l4 = tables.convergence(load.from_store(results), MARGIN)
    row = l4.query("measure == 'held_out_loss' and arm == 'accumulated' and accumulation_steps == 2").iloc[0]
    interval = stats.ttest_1samp(difference, 0).confidence_interval(0.95)
    own = {"n": 4, "mean": difference.mean(), "low": interval.low, "high": interval.high}
    own |= {"tost_p": statistics.equivalence_p(difference, MARGIN), "detectable": statistics.detectable(difference)}
    own["apart"], own["apart_p"] = statistics.stands_apart(difference, null[:, None].tolist())
    assert row[[*own]].to_dict() == pytest.approx(own, rel=1e-9)


def test_convergence_must_differ(results, make_trial):
    """A margin below the measured difference fails; without a second seed nothing is concluded."""
    for seed in range(3):
        make_trial(norm="group", seed=seed)
    make_trial(norm="none")
    arms = load.from_store(results)
    group = (tables.convergence(arms, margin).query("norm == 'group' and arm == 'accumulated'") for margin in (1.0, 1e-6))
    wide, narrow = (rows["tost_p"].max() for rows in group)
    assert wide < 0.05 < narrow
    alone = tables.convergence(arms, 1.0).query("norm == 'none'")
    assert alone["n"].eq(1).all()
    assert alone[["tost_p", "low", "detectable", "apart_p"]].isna().all(axis=None)


def test_pairs_that_are_not_finite_are_left_out(results, make_trial):
    outcome = dict.fromkeys(("final_loss", "tail_loss", "held_out_loss"), math.nan)
    for seed in range(3):
        make_trial(seed=seed, change={("accumulated", 2): outcome} if seed == 0 else {})
    l4 = tables.convergence(load.from_store(results), MARGIN).query("arm == 'accumulated' and measure == 'held_out_loss'")
    assert dict(zip(l4["accumulation_steps"], l4["n"], strict=True)) == {2: 2, 4: 3}
    assert l4["mean"].notna().all()


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1", "a\r=1", "\uff1d1"])
def test_no_text_is_a_formula_and_numbers_stay_numbers(text):
    content = tables.to_csv(pd.DataFrame({"text": [text], "number": [-0.1], "count": [-3]})).decode()
    _, *rows = csv.reader(io.StringIO(content, newline=""))
    assert [row[1:] for row in rows] == [["-0.1", "-3"]]
    assert not rows[0][0].startswith(("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"))
