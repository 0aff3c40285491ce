"""Is Adam's state that of the full batch? And what does Adam make of a gradient that is N times too large?"""

from __future__ import annotations

from pandas import DataFrame

from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    Claim,
    ClaimResult,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    claim,
    columns_over,
    curves,
    number,
    section,
    table_by,
    takes,
    undecided,
)
from accumulation_harness.experiments.momentum.answers import APART, LONG, states, states_evolve_otherwise

SMALL_EPS = 1e-8  # PyTorch's default; smaller ones count as small too
HIDDEN = 1e-2  # relative error of the first step, ten times the closed form at the default eps; later steps amplify it by chance
VISIBLE = 0.05  # relative change of the last loss that a reader of a loss curve would notice, as in analysis/faults.py
SHOWN = 1.0  # relative error of SGD's step, which is N times too long: off by N - 1 = 5 or more in these grids
CLOSED_FORM = 1e-6  # relative difference between the first step and its formula


OWN_STATES = Claim(
    "C3",
    REFUTED,
    f"Refuted when state and weights of Adam and AdamW equal the full batch's to {ALGEBRA_GATE:.0e} after {LONG} "
    "float64 steps, and those of small-batch training and of a state advanced per micro-batch differ by "
    f"{APART:.0e} or more.",
    states_evolve_otherwise.decide,
)

# Rules -------------------------------------------------------------------------------------------------------------------------


@claim(
    "C11",
    CONFIRMED,
    f"Confirmed when training without 1/N takes the steps of the right gradient at eps/N, to {ALGEBRA_GATE:.0e}; when "
    f"at eps ≤ {SMALL_EPS:.0e} it changes the first step by at most {HIDDEN:g} and the loss by at most {VISIBLE:g}; and when "
    f"it changes SGD's step by {SHOWN:g} or more.",
)
def hides_missing_division(results: Results) -> ClaimResult:
    """C11: compares the missing 1/N with the right gradient at eps / N, and its effect at the default eps with that under SGD."""
    rows = results.study("adam_scale", ["clip_norm"])
    free = rows.query("clip_norm.isna()")
    adam = free.query("optimizer in ['adam', 'adamw'] and (weight_decay == 0 or optimizer == 'adamw')")
    usual, large = adam.query("eps <= @SMALL_EPS"), adam.query("eps > @SMALL_EPS")
    sgd = free.query("optimizer == 'sgd' and weight_decay == 0")
    takes("It takes Adam at small and large eps, and SGD.", usual, large, sgd, n=len(rows))
    right, formula = rows["right_error"].max(), _closed_form_error(rows)
    if right > ALGEBRA_GATE or formula > CLOSED_FORM or sgd["fault_error_first"].min() < SHOWN:
        return undecided("The right recipe, the closed form or SGD did not do what they must: the comparison is void.", len(rows))
    exact, hidden = free["as_if_error"].max(), usual["fault_error_first"].max()
    loss = (usual["loss_undivided"] / usual["loss"] - 1).abs().max()
    unseen = hidden <= HIDDEN and loss <= VISIBLE
    holds = exact <= ALGEBRA_GATE and unseen
    bits = (free["as_if_error"] == 0).sum()
    return ClaimResult(
        verdict=CONFIRMED if holds else CONDITIONAL if unseen else REFUTED,
        condition="not exactly as eps/N",
        measured=hidden,
        threshold=f"first step ≤ {HIDDEN:g}, loss ≤ {VISIBLE:g} off at eps ≤ {SMALL_EPS:.0e}; eps/N exact to {ALGEBRA_GATE:.0e}",
        n=len(rows),
        explanation=f"Without 1/N, Adam and AdamW go where the right gradient goes under eps/N, to {number(exact)} (bit for bit "
        f"in {bits} of {len(free)} arms): the first step is off by at most {number(hidden)} at eps of {SMALL_EPS:.0e} and "
        f"below (the loss in the end by {number(loss)}), by up to {number(large['fault_error_first'].max())} at larger ones, "
        f"SGD's by {number(sgd['fault_error_first'].median())}.{_revealed(rows)}",
    )


def _closed_form_error(rows: DataFrame) -> float:
    """The largest relative error of the formula for the first step."""
    return float((rows["fault_error_first"] / rows["predicted_first"] - 1).abs().max())


def _revealed(rows: DataFrame) -> str:
    """What reveals the fault, or hides it from SGD, in words; empty where nothing of it was run."""
    clipped = rows.query("clip_norm.notna()")
    decayed = rows.query("optimizer == 'adam' and weight_decay > 0")
    sometimes = clipped.query("optimizer == 'adam' and clipped_share < 1")
    always = clipped.query("clipped_share == 1")
    parts = [
        f"{what} {number(own['fault_error'].median())}"
        for what, own in (
            ("weight decay in the gradient", decayed),
            ("clipping that is sometimes active", sometimes),
            ("clipping that is always active, SGD included,", always),
        )
        if len(own)
    ]
    return f" Medians under {', '.join(parts)}." if parts else ""


# Page --------------------------------------------------------------------------------------------------------------------------


MISSING = {
    "predicted_first": "first step, closed form",
    "fault_error_first": "first step",
    "fault_error": "all steps",
    "as_if_error": "all steps, against the right gradient at eps/N",
}


def _missing_division(material: Material) -> Section:
    """What the missing 1/N does to Adam's steps, by eps, weight decay and clipping."""
    rows = material.study("adam_scale", ["clip_norm"])
    text = (
        "A sum of mean losses gives N times the gradient. Adam divides the first moment by the root of the second, so the factor "
        "cancels except in eps: N m / (N √v + eps) = m / (√v + eps/N). Training with the fault is therefore exactly right "
        "training at eps/N, and it shows where eps is not small compared with the gradients. Weight decay that Adam adds to the "
        "gradient is in effect divided by N, which shows; AdamW's is not. Clipping that is always active removes the factor "
        "under every optimizer, SGD included; clipping that is active at times becomes N times as strict, which reveals the "
        f"fault under Adam too. The first step agrees with its closed form to {number(_closed_form_error(rows))} in {len(rows)} "
        "arms."
    )
    chosen = rows.query("optimizer == 'adam' and clip_norm.isna() and weight_decay == 0")
    head = (
        "optimizer | eps | weight decay | clipping | N | n | first step off by | after 40 steps | "
        "closed form | against the right gradient, rescaled"
    )
    caption = (
        "Relative difference of the displacement from the initial weights, in float64: median (range) over seeds. The last "
        "column is the largest difference to training with the right gradient at eps/N (Adam), weight decay/N (Adam, SGD), rate "
        "x N (SGD) and clipping at c/N. With clipping it is not exact, because PyTorch adds 1e-6 to the norm."
    )
    picture = Picture(
        "eps",
        curves({"": columns_over(chosen, "eps", MISSING)}, "eps", "relative difference of the displacement", axes=("log", "log")),
        "Relative difference of Adam's path without 1/N over eps: proportional to eps below 1e-6, above 1 at 1e-2; the "
        "difference to the right gradient at eps/N is zero everywhere.",
        "Relative error of Adam's displacement without 1/N, over eps: medians and ranges over seeds. Differences to the "
        "right gradient at eps/N that are exactly zero are drawn at the bottom.",
    )
    columns = (
        "optimizer", _eps, ("weight_decay", "{:g}".format), _clipping, "accumulation_steps", "trial n",
        "fault_error_first median_span", "fault_error median_span", "predicted_first median", "as_if_error max",
    )  # fmt: skip
    by = "optimizer eps weight_decay clip_norm accumulation_steps"
    return section("A missing 1/N under Adam", text, picture, table_by(rows, by, head, columns, caption, dropna=False))


def _eps(rows: DataFrame) -> str:
    return f"{rows['eps'].iloc[0]:g}" if rows["optimizer"].iloc[0].startswith("adam") else "-"


def _clipping(rows: DataFrame) -> str:
    share = rows["clipped_share"].mean()
    return "off" if rows["clip_norm"].isna().all() else f"at {rows['clip_norm'].iloc[0]:g}, active in {share:.0%}"


EXPERIMENT = Experiment(
    title="Is Adam's state the full batch's, and what does Adam make of a gradient N times too large?",
    question="Is the state of Adam and AdamW under accumulation that of the full batch? And why does the most common fault, the "
    "missing division by N, pass unnoticed under Adam?",
    prediction="State and weights equal the full batch's up to rounding. Without the division Adam takes exactly the steps of "
    "the right gradient at eps/N, which cannot be seen at the default eps. Weight decay in the gradient, a large eps or clipping "
    "that is active at times reveals it; clipping that is always active hides it from SGD as well.",
    rule=f"In float64, equal means within {ALGEBRA_GATE:.0e}, and counts only where the faulty arms differ. Hidden means a first "
    f"step within {HIDDEN:g} and a loss within {VISIBLE:g} of the right ones. Before any verdict the right recipe, the closed "
    "form of the first step and SGD's factor of N have to be reproduced.",
    claims=(OWN_STATES, hides_missing_division),
    sections=(states, _missing_division),
)
