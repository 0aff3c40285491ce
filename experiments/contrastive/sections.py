"""In-batch negatives: the tables of `experiments/contrastive.py` and its parts of the page."""

from __future__ import annotations

from itertools import combinations

import pandas as pd

from accumulation_harness.analysis.content import Picture, Section, estimated, number, section, table
from accumulation_harness.analysis.question import Material
from accumulation_harness.config import TUNING_SEEDS
from accumulation_harness.experiments.contrastive.figures import figure_bytes, figure_gradients, figure_peaks
from accumulation_harness.experiments.convergence.trainings import DETECTABLE, LONGEST, at_tuned_rate, longest
from accumulation_harness.judge import statistics
from accumulation_harness.judge.gates import ALGEBRA_GATE
from accumulation_harness.judge.resampling import Interval

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
# Kim et al. 2024 (arXiv:2406.12356), from worst to best, as read and not measured here; GradCache and the full batch are one.
PUBLISHED = ("small", "accumulated", "grad_cache", "dual_bank")


def words(arm: str) -> str:
    """A method as the page calls it."""
    kind, _, size = arm.partition("@")
    pairs, _, since = size.partition("+")
    return WORDS.get(kind, kind) + (f", {pairs} pairs" if pairs else "") + (f", from window {since} on" if since else "")


def decided(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the deciding seeds, each method and N at the learning rate that the tuning seeds rank highest.

    `interior`: whether that rate lies inside those tried. `slowness`: seconds of a window over the full batch's, the median of
    the trials that train both: others ran at other times. Where there is one learning rate alone, nothing is to be chosen;
    where there are several and no tuning seeds, nothing is left. Of several lengths in one store the longest trainings count.
    """
    rows = longest(rows, ["arm", "accumulation_steps"])
    full = rows.query("arm == 'full'").groupby("trial")["seconds"].first()
    beside = rows["seconds"] / rows["trial"].map(full)
    slowness = beside.groupby([rows["arm"], rows["accumulation_steps"]]).transform("median")
    rows = rows.assign(slowness=slowness, validation_loss=-rows["reciprocal_rank"])
    if rows["lr"].nunique() == 1:
        return rows[rows["seed"] < TUNING_SEEDS].assign(interior=True)
    return at_tuned_rate(rows, ["arm", "accumulation_steps"])


def by_seed(rows: pd.DataFrame, arm: str, num: int | None, column: str) -> pd.Series:
    """A column of one method by seed; `num`: its N, None for the full batch."""
    own = rows.query("arm == @arm")
    own = own if num is None else own.query("accumulation_steps == @num")
    return own.groupby("seed")[column].mean()


def difference(rows: pd.DataFrame, first: tuple[str, int | None], second: tuple[str, int | None]) -> tuple[Interval, int]:
    """Mean reciprocal rank of the first method less the second's, in points, paired by seed, and the number of pairs."""
    apart = differences(rows, first, second)
    return statistics.mean_interval(apart), len(apart)


def differences(rows: pd.DataFrame, first: tuple[str, int | None], second: tuple[str, int | None]) -> list[float]:
    """By seed."""
    a, b = (by_seed(rows, *one, "reciprocal_rank") for one in (first, second))
    return [value for value in (POINTS * (a - b)).dropna()]


def gradients_section(material: Material) -> Section:
    """How far each method's gradient is from the full batch's, over N."""
    rows = material.results.study(EXACT, ["oracle_error"])
    plain = rows.query("dropout == 0")
    picture = Picture(
        "contrastive-gradients",
        figure_gradients(plain.query("contrast == 'symmetric'"), words),
        "Relative error of the gradient, and the reported loss, over N for each method",
        "Left: distance of the gradient to the full batch's at the same weights, in float64, medians over probes and trials; "
        "what is exact lies at the bottom. Right: the loss that each method reports, whose bound is log b within micro-batches.",
    )
    head = (
        "method | loss | dropout | N | gradient off, least | most | 1 - cosine, median | temperature's gradient, times | "
        "oracle off, most | forwards"
    )
    cells = (
        (words(str(arm)), contrast, f"{dropout:g}", num, own["gradient_error"].min(), own["gradient_error"].max(),
         (1 - own["cosine"]).median(), own["temperature_ratio"].median(), own["oracle_error"].max(), own["forwards"].median())
        for (arm, contrast, dropout, num), own in rows.groupby(["arm", "contrast", "dropout", "accumulation_steps"])
    )  # fmt: skip
    caption = (
        "Probes along a training on the full batch, at its weights. The oracle is one forward of the whole window, with a "
        "table of all scores of which each row may see what the method lets it see; a dash where there is none. The "
        "temperature's gradient over the full batch's: 1 is right."
    )
    return section("One gradient", picture, table(head, cells, caption, folded=True))


def retrieval_section(material: Material) -> Section | None:
    """Reciprocal rank against bytes and seconds, and the table of all methods."""
    rows = decided(material.results.study(TRAINED))
    if rows.empty:
        return None
    picture = Picture(
        "contrastive-bytes",
        figure_bytes(rows, words),
        "Mean reciprocal rank against the bytes of a step, and against the time of a window, a point for each method and b",
        "Mean over seeds and 95% t interval of the reciprocal rank among 1,000 held-out passages, after the same pairs. Left "
        "against the memory of a step (counted), right against the time of a window of B pairs over the full batch's.",
    )
    head = (
        "method | N | b | lr | n | recall@1, % | @5 | @20 | reciprocal rank, % | last quarter added | kB | of these held | "
        "time over the full batch's | forwards | cosine to the full batch | query over passage gradient"
    )
    shares = ["recall_1", "recall_5", "recall_20", "reciprocal_rank", "gain_of_last_quarter"]
    cells = (
        (words(str(arm)), num, f"{own['micro_batch'].iloc[0]:.0f}",
         number(own["lr"].iloc[0]) + ("" if own["interior"].all() else " (an end)"), own["seed"].nunique(),
         *(POINTS * own[shares].mean()), own["total_bytes"].median() / 1e3, own["held_bytes"].median() / 1e3,
         own["slowness"].median(), own["forwards"].median(), own["cosine"].mean(), own["norm_ratio"].median())
        for (arm, num), own in rows.groupby(["arm", "accumulation_steps"])
    )  # fmt: skip
    caption = (
        "Means over seeds. Time: of a window, over the full batch's, the median of the trials that train both. Cosine: of the "
        "gradient with the full batch's at the method's own weights, second half of the training. Held: bytes of "
        "representations, their gradients and banks, beside the graph. An end: the best rate is the smallest or the largest "
        f"that was tried, and another may be better still. {LONGEST}"
    )
    return section("Recall, bytes, time", _advice(rows), picture, table(head, cells, caption))


def _advice(rows: pd.DataFrame) -> str:
    """What to use when, from the rows."""
    num = rows["accumulation_steps"].max()
    told = []
    for first, second in (("grad_cache", "accumulated"), ("accumulated", "small")):
        apart, n = difference(rows, (first, num), (second, num))
        told.append(f"{words(first)} less {words(second)}: {estimated(apart)} points, n = {n}")
    cached, plain = (rows[(rows["arm"] == arm) & (rows["accumulation_steps"] == num)] for arm in ("grad_cache", "accumulated"))
    cost = cached["slowness"].median() / plain["slowness"].median()
    memory = cached["total_bytes"].median() / plain["total_bytes"].median()
    return (
        f"Mean reciprocal rank at N = {num}. {'. '.join(told)}. GradCache is the full batch's computation; beside accumulation "
        f"it takes {number(memory)} times the memory and {number(cost)} times the time. Accumulate plainly where b pairs "
        "hold negatives enough; use GradCache where the full batch's negatives are wanted and a second forward can be paid; a "
        "bank where neither can, and only after measuring how far its representations lag behind the weights."
    )


def largest_windows(rows: pd.DataFrame, budget: float) -> dict[str, int]:
    """Of each method the largest window B measured whose step stays within `budget` bytes; 0 where none does."""
    fits = rows["window"].where(rows["peak_bytes"] <= budget, 0)
    return {str(arm): int(size) for arm, size in fits.groupby(rows["arm"]).max().items()}


def memory_section(material: Material) -> Section:
    """The bytes that live in a step of each method over B, and the window at which each leaves a given memory."""
    rows = material.results.study(WEIGHED)
    rows, b = rows.query("arm != 'permuted'"), rows["micro_batch"].max()
    full = rows.query("arm == 'full'").groupby("window")["peak_bytes"].median()
    sizes = sorted(full.index)
    middle = sizes[len(sizes) // 2]
    fits = largest_windows(rows, full[middle])

    def reach(size: int) -> str:
        if not size:
            return "at no B measured"
        return f"to B = {size}, the largest measured" if size == sizes[-1] else f"to B = {size}"

    told = "; ".join(f"{words(arm)} {reach(size)}" for arm, size in sorted(fits.items(), key=lambda one: -one[1]))
    picture = Picture(
        "contrastive-peaks",
        figure_peaks(rows, words),
        "Bytes that live at the peak of a step over the window B, a line for each method",
        f"Micro-batches of b = {b} pairs; weights, gradients, optimizer, banks and everything that operations make are counted, "
        "temporaries inside an operation are not. In less memory than its line a method cannot take the window.",
    )
    kilobytes = rows.pivot_table(index="arm", columns="window", values="peak_bytes", aggfunc="median") / 1e3
    cells = ((words(str(arm)), *own) for arm, own in kilobytes.iterrows())
    caption = f"kB that live at the peak of a step at each window B, b = {b}."
    answer = f"In the memory that the full batch takes at B = {middle} ({number(full[middle] / 1e6)} MB), b = {b}: {told}."
    return section(
        "The memory at which each method stops",
        answer,
        picture,
        table(" | ".join(["method", *(f"B = {size}" for size in sizes)]), cells, caption),
    )


def order_section(material: Material) -> Section | None:
    """The published order of methods beside the measured one."""
    rows = decided(material.results.study(TRAINED))
    if rows.empty:
        return None
    cells = []
    for num in sorted(set(rows.query("arm == 'grad_cache'")["accumulation_steps"])):
        present = [arm for arm in sorted(set(rows["arm"])) if arm.partition("@")[0] in PUBLISHED]
        ladder = sorted(present, key=lambda arm: PUBLISHED.index(arm.partition("@")[0]))
        pairs = [(a, b) for a, b in combinations(ladder, 2) if a.partition("@")[0] != b.partition("@")[0]]
        for low, high in pairs:
            apart, n = difference(rows, (high, num), (low, num))
            least = statistics.detectable(differences(rows, (high, num), (low, num)))
            verdict = "reproduced" if apart.low > 0 else "reversed" if apart.high < 0 else "not told apart"
            cells.append((f"{words(low)} < {words(high)}", num, n, apart.estimate,
                          f"{number(apart.low)} to {number(apart.high)}", least, verdict))  # fmt: skip
    head = "published order | N | n | points of reciprocal rank apart | 95% interval | detectable | here"
    caption = (
        "The order is that of Kim et al. 2024 (arXiv:2406.12356), which was read and not measured: dense retrievers that start "
        "from a pretrained encoder and move it slowly. Here towers start at random and move fast, so that a bank's "
        f"representations are older, in units of how far the weights have moved. {DETECTABLE}"
    )
    return section("The published order", table(head, cells, caption))


def judged_section(material: Material) -> Section | None:
    """The verdicts of the methods, as of any loop."""
    arms = material.arms
    if arms.empty:
        return None
    cells = (
        (words(str(arm)), num, f"{own['verdict'].eq(usual).sum()} of {len(own)} {usual}",
         ", ".join(sorted(set(own["cause"]) - {""})) or "-", f"{own['explained'].sum()} of {len(own)}",
         own["gradient_error"].max(), own["rounding_ratio"].median())
        for (arm, num), own in arms.groupby(["arm", "accumulation_steps"])
        for usual in own["verdict"].mode()[:1]
    )  # fmt: skip
    head = "method | N | verdict | cause | explained | gradient off in float64, most | rounding over the full batch's"
    caption = (
        f"Losses: {', '.join(sorted(set(arms['workload'])))}. A bank is meant to be another computation, so that `different` is "
        f"what it has to be; its oracle is in the table of gradients. Gate: {ALGEBRA_GATE:.0e}."
    )
    return section("Verdicts of the methods", table(head, cells, caption))
