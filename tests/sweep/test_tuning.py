"""A sweep that chooses its learning rates first, against the same sweep run in full."""

import dataclasses

import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.config import HarnessConfig, OptimizerConfig, TrackingConfig, TrackingMode
from accumulation_harness.config.questions import studies
from accumulation_harness.experiments.batch_order import answers as batch_order
from accumulation_harness.experiments.contrastive import sections as contrastive
from accumulation_harness.experiments.convergence import trainings as convergence
from accumulation_harness.results.store import Store
from accumulation_harness.sweep import experiment, tuning
from tests.slow import few
from tests.sweep.rated_trials import rated_trial

RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
JUDGING, TUNING = (0, 1, 2), (100, 101)
LOOKED_AT = {  # what the page makes of the trials
    "learning_curves": lambda results: convergence.judged(convergence.trainings(results)),
    "batch_order": batch_order.judged,
    "retrieval": lambda results: contrastive.decided(results.study("retrieval")),
}


def configs(results, study, seeds=(*JUDGING, *TUNING)):
    """Judging seeds first, as a careless grid has them."""
    return [
        HarnessConfig(
            study=study, results=results, seed=seed, optimizer=OptimizerConfig(lr=lr), accumulation_steps=(4,), workers=2,
            tracking=TrackingConfig(mode=TrackingMode.disabled),
        )
        for seed in seeds for lr in RATES
    ]  # fmt: skip


def finished(results):
    """Seed and rate of every trial."""
    trials = load.read(results).measurements
    return set(zip(trials["seed"], trials["lr"], strict=True))


@pytest.mark.parametrize("study", few(["learning_curves"], LOOKED_AT))
def test_the_page_sees_what_it_would_see_of_all_trials(study, tmp_path):
    outcome = experiment.run_many(configs(tmp_path / "tuned", study), rated_trial)
    for config in configs(tmp_path / "whole", study):
        rated_trial(config)
    seen, expected = (LOOKED_AT[study](load.read(tmp_path / name)) for name in ("tuned", "whole"))
    order = ["arm", "seed"]
    expected = expected.drop(columns=["trial", "group"], errors="ignore").sort_values(order, ignore_index=True)
    assert len(expected), "a page without rows would agree with anything"
    pd.testing.assert_frame_equal(seen.sort_values(order, ignore_index=True)[list(expected)], expected)
    trained, every = (len(load.read(tmp_path / name).measurements) for name in ("tuned", "whole"))
    assert outcome.failures == () and trained < every * 3 / 4
    assert {name for name, study in studies().items() if study.loss} == set(LOOKED_AT)


def test_the_same_command_resumes_and_says_how_many_trials_it_spared(tmp_path, capsys):
    every = configs(tmp_path, "learning_curves")
    first = experiment.run_many(every, rated_trial)
    chosen = {0.1, 0.4}
    assert finished(tmp_path) == {(s, lr) for s in TUNING for lr in RATES} | {(s, lr) for s in JUDGING for lr in chosen}
    assert "6 trials judge" in capsys.readouterr().err
    again = experiment.run_many(every, rated_trial)
    assert (again.done, again.skipped) == (0, first.done)


def test_an_arm_is_judged_at_its_own_rate_alone_and_what_is_stored_is_not_trained_again(tmp_path):
    every = configs(tmp_path, "learning_curves")
    whole = next(config for config in every if (config.seed, config.optimizer.lr) == (1, 0.4))
    rated_trial(whole)
    experiment.run_many(every, rated_trial)
    measured = load.read(tmp_path).measurements
    trained = {(seed, lr): set(own["arm"]) for (seed, lr), own in measured[measured["seed"] < 100].groupby(["seed", "lr"])}
    of_full, of_small = {"full", "accumulated", "permuted"}, {"small_batch"}
    assert trained == {(s, lr): arms for s in JUDGING for lr, arms in ((0.1, of_full), (0.4, of_small))} | {
        (1, 0.4): of_full | of_small
    }


def test_an_arm_of_two_grids_that_differ_in_other_methods_is_judged_once(tmp_path, capsys):
    early, late = (
        [dataclasses.replace(config, methods=(method,)) for config in configs(tmp_path, "retrieval")]
        for method in ("dual_bank@8", "dual_bank@8+5")
    )
    experiment.run_many([*early, *late], rated_trial)
    assert "15 trials judge" in capsys.readouterr().err, "three arms of both grids and one of each, on three seeds"
    measured = load.read(tmp_path).measurements
    judged = measured[measured["seed"] < 100]
    assert set(judged["arm"]) >= {"full", "small", "dual_bank@8", "dual_bank@8+5"}
    assert not judged.duplicated(["arm", "accumulation_steps", "seed"]).any()


def test_every_rate_is_judged_where_a_tuning_trial_did_not_finish(tmp_path):
    cells = experiment._distinct(configs(tmp_path, "batch_order"))
    for cell in cells:
        if cell.config.seed in TUNING:
            rated_trial(cell.config)
    [group] = tuning.split(cells)[1]
    arms = [(cell.config.optimizer.lr, cell.config.trained_arm) for cell in group.worth_judging()]
    assert sorted(arms) == sorted(
        3 * [(0.1, "large-4"), (0.1, "small_then_large-4"), (0.2, "large_then_small-4"), (0.4, "small-4")]
    )
    lost = next(cell for cell in cells if cell.config.seed == 101)
    Store(tmp_path).root.joinpath(lost.config.experiment, lost.trial, "trial.json").unlink()
    assert group.worth_judging() == group.judging
    assert len(group.judging) == len(RATES) * len(JUDGING)
