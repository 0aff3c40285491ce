"""`python -m harness.bench`: its command line, what it writes, and that both sides of a ratio do the same work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.bench import overhead, script_sweep, startup
from harness.bench.__main__ import main
from harness.bench.cost import Spread
from harness.bench.measurement import Measurement, table
from harness.config import ConfigError, Model, Norm, TrialConfig, WorkloadConfig

TRIAL = TrialConfig(
    workload=WorkloadConfig(model=Model.mlp),
    norm=Norm.layer,
    effective_batch=12,
    accumulation_steps=(3,),
    steps=4,
    algebra_steps=2,
)


def measured(part: str, name: str, value: float) -> Measurement:
    return Measurement(part=part, name=name, unit="x", wall=Spread.of([value]))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["overheads"], "expected parts of overhead"),
        (["scaling", "workload=text"], "expected parts of overhead, profile, by_hand with settings"),
        (["overhead", "workload=foo"], "workload=foo: expected one of"),
        (["profile", "optimizer.lr=-1"], "optimizer.lr=-1.0: expected a positive number"),
        (["by_hand", "lr=3"], "lr=3: expected one of norm"),
    ],
)
def test_bad_input_is_told_in_a_line(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    try:
        code = main([*arguments, "--out", str(out)])
    except SystemExit as exit:
        code = int(str(exit.code))
    assert code == 2 and expected in capsys.readouterr().err and not out.exists()


def test_a_part_replaces_its_own_measures_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, value = tmp_path / "bench.json", 1.0

    def measurements() -> Iterator[Measurement]:
        yield measured("startup", "a", value)

    monkeypatch.setattr(startup, "measurements", measurements)
    out.write_text(json.dumps({"measures": [{"part": "startup", "name": "gone"}, {"part": "memory", "name": "kept"}]}))
    assert main(["startup", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [(row["part"], row["name"]) for row in written["measures"]] == [("memory", "kept"), ("startup", "a")]
    assert written["environment"]["cores"] >= 1


def test_the_table_says_what_was_missed() -> None:
    above = Measurement(part="p", name="above", unit="x", wall=Spread.of([1.0, 1.2, 1.3]), target=1.1)
    below = Measurement(part="p", name="below", unit="x", wall=Spread.of([1.2]), target=1.1, at_least=True)
    lines = table([above, below]).splitlines()
    assert "MISSED" in lines[1] and "1 to 1.3" in lines[1] and "≤ 1.1" in lines[1]
    assert "met" in lines[2] and "≥ 1.1" in lines[2]
    assert "MISSED?" in lines[1] and "met?" not in lines[2] and lines[3].startswith("?:")


def test_a_target_is_decided_outside_the_interval_of_the_median() -> None:
    """A single outlier on the target's other side leaves it decided, half of the rounds there do not."""
    one = Measurement(part="p", name="", unit="x", wall=Spread.of([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.5]), target=1.1)
    half = Measurement(part="p", name="", unit="x", wall=Spread.of([1.0, 1.01, 1.02, 1.03, 1.04, 1.2, 1.3, 1.5]), target=1.1)
    assert (one.met, one.decided) == (True, True) and (half.met, half.decided) == (True, False)
    assert one.wall.high > 1.1  # or else the extremes would have decided it
    assert "?" not in table([one]) and Measurement(part="p", name="", unit="s", wall=one.wall).decided is None


def test_the_ratio_compares_the_same_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sides are compared to the bit before they are timed; bare loops that train something else are refused."""
    found = {one.name: one for one in overhead.of_workload("mlp", TRIAL, rounds=1)}
    assert found["mlp: whole trial, with L0 and L1"].wall.median > found["mlp: training phase, probe_every=10"].wall.median > 0
    right = overhead.bare_arms
    monkeypatch.setattr(overhead, "bare_arms", lambda *given: {label: loss + 1e-6 for label, loss in right(*given).items()})
    with pytest.raises(AssertionError, match="bare loops and trial differ in"):
        next(overhead.of_workload("mlp", TRIAL, rounds=1))


def test_a_trial_that_is_not_ours_has_its_own_name() -> None:
    assert list(overhead.named([TRIAL])) == [TRIAL.workload.label]
    assert list(overhead.named([])) == list(overhead.NAMES)


def test_the_grid_by_hand_is_the_one_that_was_asked_for() -> None:
    assert script_sweep.cells(script_sweep.changed([])) == 48
    grid = script_sweep.changed(["norm=none,group", "steps=7", "seed=0,1,2"])
    assert (script_sweep.cells(grid), grid["steps"]) == (2 * 2 * 2 * 4 * 3, "7")
    with pytest.raises(ConfigError, match="lr"):
        script_sweep.changed(["lr=1"])


@pytest.mark.slow
def test_the_sweep_by_hand_and_ours_on_a_small_grid() -> None:
    small = ["norm=none", "optimizer=sgd", "precision=float32", "accumulation_steps=2,4", "steps=3"]
    *sides, ratio = script_sweep.measurements(1, small)
    assert len(sides) == 2 and all("2 cells x 3 steps" in one.name and one.wall.median > 0 for one in sides)
    assert ratio.target is None and ratio.wall.median == pytest.approx(sides[0].wall.median / sides[1].wall.median)
