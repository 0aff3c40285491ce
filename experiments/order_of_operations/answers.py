"""What has to happen once per window, and in which order?"""

from __future__ import annotations

import dataclasses
from functools import partial

from pandas import Series

from accumulation_harness.analysis import faults
from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    TRAJECTORY_GATE,
    Cause,
    Claim,
    ClaimResult,
    Experiment,
    Material,
    Results,
    Section,
    claim,
    counted,
    needed,
    number,
    section,
    share,
    span,
    table_by,
    takes,
    undecided,
)

GATE = f"> {ALGEBRA_GATE:.0e}; correct arms ≤"
WRONG = {
    Cause.gradients_cleared_in_window: "clearing before each micro-batch",
    Cause.step_every_micro_batch: "stepping at each micro-batch",
    Cause.schedule_per_micro_batch: "a schedule that counts micro-batches",
    Cause.clip_per_micro_batch: "clipping inside the window",
    Cause.clip_before_unscale: "clipping before unscaling",
    Cause.weight_decay_per_micro_batch: "decay at each micro-batch",
    Cause.scaler_updated_in_window: "a loss scale that moves inside the window",
}
FEWEST_ARMS = 20  # that say something of all arms: fewer have no exact 95 % bound above 86 %
NOTICEABLE = 1e-3  # of the way that the weights went: what a training may be off before anybody would care
ADJUSTED = 1e-2  # relative difference: a threshold that matters changes the clipped gradient by tens of per cent
# Relative: PyTorch adds 1e-6 to the norm by which it divides, and that is not scaled with a sum; norms here are above 0.01.
SMALL_PRINT = 1e-3


def _once_per_window(names: tuple[Cause, ...], meaning: str, results: Results) -> ClaimResult:
    """Confirmed when the correct arm is equivalent and every arm with one of these faults is different."""
    arms = results.arms
    wrong = arms.query("arm in @names and changes")
    right = arms[arms["arm"].eq("accumulated") & arms["trial"].isin(wrong["trial"])]
    takes(f"It takes arms with {' or '.join(names)}.", wrong, n=0)
    if right.empty or right["verdict"].ne("equivalent").any():
        return undecided("A correct arm is not equivalent, so that nothing can be said of the others.", len(wrong))
    parted = wrong["verdict"].eq("different")
    named = [arm in faults.causes_of(cause) for arm, cause in zip(wrong["arm"], wrong["cause"], strict=True)]
    gap = wrong[["algebra_error", "trajectory_error"]].max(axis=1)
    return ClaimResult(
        verdict=CONFIRMED if parted.all() else REFUTED if not parted.any() else CONDITIONAL,
        condition=f"in {counted(parted)} arms",
        measured=gap.min(),
        threshold=GATE,
        n=len(wrong) + len(right),
        explanation=f"{meaning}: {counted(parted)} arms that do otherwise are different, by "
        f"{number(gap.min())} at least, and {share(sum(named), len(wrong))} are called by that name; the "
        f"{len(right)} arms that do it once per window are equivalent, within {number(right['algebra_error'].max())}.",
    )


@claim(
    "A12",
    CONDITIONAL,
    "A prescription, tested by its aim: conditional on following the full batch when a schedule that counts optimizer steps "
    "does, and every one that counts micro-batches does not; refuted when counting micro-batches does too.",
)
def schedule(results: Results) -> ClaimResult:
    """A12: tests what a schedule has to count if training is to follow the full batch, which counts its own steps."""
    found = _once_per_window((Cause.schedule_per_micro_batch,), "The schedule counts optimizer steps", results)
    if found.verdict != CONFIRMED:
        return found
    return dataclasses.replace(
        found,
        verdict=CONDITIONAL,
        condition="where training shall follow the full batch's",
        explanation=f"{found.explanation} What a schedule should count is a prescription: the full batch's own counts its steps.",
    )


@claim(
    "A13",
    CONDITIONAL,
    "The correct arms have to be equivalent with clipping off and active. Of the arms that clip inside the window or before "
    f"unscaling where clipping is active: confirmed when all end more than {NOTICEABLE:g} of the way off, conditional when "
    f"some do, refuted when none does; of fewer than {FEWEST_ARMS} neither all nor none says anything.",
)
def clip_afterwards(results: Results) -> ClaimResult:
    """A13: tests clipping inside the window and before unscaling, with clipping off and active, and how much it changes."""
    arms = results.arms
    right = arms.query("arm == 'accumulated'")
    active = right["clipped_share"] > 0
    if not active.any() or active.all() or not arms["arm"].eq(Cause.clip_before_unscale).any():
        return undecided("It takes trials in which clipping is off and is active, and a loss scaler.", len(right))
    clipping = counted(active)
    meaning = f"Clipping once, after the last micro-batch and after unscaling (active in {clipping} trials)"
    names = (Cause.clip_per_micro_batch, Cause.clip_before_unscale)
    found = _once_per_window(names, meaning, results)
    if found.verdict != CONFIRMED:
        return found
    wrong = arms[arms["arm"].isin(names) & arms["changes"] & arms["trial"].isin(right.loc[active, "trial"])]
    ends = wrong["trajectory_error"]
    matters = ends > NOTICEABLE
    if len(matters) < FEWEST_ARMS and matters.nunique() == 1:
        return undecided(
            f"It takes {FEWEST_ARMS} arms in which clipping is active to say that all of them end off, or none.", len(wrong)
        )
    return dataclasses.replace(
        found,
        verdict=CONFIRMED if matters.all() else CONDITIONAL if matters.any() else REFUTED,
        condition=_where_it_matters(wrong["algebra_error"], matters),
        measured=ends.min(),
        threshold=f"weights at the end, off by more than {NOTICEABLE:g} of the distance travelled in every other arm",
        n=len(wrong),
        explanation=f"{found.explanation} Where clipping is active the weights end off by "
        f"{span(ends)} of the distance covered, above {NOTICEABLE:g} in "
        f"{counted(matters)} arms. "
        "That it is critical for stability is not tested.",
    )


def _where_it_matters(gradients: Series[float], matters: Series[bool]) -> str:
    """By how far the gradient is off, where that parts the arms that matter from the others; else how many do."""
    least, most = gradients[matters].min(), gradients[~matters].max()
    if least <= most:
        return f"in {counted(matters)} arms"
    return f"where the gradient is off by {number(least)} or more; not where by {number(most)} or less"


@claim(
    "A14",
    CONDITIONAL,
    "Conditional when averaged gradients need the threshold unchanged, and summed gradients N times the threshold.",
)
def threshold(results: Results) -> ClaimResult:
    """A14: tests which threshold clips averaged, and summed, gradients as the full batch's is clipped."""
    rows = results.study("clipping_threshold")
    same = rows.query("arm == 'averaged' and factor == 1")["error"]
    moved = rows.query("arm == 'averaged' and factor != 1 and threshold == 'clipped'")["error"]
    times_n = rows.query("arm == 'summed' and factor == accumulation_steps")["error_of_nth"]
    # Where it clips, a sum under the old threshold equals the full batch's clipped gradient; elsewhere it is neither that nor N
    # times it.
    neither = rows.query("arm == 'summed' and factor == 1 and threshold == 'not_clipped'")[["error", "error_of_nth"]].min(axis=1)
    bound = (moved > ADJUSTED).all() and (times_n <= SMALL_PRINT).all() and (neither > ADJUSTED).all()
    return ClaimResult(
        verdict=CONFIRMED if (same > ALGEBRA_GATE).any() else CONDITIONAL if bound else REFUTED,
        condition="where mean losses are summed, and not averaged",
        measured=same.max(),
        threshold=f"≤ {ALGEBRA_GATE:.0e} with the threshold unchanged",
        n=len(rows),
        explanation="Averaged gradients are clipped as the full batch's with the threshold unchanged, and not with c·N or c/N "
        f"(off by {number(moved.min())} at least). Only "
        "sums of mean losses need c·N, and then have to be divided by N after all.",
    )


@claim(
    "A15",
    CONDITIONAL,
    "Conditional when a checkpoint at the boundary resumes bit-identically, and one inside a window only with its gradients "
    "or by beginning the window again.",
)
def checkpoints(results: Results) -> ClaimResult:
    """A15: tests whether trainings resumed at the boundary and inside a window end bit-identical."""
    rows = results.study("resumption")
    same = {str(arm): own.tolist() for arm, own in rows.groupby("arm")["identical"]}
    if len(same) < 4:
        return undecided("It takes checkpoints at the boundary and inside a window.", len(rows))
    saved = all(same["in_window_with_gradients"] + same["in_window_replayed"])
    belong = all(same["at_boundary"]) and not any(same["in_window"])
    lost = rows.query("arm == 'in_window'")["distance"]
    counts = {name: share(sum(own), len(own)) for name, own in same.items()}
    return ClaimResult(
        verdict=REFUTED if not belong else CONDITIONAL if saved else CONFIRMED,
        condition="unless the window's gradients are saved, or the window is begun again",
        measured=lost.min(),
        threshold="0, bit by bit",
        n=len(rows),
        explanation=f"Resumed at a boundary {counts['at_boundary']} trainings end bit-identical, inside a window "
        f"{counts['in_window']} (weights off by {number(lost.min())} at least), unless the checkpoint holds the gradients "
        f"({counts['in_window_with_gradients']}) or the window is begun again ({counts['in_window_replayed']}).",
    )


def _once(name: str, fault: Cause, meaning: str) -> Claim:
    rule = f"Confirmed when every arm with {WRONG[fault]} is different and the correct arms are equivalent."
    return Claim(name, CONFIRMED, rule, partial(_once_per_window, (fault,), meaning))


CLAIMS = (
    _once("A7", Cause.gradients_cleared_in_window, "Gradients are cleared once per window"),
    _once("A8", Cause.step_every_micro_batch, "The optimizer steps once per window"),
    _once("A11", Cause.weight_decay_per_micro_batch, "Decay acts once per optimizer step"),
    schedule,
    clip_afterwards,
    threshold,
    checkpoints,
)


def _who_differs(material: Material) -> Section:
    """The verdicts and causes of every wrong order, under every optimizer."""
    arms = material.arms[material.arms["arm"].isin(WRONG)]
    needed(arms)
    caption = (
        f"Gates: {ALGEBRA_GATE:.0e} on gradients and state, {TRAJECTORY_GATE:.0e} on the float64 trajectory; the larger of the "
        "two differences is shown. The correct arms of the same trials are equivalent."
    )
    head = "done otherwise | optimizer | different | by | called"
    arms = arms.assign(different=arms["verdict"].eq("different"), gap=arms[["algebra_error", "trajectory_error"]].max(axis=1))
    columns = (("arm", lambda arm: WRONG[Cause(arm)]), "optimizer", "different counted", "gap span", "cause names")
    return section("What happens when it is done otherwise", table_by(arms, "arm optimizer", head, columns, caption))


def _resumed(material: Material) -> Section:
    """Trainings resumed from each kind of checkpoint."""
    rows = material.study("resumption")
    names = {
        "at_boundary": "at the boundary",
        "in_window": "inside a window",
        "in_window_with_gradients": "inside a window, with the gradients",
        "in_window_replayed": "inside a window, which is begun again",
    }
    columns = (("arm", names.get), "precision", "identical counted", "distance span")
    head = "checkpoint | precision | bit-identical | distance of the weights"
    caption = (
        "Model, optimizer, schedule and scaler went through torch.save and torch.load into new objects, and trained to the end; "
        "compared with the same training without interruption. Without dropout, whose generator would have to be saved too."
    )
    return section("Checkpoints", table_by(rows, "arm precision", head, columns, caption))


EXPERIMENT = Experiment(
    title="What happens once per window?",
    question="Which of clearing, stepping, clipping, decay, schedule, unscaling and checkpoints belong to the window, and not "
    "to the micro-batch?",
    prediction="All of them. Done once per window, an arm is equivalent to the full batch, with clipping off, sometimes active "
    "and always active; done per micro-batch it is different. The clipping threshold needs no change where gradients are "
    "averaged. A checkpoint inside a window loses the gradients so far unless it holds them.",
    rule="Judged arms decide: the correct arm has to be equivalent and each wrong one different. Thresholds are judged by the "
    f"distance to the full batch's clipped gradient ({ALGEBRA_GATE:.0e} in float64), resumed trainings by bitwise comparison "
    "with uninterrupted ones.",
    claims=CLAIMS,
    sections=(_who_differs, _resumed),
)
