"""Several replicas: is synchronising once per window the large batch, and what does it save on the wire?"""

from __future__ import annotations

import pandas as pd
from pandas import DataFrame, Series

from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    TRAJECTORY_GATE,
    ClaimResult,
    Experiment,
    Material,
    Results,
    Section,
    claim,
    counted,
    names,
    number,
    section,
    span,
    table_by,
    undecided,
)

# A way that synchronises once per window -> the same after every micro-batch.
PAIRS = {"mean_of_scaled": "mean_every_micro_batch", "ddp": "ddp_every_backward"}
WORDS = {
    "sum_over_window_terms": "divided by the window's terms, gradients summed over ranks, once",
    "mean_of_scaled": "divided by the terms per rank (n/W), gradients averaged, once",
    "mean_every_micro_batch": "the same, after every micro-batch",
    "ddp": "the same by DistributedDataParallel: no_sync but for the last backward",
    "ddp_every_backward": "the same without no_sync",
    "summed_not_averaged": "divided by n/W, gradients summed",
    "averaged_twice": "divided by n, gradients averaged",
    "mean_of_local_means": "each rank's own mean, gradients averaged",
    "never_synchronised": "each rank's own mean, and no exchange",
    "synchronised_halfway": "averaged after micro-batch N/2, the rest local",
    "ddp_synchronised_halfway": "the same by DistributedDataParallel with a wrong no_sync boundary",
}


@claim(
    "D10",
    CONFIRMED,
    f"Refuted when a right way to synchronise differs from the referee's step by more than {ALGEBRA_GATE:.0e}, or a "
    "wrong one does not; confirmed when all wrong ones are named by their cause as well, conditional when some are not.",
)
def synchronised_once(results: Results) -> ClaimResult:
    """D10: tests whether right ways to synchronise take the window's step, and wrong ones do not and are named."""
    rows = results.study("replicas")
    right, wrong = rows.query("expected == ''"), rows.query("expected != ''")
    if set(right["unequal_terms"]) != {False, True} or wrong["expected"].nunique() < 2:
        return undecided("It takes equal and unequal numbers of loss terms per rank, and wrong ways of both kinds.", len(rows))
    exact = (right["cause"] == "") & (right["trajectory_error"] <= TRAJECTORY_GATE)
    exact &= right[["gradient_error", "rank_distance", "ends_apart"]].max(axis=1) <= ALGEBRA_GATE
    different = wrong["gradient_error"] > ALGEBRA_GATE
    named = wrong["cause"] == wrong["expected"]
    holds = exact.all() and different.all()
    return ClaimResult(
        verdict=REFUTED if not holds else CONFIRMED if named.all() else CONDITIONAL,
        condition="some wrong ways are found and not named",
        measured=right["gradient_error"].max(),
        threshold=f"≤ {ALGEBRA_GATE:.0e} where synchronised, above it where not",
        n=len(rows),
        explanation=f"On two processes the ranks take the whole window's step in {counted(exact)} trainings "
        f"that average over all loss terms, with equal and unequal numbers of them per rank; "
        f"{counted(different)} trainings with a wrong factor, or without synchronising the whole window, do "
        f"not (off by {span(wrong['gradient_error'])}), and "
        f"{counted(named)} of them are called by their cause. The operation is an all-reduce.",
    )


def _wire_ratios(rows: DataFrame) -> DataFrame:
    """Compare gradient bytes with those of synchronising once per window.

    Args:
        rows: Those of the study `replicas`.

    Returns:
        A row per trial, N > 1 and pair of ways. `every`: of synchronising after every micro-batch; `true_batch`: of the true
        batch on the same ranks.
    """
    table = rows.pivot_table(index=["trial", "accumulation_steps"], columns="arm", values="gradient_bytes").reset_index()
    true, own = table.query("accumulation_steps == 1").set_index("trial"), table.query("accumulation_steps > 1")
    pairs = [
        own[["accumulation_steps"]].assign(every=own[every] / own[once], true_batch=own["trial"].map(true[once]) / own[once])
        for once, every in PAIRS.items()
    ]
    return pd.concat(pairs).dropna()


@claim(
    "D9",
    CONDITIONAL,
    "Gradient bytes per optimizer step are counted at the all-reduces. Confirmed when the true batch sends at least 4 "
    "times as much as synchronising once per window; conditional when synchronising every micro-batch sends exactly N times "
    "as much and the true batch exactly as much; refuted otherwise.",
)
def communication(results: Results) -> ClaimResult:
    """D9: compares the bytes sent with synchronising every micro-batch, and with the true batch on the same ranks."""
    rows = results.study("replicas")
    if not ({*PAIRS, *PAIRS.values()} <= set(rows["arm"]) and {1} < set(rows["accumulation_steps"])):
        return undecided("It takes several micro-batches and the true batch (N = 1) on the same ranks.", len(rows))
    ratios = _wire_ratios(rows)
    by_n = (ratios["every"] == ratios["accumulation_steps"]).all()
    nothing = (ratios["true_batch"] == 1).all()
    numbers = names(ratios["accumulation_steps"])
    four = (ratios["true_batch"] >= 4).all()
    return ClaimResult(
        verdict=CONFIRMED if four else CONDITIONAL if by_n and nothing else REFUTED,
        condition="against synchronising after every micro-batch; against the true batch nothing is saved",
        measured=ratios["every"].max(),
        threshold="N against every micro-batch, 1 against the true batch",
        n=len(ratios),
        explanation=f"Gradient bytes per optimizer step fall N times against synchronising after every micro-batch "
        f"({_range(ratios['every'])} times at N = {numbers}) and "
        f"{_range(ratios['true_batch'])} times against the "
        "true batch on the same ranks: what is saved is what nobody had to send. Counted, not timed.",
    )


def _ways(material: Material) -> Section:
    """Errors and named causes of every way to synchronise."""
    rows = material.study("replicas")
    head = "way | loss terms per rank | expected | named | gradient off by | scale | ranks apart | end of training"
    rows = rows.assign(arm=pd.Categorical(rows["arm"], [*WORDS], ordered=True), named=rows["cause"] == rows["expected"])
    columns = (
        ("arm", WORDS.get), ("unequal_terms", {True: "unequal", False: "equal"}.get),
        ("expected", lambda cause: cause or "equivalent"), "named counted",
        *((lambda own, of=of: _range(own[of])) for of in ("gradient_error", "scale", "rank_distance", "trajectory_error")),
    )  # fmt: skip
    text = (
        "Two processes share every window (W = 2), accumulate N micro-batches each, exchange gradients with gloo and step. Each "
        "window is compared with the referee's gradient of the whole window; the diagnosis sees these numbers and the referee's "
        "gradients of every micro-batch, not the name of the way. Optimizers that divide by the size of the gradient hide a "
        "wrong factor from the loss: the last column is the distance of the weights to those of one process with the full batch "
        "after three steps, relative to how far these moved."
    )
    caption = "Smallest to largest over all trials and N. Gradients: up to the first wrong window."
    cells = table_by(rows, "arm unequal_terms", head, columns, caption, observed=True)
    return section("Ways to synchronise two ranks", text, cells)


def _wire(material: Material) -> Section:
    """What each way sends."""
    rows = material.study("replicas")
    chosen = rows[rows["arm"].isin([*PAIRS, *PAIRS.values()])]
    head = "way | N | all-reduces of gradients per step | bytes per parameter and step | bytes of loss terms per step"
    chosen = chosen.assign(per=chosen["gradient_bytes"] / chosen["num_parameters"])
    columns = (("arm", WORDS.get), "accumulation_steps",
               *((lambda own, of=of: _range(own[of])) for of in ("reductions", "per", "count_bytes")))  # fmt: skip
    caption = (
        "What one rank passes to all-reduces, in float64, counted in the process itself (for DistributedDataParallel in its "
        "communication hook). A ring sends 2(W - 1)/W of it. N = 1 is the true batch on the same ranks."
    )
    return section("Over the wire", table_by(chosen, "arm accumulation_steps", head, columns, caption))


def _range(values: Series[float]) -> str:
    low, high = number(values.min()), number(values.max())
    return low if low == high else f"{low} to {high}"


EXPERIMENT = Experiment(
    title="Does accumulation stay right on several replicas, and what does it save there?",
    question="If two ranks accumulate on their shares and synchronise once per window, is that the large batch, even when their "
    "numbers of loss terms differ? What do the known wrong ways do? And how much less is sent?",
    prediction="Synchronising once per window is the large batch when the loss is divided by the terms of all ranks. A sum in "
    "place of a mean, a mean of local means and a missed boundary are not, and are named. It saves a factor of N compared with "
    "synchronising after every micro-batch, and nothing compared with the true batch.",
    rule="Two gloo processes in float64: every window has to agree with the referee within "
    f"{ALGEBRA_GATE:.0e}, and trainings have to end within {TRAJECTORY_GATE:.0e} of one process with the full batch. Bytes are "
    "counted, not timed.",
    claims=(communication, synchronised_once),
    sections=(_ways, _wire),
)
