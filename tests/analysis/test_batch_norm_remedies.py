"""The table of remedies over b, on rows made by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from accumulation_harness.analysis.caveats import corrected
from accumulation_harness.analysis.load import Results
from accumulation_harness.experiments.batchnorm.tables import gone_on, remedied
from accumulation_harness.experiments.batchnorm.which_remedy import _gone_on_table

FULL = 97.0
LOST = {"accumulated": {2: 25.0, 16: 0.0}, "corrected_momentum": {2: 24.0, 16: 0.0}, "two_pass_statistics": {2: 0.0, 16: 0.0}}
GROUP = {2: 1.0, 16: 1.5}
AGAIN = 5.0  # points that recalibration restores
SEEDS = (0, 1, 2)
SHARED = {"experiment": "batchnorm", "model": "mlp", "effective_batch": 32, "steps": 141, "lr": 0.025, "trial": "t"}


def trained_row(study: str, norm: str, arm: str, b: int, seed: int, lost: float) -> dict[str, Any]:
    accuracy = (FULL + seed - lost) / 100  # seeds differ by a point: only pairs have a narrow interval
    return SHARED | {"study": study, "norm": norm, "arm": arm, "micro_batch": b, "accumulation_steps": 32 // b, "seed": seed,
                     "held_out_accuracy": accuracy, "recalibrated_held_out_accuracy": accuracy + AGAIN / 100}  # fmt: skip


def results(**changed: Any) -> Results:
    rows = [trained_row("remedies", "batch", "full", 32, seed, 0.0) for seed in SEEDS]
    rows += [
        trained_row("remedies", "batch", arm, b, seed, lost)
        for arm, over_b in LOST.items() for b, lost in over_b.items() for seed in SEEDS
    ]  # fmt: skip
    rows += [trained_row("convergence", "group", "accumulated", b, seed, lost) | changed
             for b, lost in GROUP.items() for seed in SEEDS]  # fmt: skip
    rows.append(trained_row("convergence", "batch", "accumulated", 2, 0, 50.0))  # of another section
    rows += [{**SHARED, "study": "batch_statistics", "norm": "batch", "arm": arm, "forwards": count}
             for arm, count in (("accumulated", 1.0), ("two_pass_statistics", 5.0))]  # fmt: skip
    return Results(pd.DataFrame(), pd.DataFrame(rows), pd.DataFrame(), ())


def test_losses_are_paired_by_seed_with_the_large_batch() -> None:
    rows = remedied(results())
    lost = rows.groupby(["arm", "b"])["lost"].agg(["mean", "std", "count"])
    wanted = {(arm, b): value for arm, own in LOST.items() for b, value in own.items()}
    wanted |= {("group_norm", b): value for b, value in GROUP.items()}
    wanted |= {("recalibrated", b): value - AGAIN for b, value in LOST["accumulated"].items()}
    assert lost["mean"].to_dict() == pytest.approx(wanted)
    assert lost["std"].to_numpy() == pytest.approx(0) and set(lost["count"]) == {3}


@pytest.mark.parametrize("change", [{"steps": 48}, {"lr": 0.1}, {"effective_batch": 128}, {"model": "conv"}, {"norm": "layer"}])
def test_group_norm_of_another_training_is_no_pair(change: dict[str, Any]) -> None:
    assert "group_norm" not in set(remedied(results(**change))["arm"])


@pytest.mark.parametrize("momentum, num, value", [(0.1, 2, 0.0513), (0.1, 16, 0.0066), (0.1, 1, 0.1)])
def test_corrected_momenta_make_a_window_forget_as_a_step(momentum: float, num: int, value: float) -> None:
    assert corrected(momentum, num) == pytest.approx(value, rel=0.01)
    assert 1 - (1 - corrected(momentum, num)) ** num == pytest.approx(momentum)


def test_training_that_goes_on_is_paired_with_the_full_batch_that_went_on() -> None:
    rows = [trained_row("fine_tuning", "batch", "full", 32, seed, 0.0) for seed in SEEDS]
    rows += [
        trained_row("fine_tuning", "batch", arm, b, seed, lost)
        for arm, b, lost in (("trained", 32, 0.5), ("frozen_full_batch", 32, 1.5), ("frozen_statistics", 2, 1.5),
                             ("accumulated", 2, 30.0), ("accumulated", 16, -0.5), ("frozen_statistics", 16, 1.5))
        for seed in SEEDS
    ]  # fmt: skip
    given = Results(pd.DataFrame(), pd.DataFrame([*results().measurements.to_dict("records"), *rows]), pd.DataFrame(), ())
    own = gone_on(given)
    lost = own.groupby(["arm", "b"])["lost"].mean()
    assert (lost["accumulated", 2], lost["accumulated", 16]) == (pytest.approx(30), pytest.approx(-0.5))
    table = _gone_on_table("mlp", 32, own)
    assert table.head == ("training that goes on", "b = 2", "b = 16")
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["accumulation, frozen statistics of the trained model"] == ("96.5; lost 1.5 (1.5 to 1.5; n = 3)",) * 2
    assert cells["the trained model itself"][0].startswith("97.5; lost 0.5")
    assert "frozen_full_batch" not in set(remedied(given)["arm"])
