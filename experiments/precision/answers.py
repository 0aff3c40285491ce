"""What do the formats of the accumulator and of the forward, and loss scaling, do to an accumulated gradient?"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    DASHED,
    INK,
    REFUTED,
    ROUNDING_GATE,
    UNDECIDED,
    Advice,
    ClaimResult,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    claim,
    counted,
    curves,
    ends,
    formula,
    lines,
    median_curve,
    needed,
    number,
    points,
    section,
    span,
    table_by,
    takes,
    undecided,
)
from accumulation_harness.judge.statistics import holm

SMALL = 2  # samples: the claim speaks of micro-batches of 1 or 2
GROWTH = 2.0  # factor in a 16-bit accumulator's error from the smallest N to the largest; independent roundings give sqrt(N)
SIXTEEN = ("float16", "bfloat16")
MARGIN = 0.01  # of accuracy: one percentage point, three of the 297 held-out images
LEVEL = tables.LEVEL
FEWEST_SEEDS = 3
NOTICEABLE = 10.0  # times the full batch's own rounding: one decimal digit is lost
FLOAT16_ERROR = 0.05  # relative, of one gradient under float16 autocast, in which a rounding can flip a ReLU
HEAD_ROOM = 0.9  # accuracy of the reference: above, a task has little to lose


def errors(results: Results) -> DataFrame:
    """The rows of the study `accumulators` that hold errors.

    Args:
        results: What a store holds.

    Returns:
        The rows.
    """
    rows = results.study("accumulators")
    return rows.query("quantity == 'error'")


def _growth(rows: DataFrame) -> Series[float]:
    """Error at the largest N over that at the smallest N above 1, of each trial and accumulator."""
    split = rows.query("accumulation_steps > 1").sort_values("accumulation_steps")
    ends = split.groupby(["trial", "accumulator"])["arm_error"].agg(["first", "last"])
    return ends["last"] / ends["first"]


def _scaling(results: Results) -> DataFrame:
    """Judge the rows of the study `loss_scaling`.

    In float64, exact means within the gate of L0. In float16 a flipped ReLU can make even the full batch's error large: there
    an error is too large only above both FLOAT16_ERROR and NOTICEABLE times the full batch's.

    Args:
        results: Those of the question `precision`.

    Returns:
        The rows, with `right`: both finite windows are `exact`, the overflowing one skipped `once`.
    """
    own = results.study("loss_scaling")
    exact = (own["steps"] == 1) & (own["steps_after"] == 1)
    for error in ("error", "error_after"):
        of_full = own[error].where(own["arm"] == "full").groupby([own["trial"], own["width"]]).transform("max").fillna(0.0)
        rough = (NOTICEABLE * of_full).clip(lower=FLOAT16_ERROR)
        exact &= own[error] <= rough.where(own["width"] == "float16", ALGEBRA_GATE)
    skipped = (own["steps_when_hit"] == 0) & (own["scale_factor"] == 0.5) & ~own["moved"].astype(bool)
    return own.assign(exact=exact, once=skipped, right=exact & skipped)


# E1 ----------------------------------------------------------------------------------------------------------------------------


@claim(
    "E1",
    CONDITIONAL,
    f"What accumulates grows with N. Confirmed when the error of a float32 sum grows {GROWTH:g}-fold from the "
    f"smallest N to b ≤ {SMALL}, or is above {NOTICEABLE:g} times the full batch's own rounding there; conditional when "
    "that of sums in bfloat16 and float16 alone does; refuted when neither does.",
)
def small_micro_batches(results: Results) -> ClaimResult:
    """E1: compares the error at micro-batches of 1 or 2 with the full batch's own, by accumulator, the forward in float32."""
    every = errors(results)
    rows = every.query("precision == 'float32'")
    small = rows.query("micro_batch <= @SMALL")
    if small.empty or rows["accumulation_steps"].nunique() < 2:
        return undecided("It takes micro-batches of 1 or 2 beside larger ones, with the forward in float32.", len(rows))
    wide, narrow = _growth(rows.query("accumulator == 'float32'")), _growth(rows.query("accumulator in @SIXTEEN"))
    ratio = small.query("accumulator == 'float32'")["ratio"]
    clean = bool((wide < GROWTH).all()) and bool((small.query("accumulator == 'float32'")["high"] <= NOTICEABLE).all())
    dirty = bool((narrow >= GROWTH).all())
    worst = {name: own["arm_error"].max() for name, own in small.groupby("accumulator")}
    realistic = _growth(every.query("precision == 'bfloat16' and accumulator == 'bfloat16'"))
    added = (
        f" With the forward in bfloat16 too, whose own error is larger, they grow {span(realistic)}-fold."
        if len(realistic)
        else ""
    )
    return ClaimResult(
        verdict=CONDITIONAL if clean and dirty else REFUTED if clean else CONFIRMED,
        condition="where the sum is kept in 16 bits",
        measured=wide.max(),
        threshold=f"error at the largest N over that at the smallest above 1: below {GROWTH:g} in float32, above it in 16 bits",
        n=len(small),
        explanation=f"From the smallest N to b ≤ {SMALL} the error of a float32 sum changes "
        f"{span(wide)}-fold, that of sums in 16 bits {span(narrow)}-fold. At b ≤ "
        f"{SMALL} it is at most {number(worst['float32'])} in float32 ({span(ratio)} times "
        f"the full batch's own), {number(worst['float16'])} in float16 and {number(worst['bfloat16'])} in bfloat16.{added}",
    )


# E2 ----------------------------------------------------------------------------------------------------------------------------


@claim(
    "E2",
    CONFIRMED,
    "Confirmed when every accumulated arm has the exact gradient and skips an overflowing window once, and no arm with "
    "a wrong order does both.",
)
def scaling_works(results: Results) -> ClaimResult:
    """E2: tests whether every accumulated arm is as right as the full batch, and every wrong order is not."""
    rows = _scaling(results)
    good, wrong = rows.query("arm in ['full', 'accumulated']"), rows.query("arm not in ['full', 'accumulated']")
    accumulated = good.query("arm == 'accumulated'")
    takes("It takes accumulated arms, and arms in a wrong order beside them.", accumulated, wrong, n=len(rows))
    works, tells = bool(good["right"].all()), not bool(wrong["right"].any())
    exact = accumulated.query("width == 'float64'")
    return ClaimResult(
        verdict=CONFIRMED if works and tells else REFUTED if not accumulated["right"].any() else CONDITIONAL,
        condition="in some arms, or not told from a wrong order",
        measured=max(exact["error"].max(), exact["error_after"].max()),
        threshold=f"error ≤ {ALGEBRA_GATE:.0e} in float64; a window that overflows: no step, scale halved once",
        n=len(rows),
        explanation=f"Unscaled once, clipped then, updated once: {counted(accumulated['right'])} "
        "accumulated arms have the full batch's gradient, and one infinite sample skips the whole window once and halves the "
        f"scale once. {counted(~wrong['right'])} arms in a wrong order fail "
        f"({', '.join(sorted(set(wrong['arm'])))}).",
    )


# E3 ----------------------------------------------------------------------------------------------------------------------------


def _accuracy(results: Results) -> DataFrame:
    """Compare held-out accuracy, paired by seed: 16 bits - float32's full batch, and accumulated - full in one format.

    Args:
        results: Those of the question `precision`.

    Returns:
        `mean`, `low`, `high` (Student t, 95 %), `tost_p` for MARGIN, `detectable` with 80 % power, `n` pairs.
    """
    own = results.study("convergence").query("arm in ['full', 'accumulated']")
    found = []
    for name, trained in own.groupby(own["workload"] + " " + own["model"]):
        pivot = trained.pivot_table(index="seed", columns=["precision", "accumulation_steps"], values="held_out_accuracy")
        for precision, num in ((key[0], int(key[1])) for key in pivot.columns.to_flat_index() if key[0] in SIXTEEN):
            for other in [("float32", 1)] + ([(precision, 1)] if num > 1 else []):
                if other not in pivot:
                    continue
                differences = (pivot[precision, num] - pivot[other]).dropna().tolist()
                label = f"{precision} N={num} - {other[0]} full"
                about = {"task": name, "reference": pivot[other].mean(), "label": label}
                found.append(about | tables.paired_comparison(differences, MARGIN))
    return DataFrame(found)


@claim(
    "E3",
    CONDITIONAL,
    "When in 16 bits the rounding error of accumulated gradients is at most "
    f"{ROUNDING_GATE:g} times the full batch's, and every paired difference of accuracy is within ±{MARGIN:g} (TOST, 5%, "
    f"Holm): confirmed on two tasks or more, one of them with accuracies up to {HEAD_ROOM:g}, conditional on what was "
    "trained with fewer. Refuted when an interval lies beyond the margin, else undecided.",
)
def mixed_precision(results: Results) -> ClaimResult:
    """E3: compares accumulated with full batches in 16 bits, in rounding error (L1) and in accuracy over seeds (L4), by task."""
    rounded, cells = errors(results), _accuracy(results)
    rounded = rounded.query("precision in @SIXTEEN and accumulator == 'float32'")
    if rounded.empty or cells.empty or cells["n"].min() < FEWEST_SEEDS:
        return undecided(f"It takes gradients in 16 bits, and {FEWEST_SEEDS} trainings of each format or more.", len(cells))
    no_rougher = bool((rounded["high"] <= ROUNDING_GATE).all())
    close = bool((Series(holm(cells["tost_p"].tolist())) < LEVEL).all())
    apart = bool(((cells["low"] > MARGIN) | (cells["high"] < -MARGIN)).any())
    farthest = cells.sort_values("mean", key=abs).iloc[-1]
    tasks = cells.groupby("task")["reference"].min()
    general = len(tasks) > 1 and bool((tasks <= HEAD_ROOM).any())
    return ClaimResult(
        verdict=(CONFIRMED if general else CONDITIONAL) if no_rougher and close else REFUTED if apart else UNDECIDED,
        condition=f"on what was trained: {', '.join(tasks.index)}",
        measured=farthest["mean"],
        threshold=f"accuracy within ±{MARGIN:g} (TOST, 5%, Holm), error ratio ≤ {ROUNDING_GATE:g}",
        n=int(cells["n"].sum()),
        explanation="Under autocast the accumulated gradient's error is "
        f"{span(rounded['ratio'])} times the full batch's; {counted(cells['tost_p'] < LEVEL)} "
        f"comparisons of accuracy are within ±{100 * MARGIN:g} point over {cells['n'].min()} seeds (farthest: "
        f"{100 * farthest['mean']:+.2f} points, 95% {100 * farthest['low']:+.2f} to {100 * farthest['high']:+.2f}, "
        f"{farthest['label']}). A difference of {100 * cells['detectable'].max():.2f} points would have been found (80% power).",
    )


# Sections ----------------------------------------------------------------------------------------------------------------------


def _figure_accumulators(rows: Mapping[str, DataFrame]) -> Figure:
    """Relative error of the accumulated gradient over N, a panel per title: points measured, lines from independent roundings."""
    at = "accumulation_steps"
    shown = {
        title: [
            *lines(own, "accumulator", at, "arm_error", "sum in {} (line: independent roundings)".format, points),
            *formula(own, "accumulator", at, "predicted_error"),
            median_curve(own, at, "full_error", color=INK, linestyle=DASHED, label="the large batch's own"),
        ]
        for title, own in rows.items()
    }
    return curves(shown, "accumulation steps N", "relative error of the gradient")


def _accumulator_section(material: Material) -> Section:
    """The error of the sum over N, by the format of the accumulator."""
    rows = errors(material.results).query("precision == 'float32'")
    needed(rows)
    titles = rows["model"].astype(str) + ", B = " + rows["effective_batch"].astype(int).astype(str)
    panels = {title: own for title, own in rows.groupby(titles)}
    over = rows.assign(over=rows["arm_error"] / rows["predicted_error"])
    narrow = over.query("accumulator in @SIXTEEN")
    counted = material.study("accumulators").query("quantity == 'ones'")
    ones = counted.groupby("accumulator")["stops_at"].min()
    stopped = ", ".join(f"{name} at {int(low)}" for name, low in ones.items() if name in SIXTEEN)
    text = (
        "The forward and every micro-batch's gradient are in float32; only the sum is kept in another format: "
        f"{rows['trial'].nunique()} trials of {rows['permutations'].min():.0f} orders of one window. The lines predict the error "
        "from independent roundings of the exact partial sums, without a free parameter: measured over predicted is "
        f"{span(narrow['over'])} in 16 bits. Points above a line show swamping: what "
        f"is added is below half a unit in the sum's last place and is lost. A sum of ones stops growing: {stopped}."
    )
    picture = Picture(
        "accumulators",
        _figure_accumulators(panels),
        "Relative error of the accumulated gradient over the number of accumulation steps for sums in bfloat16, float16 and "
        "float32, with the lines of independent roundings.",
        "Error of the gradient against float64 over N at fixed B, with the forward in float32; at the right end micro-batches "
        "have one sample. Points: trials (medians over the orders); lines: independent roundings; dashed: the full batch's own "
        "error.",
    )
    return section("The accumulator", text, picture)


def _scaling_section(material: Material) -> Section:
    """What each order of loss scaling does to three windows."""
    rows = _scaling(material.results)
    head = "arm | width | exact | error | error after | steps when hit | scale x | right"
    caption = (
        "Three windows, of which the second has one infinite sample. Clipping is active in each. error: the largest relative "
        "distance of the optimizer's gradient to float64's at the same weights. In float64 the scaler's algebra is exact; "
        "float16 is its real use. right: exact, and the second window skipped once, the scale halved once and nothing changed."
    )
    columns = ("arm", "width", "exact counted", "error max", "error_after max", "steps_when_hit names", "scale_factor names",
               "right counted")  # fmt: skip
    return section("Loss scaling over a window", table_by(rows, "arm width", head, columns, caption, sort=False))


def _mixed_section(material: Material) -> Section:
    """Rounding under autocast, accumulated beside full."""
    wide = errors(material.results).query("accumulator == 'float32'")
    head = "forward in | N | trials | error over the full batch's | upper end of its 95% interval, at most"
    caption = (
        "Error of the accumulated gradient over the full batch's, sums in float32, with bootstrap intervals; the gate is "
        f"{ROUNDING_GATE:g}. In 16 bits the forward's rounding is the whole error, and the same for both."
    )
    columns = ("precision", "accumulation_steps span", "trial nunique", "ratio median_span", "high max")
    return section("Mixed precision", table_by(wide, "precision", head, columns, caption))


def _accuracy_section(material: Material) -> Section:
    """Accuracy under autocast, accumulated beside full."""
    cells = _accuracy(material.results)
    head = "trained | compared | n | points of held-out accuracy apart | 95% interval | detectable"
    caption = (
        "Differences paired by seed, mean and 95% interval; detectable: what a paired t test would have found (5%, power 80%). "
        f"The margin is ±{100 * MARGIN:g} point. These are small models on 1,500 images: it does not show that large models "
        "train well in 16 bits."
    )
    columns = ("task", "label", "n", "mean", ends, "detectable")
    points = cells.assign(**100 * cells[["mean", "low", "high", "detectable"]])
    return section("Accuracy in 16 bits", table_by(points, "", head, columns, caption))


def _does_half_precision_hold(results: Results) -> Advice:
    """Of the experiment on equivalence: rounding error over that of the large batch, by precision."""
    arms = results.of("equivalence").arms
    arms = arms.query("arm == 'accumulated' and norm != 'batch' and precision in ['float16', 'bfloat16']")
    needed(arms)
    told = [
        f"{name}: {own['rounding_ratio'].median():.2g} ({own['rounding_ratio'].min():.2g} to {own['rounding_ratio'].max():.2g})"
        for name, own in arms.groupby("precision")
    ]
    same = arms["verdict"] == "equivalent"
    return Advice(
        "Does it hold in float16 or bfloat16?",
        "Yes, with a float32 accumulator" if same.all() else f"In {counted(same)} runs",
        f"Rounding error over that of the large batch, median (range): {'; '.join(told)}",
        "Keep parameters and .grad in float32 (autocast does). With float16: unscale once per window, then clip, then step; "
        "never update the scaler inside a window.",
        "precision",
    )


EXPERIMENT = Experiment(
    title="What do number formats do to an accumulated gradient?",
    question="Do small micro-batches accumulate rounding error, does loss scaling survive accumulation, and does mixed precision "
    "cost accuracy?",
    prediction="Accumulators in float32 gather no error. In 16 bits it grows as independent roundings of the partial sums would, "
    "and faster where additions are swamped. Loss scaling works when gradients are unscaled once and the scale is updated once "
    "per window. Accumulation adds no error to autocast's own.",
    rule="Errors are distances to float64, never between two formats. A sum counts as rough above "
    f"{NOTICEABLE:g} times the full batch's own rounding. Loss scaling has to be exact in float64 and to skip an overflowing "
    f"window once, and each wrong order has to fail. Accuracies have to lie within ±{MARGIN:g} by TOST.",
    margin=MARGIN,
    margin_reason="one point of accuracy, three of the 297 held-out images",
    claims=(small_micro_batches, scaling_works, mixed_precision),
    advice=_does_half_precision_hold,
    sections=(_accumulator_section, _scaling_section, _mixed_section, _accuracy_section),
)
