from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.config import ConfigError, TrialConfig, to_dict
from accumulation_harness.config.identity import identity
from accumulation_harness.results import tracking
from accumulation_harness.results.judged_arm import OUTCOMES, VERDICT_COLUMNS
from accumulation_harness.results.record import read_trial, write_record
from accumulation_harness.results.store import Store
from tests.results.wandb_stand_in import API_KEY, stand_in


def test_one_row_per_trial_and_arm(results: Path, grid: list[str]) -> None:
    arms = load.from_store(results)
    assert len(arms) == 3 * len(grid)
    assert list(arms.columns[: len(VERDICT_COLUMNS)]) == list(VERDICT_COLUMNS)
    assert arms["full_held_out_loss"].eq(0.5).all()
    assert arms.equals(load.from_store(results, "equivalence"))
    assert load.from_store(results, "another").empty


def test_group_joins_trials_that_differ_only_in_seed(results: Path, grid: list[str]) -> None:
    arms = load.from_store(results)
    groups = arms.groupby("group")
    assert (groups[["norm", "optimizer", "precision"]].nunique() == 1).all(axis=None)
    assert len(groups) == 6
    assert groups["seed"].nunique().max() == 3


def test_group_is_of_the_settings_whatever_their_order_and_kind_of_number() -> None:
    one = load.group({"lr": 1, "nested": {"a": [0, True], "b": None}, "seed": 1})
    assert one == load.group({"nested": {"b": None, "a": (0.0, True)}, "seed": 2, "lr": 1.0})
    assert one != load.group({"lr": 1, "nested": {"a": [0, 1], "b": None}, "seed": 1}), "a truth value is no number"


def test_trials_without_result_are_named(results: Path, make_trial) -> None:
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


def test_a_trial_without_verdicts_is_damaged_and_not_fatal(results: Path) -> None:
    with Store(results).open_trial("equivalence", "foreign", {}) as writer:
        writer.finish({"arms": [{"arm": "accumulated"}], "environment": {}, "seconds": {}})
    found = load.read(results)
    assert found.arms.empty
    assert [(one.trial, one.state) for one in found.missing] == [("foreign", "damaged")]


def test_a_column_that_is_missing_is_named(results: Path, make_trial) -> None:
    good, other = make_trial(seed=0), make_trial(seed=1)
    folder = Store(results).folder("equivalence", other)
    record = read_trial(folder).record
    del record["arms"][1]["cause"]
    write_record(folder, record)
    found = load.read(results)
    assert set(found.arms["trial"]) == {good}
    assert [(one.trial, one.state, one.detail) for one in found.missing] == [(other, "damaged", "KeyError: 'cause'")]


def test_step_rows_of_chosen_trials_and_damage(results: Path, grid: list[str]) -> None:
    rows, missing = load.steps(results, "equivalence", grid[:2])
    assert set(rows["trial"]) == set(grid[:2])
    assert not missing
    Store(results).folder("equivalence", grid[0]).joinpath("steps.parquet").write_bytes(b"no")
    rows, missing = load.steps(results, "equivalence", grid[:2])
    assert set(rows["trial"]) == {grid[1]}
    assert [one.trial for one in missing] == [grid[0]]


def test_columns_keep_gaps() -> None:
    columns = load.Columns()
    columns.extend([{"b": 1, "a": "x"}, {"b": 2, "c": 0.5}])
    frame = columns.frame(("a",), ["b"])
    assert list(frame) == ["a", "b", "c"]
    assert frame["b"].tolist() == [1, 2]
    assert math.isnan(frame["c"][0])


def test_analysis_imports_no_torch() -> None:
    code = "import sys, accumulation_harness.analysis.report, accumulation_harness.experiments.equivalence.answers"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


EVIDENCE = {  # column of the arms -> where it lies in a stored arm's evidence
    **{name: ("algebra", name) for name in ("gradient_error", "state_error", "trajectory_error", "loss_error", "clipping_active",
                                            "clipped_share", "short_windows", "unequal_terms")},
    "algebra_steps": ("algebra", "steps"), "algebra_floor": ("algebra", "floor"),
    **{name: ("rounding", name) for name in ("full_error", "arm_error", "rank_p", "permutations", "skipped", "scale", "cosine")},
    "rounding_high": ("rounding", "high"), "rounding_windows": ("rounding", "windows"),
    "rounding_ratio": ("rounding", "ratio"), "residual": ("rounding", "residual"),
    "final_distance": ("trajectory", "final_distance"), "trajectory_ratio": ("trajectory", "ratio"),
}  # fmt: skip


def test_the_evidence_of_real_trials_is_the_stored_one(mirrored: Path) -> None:
    arms = load.from_store(mirrored).set_index(["trial", "arm", "accumulation_steps"])
    stored = [arm for trial in Store(mirrored).trials() for arm in read_trial(trial.folder, evidence=True).arms]
    assert len(stored) == len(arms) == 2 * 5
    for arm in stored:
        row, evidence = arms.loc[arm["trial"], arm["arm"], arm["accumulation_steps"]], arm["evidence"]
        for column, (part, name) in EVIDENCE.items():
            np.testing.assert_equal(row[column], evidence[part][name], column)
        assert row["algebra_error"] == max(row["gradient_error"], row["state_error"])
        assert row["counters"].split(", ") == (sorted(evidence["counters"]) or [""])
        assert row["counters_ok"] == (not evidence["counters"])
        np.testing.assert_equal(row["oracle_error"], evidence["signature"]["explanations"].get("batch_statistics", math.nan))
        np.testing.assert_equal(row["jump_step"], arm["evidence"]["trajectory"]["jump_step"] or math.nan)
    assert arms["oracle_error"].max() < 1e-12 < arms["algebra_error"].max(), "some arm differs and is explained"


def test_wandb_gives_the_arms_and_the_steps_that_the_store_gives(
    mirrored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trial after `wandb sync`, read through W&B's own API, as far as a stand-in of its server goes."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), "WANDB_API_KEY": API_KEY, "WANDB_ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(name, value)
    [log] = mirrored.glob("single/*batch*/wandb/*/*.wandb")
    trial = log.parents[2].name
    with stand_in() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert tracking.upload([log]) == 0
        code = "import sys; from accumulation_harness.analysis import load; [f('tester/project', 'single').to_pickle(sys.argv[1]"
        code += " + f.__name__) for f in (load.from_wandb, load.steps_from_wandb)]"
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, f"{tmp_path}/"], check=True)
        [sent] = [variables for name, variables in server.operations if name == "UpsertBucket" and variables.get("jobType")]
        config = {name: item["value"] for name, item in json.loads(sent["config"]).items()}
        history, whole = server.history, server.summary
    arms, steps = (pd.read_pickle(tmp_path / name) for name in ("from_wandb", "steps_from_wandb"))
    stored = load.from_store(mirrored)
    stored = stored[stored["trial"] == trial].reset_index(drop=True)
    columns = [*VERDICT_COLUMNS, *OUTCOMES, *(f"full_{name}" for name in OUTCOMES), "model"]
    pd.testing.assert_frame_equal(arms[columns], stored[columns], check_exact=True)
    kept, _ = load.steps(mirrored, "single", [trial])
    order = ["trial", "step", "arm", "accumulation_steps", "replicate"]
    frames = [frame.sort_values(order, ignore_index=True)[list(kept)] for frame in (steps, kept)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)
    assert set(steps["arm"]) >= {"full", "accumulated", "null", "ulp", "scale@1e-3"}
    assert (sent["jobType"], config["workload_name"], config["optimizer_name"]) == ("trial", "digits", "sgd")
    assert whole["verdict"] == "different" and whole["cause"] == "batch_statistics"
    for row in history:
        assert row["optimizer_step"] == row["_step"]
        assert all(row[f"gradient_difference_norm/accumulated-{n}"] > 0 for n in (2, 8)), "at every step"


@pytest.mark.slow
def test_logging_a_run_per_arm_changes_no_bit_of_a_training(tmp_path: Path) -> None:
    tiny = ["steps=3", "algebra_steps=2", "accumulation_steps=[2,8]", "precision=float16", "tracking.per_arm=true"]
    command = [sys.executable, "-m", "accumulation_harness", "run", *tiny, f"results={tmp_path}"]
    subprocess.run(command, capture_output=True, check=True, cwd=Path(__file__).parents[2])
    bare = [*command[:-1], "tracking=disabled", f"results={tmp_path}/bare"]
    subprocess.run(bare, capture_output=True, check=True, cwd=Path(__file__).parents[2])
    both = [*Store(tmp_path).trials("single"), *Store(tmp_path / "bare").trials("single")]
    assert len(both) == 2 and len({trial.record["steps_sha256"] for trial in both}) == 1
    assert len(list(tmp_path.rglob("*.wandb"))) == 5, "the trial and its four arms"


@pytest.mark.parametrize("source", ["results", "/nowhere/results", "a/b/c"])
def test_a_folder_is_no_project(source: str) -> None:
    with pytest.raises(ConfigError, match=f"project={source}: expected a project on a W&B server"):
        load.from_wandb(source)


def test_whole_numbers_stay_whole_beside_a_study_without_them(results: Path) -> None:
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
