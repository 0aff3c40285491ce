"""Is Muon's update of the accumulated gradient that of the full batch, and what if every micro-batch is orthogonalised alone?"""

from __future__ import annotations

import pandas as pd

from accumulation_harness.analysis.content import Picture, Section, number, section, span, table, yes_or_no
from accumulation_harness.analysis.load import Results
from accumulation_harness.analysis.question import Experiment, Material
from accumulation_harness.experiments.convergence.trainings import DETECTABLE
from accumulation_harness.experiments.momentum.states import interval
from accumulation_harness.experiments.muon.figures import LABELS, figure_muon
from accumulation_harness.judge.statistics import detectable, ratio_of_means

RATIO = 2.0  # of rounding, as in L1
ANOTHER = 0.1  # relative error of the update that makes another update: some thirty roundings of bfloat16
LIFT = 10.0  # from the gradient's relative error to the update's


def measured(results: Results, quantity: str) -> pd.DataFrame:
    """The study's rows of one quantity; `lift` is the update's error over the gradient's."""
    rows = results.study("muon")
    rows = rows.query("quantity == @quantity")
    return rows.assign(lift=rows["update_error"].astype(float) / rows["gradient_error"].astype(float))


def finding(rows: pd.DataFrame) -> str:
    """What the updates say of the prediction, clause by clause."""
    of = {arm: own for arm, own in rows.groupby("arm")}
    double = of["accumulated"][of["accumulated"]["precision"] == "float64"]
    words = []
    if len(double):
        windows = int(double["windows"].sum())
        words.append(
            f"In float64 the update is the full batch's to the bit in {int(double['same'].sum())} of {windows} windows. "
        )
    single = rows.query("precision == 'float32'")
    if len(single):
        by_trial = single.groupby(["trial", "arm"])["update_error"].mean().unstack()
        ratio = ratio_of_means(by_trial["accumulated"].tolist(), by_trial["permuted"].tolist())
        holds = "yes" if ratio.high <= RATIO else "no" if ratio.low > RATIO else "undecided"
        words.append(
            f"In float32 its error is {number(ratio.estimate)} times ({number(ratio.low)} to {number(ratio.high)}) that of the "
            f"permuted full batch, n = {len(by_trial)}; no more than rounding: {holds}. "
        )
    calls, errors = of["accumulated"]["orthogonalisations"], of["per_micro_batch"]["update_error"]
    words.append(
        f"One orthogonalisation a window at every N: {yes_or_no(bool((calls == 1).all()))}. Per micro-batch, another update: "
        f"{yes_or_no(bool(errors.min() >= ANOTHER))} (off by {span(errors)}, with "
        f"{span(of['per_micro_batch']['length'])} of the length). "
        f"A sum in bfloat16 is lifted {LIFT:g}-fold or more: {yes_or_no(bool(of['bfloat16_sum']['lift'].min() >= LIFT))} "
        f"({span(of['bfloat16_sum']['lift'])} times the gradient's error)."
    )
    return "".join(words)


def updates(material: Material) -> Section:
    """The update of a window beside the full batch's, and the advice."""
    rows = measured(material.results, "update")
    chosen = rows.query("arm in @LABELS")
    head = (
        "way | N | format | trained | trials | orthogonalisations | same to the bit | gradient error | update error | cosine | "
        "length"
    )
    cells = (
        (LABELS[str(arm)][0], num, precision, f"{after} steps", len(own), own["orthogonalisations"].mean(),
         f"{own['same'].sum():.0f} of {own['windows'].sum():.0f}", own["gradient_error"].median(), own["update_error"].median(),
         own["cosine"].mean(), own["length"].mean())
        for (arm, num, precision, after), own in chosen.groupby(["arm", "accumulation_steps", "precision", "after_steps"])
    )  # fmt: skip
    advice = (
        f"{finding(chosen)} Advice: accumulate as ever, and let Muon see the window's whole gradient, once. A trainer that "
        "orthogonalises each micro-batch's gradient (as it is reduced, say) takes a shorter step in another direction, at N "
        "times the cost. Keep the sum in float32: orthogonalisation brings small singular values to 1, and the rounding too."
    )
    picture = Picture(
        "update-errors",
        figure_muon(chosen),
        "Relative error of Muon's update over that of the gradient: rounding in float32 gives roundings of bfloat16, a sum in "
        "bfloat16 far more, and orthogonalisation per micro-batch another update.",
        "The weight matrices' update of a window against the full batch's, root mean square over windows; a mark is a trial and "
        "N, before or after its training. Windows in which nothing differs to the bit are in the mean; marks of trials in which "
        "none does are left out.",
    )
    caption = "Errors: median over trials of the root mean square over windows. Muon computes in bfloat16 whatever the format."
    return section("One window", advice, picture, table(head, cells, caption))


def trained(material: Material) -> Section:
    """Where trainings end, beside the full batch's."""
    rows = measured(material.results, "training")
    full = rows.query("arm == 'full'").set_index("trial")["held_out_loss"]
    rows = rows.assign(more=rows["held_out_loss"] - rows["trial"].map(full))
    head = "workload | way | N | format | n | held-out loss | less the full batch's | detectable"
    cells = (
        (workload, LABELS.get(str(arm), ("full batch",))[0], num, precision, len(own), own["held_out_loss"].mean(),
         interval(own["more"]), detectable(own["more"].tolist()))
        for (workload, arm, num, precision), own in rows.groupby(["workload", "arm", "accumulation_steps", "precision"])
    )  # fmt: skip
    caption = (
        "At one learning rate and number of windows: a shorter step might catch up at a larger one, which is not measured. Means "
        f"and paired 95% t intervals over seeds, not corrected. {DETECTABLE}"
    )
    return section("After a training", table(head, cells, caption))


EXPERIMENT = Experiment(
    title="Is Muon's update of an accumulated gradient the full batch's?",
    question="Muon orthogonalises the gradient of a matrix. Is its update of the accumulated gradient that of the full batch, "
    "how often does it orthogonalise, and what if it does so with every micro-batch's own gradient, or with a bfloat16 sum?",
    prediction="The accumulated update is the full batch's: to the bit in float64, to rounding in float32, with one "
    "orthogonalisation a window. Per micro-batch it is another update, and shorter. A sum in bfloat16 errs more in the update "
    "than in the gradient.",
    rule=f"To rounding: the error of the update over that of the permuted full batch's, ratio of means over trials, has its 95% "
    f"interval below {RATIO:g} (no: above; else undecided). Another update: off by {ANOTHER:g} or more in every trial. Lifted: "
    f"the update's relative error is {LIFT:g} times the gradient's or more in every trial.",
    sections=(updates, trained),
)
