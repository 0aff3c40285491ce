"""In-batch negatives: the tables of `experiments/contrastive.py`, its figures and its parts of the page."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    DASHED,
    INK,
    Interval,
    Material,
    Picture,
    Section,
    curves,
    estimated,
    lines,
    log_axis,
    mean_curve,
    median_curve,
    needed,
    number,
    section,
    statistics,
    table_by,
)
from accumulation_harness.config import TUNING_SEEDS
from accumulation_harness.experiments.shared.tuning import LONGEST, at_tuned_rate, longest

EXACT, TRAINED, WEIGHED = "negatives", "retrieval", "method_memory"
POINTS = 100.0
WORDS = {
    "full": "full batch",
    "small": "small batch: a step for every b",
    "accumulated": "accumulated",
    "permuted": "full batch, rows shuffled (control)",
    "grad_cache": "GradCache",
    "grad_cache_other_draws": "GradCache, other masks in its second forward (wrong)",
    "temperature_repeated": "GradCache by parts, temperature counted N times (wrong)",
    "dual_bank": "two banks (ContAccum)",
    "passage_bank": "one bank, of passages",
    "momentum_bank": "two banks, momentum encoder (as MoCo)",
}
MB, PEAK = 1e6, "bytes at the peak of a step, MB"
KB = (1e3).__rtruediv__


def words(arm: str) -> str:
    """A method as the page calls it.

    Args:
        arm: Name of an arm.

    Returns:
        A phrase.
    """
    kind, _, size = arm.partition("@")
    pairs, _, since = size.partition("+")
    return WORDS.get(kind, kind) + (f", {pairs} pairs" if pairs else "") + (f", from window {since} on" if since else "")


def decided(rows: DataFrame) -> DataFrame:
    """Choose the rows of the deciding seeds, each method and N at the learning rate that the tuning seeds rank highest.

    Where there is one learning rate alone, nothing is to be chosen; where there are several and no tuning seeds, nothing is
    left. Of several lengths in one store the longest trainings count.

    Args:
        rows: Those of the study `retrieval`.

    Returns:
        The rows. `interior`: whether the rate lies inside those tried. `slowness`: seconds of a window over the full batch's,
        the median of the trials that train both: others ran at other times.
    """
    rows = longest(rows, ["arm", "accumulation_steps"])
    full = rows.query("arm == 'full'").groupby("trial")["seconds"].first()
    beside = rows["seconds"] / rows["trial"].map(full)
    slowness = beside.groupby([rows["arm"], rows["accumulation_steps"]]).transform("median")
    rows = rows.assign(slowness=slowness, loss=-rows["reciprocal_rank"])
    if rows["lr"].nunique() == 1:
        return rows[rows["seed"] < TUNING_SEEDS].assign(interior=True)
    return at_tuned_rate(rows, ["arm", "accumulation_steps"], "loss")


Method = tuple[str, int]  # its arm, and N


def difference(rows: DataFrame, first: Method, second: Method) -> tuple[Interval, list[float]]:
    """Mean reciprocal rank of the first method less the second's, in points, with its interval; and the differences by seed.

    Args:
        rows: Trainings.
        first: Arm and N.
        second: Arm and N.

    Returns:
        Interval in points of 100, and one difference for each seed.
    """
    ranks = rows.pivot_table(index="seed", columns=["arm", "accumulation_steps"], values="reciprocal_rank")
    a, b = ranks.reindex(columns=[first, second]).to_numpy().T
    apart = POINTS * (a - b)
    known: list[float] = apart[np.isfinite(apart)].tolist()
    return statistics.mean_interval(known), known


def _figure_gradients(rows: DataFrame) -> Figure:
    """Distance of the gradient to the full batch's over N, and the reported loss; a line per method."""
    off, loss = (lines(rows, "arm", "accumulation_steps", name, words) for name in ("gradient_error", "loss"))
    full = median_curve(rows, "accumulation_steps", "full_loss", color=INK, linestyle=DASHED, label="the full batch's")
    panels = {"gradient off the full batch's": off, "reported loss, nats": [*loss, full]}
    figure = curves(panels, "accumulation steps N", "", axes=("steps", "linear"), sharey=False)
    log_axis(figure.axes[0], "y")
    return figure


def _figure_bytes(rows: DataFrame) -> Figure:
    """Mean reciprocal rank with its interval against bytes of a step and against the time of a window; a row per N."""

    def cell(own: DataFrame) -> dict[str, float]:
        rank = statistics.mean_interval((POINTS * own.groupby("seed")["reciprocal_rank"].mean()).tolist())
        middle = own[["total_bytes", "slowness"]].median()
        return {"mean": rank.estimate, "low": rank.low, "high": rank.high, **middle}

    cells = tables.cells(rows.query("arm != 'permuted'"), ["arm", "accumulation_steps"], cell)
    cells["total_bytes"] /= MB
    titles = {"total_bytes": "memory of a step, MB", "slowness": "time of a window over the full batch's"}
    panels = {
        f"N = {num}: over the {title}": lines(at, "arm", column, names=words, of=mean_curve, linestyle="")
        for num in sorted({*cells["accumulation_steps"]} - {1}) or [1]
        for at in [cells[cells["accumulation_steps"].isin([1, num])]]
        for column, title in titles.items()
    }
    y = "mean reciprocal rank, %"
    return curves(panels, "", y, axes=("linear", "linear"), xlim=(0, None))


def gradients_section(material: Material) -> Section:
    """How far each method's gradient is from the full batch's, over N.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = material.study(EXACT, ["oracle_error"])
    plain = rows.query("dropout == 0")
    picture = Picture(
        "contrastive-gradients",
        _figure_gradients(plain.query("contrast == 'symmetric'")),
        "Relative error of the gradient, and the reported loss, over N for each method",
        "Left: distance of the gradient to the full batch's at the same weights, in float64, medians over probes and trials; "
        "what is exact lies at the bottom. Right: the loss that each method reports, whose bound is log b within "
        "micro-batches.",
    )
    head = (
        "method | loss | dropout | N | gradient off, least | most | 1 - cosine, median | temperature's gradient, times | "
        "oracle off, most | forwards"
    )
    caption = (
        "Probes along a training on the full batch, at its weights. The oracle is one forward of the whole window, with a "
        "table of all scores of which each row may see what the method lets it see; a dash where there is none. The "
        "temperature's gradient over the full batch's: 1 is right."
    )
    columns = (
        ("arm", words), "contrast", ("dropout", "{:g}".format), "accumulation_steps", "gradient_error min", "gradient_error max",
        lambda own: (1 - own["cosine"]).median(), "temperature_ratio median", "oracle_error max", "forwards median",
    )  # fmt: skip
    by = "arm contrast dropout accumulation_steps"
    return section("One gradient", picture, table_by(rows, by, head, columns, caption, folded=True))


def retrieval_section(material: Material) -> Section:
    """Reciprocal rank against bytes and seconds, and the table of all methods.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = decided(material.study(TRAINED))
    needed(rows)
    told = _advice(rows)
    picture = Picture(
        "contrastive-bytes",
        _figure_bytes(rows),
        "Mean reciprocal rank against the bytes of a step, and against the time of a window, a point for each method and b",
        "Mean over seeds and 95% t interval of the reciprocal rank among 1,000 held-out passages, after the same pairs. Left "
        "against the memory of a step (counted), right against the time of a window of B pairs over the full batch's.",
    )
    head = (
        "method | N | b | lr | n | recall@1, % | @5 | @20 | reciprocal rank, % | last quarter added | kB | of these held | "
        "time over the full batch's | forwards | cosine to the full batch | query over passage gradient"
    )
    shares = ["recall_1", "recall_5", "recall_20", "reciprocal_rank", "gain_of_last_quarter"]
    columns = (
        ("arm", words), "accumulation_steps", ("micro_batch", "{:.0f}".format),
        lambda own: number(own["lr"].iloc[0]) + ("" if own["interior"].all() else " (an end)"), "seed nunique",
        *((f"{name} mean", POINTS.__mul__) for name in shares), ("total_bytes median", KB), ("held_bytes median", KB),
        "slowness median", "forwards median",
        "cosine mean", "norm_ratio median",
    )  # fmt: skip
    caption = (
        "Means over seeds. Time: of a window, over the full batch's, the median of the trials that train both. Cosine: of the "
        "gradient with the full batch's at the method's own weights, second half of the training. Held: bytes of "
        "representations, their gradients and banks, beside the graph. An end: the best rate is the smallest or the largest "
        f"that was tried, and another may be better still. {LONGEST}"
    )
    return section("Recall, bytes, time", told, picture, table_by(rows, "arm accumulation_steps", head, columns, caption))


def _advice(rows: DataFrame) -> str:
    """What to use when, from the rows."""
    num = rows["accumulation_steps"].max()
    told = []
    for first, second in (("grad_cache", "accumulated"), ("accumulated", "small")):
        apart, each = difference(rows, (first, num), (second, num))
        told.append(f"{words(first)} less {words(second)}: {estimated(apart)} points, n = {len(each)}")
    middle = rows.query("accumulation_steps == @num").groupby("arm")[["slowness", "total_bytes"]].median()
    cost, memory = middle.reindex(["grad_cache"]).iloc[0] / middle.reindex(["accumulated"]).iloc[0]
    return (
        f"Mean reciprocal rank at N = {num}. {'. '.join(told)}. GradCache is the full batch's computation; beside accumulation "
        f"it takes {number(memory)} times the memory and {number(cost)} times the time. Accumulate plainly where b pairs "
        "hold negatives enough; use GradCache where the full batch's negatives are wanted and a second forward can be paid; a "
        "bank where neither can, and only after measuring how far its representations lag behind the weights."
    )


def _largest_windows(rows: DataFrame, budget: float) -> dict[str, int]:
    """Of each method the largest window B measured whose step stays within `budget` bytes; 0 where none does."""
    fits = rows["window"].where(rows["peak_bytes"] <= budget, 0)
    return {str(arm): int(size) for arm, size in fits.groupby(rows["arm"]).max().items()}


def memory_section(material: Material) -> Section:
    """The bytes that live in a step of each method over B, and the window at which each leaves a given memory.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = material.study(WEIGHED)
    rows, b = rows.query("arm != 'permuted'"), rows["micro_batch"].max()
    full = rows.query("arm == 'full'").groupby("window")["peak_bytes"].median()
    sizes = sorted(full.index)
    middle = sizes[len(sizes) // 2]
    fits = _largest_windows(rows, full[middle])

    def reach(size: int) -> str:
        if not size:
            return "at no B measured"
        return f"to B = {size}, the largest measured" if size == sizes[-1] else f"to B = {size}"

    told = "; ".join(f"{words(arm)} {reach(size)}" for arm, size in sorted(fits.items(), key=lambda one: -one[1]))
    picture = Picture(
        "contrastive-peaks",
        curves({"": lines(rows.assign(peak=rows["peak_bytes"] / MB), "arm", "window", "peak", words)}, "window B", PEAK),
        "Bytes that live at the peak of a step over the window B, a line for each method",
        f"Micro-batches of b = {b} pairs; weights, gradients, optimizer, banks and everything that operations make are counted, "
        "temporaries inside an operation are not. In less memory than its line a method cannot take the window.",
    )
    answer = f"In the memory that the full batch takes at B = {middle} ({number(full[middle] / 1e6)} MB), b = {b}: {told}."
    return section("The memory at which each method stops", answer, picture)
