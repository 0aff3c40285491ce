from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from accumulation_harness.analysis import load, report
from accumulation_harness.analysis.question import ClaimResult
from accumulation_harness.config import (
    Data,
    Model,
    OptimizerConfig,
    OptimizerName,
    Precision,
    TrialConfig,
    WorkloadConfig,
    to_dict,
)
from accumulation_harness.config.identity import identity
from accumulation_harness.experiments.order_of_operations.answers import CLAIMS, _at_rest
from accumulation_harness.measure import studies
from accumulation_harness.results.store import Store

Row = dict[str, object]
EMPTY = pd.DataFrame({"experiment": []})
FAULTS = {"A7": "gradients_cleared_in_window", "A8": "step_every_micro_batch", "A11": "weight_decay_per_micro_batch",
          "A12": "schedule_per_micro_batch"}  # fmt: skip


def decide(name: str, arms: list[Row] | None = None, measurements: list[Row] | None = None) -> ClaimResult:
    (one,) = [claim for claim in CLAIMS if claim.id == name]
    rows = pd.DataFrame(measurements) if measurements else EMPTY
    return one.decide(
        load.Results(pd.DataFrame(arms) if arms else EMPTY.assign(arm="", changes=False, clipped_share=0.0), rows, EMPTY, ())
    )


def arm(name: str, verdict: str = "equivalent", trial: str = "a", **changes: object) -> Row:
    wrong = verdict == "different"
    usual: Row = {"arm": name, "trial": trial, "verdict": verdict, "cause": name if wrong else "",
                  "changes": name != "accumulated", "algebra_error": 0.1 if wrong else 1e-16,
                  "trajectory_error": 0.2 if wrong else 1e-16, "clipped_share": 0.0}  # fmt: skip
    return usual | changes


@pytest.mark.parametrize("name", FAULTS)
def test_once_per_window(name: str) -> None:
    right, wrong, unseen = arm("accumulated"), arm(FAULTS[name], "different"), arm(FAULTS[name])
    verdicts = [str(decide(name, rows).verdict) for rows in ([right, wrong], [right, wrong, unseen], [right, unseen])]
    assert verdicts == ["conditional" if name == "A12" else "confirmed", "conditional", "refuted"]
    assert str(decide(name, [right]).verdict) == "needs the full grid"
    assert str(decide(name, [arm("accumulated", "different"), wrong]).verdict) == "needs the full grid"
    assert str(decide(name, [right, unseen | {"changes": False}]).verdict) == "needs the full grid", "at rest"


RIGHT = [arm("accumulated"), arm("accumulated", trial="b", clipped_share=1.0)]
INSIDE = [arm("clip_per_micro_batch", "different"), arm("clip_per_micro_batch", "different", "b")]
SCALED = arm("clip_before_unscale", "different", "b")


@pytest.mark.parametrize(
    ("arms", "verdict"),
    [
        ([*RIGHT, *INSIDE, *[SCALED] * 20], "confirmed"),
        ([*RIGHT, *INSIDE, SCALED], "needs the full grid"),  # two arms are not all
        ([*RIGHT, INSIDE[0], INSIDE[1] | {"trajectory_error": 1e-7}, SCALED], "conditional"),  # different, and hardly
        ([*RIGHT, INSIDE[0], INSIDE[1] | {"trajectory_error": 1e-7}, *[SCALED | {"trajectory_error": 1e-7}] * 20], "refuted"),
        ([*RIGHT, INSIDE[0], arm("clip_per_micro_batch", trial="b"), SCALED], "conditional"),
        ([*RIGHT, arm("clip_per_micro_batch"), arm("clip_before_unscale", trial="b")], "refuted"),
        ([*RIGHT, *INSIDE], "needs the full grid"),  # no loss scaler
        ([RIGHT[0], INSIDE[0], SCALED], "needs the full grid"),  # clipping never active
    ],
)
def test_clipping_afterwards(arms: list[Row], verdict: str) -> None:
    assert str(decide("A13", arms).verdict) == verdict


def threshold(name: str, kind: str, factor: float, error: float, nth: float) -> Row:
    return {"study": "clipping_threshold", "arm": name, "threshold": kind, "accumulation_steps": 4, "factor": factor,
            "error": error, "error_of_nth": nth}  # fmt: skip


AVERAGED = [threshold("averaged", "clipped", 1.0, 0.0, 0.75), threshold("averaged", "clipped", 4.0, 1.0, 0.5),
            threshold("averaged", "not_clipped", 1.0, 0.0, 0.75)]  # fmt: skip
SUMMED = [threshold("summed", "clipped", 4.0, 3.0, 0.0), threshold("summed", "not_clipped", 4.0, 3.0, 0.0)]
SUMMED_SAME = [threshold("summed", "clipped", 1.0, 0.0, 0.75), threshold("summed", "not_clipped", 1.0, 0.5, 0.6)]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        ([*AVERAGED, *SUMMED, *SUMMED_SAME], "conditional"),
        ([AVERAGED[0] | {"error": 0.1}, *AVERAGED[1:], *SUMMED, *SUMMED_SAME], "confirmed"),
        ([*AVERAGED, *SUMMED, SUMMED_SAME[0], SUMMED_SAME[1] | {"error": 0.0}], "refuted"),
        ([], "needs the full grid"),
    ],
)
def test_the_threshold(rows: list[Row], verdict: str) -> None:
    assert str(decide("A14", measurements=rows).verdict) == verdict


def resumed(boundary: bool, inside: bool, gradients: bool, replayed: bool) -> list[Row]:
    same = {"at_boundary": boundary, "in_window": inside, "in_window_with_gradients": gradients, "in_window_replayed": replayed}
    return [{"study": "resumption", "arm": name, "identical": own, "distance": 0.0 if own else 0.1} for name, own in same.items()]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (resumed(True, False, True, True), "conditional"),
        (resumed(True, False, False, True), "confirmed"),
        (resumed(True, True, True, True), "refuted"),
        (resumed(False, False, True, True), "refuted"),
        (resumed(True, False, True, True)[:2], "needs the full grid"),
    ],
)
def test_checkpoints(rows: list[Row], verdict: str) -> None:
    assert str(decide("A15", measurements=rows).verdict) == verdict


def test_real_studies_and_the_page(tmp_path: Path) -> None:
    for study in ("convergence", "clipping_threshold", "resumption"):
        config = TrialConfig(
            experiment="order_of_operations", study=study, effective_batch=48, accumulation_steps=(4,), steps=4,
            workload=WorkloadConfig(data=Data.digits, model=Model.mlp), optimizer=OptimizerConfig(name=OptimizerName.adam),
            precision=Precision.float32, faults=("gradients_cleared_in_window",) if study == "convergence" else (),
        )  # fmt: skip
        with Store(tmp_path / "results").open_trial(config.experiment, identity(config), to_dict(config)) as writer:

            def keep(step: int, rows: list[studies.Row], writer=writer) -> None:  # type: ignore[no-untyped-def]
                for row in rows:
                    writer.add(row)

            writer.finish(studies.run(config, keep))
    own = load.read(tmp_path / "results")
    verdicts = {claim.id: str(claim.decide(own).verdict) for claim in CLAIMS}
    assert (verdicts["A14"], verdicts["A15"], verdicts["A7"]) == ("conditional", "conditional", "needs the full grid")
    report.write(tmp_path / "results", tmp_path / "out")
    page = (tmp_path / "out" / "pages/order_of_operations.html").read_text()
    assert "Which of these you would have seen in the loss" in page and "begun again" in page


def test_arms_that_change_nothing_are_at_rest() -> None:
    losses = {"accumulated": [1.0, 0.5], "full": [1.0, 0.5], "clip_per_micro_batch": [1.0, 0.5000001], "step_every": [1.0, 2.0]}
    rows = [(arm, step, loss) for arm, own in losses.items() for step, loss in enumerate(own)]
    steps = pd.DataFrame(rows, columns=["arm", "step", "loss"]).assign(trial="a")
    assert set(steps[_at_rest(steps)]["arm"]) == {"clip_per_micro_batch"}
