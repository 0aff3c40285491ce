"""Real trials with their offline W&B runs: what is read of them, and that they reach a server with one command, once."""

import json
import math
import os
import shutil

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import load, sync
from accumulation_harness.results import tracking
from accumulation_harness.results.judged_arm import OUTCOMES, VERDICT_COLUMNS
from accumulation_harness.results.record import read_trial
from accumulation_harness.results.store import Store
from tests.commands import harness, python
from tests.results.wandb_stand_in import API_KEY, stand_in
from tests.stored_trials import store_trial
from tests.trials import stored, trial

TINY = "norm=batch faults=[scale@1e-3] steps=3 algebra_steps=2 probe_every=2 accumulation_steps=[2,8]"


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """A real trial, of 5 judged arms (two of them with a planted error)."""
    results = tmp_path_factory.mktemp("mirrored")
    harness("run", *TINY.split(), f"results={results}")
    return results


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """The same trial, without its runs."""
    results = tmp_path_factory.mktemp("judged")
    stored(results, trial(TINY))
    return results


def test_the_evidence_of_real_trials_is_the_stored_one(judged):
    arms = load.from_store(judged).set_index(["trial", "arm", "accumulation_steps"])
    kept = [arm for one in Store(judged).trials() for arm in read_trial(one.folder, evidence=True).arms]
    assert len(kept) == len(arms) == 5
    for arm in kept:
        row, evidence = arms.loc[arm["trial"], arm["arm"], arm["accumulation_steps"]], arm["evidence"]
        parts = [(part, name) for part in ("algebra", "rounding", "trajectory") for name in evidence[part]]
        columns = {f"{part}_{name}" if f"{part}_{name}" in row else name: evidence[part][name] for part, name in parts}
        assert len(columns.keys() & row.keys()) > 20
        for column in columns.keys() & row.keys():
            np.testing.assert_equal(row[column], math.nan if columns[column] is None else columns[column], column)
        assert row["algebra_error"] == max(row["gradient_error"], row["state_error"])
        assert row["counters"].split(", ") == (sorted(evidence["counters"]) or [""])
        assert row["counters_ok"] == (not evidence["counters"])
        np.testing.assert_equal(row["oracle_error"], evidence["signature"]["explanations"].get("batch_statistics", math.nan))
    assert arms["oracle_error"].max() < 1e-12 < arms["algebra_error"].max(), "some arm differs and is explained"


@pytest.mark.slow
def test_wandb_gives_the_arms_and_the_steps_that_the_store_gives(mirrored, tmp_path, monkeypatch):
    """One trial after `wandb sync`, read through W&B's own API, as far as a stand-in of its server goes."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), "WANDB_API_KEY": API_KEY, "WANDB_ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(name, value)
    shutil.copytree(mirrored, tmp_path / "sent")
    [log] = (tmp_path / "sent").glob("single/*batch*/wandb/*/*.wandb")
    name = log.parents[2].name
    with stand_in() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert tracking.upload([log]) == 0
        code = "import sys; from accumulation_harness.analysis import load; [f('tester/project', 'single').to_pickle(sys.argv[1]"
        code += " + f.__name__) for f in (load.from_wandb, load.steps_from_wandb)]"
        python("-W", "ignore", "-c", code, f"{tmp_path}/")
        [sent] = [variables for name, variables in server.operations if name == "UpsertBucket" and variables.get("jobType")]
        config = {name: item["value"] for name, item in json.loads(sent["config"]).items()}
        history, whole = server.history, server.summary
    arms, steps = (pd.read_pickle(tmp_path / name) for name in ("from_wandb", "steps_from_wandb"))
    known = load.from_store(mirrored)
    known = known[known["trial"] == name].reset_index(drop=True)
    columns = [*VERDICT_COLUMNS, *OUTCOMES, *(f"full_{name}" for name in OUTCOMES), "model"]
    pd.testing.assert_frame_equal(arms[columns], known[columns], check_exact=True)
    kept, _ = load.steps(mirrored, "single", [name])
    order = ["trial", "step", "arm", "accumulation_steps", "replicate"]
    frames = [frame.sort_values(order, ignore_index=True)[list(kept)] for frame in (steps, kept)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)
    assert set(steps["arm"]) >= {"full", "accumulated", "null", "ulp", "scale@1e-3"}
    assert (sent["jobType"], config["workload_name"], config["optimizer_name"]) == ("trial", "digits", "sgd")
    assert whole["verdict"] == "different" and whole["cause"] == "batch_statistics"
    for row in history:
        assert row["optimizer_step"] == row["_step"]
        assert all(row[f"gradient_difference_norm/accumulated-{n}"] > 0 for n in (2, 8)), "at every step"


def test_nothing_to_upload(tmp_path, capsys):
    assert sync.main(["--results", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == (
        f"--results={tmp_path}/none: expected a folder with offline runs of W&B, as `accumulation-harness run "
        f"results={tmp_path}/none` makes one\n"
    )


def test_the_table_and_the_figures_of_a_sweep(judged, tmp_path):
    arms = load.from_store(judged)
    table = sync.table(arms)
    assert set(table) == set(VERDICT_COLUMNS) and len(table) == len(arms)
    assert list(table)[:2] == ["workload", "norm"], "what one groups by comes first"
    made = dict(sync.pictures(judged, load.read(judged).of("single")))
    assert {*made} >= {"algebra", "gradient-error", "loss-float32", "distance"}, "as the page has them"
    path = sync.to_png(made["algebra"], tmp_path / "a.png")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_runs_are_uploaded_once(mirrored, tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(mirrored, results)
    other = store_trial(results, experiment="single")  # without a run
    for name in [name for name in os.environ if name.startswith("WANDB") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    with stand_in() as server:
        for name, value in {"HOME": str(tmp_path), "WANDB_BASE_URL": server.url, "WANDB_API_KEY": API_KEY}.items():
            monkeypatch.setenv(name, value)

        def run(code=0):
            done = harness("sync", "--results", results, "--project", "mine", code=code)
            assert ("No run of the sweep single" in done.stderr) == bool(code), done.stderr
            return [line.partition(" and ")[0] for line in done.stdout.splitlines() if "uploaded" in line or "sweep" in line]

        table = "“single”: a run of the sweep, with a table of 8 verdicts"
        assert run() == [table, "2 runs uploaded, 0 were there already."]
        sent = [variables for name, variables in server.operations if name == "UpsertBucket" and variables.get("jobType")]
        assert [made["jobType"] for made in sent].count("trial") == 1 and {made["project"] for made in sent} == {"mine"}
        [shown] = [row["verdicts"] for row in server.history if "verdicts" in row]
        assert (shown["nrows"], shown["ncols"]) == (8, len(VERDICT_COLUMNS))
        assert run() == ["0 runs uploaded, 2 were there already."]
        record = results / "single" / other / "trial.json"
        record.write_bytes(record.read_bytes()[:-9])
        assert run(code=1) == ["0 runs uploaded, 2 were there already."], "no run of what is left"
        shutil.rmtree(record.parent)  # other verdicts: another run of the sweep
        assert run() == [table.replace("8", "5"), "1 runs uploaded, 2 were there already."]
        assert sync.SWEEP in [variables.get("jobType") for name, variables in server.operations if name == "UpsertBucket"]
