"""The rule of `experiments/groupnorm.py`, and the tables of accuracy over b, on rows made by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import report
from analysis.batch_norm import against_full, between_norms, error_cells, fixed_batch, growing_batch, t_test, trained
from analysis.batch_norm_sections import _shape
from analysis.load import Results
from analysis.question import Ruling
from experiments.batchnorm import costs_accuracy
from experiments.groupnorm import better_choice
from harness import studies
from harness.config import Model, Norm, Study, TrialConfig, WorkloadConfig, identity, to_dict
from harness.results.store import Store

SEEDS = range(6)
JITTER = 0.1  # points, of the errors made here
BATCH = {32: 3.0, 16: 3.0, 8: 3.5, 4: 5.0, 2: 30.0}  # b: held-out error, %, as the theory has it
GROUP = dict.fromkeys(BATCH, 4.0)


def run_of(norm: str, errors: Mapping[int, float], size: int, seed: int, model: str = "mlp") -> list[dict[str, Any]]:
    """One trial: the full batch is the largest b."""
    rng = np.random.default_rng([seed, size, len(norm)])
    rows = []
    for b, error in errors.items():
        arm = "full" if b == max(errors) else "accumulated"
        own = error + JITTER * float(rng.standard_normal())
        rows.append({"arm": arm, "accumulation_steps": size // b if arm == "accumulated" else 1,
                     "micro_batch": size if arm == "full" else b, "held_out_accuracy": 1 - own / 100,
                     "held_out_loss": own / 30 + 1e-3 * float(rng.standard_normal())})  # fmt: skip
    rows.append(rows[0] | {"arm": "permuted", "held_out_loss": rows[0]["held_out_loss"] + 1e-6 * float(rng.standard_normal())})
    shared = {"experiment": "groupnorm", "trial": f"{model}-{norm}-{size}-{seed}", "study": "convergence", "model": model,
              "norm": norm, "effective_batch": size, "seed": seed}  # fmt: skip
    return [shared | row for row in rows]


def exact(error: float) -> dict[str, Any]:
    return {"experiment": "groupnorm", "trial": "e", "study": "batch_statistics", "norm": "group", "model": "mlp",
            "arm": "accumulated", "gradient_error": error, "accumulation_steps": 8, "momentum": 0.1}  # fmt: skip


def results(batch: Mapping[int, float] = BATCH, group: Mapping[int, float] = GROUP, error: float = 1e-15) -> Results:
    rows = [
        row for seed in SEEDS for norm, errors in (("batch", batch), ("group", group)) for row in run_of(norm, errors, 32, seed)
    ]
    return Results(pd.DataFrame(), pd.DataFrame([*rows, exact(error)]), pd.DataFrame(), ())


@pytest.mark.parametrize("changes, verdict", [
    ({}, Ruling.conditional),
    ({"error": 1e-3}, Ruling.refuted),
    ({"group": dict.fromkeys(BATCH, 40.0)}, Ruling.refuted),
    ({"group": dict.fromkeys(BATCH, 1.0)}, Ruling.confirmed),
    ({"batch": dict.fromkeys(BATCH, 4.0)}, Ruling.needs_full_grid),
])  # fmt: skip
def test_rule_of_b3(changes: dict[str, Any], verdict: Ruling) -> None:
    assert better_choice(results(**changes)).verdict == verdict


def test_b3_without_rows() -> None:
    nothing = Results(pd.DataFrame(), pd.DataFrame(columns=["experiment", "trial"]), pd.DataFrame(), ())
    assert better_choice(nothing).verdict == Ruling.needs_full_grid
    assert costs_accuracy(nothing).verdict == Ruling.needs_full_grid


def two_batches(small: Mapping[int, float], large: Mapping[int, float]) -> Results:
    rows = [row for seed in SEEDS for size, errors in ((32, small), (128, large)) for row in run_of("batch", errors, size, seed)]
    return Results(pd.DataFrame(), pd.DataFrame(rows), pd.DataFrame(), ())


LARGE = {128: 3.0} | {b: error for b, error in BATCH.items() if b < 32}


@pytest.mark.parametrize("small, large, verdict", [
    (BATCH, LARGE, Ruling.conditional),
    (dict.fromkeys(BATCH, 3.0), dict.fromkeys(LARGE, 3.0), Ruling.refuted),
    (dict.fromkeys(BATCH, 9.0) | {32: 3.0}, dict.fromkeys(LARGE, 9.0) | {128: 3.0}, Ruling.confirmed),
    (BATCH, LARGE | {16: 9.0}, Ruling.needs_full_grid),
    (BATCH, {128: 3.0, 8: 3.5}, Ruling.needs_full_grid),
])  # fmt: skip
def test_rule_of_b4(small: Mapping[int, float], large: Mapping[int, float], verdict: Ruling) -> None:
    assert costs_accuracy(two_batches(small, large)).verdict == verdict


def test_b4_takes_four_seeds() -> None:
    few = two_batches(BATCH, LARGE)
    rows = few.measurements
    assert costs_accuracy(dataclasses.replace(few, measurements=rows[rows["seed"] < 4])).verdict == Ruling.conditional
    assert costs_accuracy(dataclasses.replace(few, measurements=rows[rows["seed"] < 3])).verdict == Ruling.needs_full_grid


def test_costs_are_paired_with_the_full_batch_of_the_same_trial() -> None:
    rows = trained(two_batches(BATCH, LARGE))
    table = against_full(rows, 1.0)
    row = table[(table["effective_batch"] == 128) & (table["b"] == 4)].iloc[0]
    pairs = [run_of("batch", LARGE, 128, seed) for seed in SEEDS]
    error = {(seed, one["micro_batch"]): 100 * (1 - one["held_out_accuracy"]) for seed in SEEDS for one in pairs[seed][:-1]}
    differences = np.array([error[seed, 4] - error[seed, 128] for seed in SEEDS])
    test = stats.ttest_rel([error[seed, 4] for seed in SEEDS], [error[seed, 128] for seed in SEEDS])
    interval = test.confidence_interval()
    assert (row["n"], row["accumulation_steps"]) == (6, 32)
    assert row["mean"] == pytest.approx(differences.mean()) and row["p"] == pytest.approx(test.pvalue)
    assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
    assert row["f"] > 1e3 and (table["p_holm"] >= table["p"]).all(), "the permuted full batch moves the loss by 1e-6"
    assert len(table) == 8 and len(error_cells(rows)) == 10


def test_gains_are_paired_by_seed() -> None:
    gains = between_norms(fixed_batch(trained(results()))).set_index("b")
    assert gains.loc[2, "gain"] == pytest.approx(26, abs=0.5) and gains.loc[32, "gain"] == pytest.approx(-1, abs=0.5)
    assert gains.loc[2, "low"] < gains.loc[2, "gain"] < gains.loc[2, "high"] and set(gains["n"]) == {6}
    only = trained(results())
    assert between_norms(only[only["norm"] == "batch"]).empty


def test_trials_of_one_n_are_those_whose_batch_grows() -> None:
    growing = [
        row for seed in SEEDS for size, b in ((16, 2), (64, 8)) for row in run_of("batch", {size: 3.0, b: 4.0}, size, seed)
    ]
    rows = pd.concat([trained(results()), trained(Results(pd.DataFrame(), pd.DataFrame(growing), pd.DataFrame(), ()))])
    rows = rows.reset_index(drop=True)
    assert set(growing_batch(rows)["effective_batch"]) == {16, 64} and set(growing_batch(rows)["arm"]) == {"accumulated"}
    assert set(fixed_batch(rows)["effective_batch"]) == {32}


@pytest.mark.parametrize("values, p", [([0.0, 0.0], 1.0), ([1.0, 1.0], 0.0), ([1.0], math.nan)])
def test_a_t_test_without_spread(values: list[float], p: float) -> None:
    assert t_test(values) == pytest.approx(p, nan_ok=True)


def test_both_tables_beside_wu_and_hes_on_the_page(tmp_path: Path) -> None:
    """Real trials: one B cut in two ways, and one N with a B that grows."""
    mlp = WorkloadConfig(model=Model.mlp)
    config = TrialConfig(experiment="groupnorm", study=Study.convergence, workload=mlp, steps=2)
    cuts = [(16, (2, 8)), (8, (4,)), (16, (4,))]
    for (size, steps), norm, seed in itertools.product(cuts, (Norm.batch, Norm.group), (0, 1)):
        own = dataclasses.replace(config, effective_batch=size, accumulation_steps=steps, norm=norm, seed=seed)
        with Store(tmp_path / "results").open_trial("groupnorm", identity(own), to_dict(own)) as writer:
            writer.finish(studies.run(own, lambda step, rows: None))
    page = report.write(tmp_path / "results", tmp_path / "out").read_text()
    assert "At fixed B: only the normaliser changes" in page and "As they did it: B grows with b" in page
    assert {path.stem for path in (tmp_path / "out" / "figures").iterdir()} >= {
        "groupnorm-fixed-batch",
        "groupnorm-growing-batch",
    }


def test_the_shape_in_words() -> None:
    gains = between_norms(fixed_batch(trained(results())))
    words = _shape("mlp", gains)
    assert "at b = 32 to" in words and "steepest from 4 to 2 (" in words
    moved = between_norms(fixed_batch(trained(results(batch=BATCH | {4: 29.0}))))
    assert "steepest from 8 to 4 (" in _shape("mlp", moved)
