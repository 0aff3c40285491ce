"""b and N apart: planted effects of each alone, of both, of neither, against a least-squares fit of the 2 x 2 design."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis.content import Section, Table
from accumulation_harness.analysis.load import Results
from accumulation_harness.analysis.question import Material
from accumulation_harness.experiments.batchnorm import answers as batchnorm
from accumulation_harness.experiments.batchnorm.factors import b_and_n, factors

SEEDS = range(8)
B = 32


def results(of_b: float, of_n: float, both: float = 0.0, noise: float = 0.2, sizes: tuple[int, ...] = (2, 16)) -> Results:
    """Trainings whose accuracy falls by `of_b` points with b alone, by `of_n` with N alone, and by `both` more with both."""
    rng, rows = np.random.default_rng(3), []
    corners = {"full": (0, 0), "ghost_full_batch": (1, 0), "two_pass_statistics": (0, 1), "accumulated": (1, 1)}
    for seed in SEEDS:
        for arm, (b, n) in corners.items():
            for size in sizes if arm != "full" else (B,):
                lost = of_b * b + of_n * n + both * b * n + noise * rng.standard_normal()
                rows.append(row(arm, size, seed, (97 + seed - lost) / 100))
    return Results(pd.DataFrame(), pd.DataFrame(rows), pd.DataFrame(), ())


def row(arm: str, size: int, seed: int, accuracy: float) -> dict[str, Any]:
    shared = {"experiment": "batchnorm", "model": "mlp", "effective_batch": B, "steps": 141, "lr": 0.025, "trial": "t"}
    return shared | {"study": "remedies", "norm": "batch", "arm": arm, "micro_batch": size, "accumulation_steps": B // size,
                     "seed": seed, "held_out_accuracy": accuracy, "recalibrated_held_out_accuracy": accuracy}  # fmt: skip


@pytest.mark.parametrize(
    "of_b, of_n, both", [(5.0, 0.0, 0.0), (0.0, 5.0, 0.0), (3.0, 2.0, 0.0), (2.0, 0.0, 4.0), (0.0, 0.0, 0.0)]
)
def test_planted_effects_are_those_of_a_least_squares_fit(of_b: float, of_n: float, both: float) -> None:
    cells = factors(results(of_b, of_n, both))
    assert cells["b"].tolist() == [2, 16] and set(cells["n"]) == {len(SEEDS)}
    assert cells["b_mean"].to_numpy() == pytest.approx(of_b + both / 2, abs=0.2)
    assert cells["n_mean"].to_numpy() == pytest.approx(of_n + both / 2, abs=0.2)
    own = results(of_b, of_n, both).measurements
    own = own[(own["micro_batch"] == 2) | (own["arm"] == "full")]
    design = np.array([[1, *([1, 0] if arm == "ghost_full_batch" else [0, 1] if arm == "two_pass_statistics" else
                             [1, 1] if arm == "accumulated" else [0, 0])] for arm in own["arm"]])  # fmt: skip
    centred = design[:, 1:] - design[:, 1:].mean(axis=0)
    fitted = np.linalg.lstsq(np.c_[np.ones(len(own)), centred], -100 * own["held_out_accuracy"], rcond=None)[0]
    assert cells[["b_mean", "n_mean"]].iloc[0].to_numpy() == pytest.approx(fitted[1:])


def test_a_seed_without_all_corners_is_left_out_and_the_page_has_a_row_for_each_b() -> None:
    whole, nothing = results(5.0, 0.0), pd.DataFrame()

    def page(rows: pd.DataFrame) -> Section | None:
        made = Results(nothing, rows, nothing, ())
        return b_and_n(
            Material(experiment=batchnorm.EXPERIMENT, results=made, steps=nothing, read_steps=lambda _: nothing, l4=nothing)
        )

    rows = whole.measurements
    less = rows[~((rows["arm"] == "two_pass_statistics") & (rows["seed"] == 0))]
    assert set(factors(Results(pd.DataFrame(), less, pd.DataFrame(), ()))["n"]) == {len(SEEDS) - 1}
    without = rows[rows["arm"] != "two_pass_statistics"]
    assert page(without) is None
    section = page(rows)
    assert section is not None
    [table] = [block for block in section.blocks if isinstance(block, Table)]
    assert [line[:5] for line in table.rows] == [("perceptron", "32", "2", "16", "8"), ("perceptron", "32", "16", "2", "8")]
