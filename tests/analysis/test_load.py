import pytest

from accumulation_harness.analysis import load
from accumulation_harness.config import ConfigError, TrialConfig, to_dict
from accumulation_harness.config.identity import identity
from accumulation_harness.results.judged_arm import VERDICT_COLUMNS
from accumulation_harness.results.store import Store
from tests.commands import harness


def test_one_row_per_trial_and_arm(results, grid):
    arms = load.from_store(results)
    assert len(arms) == 3 * len(grid)
    assert list(arms.columns[: len(VERDICT_COLUMNS)]) == list(VERDICT_COLUMNS)
    assert arms["full_held_out_loss"].eq(0.5).all()
    assert arms.equals(load.from_store(results, "equivalence"))
    assert load.from_store(results, "another").empty
    groups = arms.groupby("group")
    assert (groups[["norm", "optimizer", "precision"]].nunique() == 1).all(axis=None) and len(groups) == 6


def test_group_is_of_the_settings_whatever_their_order_and_kind_of_number():
    one = load.group({"lr": 1, "nested": {"a": [0, True], "b": None}, "seed": 1})
    assert one == load.group({"nested": {"b": None, "a": (0.0, True)}, "seed": 2, "lr": 1.0})
    assert one != load.group({"lr": 1, "nested": {"a": [0, 1], "b": None}, "seed": 1}), "a truth value is no number"


def test_trials_without_result_are_named(results, make_trial):
    good, torn, changed = make_trial(seed=0), make_trial(seed=1), make_trial(seed=2)
    store = Store(results)
    (store.folder("equivalence", torn) / "trial.json").write_text("{")
    file = store.folder("equivalence", changed) / "trial.json"
    file.write_text(file.read_text().replace('"equivalent"', '"different"', 1))
    with pytest.raises(ZeroDivisionError), store.open_trial("equivalence", "raised", {}):
        raise ZeroDivisionError("of all things")
    store.open_trial("equivalence", "left", {}).close()
    with store.open_trial("equivalence", "now", {}):
        found = load.read(results)
    assert set(found.arms["trial"]) == {good}
    assert {one.trial: one.state for one in found.missing} == {
        torn: "damaged",
        changed: "damaged",
        "raised": "failed",
        "left": "unfinished",
        "now": "running",
    }
    assert any("of all things" in one.detail for one in found.missing)


@pytest.mark.slow
def test_logging_a_run_per_arm_changes_no_bit_of_a_training(tmp_path):
    tiny = ["steps=3", "algebra_steps=2", "accumulation_steps=[2,8]", "precision=float16", "tracking.per_arm=true"]
    harness("run", *tiny, f"results={tmp_path}")
    harness("run", *tiny, "tracking=disabled", f"results={tmp_path}/bare")
    both = [*Store(tmp_path).trials("single"), *Store(tmp_path / "bare").trials("single")]
    assert len(both) == 2 and len({trial.record["steps_sha256"] for trial in both}) == 1
    assert len(list(tmp_path.rglob("*.wandb"))) == 5, "the trial and its four arms"


@pytest.mark.parametrize("source", ["results", "/nowhere/results", "a/b/c"])
def test_a_folder_is_no_project(source):
    with pytest.raises(ConfigError, match=f"project={source}: expected a project on a W&B server"):
        load.from_wandb(source)


def test_whole_numbers_stay_whole_beside_a_study_without_them(results):
    """One store holds all studies: a column that one of them lacks is no reason for 8.0 micro-batches in another."""
    for study, rows in {
        "counted": [{"accumulation_steps": 8, "share": 1.0}, {"accumulation_steps": 2, "share": 2.0}],
        "without": [{"share": 0.5}],
        "gaps": [{"accumulation_steps": 4}, {"accumulation_steps": None}],
    }.items():
        config = TrialConfig(experiment=study)
        with Store(results).open_trial(study, identity(config), to_dict(config)) as writer:
            measurements = [{"study": study, **row} for row in rows]
            environment = {"python": "3.11.7", "device": "cpu", "packages": {}}
            writer.finish({"environment": environment, "seconds": {}, "arms": [], "faults": {}, "measurements": measurements})
    found = load.read(results)
    assert not found.missing
    counted = found.study("counted")
    assert [str(n) for n in counted["accumulation_steps"]] == ["8", "2"] and counted["share"].dtype == float
    assert found.of("counted").study("counted")["accumulation_steps"].dtype == int
    assert "accumulation_steps" not in found.study("without") and found.has("gaps") and not found.has("other")
    with pytest.raises(load.Unmeasured, match="other"):
        found.study("other")
    assert found.study("gaps")["accumulation_steps"].isna().sum() == 1
