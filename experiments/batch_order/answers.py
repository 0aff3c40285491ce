"""Do large batches pay early in a training and small ones late, or the reverse?"""

from __future__ import annotations

import pandas as pd
from pandas import DataFrame

from accumulation_harness.analysis.answering import (
    REFUTED,
    ClaimResult,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    claim,
    curves,
    interval,
    lines,
    needed,
    over_settings,
    points,
    power,
    section,
    statistics,
    table_by,
    undecided,
)
from accumulation_harness.experiments.shared.tuning import (
    DETECTABLE,
    FEWEST_SEEDS,
    FEWEST_SETTINGS,
    LEVEL,
    LONGEST,
    Contrast,
    at_tuned_rate,
    contrasts,
    longest,
)

MARGIN = 0.02  # nats of test loss that a benefit has to have
SETTING = ["workload", "norm", "optimizer", "effective_batch", "accumulation_steps"]
LABELS = {
    "large": "large throughout",
    "large_then_small": "large, then small",
    "small_then_large": "small, then large",
    "small": "small throughout",
}


def name(one: Contrast) -> str:
    """The setting in words.

    Args:
        one: A difference between two arms, by seed.

    Returns:
        A phrase.
    """
    workload, norm, optimizer, batch, num = one.key
    return f"{workload} ({norm}), {optimizer}, batches of {batch} and {int(batch) // int(num)}"


def judged(results: Results) -> DataFrame:
    """The rows of the judging seeds, each order at the rate with its lowest validation loss over the tuning seeds.

    Args:
        results: What a store holds.

    Returns:
        Rows of `measurements`, with `interior`: whether the rate is not the largest or smallest that was tried.
    """
    rows = longest(results.study("batch_order"), SETTING)
    return at_tuned_rate(rows.drop_duplicates([*SETTING, "arm", "seed", "lr"]), [*SETTING, "arm"])  # alone, and beside the others


def _orders_apart(rows: DataFrame) -> list[Contrast]:
    """Large-then-small less small-then-large in every setting that has both; below zero where the claim is right."""
    first, second = (rows[rows["arm"] == arm] for arm in ("large_then_small", "small_then_large"))
    return contrasts(first, second, SETTING, ["test_loss"])


def _decisive(found: list[Contrast]) -> list[Contrast]:
    """Those that may decide; none where they are of one setting, which says nothing of another."""
    usable = [one for one in found if one.is_usable]
    return usable if len(usable) >= FEWEST_SETTINGS else []


@claim(
    "C7",
    REFUTED,
    "Confirmed when large-then-small ends with a lower test loss than small-then-large in every setting (paired t test, "
    f"Holm over settings, {LEVEL:g}); refuted when in every setting the one-sided 95% interval excludes that it is lower by "
    f"{MARGIN:g} nats; conditional when each setting is one of both; else undecided. Both at equal samples, each at the rate "
    f"tuned on other seeds, inside the grid, with {FEWEST_SEEDS} judging seeds or more, in two settings or more. It measures "
    "which order ends better, not which batch pays at a point.",
)
def early_large_late_small(results: Results) -> ClaimResult:
    """C7: compares large-then-small with small-then-large at equal samples, at tuned rates, paired by seed."""
    usable = _decisive(_orders_apart(judged(results)))
    if not usable:
        return undecided(f"It takes two settings with {FEWEST_SEEDS} judging seeds, and rates of both orders inside the grid.")
    corrected = statistics.holm([statistics.t_test(one.of()) for one in usable])
    ends = [statistics.mean_interval(one.of(), level=1 - 2 * LEVEL) for one in usable]  # one-sided 95 %
    better = [p < LEVEL and end.estimate < 0 for p, end in zip(corrected, ends, strict=True)]
    shown = "; ".join(f"{name(one)}: {interval(one.of())}, n = {len(one.of())}" for one in usable)
    return ClaimResult(
        verdict=over_settings(better, [end.low > -MARGIN for end in ends]),
        condition="on " + "; ".join(name(one) for b, one in zip(better, usable, strict=True) if b),
        measured=max(end.estimate for end in ends),
        threshold=f"test loss of large-then-small less small-then-large: below 0 by {MARGIN:g} nats or not",
        n=sum(len(one.of()) for one in usable),
        explanation=f"Test loss of large-then-small less small-then-large at equal samples, rates tuned for each: {shown}. "
        f"{power(max((one.of() for one in usable), key=statistics.detectable))}",
    )


def _orders(material: Material) -> Section:
    """Where the four trainings end, beside the small batch throughout, and the advice."""
    rows = judged(material.results)
    needed(rows)
    found = _orders_apart(rows)
    head = (
        "setting | order | n | rate | inside the grid | test loss | less small throughout | detectable | validation loss at half"
    )
    small = rows.query("arm == 'small'").set_index([*SETTING, "seed"])["test_loss"]
    shown = rows.assign(
        arm=pd.Categorical(rows["arm"], [*LABELS], ordered=True),
        less=rows["test_loss"] - small.reindex(pd.MultiIndex.from_frame(rows[[*SETTING, "seed"]])).to_numpy(),
    )
    columns = (
        lambda own: name(Contrast(tuple(own[SETTING].iloc[0]), own)), ("arm", LABELS.get), "seed n", "lr",
        "interior ended", "test_loss mean", lambda own: interval(own["less"].dropna()),
        lambda own: statistics.detectable(own["less"].dropna()), "switch_loss mean",
    )  # fmt: skip
    advice = (
        f"{_finding(found)} {_advice(found)} Small batches take the rate over N, under Adam over sqrt(N): "
        "the one rate that is tuned for an order is that of its large batches. These tasks are small and their trainings short: "
        "the size of the gain does not carry over to large models, where arXiv 2505.23971 measures it."
    )
    caption = f"Means; paired 95% t intervals. {DETECTABLE} {LONGEST}"
    cells = table_by(shown, " ".join([*SETTING, "arm"]), head, columns, caption, observed=True)
    panels = {
        name(Contrast(key, own)): lines(own.assign(place=own["arm"].cat.codes), "arm", "place", "test_loss", LABELS.get, points)
        for key, own in shown.groupby(SETTING)
    }
    picture = Picture(
        "orders",
        curves(panels, "order, as in the legend", "test loss", axes=("linear", "linear"), sharey=False, height=2.2),
        "Test loss of the four orders of batch sizes at equal samples, by seed.",
        "Test loss at equal samples, each order at its tuned rate; a mark is a judging seed.",
    )
    return section("Small first or large first", advice, picture, cells)


def _advice(found: list[Contrast]) -> str:
    """From settings that decide, and only where they agree."""
    ends = [statistics.mean_interval(one.of()) for one in _decisive(found)]
    if ends and all(one.low > 0 for one in ends):
        return "Advice: where the batch changes along a training, begin small, and accumulate more micro-batches later."
    if ends and all(one.high < 0 for one in ends):
        return "Advice: where the batch changes along a training, begin with the large batch."
    return "Advice: none follows from these trainings; try a change of the batch in your own training."


def _finding(found: list[Contrast]) -> str:
    words = []
    for one in found:
        end = statistics.mean_interval(one.of())
        side = "large first is better" if end.high < 0 else "no order is apart from the other"
        side = "small first is better" if end.low > 0 else side
        words.append(f"{name(one)}: {side} (large first less small first: {interval(one.of())}, "
                     f"n = {len(one.of())}).")  # fmt: skip
    return " ".join(words)


EXPERIMENT = Experiment(
    title="Do large batches pay early or late?",
    question="At equal samples, is it better to train with large batches first and small ones then, or the reverse? Does the "
    "batch that pays grow along a training (arXiv 2505.23971)?",
    prediction="Small first is better: noise matters little while the gradient is large, and its average pays late.",
    rule=f"Paired by seed at equal samples, each order at its own tuned rate; a benefit is {MARGIN:g} nats of test loss or more.",
    claims=(early_large_late_small,),
    sections=(_orders,),
)
