from __future__ import annotations

import math
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import load
from accumulation_harness.config import ConfigError, TrialConfig, to_dict
from accumulation_harness.identity import identity
from accumulation_harness.results.judged_arm import OUTCOMES, VERDICT_COLUMNS
from accumulation_harness.results.record import read_trial, write_record
from accumulation_harness.results.store import Store
from accumulation_harness.results.tracking import TrackingWarning, read_offline


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


@pytest.mark.parametrize(("seconds", "total"), [(7.25, 7.25), ({"algebra": 1.0, "training": 2.0}, 3.0)])
def test_seconds_as_a_number_or_by_phase(results: Path, make_trial, seconds: object, total: float) -> None:
    make_trial(seconds=seconds)
    assert load.read(results).trials["seconds"].tolist() == [total]


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
        writer.finish({"arms": [{"arm": "accumulated"}], "environment": {}, "seconds": 1.0})
    found = load.read(results)
    assert found.arms.empty
    assert [(one.trial, one.state) for one in found.missing] == [("foreign", "damaged")]


@pytest.mark.parametrize(
    ("path", "renamed", "told"),
    [
        ("cause", None, "arm: missing cause"),
        ("cause", "why", "arm: missing cause and unknown why"),
        ("evidence", None, "arm: missing evidence"),
        ("evidence.algebra.floor", "ground", "evidence.algebra: missing floor and unknown ground"),
        ("evidence.rounding.zeros", "lost", "evidence.rounding: unknown lost"),
        ("evidence.rounding.high", None, "evidence.rounding: missing high"),
        ("evidence.trajectory.final_distance", None, "evidence.trajectory: missing final_distance"),
        ("evidence.counters", "counts", "evidence: missing counters"),
        ("evidence.signature.explanations", None, "evidence.signature: missing explanations"),
        ("outcome.held_out_loss", None, "outcome: missing held_out_loss"),
    ],
)
def test_a_field_that_is_missing_or_renamed_is_named(
    results: Path, make_trial, path: str, renamed: str | None, told: str
) -> None:
    good, other = make_trial(seed=0), make_trial(seed=1)
    folder = Store(results).folder("equivalence", other)
    record = {name: value for name, value in read_trial(folder).record.items() if name != "sha256"}
    *parts, name = path.split(".")
    place = record["arms"][1]
    for part in parts:
        place = place[part]
    value = place.pop(name)
    if renamed:
        place[renamed] = value
    write_record(folder, record)
    found = load.read(results)
    assert set(found.arms["trial"]) == {good}
    assert [(one.trial, one.state, one.detail) for one in found.missing] == [(other, "damaged", f"FieldError: {told}")]


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
    code = "import sys, analysis.report, experiments.equivalence; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_wandb_gives_the_arms_that_the_store_gives(mirrored: Path) -> None:
    stored, logged = load.from_store(mirrored), load.from_wandb(mirrored)
    columns = [*VERDICT_COLUMNS, *OUTCOMES, *(f"full_{name}" for name in OUTCOMES), "group", "model"]
    pd.testing.assert_frame_equal(logged[columns], stored[columns], check_exact=True)
    assert len(logged) == 2 * 5 and load.from_wandb(mirrored, "another").empty


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
    stored = [arm for trial in Store(mirrored).trials() for arm in trial.arms]
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


@pytest.mark.slow
def test_every_judged_arm_has_a_run_of_its_own(tmp_path: Path) -> None:
    """Its metrics are its trial's at every step, and what W&B groups by is flat; no reader takes it for a trial."""
    tiny = ["steps=3", "algebra_steps=2", "accumulation_steps=[2,8]", "precision=float16", "tracking.per_arm=true"]
    command = [sys.executable, "-m", "accumulation_harness", "run", *tiny, f"results={tmp_path}"]
    subprocess.run(command, capture_output=True, check=True, cwd=Path(__file__).parents[2])
    bare = [*command[:-1], "tracking=disabled", f"results={tmp_path}/bare"]
    subprocess.run(bare, capture_output=True, check=True, cwd=Path(__file__).parents[2])
    both = [*Store(tmp_path).trials("single"), *Store(tmp_path / "bare").trials("single")]
    assert len(both) == 2 and len({trial.record["steps_sha256"] for trial in both}) == 1, "logging changes no bit of a training"
    runs = [read_offline(log) for log in sorted(tmp_path.rglob("*.wandb"))]
    trials = {run.name: run for run in runs if run.job_type == "trial"}
    arms = [run for run in runs if run.job_type == "arm"]
    assert (len(trials), len(arms)) == (1, 4)
    assert len(load.from_wandb(tmp_path)) == 3, "the arms of the trial, once"
    for run in arms:
        trial, own = trials[run.config["trial"]], run.config
        label = f"{own['arm']}-{own['N']}"
        assert (run.name, run.group, own["b"]) == (f"{trial.name} {label}", "single", 64 / own["N"])
        for mine, whole in zip(run.rows, trial.rows, strict=True):
            assert {f"{name}/{label}": value for name, value in mine.items() if name not in ("step", "optimizer_step")} == {
                name: value for name, value in whole.items() if name.endswith(f"/{label}")
            }
            assert (
                mine["gradient_norm"] > 0
                and mine["learning_rate"] == 0.1
                and mine["loss_scale"] == 4096
                and mine["optimizer_step"] == mine["step"]
            )
            assert (mine["gradient_difference_norm"] > 0) == (own["arm"] != "full")
        if own["arm"] != "full":
            assert own["verdict"] == run.summary["verdict"] == trial.config[f"verdict/{label}"]
            assert trial.summary[f"algebra_error/{label}"] == run.summary["algebra_error"]


def test_what_wandb_groups_a_trial_by(mirrored: Path) -> None:
    for log in mirrored.rglob("*.wandb"):
        run = read_offline(log)
        about = [run.config[name] for name in ("workload_name", "optimizer_name", "precision")]
        assert (run.job_type, about) == ("trial", ["digits", "sgd", "float32"])
        assert run.config["environment"]["packages"]["torch"] == version("torch")
        different = run.config["norm"] == "batch"
        assert run.config["verdict"] == ("different" if different else "equivalent")
        assert run.config["cause"] == ("batch_statistics" if different else "")
        assert run.config["verdict/scale@1e-3-2"] != "equivalent"
        for row in run.rows:
            assert row["optimizer_step"] == row["step"]
            assert all(row[f"gradient_difference_norm/accumulated-{n}"] > 0 for n in (2, 8)), "at every step"


def test_wandb_gives_the_steps_that_the_store_gives(mirrored: Path) -> None:
    logged = load.steps_from_wandb(mirrored, "single")
    stored, _ = load.steps(mirrored, "single", sorted(set(logged["trial"])))
    order = ["trial", "step", "arm", "accumulation_steps", "replicate"]
    frames = [frame.sort_values(order, ignore_index=True)[list(load.STEP_COLUMNS)] for frame in (logged, stored)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)
    assert set(logged["arm"]) >= {"full", "accumulated", "null", "ulp", "scale@1e-3"}


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"precision": "float8"}, "precision=float8, expected one of float64, float32, float16, bfloat16"),
        ({"algebra_error": "1e-16"}, "algebra_error='1e-16', expected float"),
        ({"explained": 1}, "explained=1, expected bool"),
        ({"experiment": "another"}, "belongs to another/"),
    ],
)
def test_a_field_of_an_odd_kind_is_named(results: Path, make_trial, columns: dict[str, object], told: str) -> None:
    good, other = make_trial(), make_trial(seed=1, change={("accumulated", 2): columns})
    found = load.read(results)
    assert set(found.arms["trial"]) == {good}
    [missing] = found.missing
    assert (missing.trial, missing.state) == (other, "damaged")
    assert told in missing.detail


def test_logs_that_are_not_whole_are_left_out_by_name(tmp_path: Path) -> None:
    (tmp_path / "run.wandb").write_bytes(b"no log")
    with pytest.warns(TrackingWarning, match=r"left out: .*run\.wandb: not a W&B log"):
        assert load.from_wandb(tmp_path).empty


@pytest.mark.parametrize("source", ["results", "/nowhere/results", "a/b/c"])
def test_a_folder_that_is_not_there_is_no_project(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where one works there may well be `results`
    with pytest.raises(ConfigError, match=f"source={source}: expected a folder with offline runs, or a project"):
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
            writer.finish({"environment": environment, "seconds": 1.0, "arms": [], "faults": {}, "measurements": measurements})
    found = load.read(results)
    assert not found.missing
    counted = found.study("counted")
    assert [str(n) for n in counted["accumulation_steps"]] == ["8", "2"] and counted["share"].dtype == float
    assert found.of("counted").study("counted")["accumulation_steps"].dtype == int
    assert "accumulation_steps" not in found.study("without") and found.study("gaps")["accumulation_steps"].isna().sum() == 1
