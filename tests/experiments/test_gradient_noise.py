"""The rules on results made by hand, and the page of a real tiny run."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import load, report
from accumulation_harness.analysis.question import Ruling
from accumulation_harness.config import Norm, TrialConfig, WorkloadConfig, to_dict
from accumulation_harness.config.identity import identity
from accumulation_harness.experiments.gradient_noise.answers import EXPERIMENT, falls_as_one_over_b, growth
from accumulation_harness.measure import studies
from accumulation_harness.results.store import Store

D = 1500
SIZES = (4, 16, 64, 256, 1024)


def results(rows: list[dict[str, Any]]) -> load.Results:
    empty = pd.DataFrame(columns=["experiment", "trial"])
    return load.Results(empty, pd.DataFrame(rows), empty, ())


def training(trial: str, growth: float, *, slope: float = -1.0, draws: int = 200) -> list[dict[str, Any]]:
    """Four points along a training whose noise scale grows from 50; variances S B^slope, with the factor where it belongs."""
    rows: list[dict[str, Any]] = []
    for step in (0, 80, 160, 240):
        trace = 2.0
        about = {"trial": trial, "step": step, "quantity": "noise_scale", "optimizer": "sgd", "norm": f"of {trial}"}
        scale = 50 * growth if step > 120 else 50
        rows.append({**about, "noise_trace": trace, "gradient_square": trace / scale, "windows": 200})
        for replacement in (True, False):
            for size in SIZES:
                factor = 1.0 if replacement else (D - size) / (D - 1)
                drawn = {"batch": size, "draws": draws, "replacement": replacement, "expected": trace / size * factor}
                rows.append({**about, "quantity": "variance", **drawn, "variance": trace * size**slope * factor})
    return rows


@pytest.mark.parametrize(
    ("trials", "verdict"),
    [
        ([training(name, 2, slope=slope) for name, slope in zip("abc", (-1.01, -0.99, -1.0), strict=True)], Ruling.confirmed),
        ([training(name, 2, slope=slope) for name, slope in zip("abc", (-0.51, -0.49, -0.5), strict=True)], Ruling.refuted),
        ([training(name, 2, slope=slope) for name, slope in zip("abc", (-1.2, -0.8, -1.0), strict=True)], Ruling.undecided),
        ([training("a", 2)], Ruling.needs_full_grid),
        ([training(name, 2, draws=50) for name in "abc"], Ruling.needs_full_grid),
    ],
)
def test_c6(trials: list[list[dict[str, Any]]], verdict: Ruling) -> None:
    found = falls_as_one_over_b(results(list(itertools.chain(*trials))))
    assert found.verdict == verdict
    if verdict == Ruling.confirmed:
        assert found.measured == pytest.approx(-1)
        plain = np.polyfit(np.log(SIZES), [math.log((D - size) / (D - 1) / size) for size in SIZES], 1)[0]
        assert plain < -1.1 and f"{plain:.3f}" in found.explanation, "without the factor it falls faster"


def test_the_growth_of_the_noise_scale_is_told_by_setting() -> None:
    told = growth(pd.DataFrame([row for k, factor in enumerate((3, 1.5)) for row in training(f"t{k}", factor)]))
    assert f"Last quarter over first: {math.sqrt(3 * 1.5):.2g} (" in told
    assert "sgd, norm=of t1: 1.5 to 1.5 (n = 1); sgd, norm=of t0: 3 to 3 (n = 1)" in told


def test_the_page_of_a_real_run(tmp_path: Path) -> None:
    for seed in (0, 1):
        config = TrialConfig(
            experiment="gradient_noise", study="gradient_noise", workload=WorkloadConfig(width=2), norm=Norm.group,
            effective_batch=40, accumulation_steps=(4,), steps=6, probe_every=3, permutations=30, seed=seed,
        )  # fmt: skip
        with Store(tmp_path / "results").open_trial(config.experiment, identity(config), to_dict(config)) as writer:
            record = studies.run(config, lambda step, rows, writer=writer: [writer.add(row) for row in rows])  # type: ignore[misc]
            writer.finish(record)
    page = (report.write(tmp_path / "results", tmp_path / "out").parent / "pages/gradient_noise.html").read_text()
    assert EXPERIMENT.title in page and "The noise scale along the training" in page
    assert "It takes 200 draws" in page, "30 draws do not decide"
    assert (tmp_path / "out" / "figures" / "gradient_noise-noise-scale.svg").exists()
