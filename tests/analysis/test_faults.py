import csv
import io
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import faults, load, report, tables
from accumulation_harness.config import Precision
from accumulation_harness.judge import verdict
from accumulation_harness.judge.verdict import Algebra, Evidence, Rounding, Trajectory
from accumulation_harness.results.store import Store

FAULT = "mean_of_means"
SAME = [1.0] * 12
LATE = [1.0] * 5 + [1.2] * 7  # visible from step 5 on
BATCH = "batch_statistics"


def different(cause, **more):
    return {"verdict": "different", "cause": cause, "explained": "unexplained" not in cause, **more}


def both(changes, fault=FAULT):
    """The same for both N."""
    return {(fault, n): changes for n in (2, 4)}


@pytest.mark.parametrize(
    ("norm", "judgement", "detected", "named", "confidently_wrong"),
    [
        ("none", different(FAULT), True, True, False),
        ("none", {"verdict": "equivalent"}, False, False, False),  # missed
        ("none", {"verdict": "degraded"}, True, False, False),
        ("none", {"verdict": "inconclusive"}, False, False, False),  # nobody has found anything
        ("none", different("loss_not_divided"), True, False, True),  # a wrong name
        ("none", different("unexplained"), True, False, False),
        ("none", different("loss_not_divided+unexplained"), True, False, False),  # a guess, but with doubt
        ("none", different(f"{FAULT}+loss_not_divided"), True, True, True),  # one too many
        ("none", different(f"loss_not_divided_{FAULT}"), True, False, True),  # names are compared whole
        ("none", different(BATCH), True, False, True),  # without BatchNorm this is a wrong name
        ("batch", different(BATCH), False, False, False),  # what the correct arm shows as well
        ("batch", {"verdict": "equivalent", "cause": "", "explained": False}, False, False, False),
        ("batch", different(f"{BATCH}+{FAULT}"), True, True, False),
        ("batch", different(f"{FAULT}+{BATCH}"), True, True, False),
        ("batch", different(FAULT), True, True, False),
        ("batch", different(f"{BATCH}+loss_not_divided"), True, False, True),
        ("batch", different("unexplained"), True, False, False),
    ],
)
def test_detection_and_naming(results, make_trial, norm, judgement, detected, named, confidently_wrong):
    make_trial(norm=norm, faults={FAULT: True}, change=both(judgement))
    rows = faults.judged(load.from_store(results))
    assert len(rows) == 2
    assert rows["detected"].tolist() == [detected] * 2
    assert rows["named"].tolist() == [named] * 2
    assert rows["confidently_wrong"].tolist() == [confidently_wrong] * 2


def test_the_correct_arm_is_that_of_the_same_n(results, make_trial):
    """A cause that the correct arm of another N has is none of this one's."""
    odd = {("accumulated", 4): different(BATCH)}
    make_trial(faults={FAULT: True}, change={**both(different(BATCH)), **odd})
    rows = faults.judged(load.from_store(results)).set_index("accumulation_steps")
    assert rows["detected"].to_dict() == {2: True, 4: False}


def reference_first_visible(losses, correct):
    """Slow, in plain words."""
    for start in range(len(losses)):
        run = range(start, start + 3)
        if run[-1] < len(losses) and all(
            not math.isfinite(losses[t]) or abs(losses[t] - correct[t]) > correct[t] / 20 for t in run
        ):
            return start
    return math.inf


@pytest.mark.parametrize("seed", range(40))
def test_visibility_against_an_independent_computation(seed):
    rng = np.random.default_rng(seed)
    correct = rng.uniform(0.5, 2, 30).tolist()
    losses = [c * (1 + d) for c, d in zip(correct, rng.normal(0, 0.06, 30), strict=True)]
    if seed % 4 == 0:
        losses[rng.integers(30)] = math.nan
    assert faults.first_visible(losses, correct) == reference_first_visible(losses, correct)


def write_report(results, out):
    assert report.main(["--results", str(results), "--out", str(out)]) == 0
    return list(csv.DictReader(io.StringIO((out / "faults.csv").read_text())))


def test_faults_csv(results, tmp_path, make_trial):
    always = {("accumulated", n): {} for n in (2, 4)}
    make_trial(
        experiment="fault_matrix",
        split="ragged",
        faults={FAULT: True, "resume_in_window": True, "clip_before_unscale": False, "scale@1e-6": True},
        losses={FAULT: LATE, "resume_in_window": SAME, "clip_before_unscale": SAME, "scale@1e-6": SAME},
        change={**always, **both(different(FAULT))},
    )
    rows = write_report(results, tmp_path)
    assert (tmp_path / "faults.csv").read_text().splitlines()[0] == (
        "fault,optimizer,norm,precision,clipping,lengths,detected,cause_named,steps_until_visible_in_loss"
    )
    setting = {"optimizer": "adam", "norm": "none", "precision": "float32", "clipping": "off", "lengths": "ragged+remainder"}
    found = {"fault": FAULT, **setting, "detected": "True", "cause_named": "True", "steps_until_visible_in_loss": "5"}
    missed = {
        "fault": "resume_in_window",
        **setting,
        "detected": "False",
        "cause_named": "False",
        "steps_until_visible_in_loss": "",
    }
    assert rows == [found, found, missed, missed]  # two N; nothing at rest, no planted error
    arms = {row["arm"] for row in csv.DictReader(io.StringIO((tmp_path / "verdicts.csv").read_text()))}
    assert arms == {"accumulated", "permuted", FAULT, "resume_in_window", "clip_before_unscale", "scale@1e-6"}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_trial_with_lost_steps_keeps_its_verdicts_and_is_in_no_number_of_curves(results, tmp_path, make_trial, lost):
    """Without its loss curve a fault would look as if it never showed."""
    trials = [
        make_trial(
            experiment="fault_matrix", seed=seed, faults={FAULT: True}, losses={FAULT: LATE}, change=both(different(FAULT))
        )
        for seed in (0, 1)
    ]
    for name in trials[:lost]:
        Store(results).folder("fault_matrix", name).joinpath("steps.parquet").unlink()
    rows = write_report(results, tmp_path)
    assert [row["steps_until_visible_in_loss"] for row in rows] == ["unknown"] * 2 * lost + ["5"] * (4 - 2 * lost)
    assert trials[0] in (tmp_path / "provenance.html").read_text()
    page = (tmp_path / "pages/fault_matrix.html").read_text()
    assert "1 fault in 2 trials" in page and "A section that is missing" not in page
    assert ("The loss curve shows 2 of 2" in page) is (lost == 1)


def test_faults_do_not_enter_the_question_of_equivalence(results, tmp_path, make_trial):
    """Also where somebody put fault arms into its trials."""
    for norm in ("none", "batch"):
        make_trial(norm=norm, faults={FAULT: True}, losses={FAULT: LATE}, change=both(different("unexplained")))
    arms = load.from_store(results)
    right = arms[~arms["fault"]].reset_index(drop=True)
    for table in (tables.matrix, tables.vacuity):
        pd.testing.assert_frame_equal(table(arms), table(right))
    pd.testing.assert_frame_equal(tables.convergence(arms, 0.02), tables.convergence(right, 0.02))
    write_report(results, tmp_path)
    page = (tmp_path / "pages/equivalence.html").read_text()
    assert "The prediction held." in page
    assert "2 of 2 accumulated arms without BatchNorm are equivalent" in page
    assert "all 6 arms have a verdict" in page


ROUND = Rounding(
    ratio=1.0, low=0.9, high=1.1, full_error=1e-7, arm_error=1e-7, rank_p=0.5, permutations=99, scale=1.0, cosine=1.0,
    residual=0.0, weights=(), condition=1.0, skipped=0,
)  # fmt: skip
RIGHT = Algebra(
    gradient_error=1e-15, state_error=1e-15, trajectory_error=1e-15, loss_error=1e-16, steps=4, floor=1e-16, clipping_active=True,
    clipped_share=0.0, short_windows=1, unequal_terms=True,
)  # fmt: skip


@pytest.mark.parametrize("precision", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"high": 2.5}, {"scale": 1 + 1e-5}, {"rank_p": 0.01}, {"high": math.nan}, {"rank_p": 0.011, "scale": 1 + 9e-7}],
)
def test_rounding_as_the_verdict_has_it(precision, changes):
    rounding = replace(ROUND, **changes)
    evidence = Evidence(
        precision=Precision(precision), algebra=RIGHT, rounding=rounding,
        trajectory=Trajectory(ratio=1, jump_step=None, final_distance=0),
        counters={},
    )  # fmt: skip
    row = {"precision": precision, "rounding_ratio": rounding.ratio, "rounding_high": rounding.high} | {
        name: getattr(rounding, name) for name in ("full_error", "scale", "cosine", "rank_p")
    }
    assert faults.rounding_fails(pd.DataFrame([row])).tolist() == [
        bool(verdict.rounding_failures(evidence.precision, evidence.rounding))
    ]


@pytest.mark.parametrize("name", ["gradient_error", "state_error", "loss_error", "trajectory_error"])
@pytest.mark.parametrize("value", [1e-15, 1.1e-12, 1.1e-9, math.nan])
def test_algebra_as_the_verdict_has_it(name, value):
    algebra = replace(RIGHT, **{name: value})
    row = {key: getattr(algebra, key) for key in ("gradient_error", "state_error", "loss_error", "trajectory_error")}
    row |= {"precision": "float64", "counters": "", "rounding_ratio": 1.0, "rounding_high": 1.0, "rank_p": 1.0}
    checks = faults.by_check(pd.DataFrame([row | {"full_error": 1.0, "scale": 1.0, "cosine": 1.0}]))
    assert list(checks) == list(faults.CHECKS)
    assert int(checks.sum(axis=1).iloc[0]) == len(verdict.algebra_failures(algebra))


def test_reports_and_experiments_import_no_torch():
    module = "accumulation_harness.analysis.question"
    report = "accumulation_harness.analysis.report"
    code = f"import sys, {report}, {module} as question; question.registered(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
