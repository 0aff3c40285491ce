"""Is the balance loss of a mixture of experts, taken per micro-batch, that of the window, and what brings the window's back?"""

from __future__ import annotations

import math

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    BLUE,
    EXACT,
    GREEN,
    VERMILLION,
    Curve,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    curves,
    interval,
    median_curve,
    number,
    section,
    share,
    span,
    table_by,
    yes_or_no,
)
from accumulation_harness.experiments.shared.tuning import longest

APART = 1e-3  # relative error of the router's gradient that makes another loss: nine decades above the gate
BY = "workload arm accumulation_steps"
LABELS = {
    "per_micro_batch": ("per micro-batch", VERMILLION, "X"),
    "buffered_counts": ("counts buffered within the window", BLUE, "o"),
    "two_passes": ("two passes", GREEN, "D"),
}


def figure_balance(rows: DataFrame) -> Figure:
    """Relative error of the router's gradient over N, at the initial weights, by task: every seed, and the median."""
    panels: dict[str, list[Curve]] = {}
    for (task, arm), own in rows.query("arm in @LABELS").groupby(["workload", "arm"]):
        label, colour, mark = LABELS[str(arm)]
        every = {"color": colour, "marker": mark, "linestyle": "", "alpha": 0.5, "label": label}
        panels.setdefault(str(task), []).extend((
            Curve(own["accumulation_steps"], own["gradient_error"].clip(lower=EXACT), every),
            median_curve(own, "accumulation_steps", "gradient_error", color=colour),
        ))  # fmt: skip
    return curves(panels, "N", "router gradient: relative error", size=(5.6 if len(panels) == 1 else 9.4, 3.2), ncols=3)


def measured(results: Results) -> DataFrame:
    """The study's rows; `identity_error`: how far the difference of the losses per micro-batch is from the covariance."""
    rows = longest(results.study("balance_loss"), ["workload"])
    off = (rows["loss"] - rows["window_loss"] - rows["covariance"]).abs()
    return rows.assign(identity_error=off.where(rows["arm"] == "per_micro_batch"))


def finding(rows: DataFrame) -> str:
    """What the numbers say of the prediction, clause by clause."""
    identity = rows["identity_error"].max()
    own, passes = (rows.query("arm == @arm")["gradient_error"] for arm in ("per_micro_batch", "two_passes"))
    another = identity <= ALGEBRA_GATE and own.min() >= APART
    exact = passes.max() <= ALGEBRA_GATE
    nearer = _nearer(rows)
    return (
        f"Another loss per micro-batch: {yes_or_no(bool(another))} (formula to {number(identity)}, gradient off by "
        f"{span(own)}). "
        f"Two passes exact: {yes_or_no(bool(exact))} (to {number(passes.max())}). "
        f"Buffered counts nearer than none, in the median over seeds: {share(int(nearer.sum()), len(nearer))} tasks and N."
    )


def advice(rows: DataFrame) -> str:
    """What the numbers advise."""
    exact = bool(rows.query("arm == 'two_passes'")["gradient_error"].max() <= ALGEBRA_GATE)
    nearer = _nearer(rows)
    passes = (
        "route the whole window first, without gradients, and give every micro-batch the window's counts: it costs one forward "
        "of the router and the layers below it, and the gradient is the large batch's."
        if exact
        else "two passes did not bring the large batch's gradient back here: look for what the second forward does otherwise."
    )
    told = {"nearer to it": nearer[nearer], "not nearer": nearer[~nearer]}
    buffers = "; ".join(f"{word} {_where(own)}" for word, own in told.items() if len(own))
    noise = "" if nearer.all() else " They are noisy for the first micro-batches, and these errors do not cancel."
    return f"Advice: {passes} Counts that are buffered from the window's beginning are {buffers}.{noise}"


def _nearer(rows: DataFrame) -> Series[bool]:
    """By task and N: whether buffered counts have a smaller median error than none."""
    middle = rows.groupby(["arm", "workload", "accumulation_steps"])["gradient_error"].median()
    nearer: Series[bool] = middle["buffered_counts"] < middle["per_micro_batch"]
    return nearer


def _where(chosen: Series[bool]) -> str:
    """Tasks with their N, in words."""
    parts = (f"on {task} at N = {', '.join(str(num) for _, num in own.index)}" for task, own in chosen.groupby(level=0))
    return " and ".join(parts)


def losses(material: Material) -> Section:
    """Gradient error over N, the formula, and the advice."""
    rows = measured(material.results)
    chosen = rows.query("arm in @LABELS")
    head = "task | way | N | b | n | loss less the window's | by the formula | router gradient off by"
    picture = Picture(
        "router-gradient",
        figure_balance(chosen),
        "Relative error of the router's gradient over N: two passes are exact, the others are not.",
        "Gradient of the balance loss alone with respect to the router, against the window's, at the initial weights; all "
        "seeds, and their median.",
    )
    text = f"{finding(chosen)} {advice(chosen)}"
    columns = (
        "workload", ("arm", _label), "accumulation_steps", ("micro_batch", "{:g}".format), "trial n",
        lambda own: interval(own["loss"] - own["window_loss"]), "covariance mean",
        lambda own: f"{number(own['gradient_error'].median())} ({span(own['gradient_error'])})",
    )  # fmt: skip
    cells = table_by(chosen, BY, head, columns, "Means with 95% t intervals; medians (range).")
    return section("One window", text, picture, cells)


def _label(arm: str) -> str:
    return LABELS.get(arm, ("window",))[0]


def trained(material: Material) -> Section:
    """Where trainings with each end."""
    rows = measured(material.results)
    full = rows.query("arm == 'full'").set_index("trial")
    measures = ["held_out_loss", "load_entropy", "class_entropy"]
    less = rows[measures] - full.loc[rows["trial"], measures].to_numpy()
    head = "task | way | N | n | held-out loss | less the window's | entropy of the load | less | within a class | less"
    columns = (
        "workload", ("arm", _label), "accumulation_steps", "trial n",
        *(f"{name} {how}" for measure in measures for name, how in ((measure, "mean"), (f"less_{measure}", "interval"))),
    )  # fmt: skip
    caption = (
        "A router of 8 experts, linear classifiers of which one answers; SGD on cross-entropy and 0.1 times the balance "
        f"loss. Entropies in nats, at most ln 8 = {math.log(8):.2f}. Means and paired 95% t intervals, not corrected; far "
        "smaller than what the loss is for."
    )
    return section("After a training", table_by(rows.join(less.add_prefix("less_")), BY, head, columns, caption))


EXPERIMENT = Experiment(
    title="Does the balance loss of a mixture of experts survive accumulation?",
    question="Is the balance loss taken per micro-batch that of the window (arXiv 2501.11873), and do buffered counts or "
    "two passes bring the window's back?",
    prediction="Per micro-batch it is another loss, larger by E times the covariance of shares and probabilities, and more "
    "so with N. Two passes are exact. Buffered counts are nearer to the window's than none.",
    rule=f"Another loss: the formula holds to {ALGEBRA_GATE:.0e} and the router's gradient is off by {APART:g} or more in "
    f"every trial. Exact: off by {ALGEBRA_GATE:.0e} or less in every trial. Nearer: a smaller median over seeds, on "
    "each task and at each N.",
    sections=(losses, trained),
)
