"""Training that goes on from a trained model, beside the loop everyone writes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from accumulation_harness.config import Norm, OptimizerConfig, Precision, TrialConfig
from accumulation_harness.measure import studies
from accumulation_harness.measure.lock_step import Setting
from accumulation_harness.recipes.determinism import choose_device
from accumulation_harness.recipes.micro_batch import windows

CONFIG = TrialConfig(
    study="fine_tuning", norm=Norm.batch, precision=Precision.float64, effective_batch=24, accumulation_steps=(3, 6), steps=5,
    optimizer=OptimizerConfig(lr=0.05), seed=4,
)  # fmt: skip
SAME = 1e-9  # relative, after ten float64 steps
LOSS = "held_out_loss"


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], studies.Row]:
    found = studies.run(CONFIG, lambda step, rows: None)["measurements"]
    return {(row["arm"], row["accumulation_steps"]): row for row in found}


def by_hand(num: int, *, is_frozen: bool, goes_on: bool = True) -> float:
    """Held-out loss: trained whole, then again over `num` micro-batches, in evaluation mode where statistics are frozen."""
    setting = Setting(CONFIG, choose_device(CONFIG.device))
    model, data = setting.initial.double(), setting.exact
    stream = list(itertools.islice(
        windows(data.num_samples, CONFIG.effective_batch, CONFIG.seed, CONFIG.data.last_window), CONFIG.steps
    ))  # fmt: skip
    for parts, mode in [(1, True), (num, not is_frozen)] if goes_on else [(1, True)]:
        model.train(mode)  # this model has no dropout
        optimizer = torch.optim.SGD(model.parameters(), lr=CONFIG.optimizer.lr)
        for ids in stream:
            optimizer.zero_grad()
            for part in ids.chunk(parts):
                batch = data.batch(part)
                (F.cross_entropy(model(batch.inputs), batch.targets) / parts).backward()
            optimizer.step()
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(data.held_out.inputs), data.held_out.targets))


@pytest.mark.parametrize("arm, num, is_frozen", [
    ("full", 1, False), ("accumulated", 3, False), ("accumulated", 6, False),
    ("frozen_full_batch", 1, True), ("frozen_statistics", 3, True), ("frozen_statistics", 6, True),
])  # fmt: skip
def test_each_arm_goes_on_as_by_hand(rows: dict[tuple[str, int], studies.Row], arm: str, num: int, is_frozen: bool) -> None:
    assert rows[arm, num][LOSS] == pytest.approx(by_hand(num, is_frozen=is_frozen), rel=SAME)


def test_frozen_statistics_make_accumulation_the_full_batch_and_moving_ones_do_not(
    rows: dict[tuple[str, int], studies.Row],
) -> None:
    assert rows["trained", 1][LOSS] == pytest.approx(by_hand(1, is_frozen=False, goes_on=False), rel=SAME)
    frozen = rows["frozen_full_batch", 1][LOSS]
    moving = rows["full", 1][LOSS]
    for num in CONFIG.accumulation_steps:
        assert rows["frozen_statistics", num][LOSS] == pytest.approx(frozen, rel=SAME)
        assert rows["accumulated", num][LOSS] != pytest.approx(moving, rel=1e-4)
    assert len({frozen, moving, rows["trained", 1][LOSS]}) == 3
