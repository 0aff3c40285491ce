"""By what must the loss of a micro-batch be divided, and what becomes of an epoch's last micro-batches?"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    Advice,
    Cause,
    ClaimResult,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    by_optimizer,
    claim,
    counted,
    curves,
    lines,
    needed,
    number,
    section,
    share,
    span,
    spread,
    table_by,
    takes,
    undecided,
)

UNDIVIDED, DIVIDED_BY_N, BY_FULL_N = Cause.loss_not_divided, Cause.mean_of_means, Cause.short_window_divided_by_n
FAULTS: dict[str, str] = {  # arm -> how it divides
    UNDIVIDED: "sum of means, undivided",
    DIVIDED_BY_N: "mean of means, divided by the window's N",
    BY_FULL_N: "right weights, divided by the configured N",
}
SCALE_TOLERANCE = 1e-9  # relative, of the scale of a float64 gradient against N
EXACT = 1e-9  # relative, of float64 update norms at the same weights
# Allowed factor between the first update at N and at N = 1. A single micro-batch may have a small gradient, and under Adam more
# samples reach more weights; under SGD an undivided update exceeds it from N = 4 on.
GROWTH = 2.0


def _accumulated(arms: DataFrame) -> DataFrame:
    return arms.query("arm == 'accumulated'")


@claim(
    "A3",
    CONDITIONAL,
    "Of float64 gradients: confirmed when sums of summed and of mean losses are both the full batch's within "
    f"{ALGEBRA_GATE:.0e}, conditional when the former are and the latter are N times it, refuted when neither is.",
)
def sum_of_gradients(results: Results) -> ClaimResult:
    """A3: tests whether sums of the window's summed losses, and sums of mean losses, give the full batch's gradient."""
    arms = results.arms
    summed, means = _accumulated(arms), arms.query("arm == @UNDIVIDED and not unequal_terms and short_windows == 0")
    takes("It takes sums of summed losses, and of mean losses over equal micro-batches.", summed, means)
    exact = summed["gradient_error"] <= ALGEBRA_GATE
    off = (means["scale"] / means["accumulation_steps"] - 1).abs()
    times_n, as_it_is = (off <= SCALE_TOLERANCE).all(), (means["gradient_error"] <= ALGEBRA_GATE).all()
    if exact.any() and not (exact.all() and (as_it_is or times_n)):
        return undecided("Some sums are the full batch's gradient and others are not.", len(summed) + len(means))
    return ClaimResult(
        verdict=REFUTED if not exact.any() else CONFIRMED if as_it_is else CONDITIONAL,
        condition="for losses summed over the window's terms; of mean losses the sum is N times it",
        measured=summed["gradient_error"].max(),
        threshold=f"≤ {ALGEBRA_GATE:.0e}; of mean losses |scale / N - 1| ≤ {SCALE_TOLERANCE:.0e}",
        n=len(summed) + len(means),
        explanation=f"{counted(exact)} sums over the window's terms are the full batch's gradient, in "
        f"float64. The sum of mean losses is N times it in {counted(off <= SCALE_TOLERANCE)} arms "
        f"(largest deviation from N: {number(off.max())}).",
    )


@claim(
    "A4",
    REFUTED,
    "Refuted when every undivided arm is different, for that cause, and its gradient is N times the full batch's.",
)
def undivided_loop(results: Results) -> ClaimResult:
    """A4: tests whether the sum of mean losses gives N times the gradient, under every optimizer."""
    arms = results.arms[~results.arms["unequal_terms"]]
    wrong, right = arms.query("arm == @UNDIVIDED"), _accumulated(arms)
    if wrong.empty or right["verdict"].ne("equivalent").any():
        return undecided("It takes equal micro-batches, with correct arms that are equivalent.", len(wrong))
    off = (wrong["scale"] / wrong["accumulation_steps"] - 1).abs().max()
    parted = wrong["verdict"].eq("different") & wrong["cause"].eq(UNDIVIDED)
    same = wrong["verdict"].eq("equivalent")
    few = wrong[wrong["accumulation_steps"] == wrong["accumulation_steps"].min()]
    hidden = few.groupby("optimizer")["final_distance"].median()
    moved = ", ".join(f"{number(hidden[name])} under {name}" for name in sorted(hidden.index, key=tables.place_of))
    return ClaimResult(
        verdict=REFUTED if parted.all() and off <= SCALE_TOLERANCE else CONFIRMED if same.all() else CONDITIONAL,
        condition=f"different for another cause in {counted(~parted)} arms",
        measured=off,
        threshold=f"|scale / N - 1| ≤ {SCALE_TOLERANCE:.0e}",
        n=len(wrong),
        explanation=f"Without the division the gradient is N times the full batch's in {counted(parted)} "
        f"arms. At N = {few['accumulation_steps'].min()} the weights end off by {moved} times the way of the full batch (medians "
        f"after {few['steps'].max()} steps): Adam hides it.",
    )


@claim(
    "A9",
    CONDITIONAL,
    "Conditional when dividing by N is equivalent with equal weights in full windows, and different otherwise.",
)
def divided_by_n(results: Results) -> ClaimResult:
    """A9: tests division by N with equal weights in full windows, with unequal weights, and in short windows."""
    arms = results.arms
    by_n, short = arms.query("arm == @DIVIDED_BY_N"), arms.query("arm == @BY_FULL_N and short_windows > 0")
    even = by_n.query("not unequal_terms and short_windows == 0")
    uneven = pd.concat([by_n[by_n["unequal_terms"]], short])
    if even.empty or short.empty or not by_n["unequal_terms"].any():
        return undecided("It takes equal weights in full windows, unequal weights, and short windows.", len(even) + len(uneven))
    if _accumulated(arms)["verdict"].ne("equivalent").any():
        return undecided("A correct arm is not equivalent, so that nothing can be said of the others.", len(even) + len(uneven))
    same, parted = even["verdict"].eq("equivalent"), uneven["verdict"].eq("different")
    least = uneven["gradient_error"]
    return ClaimResult(
        verdict=REFUTED if not same.all() else CONDITIONAL if parted.any() else CONFIRMED,
        condition="with equal weights in full windows",
        measured=least.min(),
        threshold=f"> {ALGEBRA_GATE:.0e} with unequal weights or short windows, ≤ with neither",
        n=len(even) + len(uneven),
        explanation=f"Equal weights and full windows: {counted(same)} arms are equivalent. Text, class "
        f"weights, ignored labels or a short window: {counted(parted)} arms are not, with gradients off by "
        f"{span(least)}.",
    )


@claim(
    "A10",
    CONDITIONAL,
    "Conditional when the loop misses steps and samples wherever an epoch has a remainder, and nothing where it has "
    "none, as in an endless stream; confirmed when it never misses any; refuted when only some remainders cost any.",
)
def loop_over_the_loader(results: Results) -> ClaimResult:
    """A10: counts steps missed and samples leaked or dropped where the epoch does not end with a window."""
    rows = results.study("epoch_tail")
    tails, none = rows.query("tail_samples > 0"), rows.query("tail_samples == 0")
    takes("It takes an epoch with a remainder and one without.", tails, none, n=len(rows))
    written, whole = tails.query("arm == 'as_written'"), tails.query("arm == 'complete'")
    lost = (written["steps"] < written["windows"]) & (written["leaked_samples"] + written["unused_samples"] > 0)
    mended = (whole["gradient_error"] <= ALGEBRA_GATE) & (whole["steps"] == whole["windows"]) & (whole["unused_samples"] == 0)
    if not mended.all() or (none["gradient_error"] > ALGEBRA_GATE).any():
        return undecided("The complete loop, or one over an epoch without remainder, is not exact.", len(rows))
    one = written.iloc[0]
    return ClaimResult(
        verdict=CONDITIONAL if lost.all() else CONFIRMED if not lost.any() else REFUTED,
        condition="where no epoch ends inside a window: S3's endless stream, not S0's and S1's epochs",
        measured=written["gradient_error"].median(),
        threshold=f"≤ {ALGEBRA_GATE:.0e}",
        n=len(written),
        explanation=f"Over two epochs with B = {one['effective_batch']}, N = {one['accumulation_steps']:.0f} it takes "
        f"{one['steps']:.0f} of {one['windows']:.0f} steps; {one['leaked_samples']:.0f} samples leak into the next epoch's first "
        f"step and {one['unused_samples']:.0f} never count. Where the windows divide the epoch it misses nothing "
        f"({len(none)} trainings).",
    )


@claim(
    "A16",
    CONDITIONAL,
    "Of the first update and the mean of the first steps: confirmed when the divided one grows more than "
    f"{GROWTH:g}-fold with N, conditional when only the undivided one does (N times, under SGD), refuted when neither does.",
)
def update_over_n(results: Results) -> ClaimResult:
    """A16: compares updates over N at a fixed micro-batch, divided and undivided: the first, and the mean of the first steps."""
    rows = results.study("update_size")
    keys, updates = ["trial", "optimizer", "accumulation_steps", "arm"], ["first_update", "mean_update"]
    wide = (
        rows.set_index(keys)[updates].unstack().stack(0).rename_axis([*keys[:3], "of"]).reset_index()
    )  # a row for either update
    one = wide.query("accumulation_steps == 1").set_index(["trial", "of"])["accumulated"]
    wide = wide.query("accumulation_steps > 1")
    wide = wide.assign(
        divided=wide["accumulated"] / one.loc[pd.MultiIndex.from_frame(wide[["trial", "of"]])].to_numpy(),
        undivided=wide[UNDIVIDED] / wide["accumulated"],
    )
    first = wide.query("of == 'first_update'")
    plain, adam = wide.query("optimizer in ['sgd', 'momentum']"), first.query("optimizer == 'adam'")
    takes("It takes SGD and Adam.", plain, adam, n=len(first))
    divided, undivided, hidden = wide["divided"], plain["undivided"], adam["undivided"] - 1
    times_n = (plain["undivided"] / plain["accumulation_steps"] - 1)[plain["of"] == "first_update"]
    most = first["accumulation_steps"].max()
    return ClaimResult(
        verdict=CONFIRMED if (divided > GROWTH).any() else CONDITIONAL if (times_n.abs() <= EXACT).all() else REFUTED,
        condition="without the division by N, under an optimizer whose steps keep the scale (SGD, momentum)",
        measured=divided.max(),
        threshold=f"≤ {GROWTH:g} times the update of one micro-batch, up to N = {most}",
        n=len(first),
        explanation="Divided, first update and mean over the first steps are "
        f"{span(divided)} times those of one micro-batch, whatever N. Undivided the first is N times the divided "
        f"one under SGD, the mean up to {number(undivided.max())} times it; under Adam the first is the same within "
        f"{number(hidden.abs().max())}. Whether training becomes unstable is not tested.",
    )


def _when_n_is_right(material: Material) -> Section:
    """The verdicts of each way to divide, by loss and kind of window."""
    arms = material.arms[material.arms["arm"].isin(["accumulated", *FAULTS])]
    needed(arms)
    head = "loss | windows | the loss is divided | arms | verdicts | gradient error in float64"
    caption = (
        "The mean of means is right for equal weights in full windows, dividing by the configured N in full windows: there both "
        "equal the division by the window's weights. Arms differ in optimizer, N and seed."
    )
    arms = arms.assign(short=arms["short_windows"] > 0)
    columns = (
        ("workload", _words), ("short", {True: "with a short one", False: "all full"}.get),
        ("arm", lambda arm: FAULTS.get(arm, "divided by the window's weights")), "trial n",
        lambda own: ", ".join(f"{count} {verdict}" for verdict, count in tables.verdict_counts(own).items()),
        "gradient_error span",
    )  # fmt: skip
    return section("When is 1/N the right divisor?", table_by(arms, "workload short arm", head, columns, caption))


def _words(workload: str) -> str:
    kinds = {"class": "class weights 1 to 10", "ignored": "a third of the labels ignored", "text": "characters of ragged lines"}
    return kinds.get(workload.partition("_")[0], "equal weights")


def _end_of_an_epoch(material: Material) -> Section:
    """What each loop does with the last micro-batches of an epoch."""
    rows = material.study("epoch_tail")
    names = {
        "as_written": "as tutorials write it",
        "cleared": "gradients cleared at the epoch's start",
        "stepped": "steps at the last micro-batch, divides by N",
        "complete": "steps at the last micro-batch, divides by the window",
    }
    head = "B | remainder | loop | steps taken | leaked into the next epoch | never used | worst gradient error"
    caption = (
        f"Two epochs of 1,500 samples; medians over {rows['trial'].nunique()} trials. Each step's gradient is compared with the "
        "mean over the samples of its own window. Where B divides the epoch the four loops are the same: a divisible data set "
        "hides all of this. Clearing at the epoch's start makes every step right, but leaves samples out in every epoch."
    )
    columns = (
        "effective_batch", "tail_samples", ("arm", names.get),
        lambda own: share(int(own["steps"].median()), int(own["windows"].median())), ("leaked_samples median", "{:.0f}".format),
        ("unused_samples median", "{:.0f}".format), "gradient_error median",
    )  # fmt: skip
    by = "effective_batch tail_samples arm"
    return section("What becomes of the remainder", table_by(rows, by, head, columns, caption))


def _figure_update_size(rows: DataFrame) -> Figure:
    """||theta_1 - theta_0|| over N, relative to N = 1 of the same trial, beside N itself; a panel per optimizer."""
    start = rows.query("accumulation_steps == 1 and arm == 'accumulated'").set_index("trial")["first_update"]
    rows = rows.assign(relative=rows["first_update"] / rows["trial"].map(start))
    own = rows.query("arm == 'accumulated'")
    rows = pd.concat([rows, own.assign(arm="n", relative=own["accumulation_steps"])])
    names = {"accumulated": "divided by N", UNDIVIDED: "undivided", "n": "N times"}.get
    shown = {name: lines(own, "arm", "accumulation_steps", "relative", names) for name, own in by_optimizer(rows).items()}
    return curves(shown, "N, micro-batches of one size", "first update / that of N = 1")


def update_size(material: Material) -> Section:
    """The size of the first update over N, divided and undivided.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = material.study("update_size")
    picture = Picture(
        "update-size",
        _figure_update_size(rows),
        "Norm of the first update over N for each optimizer, divided and undivided, relative to one micro-batch.",
        f"Micro-batches of {rows['micro_batch'].iloc[0]:.0f} samples, so that B = N·b grows with N; from the same weights, "
        f"{rows['trial'].nunique()} trials. A divided update of SGD shrinks, as the noise of its gradient averages out. An "
        "undivided one is N times as large under SGD, and the same under Adam, whose steps do not depend on the scale.",
    )
    text = (
        "“Too many micro-batches make the update disproportionately large” describes a loop that forgot the division, under an "
        "optimizer that is not scale-free. It is no reason to limit N."
    )
    return section("The size of an update", text, picture)


def _what_is_the_loss_divided_by(results: Results) -> Advice | None:
    """Planted means of means, beside correct arms, wherever they were run."""
    arms = results.arms
    wrong = arms[(arms["arm"] == Cause.mean_of_means) & (arms["verdict"] == "different")]
    twice = arms[(arms["arm"] == Cause.loss_not_divided) & (arms["verdict"] == "different")]
    if wrong.empty and twice.empty:
        return None
    sizes = []
    if len(wrong):
        sizes.append(f"means of micro-batch means: gradient off by {spread(wrong['algebra_error'])} ({len(wrong)} runs)")
    if len(twice):
        sizes.append(f"not divided: off by {spread(twice['algebra_error'])} ({len(twice)} runs)")
    return Advice(
        "What must the loss be divided by?",
        "By the loss terms (tokens, rows) of the whole window",
        "; ".join(sizes).capitalize(),
        "Sum the loss of each micro-batch and divide by the window's terms, counted before its first backward. Dividing means "
        "by N is the same only where all micro-batches hold equally many terms.",
        "normalisation_of_loss",
    )


EXPERIMENT = Experiment(
    title="By what is the loss divided?",
    question="When is dividing the mean loss by N the full batch's loss, and what becomes of the last micro-batches of an epoch?",
    prediction="Dividing by N is exact for equal weights in full windows, and wrong for ragged text, class weights, ignored "
    "labels and short windows; not dividing multiplies the gradient by N. The tutorial's loop loses steps and samples wherever "
    "N·b does not divide the epoch. A divided update does not grow with N.",
    rule=f"Judged arms decide: the correct arm has to be equivalent (gradients within {ALGEBRA_GATE:.0e} in float64) and the "
    "faulty one different. Samples and steps of the loop are counted; its gradients are compared with a float64 referee's.",
    claims=(sum_of_gradients, undivided_loop, divided_by_n, loop_over_the_loader, update_over_n),
    advice=_what_is_the_loss_divided_by,
    sections=(_when_n_is_right, _end_of_an_epoch, update_size),
)
