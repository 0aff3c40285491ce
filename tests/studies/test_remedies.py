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
from accumulation_harness.recipes.remedies import REMEDIES

CONFIG = TrialConfig(
    study="remedies", norm=Norm.batch, precision=Precision.float64, effective_batch=24, accumulation_steps=(6,), steps=5,
    optimizer=OptimizerConfig(lr=0.05), seed=4,
)  # fmt: skip
SAME = 1e-9  # relative, after five float64 steps


def run(config: TrialConfig) -> dict[str, studies.Row]:
    return {row["arm"]: row for row in studies.run(config, lambda step, rows: None)["measurements"]}


@pytest.fixture(scope="module")
def arms() -> dict[str, studies.Row]:
    return run(CONFIG)


def by_hand(num: int) -> tuple[float, float]:
    """Held-out loss of the loop everyone writes over `num` micro-batches: with its buffers, and with the training set's."""
    setting = Setting(CONFIG, choose_device(CONFIG.device))
    model, data = setting.initial.double(), setting.exact
    optimizer = torch.optim.SGD(model.parameters(), lr=CONFIG.optimizer.lr)
    stream = windows(data.num_samples, CONFIG.effective_batch, CONFIG.seed, CONFIG.data.last_window)
    for ids in itertools.islice(stream, CONFIG.steps):
        optimizer.zero_grad()
        for part in ids.chunk(num):
            batch = data.batch(part)
            (F.cross_entropy(model(batch.inputs), batch.targets) / num).backward()
        optimizer.step()

    def held_out() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model.eval()(data.held_out.inputs), data.held_out.targets))

    kept = held_out()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # the plain average, of one batch
    with torch.no_grad():
        model.train()(data.batch(torch.arange(data.num_samples)).inputs)
    return kept, held_out()


@pytest.mark.parametrize("arm, num", [("full", 1), ("accumulated", 6)])
def test_both_evaluations_are_those_of_the_loop_everyone_writes(arms: dict[str, studies.Row], arm: str, num: int) -> None:
    kept, again = by_hand(num)
    assert arms[arm]["held_out_loss"] == pytest.approx(kept, rel=SAME)
    assert arms[arm]["recalibrated_held_out_loss"] == pytest.approx(again, rel=SAME)
    assert abs(kept / again - 1) > 0.01, "after five steps the running statistics still lag"


def test_every_remedy_is_an_arm(arms: dict[str, studies.Row]) -> None:
    assert set(arms) == {"full", "accumulated", "permuted", *REMEDIES}
    assert {arms[name]["micro_batch"] for name in REMEDIES} == {4}
    full, plain = arms["full"], arms["accumulated"]
    both = ("held_out_loss", "recalibrated_held_out_loss")
    assert [arms["two_pass_statistics"][name] for name in both] == pytest.approx([full[name] for name in both], rel=SAME)
    assert [arms["ghost_full_batch"][name] for name in both] == pytest.approx([plain[name] for name in both], rel=SAME)
    for name in ("corrected_momentum", "window_statistics"):
        assert arms[name]["recalibrated_held_out_loss"] == pytest.approx(plain["recalibrated_held_out_loss"], rel=SAME)
        assert abs(arms[name]["held_out_loss"] / plain["held_out_loss"] - 1) > 0.01
    assert abs(plain["held_out_loss"] / full["held_out_loss"] - 1) > 1e-3
