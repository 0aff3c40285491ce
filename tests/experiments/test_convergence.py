"""The pages on convergence and on the balance loss: from rows made by hand, and from a tiny run."""

from __future__ import annotations

import pandas as pd
import pytest

from accumulation_harness.analysis import ledger
from accumulation_harness.analysis.content import Table
from accumulation_harness.analysis.question import ClaimResult, Material, Ruling
from accumulation_harness.experiments.balance_loss import answers as balance_loss
from accumulation_harness.experiments.convergence import answers as convergence
from accumulation_harness.experiments.convergence.trainings import trainings
from tests.analysis.test_convergence import rows
from tests.experiments.optimizer_rows import results


def verdicts(frame: pd.DataFrame) -> dict[str, str]:
    """The verdict column of the endings, by arm."""
    columns = {name: 0.0 for name in ("rate", "gap", "test_accuracy")}
    found = results(frame.assign(study="learning_curves", **columns).to_dict("records"))  # type: ignore[arg-type]
    material = Material(experiment=convergence.EXPERIMENT, results=found, steps=frame, read_steps=lambda _: frame, l4=frame)
    section = convergence.endings(material)
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    arm, verdict = table.head.index("arm"), table.head.index("verdict")
    return {row[arm]: row[verdict] for row in table.rows if row[verdict] != "-"}


def test_an_effect_is_judged_at_tuned_rates_inside_the_grid_and_with_enough_seeds() -> None:
    small = "small batch, N = 4"
    assert verdicts(rows(0.05))[small] == "worse" and verdicts(rows(-0.05))[small] == "better"
    assert set(verdicts(rows(0.0)).values()) == {"same"}
    assert set(verdicts(rows(0.05, best=0.4)).values()) == {"undecided"}
    assert set(verdicts(rows(0.05, seeds=4)).values()) == {"undecided"}


def test_a_training_that_is_stored_twice_is_one_and_a_shorter_one_is_another() -> None:
    about = {"study": "learning_curves", "rate": 0.1, "test_accuracy": 0.5, "gap": 0.0, "step_samples": 16}
    frame = rows(0.0).assign(**about)  # type: ignore[arg-type]
    for other in (frame, frame.assign(steps=100)):
        twice = pd.concat([frame, other.assign(trial=other["trial"] + "-again")], ignore_index=True)
        seen = trainings(results(twice.to_dict("records")))  # type: ignore[arg-type]
        assert seen["trial"].tolist() == frame["trial"].tolist()


OPEN = Ruling.needs_full_grid


def decided(
    frame: pd.DataFrame, *, wobble: float = 0.1, gap: float = 0.0, falling: float = 0.0
) -> tuple[ClaimResult, ClaimResult]:
    """C8 and C9. `wobble`: of the small batch's curve, otherwise 0.1; `gap`: more in the full batch; `falling`: at the end."""
    is_small = frame["arm"] == "small_batch"
    waves = [1 + 0.01 * ((7 * seed) % 5 - 2) for seed in frame["seed"]]  # chance, the other way in the two arms
    waves = [wobble / wave if small else 0.1 * wave for wave, small in zip(waves, is_small, strict=True)]
    fall = [1.0 if i < 46 else 1 - falling for i in range(51)]
    curves = {
        "curve_probe_loss": [[a * (1 + wave * (-1) ** i) for i, a in enumerate(c)]
                             for c, wave in zip(frame["curve_probe_loss"], waves, strict=True)],
        "curve_validation_loss": [[end * f for f in fall] for end in frame["validation_loss"]],
    }  # fmt: skip
    about = {"study": "learning_curves", "rate": 0.1, "test_accuracy": 0.5, "step_samples": 16, "gap": gap * ~is_small}
    found = results(frame.assign(**about, **curves).to_dict("records"))  # type: ignore[arg-type]
    by_id = ledger.findings(convergence.EXPERIMENT, found)
    return by_id["C8"], by_id["C9"]


def two_settings(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([one, other.assign(optimizer="adam", trial=other["trial"] + "-adam")], ignore_index=True)


@pytest.mark.parametrize(
    ("frame", "changes", "smoother", "better"),
    [
        (rows(0.05), {"wobble": 0.2}, Ruling.confirmed, Ruling.conditional),  # S4
        (rows(0.05), {}, Ruling.undecided, Ruling.conditional),  # better, and as smooth
        (rows(-0.05), {"wobble": 0.2, "gap": 0.02}, Ruling.refuted, Ruling.conditional),  # S0: worse, with a larger gap
        (rows(-0.05), {}, Ruling.refuted, Ruling.undecided),  # worse, with the same gap: neither article
        (rows(0.0), {"wobble": 0.2}, Ruling.refuted, Ruling.refuted),  # a gain is excluded, the same by TOST
        (rows(0.0), {"falling": 0.2}, Ruling.refuted, Ruling.undecided),  # undertrained
        (rows(0.0, noise=0.2), {"wobble": 0.2}, Ruling.undecided, Ruling.undecided),
        (two_settings(rows(0.05), rows(-0.05)), {"wobble": 0.2}, Ruling.conditional, Ruling.conditional),
        (rows(0.05, seeds=4), {}, OPEN, OPEN),
        (rows(0.05, best=0.4), {}, OPEN, OPEN),  # the best rate is at an end of the grid
    ],
)
def test_smoother_and_better(frame: pd.DataFrame, changes: dict[str, float], smoother: Ruling, better: Ruling) -> None:
    assert tuple(one.verdict for one in decided(frame, **changes)) == (smoother, better)


def test_a_condition_names_its_setting_and_numbers_are_those_that_were_planted() -> None:
    smoother, better = decided(two_settings(rows(0.05), rows(-0.05)), wobble=0.2, gap=0.02)
    assert smoother.condition == "under mnist1d (none), sgd, B = 64"
    assert better.condition == "S4 under mnist1d (none), sgd, B = 64 and S0 under mnist1d (none), adam, B = 64"
    assert smoother.n == 20 and smoother.measured == pytest.approx(0.05, abs=0.005)


def test_the_finding_on_the_balance_loss_follows_the_numbers() -> None:
    frame = pd.DataFrame([
        {"workload": task, "arm": arm, "accumulation_steps": num, "gradient_error": error, "identity_error": 1e-16}
        for task in ("digits", "mnist1d")
        for num in (2, 8)
        for arm, error in (("per_micro_batch", 0.02), ("buffered_counts", 0.1), ("two_passes", 1e-16))
    ])  # fmt: skip

    def said(**changes: float) -> str:
        own = frame.copy()
        for arm, error in changes.items():
            own.loc[own["arm"] == arm, "gradient_error"] = error
        return balance_loss.finding(own)

    assert "micro-batch: yes" in said() and "exact: yes" in said() and "seeds: 0 of 4 tasks and N" in said()
    assert "micro-batch: no" in said(per_micro_batch=1e-5) and "exact: no" in said(two_passes=1e-9)
    assert "seeds: 4 of 4 tasks and N" in said(buffered_counts=0.01)
