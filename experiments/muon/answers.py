"""Is Muon's update of the accumulated gradient that of the full batch, and what if every micro-batch is orthogonalised alone?"""

from __future__ import annotations

from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis.answering import (
    BLUE,
    GREEN,
    GREY,
    VERMILLION,
    Curve,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    curves,
    number,
    section,
    share,
    span,
    table_by,
    yes_or_no,
)
from accumulation_harness.experiments.shared.tuning import DETECTABLE
from accumulation_harness.judge.statistics import ratio_of_means

RATIO = 2.0  # of rounding, as in L1
ANOTHER = 0.1  # relative error of the update that makes another update: some thirty roundings of bfloat16
LIFT = 10.0  # from the gradient's relative error to the update's
LABELS = {
    "permuted": ("full batch, rows permuted (null)", GREY, "s"),
    "accumulated": ("accumulated", BLUE, "o"),
    "bfloat16_sum": ("accumulated in bfloat16", GREEN, "D"),
    "per_micro_batch": ("orthogonalised per micro-batch", VERMILLION, "X"),
}


def figure_muon(rows: DataFrame) -> Figure:
    """Relative error of the update over that of the gradient, both root mean squares over windows; a mark per trial and N."""
    drawn = [
        Curve(own["gradient_error"], own["update_error"],
              {"color": colour, "marker": mark, "linestyle": "", "alpha": 0.6, "label": label})
        for arm, (label, colour, mark) in LABELS.items()
        for own in [rows.query("arm == @arm and update_error > 0 and gradient_error > 0")]
    ]  # fmt: skip
    x, y = "gradient: relative error", "Muon's update: relative error"
    return curves({"": drawn}, x, y, axes=("log", "log"), size=(5.6, 3.2), ncols=2)


def measured(results: Results, quantity: str) -> DataFrame:
    """The study's rows of one quantity; `lift` is the update's error over the gradient's."""
    rows = results.study("muon").query("quantity == @quantity")
    return rows.assign(lift=rows["update_error"].astype(float) / rows["gradient_error"].astype(float))


def finding(rows: DataFrame) -> str:
    """What the updates say of the prediction, clause by clause."""
    of = dict(iter(rows.groupby("arm")))
    double = of["accumulated"].query("precision == 'float64'")
    words = []
    if len(double):
        same = share(int(double["same"].sum()), int(double["windows"].sum()))
        words.append(f"In float64 the update is the full batch's to the bit in {same} windows. ")
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
    columns = (
        ("arm", _label), "accumulation_steps", "precision", ("after_steps", "{} steps".format), "trial n",
        "orthogonalisations mean",
        lambda own: f"{own['same'].sum():.0f} of {own['windows'].sum():.0f}", "gradient_error median", "update_error median",
        "cosine mean", "length mean",
    )  # fmt: skip
    by = "arm accumulation_steps precision after_steps"
    return section("One window", advice, picture, table_by(chosen, by, head, columns, caption))


def _label(arm: str) -> str:
    return LABELS.get(arm, ("full batch",))[0]


def trained(material: Material) -> Section:
    """Where trainings end, beside the full batch's."""
    rows = measured(material.results, "training")
    full = rows.query("arm == 'full'").set_index("trial")["held_out_loss"]
    rows = rows.assign(more=rows["held_out_loss"] - rows["trial"].map(full))
    head = "workload | way | N | format | n | held-out loss | less the full batch's | detectable"
    caption = (
        "At one learning rate and number of windows: a shorter step might catch up at a larger one, which is not measured. Means "
        f"and paired 95% t intervals over seeds, not corrected. {DETECTABLE}"
    )
    columns = ("workload", ("arm", _label), "accumulation_steps", "precision", "trial n", "held_out_loss mean", "more interval",
               "more detectable")  # fmt: skip
    by = "workload arm accumulation_steps precision"
    return section("After a training", table_by(rows, by, head, columns, caption))


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
