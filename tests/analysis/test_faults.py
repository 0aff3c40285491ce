import csv
import io
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from accumulation_harness.analysis import faults, load, report, sections, tables
from accumulation_harness.experiments.equivalence import answers as equivalence
from accumulation_harness.results.store import Store

FAULT = "mean_of_means"
SAME = [1.0] * 12
LATE = [1.0] * 5 + [1.2] * 7  # visible from step 5 on


def different(cause):
    return {"verdict": "different", "cause": cause, "explained": "unexplained" not in cause}


def both(changes, fault=FAULT):
    """The same for both N."""
    return {(fault, n): changes for n in (2, 4)}


# normalisation, verdict, causes of an arm with mean_of_means -> what is made of it
JUDGED = """
none  different    mean_of_means                         detected named
none  equivalent   -                                     missed
none  degraded     -                                     detected
none  inconclusive -                                     nobody_has_found_anything
none  different    loss_not_divided                      detected confidently_wrong
none  different    unexplained                           detected
none  different    loss_not_divided+unexplained          a_guess_but_with_doubt detected
none  different    mean_of_means+loss_not_divided        one_too_many detected named confidently_wrong
none  different    loss_not_divided_mean_of_means        names_are_compared_whole detected confidently_wrong
none  different    batch_statistics                      without_BatchNorm_a_wrong_name detected confidently_wrong
batch different    batch_statistics                      what_the_correct_arm_shows_as_well
batch equivalent   -                                     missed
batch different    batch_statistics+mean_of_means        detected named
batch different    mean_of_means+batch_statistics        detected named
batch different    mean_of_means                         detected named
batch different    batch_statistics+loss_not_divided     detected confidently_wrong
batch different    unexplained                           detected
"""


@pytest.mark.parametrize("row", JUDGED.strip().splitlines())
def test_detection_and_naming(results, make_trial, row):
    norm, verdict, cause, *said = row.split()
    explained = verdict == "different" and "unexplained" not in cause
    judgement = {"verdict": verdict, "cause": cause.strip("-"), "explained": explained}
    make_trial(norm=norm, faults={FAULT: True}, change=both(judgement))
    rows = faults.judged(load.from_store(results))
    assert len(rows) == 2
    for what in ("detected", "named", "confidently_wrong"):
        assert rows[what].tolist() == [what in said] * 2, what


def test_the_correct_arm_is_that_of_the_same_n(results, make_trial):
    """A cause that the correct arm of another N has is none of this one's."""
    odd = {("accumulated", 4): different("batch_statistics")}
    make_trial(faults={FAULT: True}, change={**both(different("batch_statistics")), **odd})
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


def test_a_trial_with_lost_steps_keeps_its_verdicts_and_is_in_no_number_of_curves(results, tmp_path, make_trial):
    """Without its loss curve a fault would look as if it never showed."""
    trials = [
        make_trial(
            experiment="fault_matrix", seed=seed, faults={FAULT: True}, losses={FAULT: LATE}, change=both(different(FAULT))
        )
        for seed in (0, 1)
    ]
    Store(results).folder("fault_matrix", trials[0]).joinpath("steps.parquet").unlink()
    rows = write_report(results, tmp_path)
    assert [row["steps_until_visible_in_loss"] for row in rows] == ["unknown", "unknown", "5", "5"]
    assert trials[0] in (tmp_path / "provenance.html").read_text()
    page = (tmp_path / "pages/fault_matrix.html").read_text()
    assert "1 fault in 2 trials" in page and "A section that is missing" not in page
    assert "The loss curve shows 2 of 2" in page


def test_faults_do_not_enter_the_question_of_equivalence(results, make_trial):
    """Also where somebody put fault arms into its trials."""
    for norm in ("none", "batch"):
        make_trial(norm=norm, faults={FAULT: True}, losses={FAULT: LATE}, change=both(different("unexplained")))
    arms = load.from_store(results)
    right = arms[~arms["fault"]].reset_index(drop=True)
    for table in (tables.matrix, tables.vacuity):
        pd.testing.assert_frame_equal(table(arms), table(right))
    pd.testing.assert_frame_equal(tables.convergence(arms, 0.02), tables.convergence(right, 0.02))
    own = equivalence.answer(arms)
    assert own.holds and "2 of 2 accumulated arms without BatchNorm are equivalent" in own.sentences[0]
    [text] = sections.unjudged(SimpleNamespace(arms=arms)).blocks
    assert "all 6 arms have a verdict" in text.text
