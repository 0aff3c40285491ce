import pytest

from accumulation_harness.analysis import load, report
from accumulation_harness.config import ConfigError
from accumulation_harness.experiments.replicas import replicas
from accumulation_harness.experiments.replicas.answers import EXPERIMENT
from tests.trials import setting_of, stored, trial


def config(split, nums):
    sizes = "experiment=replicas study=replicas workload.model=mlp device=cpu effective_batch=26 steps=2"
    return trial(sizes, f"split={split} accumulation_steps={nums}")


@pytest.mark.slow
def test_every_way_on_two_processes_and_the_page(tmp_path):
    for split, nums in (("even", "[1,13]"), ("ragged", "[1,3]")):
        rows = stored(tmp_path / "results", config(split, nums))["measurements"]
        assert len(rows) == 20 and {row["unequal_terms"] for row in rows} == {split == "ragged"}
        assert [row["cause"] for row in rows] == [row["expected"] for row in rows]
        for row in rows:
            assert row["reductions"] == (
                0 if row["arm"] == "never_synchronised" else row["gradient_bytes"] / 8 / row["num_parameters"]
            )
            if row["expected"] == "":
                assert row["gradient_error"] <= 1e-12 and row["trajectory_error"] <= 1e-12 and row["windows"] == 2
                assert row["rank_distance"] == row["ends_apart"] == 0
            else:
                assert row["gradient_error"] > 1e-3 and row["trajectory_error"] > 1e-3 and row["windows"] == 1
    own = load.read(tmp_path / "results")
    assert {claim.id: str(claim.decide(own).verdict) for claim in EXPERIMENT.claims} == {"D9": "conditional", "D10": "confirmed"}
    report.write(tmp_path / "results", tmp_path / "out")
    page = (tmp_path / "out" / "pages/replicas.html").read_text()
    assert "Ways to synchronise two ranks" in page and "Over the wire" in page


def test_too_many_micro_batches_for_the_smallest_share():
    setting = setting_of(config("ragged", "[13]"))
    with pytest.raises(ConfigError, match="accumulation_steps=13: expected at most the 9 samples"):
        replicas.measurements(setting, lambda step, rows: None)
