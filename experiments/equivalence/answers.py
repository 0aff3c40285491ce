"""Are N accumulated micro-batches of b the same computation as one batch of B = N·b?"""

from __future__ import annotations

from pandas import DataFrame

from accumulation_harness.analysis import sections, tables
from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    Advice,
    Answer,
    Cause,
    ClaimResult,
    Experiment,
    Results,
    Ruling,
    claim,
    counted,
    needed,
    not_measured,
    number,
    share,
    takes,
    undecided,
)

UNDIVIDED = Cause.loss_not_divided
GATE = f"≤ {ALGEBRA_GATE:.0e}"
LEAST_SEEDS = 5  # of A6


def answer(arms: DataFrame) -> Answer:
    """Refuted by one judged arm that fell otherwise; held when every arm was judged, with BatchNorm and without.

    Args:
        arms: Judged arms, a row each.

    Returns:
        The answer.
    """
    accumulated = arms.query("arm == 'accumulated'")
    bound = accumulated.query("norm == 'batch' and micro_batch < effective_batch")
    free, null = accumulated.drop(bound.index), arms.query("arm == 'permuted'")
    same, still = (part["verdict"].eq("equivalent") for part in (free, null))
    parted = bound["verdict"].eq("different")
    explained = bound[parted & bound["explained"] & bound["cause"].eq(Cause.batch_statistics)]
    worst = (
        f" (largest float64 difference {free[same]['algebra_error'].max():.0e}, gate {ALGEBRA_GATE:.0e})" if same.any() else ""
    )
    oracle = f"largest oracle error {explained['oracle_error'].max():.0e}" if len(explained) else "no oracle agrees"
    which = "all" if len(explained) == parted.sum() else f"{len(explained)} of them"
    reason = f", {which} explained exactly by batch statistics ({oracle})" if parted.any() else ""
    told = (
        (free, f"{counted(same)} accumulated arms without BatchNorm are equivalent to the full batch{worst}"
               f"{_others(free, 'equivalent')}."),
        (bound, f"{counted(parted)} BatchNorm arms are different{reason}{_others(bound, 'different')}."),
        (null, f"The check on the test itself, a full batch in another order, is called equivalent {counted(still)} times."),
    )  # fmt: skip
    sentences = tuple(sentence for part, sentence in told if len(part))
    fallen = len(free) + len(bound) + len(null) - same.sum() - len(explained) - still.sum()
    left = sum(part["verdict"].eq("inconclusive").sum() for part in (free, bound, null))
    if fallen > left:
        return Answer(sentences, False)
    return Answer(sentences, None if left or free.empty or bound.empty else True)


def _others(arms: DataFrame, usual: str) -> str:
    """The verdicts that are not the usual one, in words."""
    others = tables.verdict_counts(arms).drop(usual, errors="ignore")
    return "".join(f"; {count} {verdict}" for verdict, count in others.items())


# Claims ------------------------------------------------------------------------------------------------------------------------


def _accumulated(results: Results, *, batch_norm: bool) -> DataFrame:
    return results.arms.query(f"arm == 'accumulated' and norm {'==' if batch_norm else '!='} 'batch'")


def _own_algebra(arms: DataFrame) -> DataFrame:
    """The arms whose float64 algebra was run for them: a trial in 16 bits repeats that of its float32 twin."""
    wide = arms.query("precision in ['float64', 'float32']")
    return wide if len(wide) else arms


@claim(
    "A1",
    CONDITIONAL,
    "Conditional when arms without BatchNorm are equivalent and arms with it are not.",
)
def same_update(results: Results) -> ClaimResult:
    """A1: tests whether accumulated arms are equivalent, without BatchNorm and with it."""
    free, bound = _accumulated(results, batch_norm=False), _accumulated(results, batch_norm=True)
    takes("It takes arms with BatchNorm and without.", free, bound)
    same, parted = free["verdict"].eq("equivalent"), bound["verdict"].eq("different")
    return ClaimResult(
        verdict=REFUTED if not same.any() else CONFIRMED if same.all() and not parted.any() else CONDITIONAL,
        condition="without BatchNorm",
        measured=free["algebra_error"].max(),
        threshold=GATE,
        n=len(_own_algebra(free)) + len(_own_algebra(bound)),
        explanation=f"The same without BatchNorm ({counted(same)} arms, largest float64 difference measured "
        f"here), a different computation with it ({counted(parted)} arms). Trials in 16 bits repeat the float64 "
        "algebra of those in float32; n counts it once.",
    )


@claim(
    "A2",
    CONDITIONAL,
    "Refuted when every arm agrees with the full batch within the gate of L0, confirmed when none without BatchNorm "
    "does, conditional when those without BatchNorm do and those with it do not.",
)
def only_approximates(results: Results) -> ClaimResult:
    """A2: tests in which arms accumulation is exact in float64, and in which it only approximates; S1 excepts BatchNorm."""
    free, bound = (_own_algebra(_accumulated(results, batch_norm=kind)) for kind in (False, True))
    bound = bound.query("micro_batch < effective_batch")
    takes("It takes arms with BatchNorm and without.", free, bound)
    exact, off = free["algebra_error"] <= ALGEBRA_GATE, bound["algebra_error"] > ALGEBRA_GATE
    everywhere = exact.all() and not off.any()
    return ClaimResult(
        verdict=REFUTED if everywhere else CONDITIONAL if exact.any() else CONFIRMED,
        condition="with BatchNorm; without it, accumulation is exact",
        measured=free["algebra_error"].max(),
        threshold=GATE,
        n=len(free) + len(bound),
        explanation=f"{counted(exact)} arms without BatchNorm agree with the full batch in float64; what is "
        f"left in lower precision is rounding, no more than the full batch's own. {counted(off)} arms with "
        "BatchNorm do not.",
    )


NO_RELATION = not_measured(
    "A5",
    Ruling.wrong_by_arithmetic,
    "Wrong by arithmetic: B = N·b is a definition, by which trials are configured; nothing is measured.",
    "B = N·b binds them: of the batch, the micro-batch and the number of steps, two fix the third. That is a "
    "definition, by which every trial here is configured, and not measured.",
    threshold="B = N·b",
)


@claim(
    "A6",
    CONDITIONAL,
    f"B = 8 as 4 x 2 under SGD, {LEAST_SEEDS} seeds: divided and undivided, without BatchNorm and with it. Confirmed "
    "when all four are equivalent, conditional when only the divided one without BatchNorm is and the others are different, "
    "refuted when all are different.",
)
def eight_and_two(results: Results) -> ClaimResult:
    """A6: tests B = 8 as 4 x 2 under SGD, with the loss divided and undivided, without BatchNorm and with it."""
    arms = results.arms.query(
        "arm in ['accumulated', @UNDIVIDED] and norm in ['none', 'batch'] and effective_batch == 8 and accumulation_steps == 4 "
        "and optimizer == 'sgd'"
    )
    cells = {(arm, norm): own["verdict"] for (arm, norm), own in arms.groupby(["arm", "norm"])}
    if len(cells) < 4 or min(map(len, cells.values())) < LEAST_SEEDS:
        return undecided(f"It takes 8 as 4 x 2, divided and not, with BatchNorm and not, over {LEAST_SEEDS} seeds.", len(arms))
    same, apart = ({cell: own.eq(verdict).all() for cell, own in cells.items()} for verdict in ("equivalent", "different"))
    right = ("accumulated", "none")
    rest_apart = all(apart[cell] for cell in cells if cell != right)
    if not (all(same.values()) or (rest_apart and (same[right] or apart[right]))):
        return undecided("A cell has arms that are equivalent and others that are not.", len(arms))
    words = ", ".join(
        f"{'divided' if arm == 'accumulated' else 'undivided'}, norm {norm}: {counted(own.eq('equivalent'))}"
        for (arm, norm), own in cells.items()
    )
    return ClaimResult(
        verdict=CONFIRMED if all(same.values()) else CONDITIONAL if same[right] else REFUTED,
        condition="with the mean loss divided by N, and without BatchNorm",
        measured=arms.query("arm == 'accumulated' and norm == 'none'")["algebra_error"].max(),
        threshold=GATE,
        n=len(arms),
        explanation=f"S2 writes the update as a plain sum, which is the undivided one. Equivalent under SGD: {words} arms.",
    )


def _may_i_accumulate(results: Results) -> Advice:
    """Of the experiment on equivalence: arms without batch statistics, and that those with them are another matter."""
    arms = results.of("equivalence").arms
    free = arms.query("arm == 'accumulated' and norm != 'batch'")
    needed(free)
    same = free.query("verdict == 'equivalent'")
    bound = arms.query("arm == 'accumulated' and norm == 'batch' and micro_batch < effective_batch")
    parted = bound.query("verdict == 'different'")
    least, most = parted["gradient_error"].min(), parted["gradient_error"].max()
    return Advice(
        "May I accumulate instead of a large batch?",
        "Yes, if no layer and no loss mixes samples, as BatchNorm does" if len(same) == len(free) else "Not in every case",
        f"{share(len(same), len(free))} runs without BatchNorm are the same computation; their gradients differ by at most "
        f"{number(same['algebra_error'].max())} in double precision"
        + (f"; {share(len(parted), len(bound))} runs with BatchNorm are a different one" if len(bound) else "")
        + (
            f", by {least:.0%} to {most:.0%} of the gradient's norm: it normalises each micro-batch by itself"
            if len(parted)
            else ""
        ),
        "Accumulate, and divide the loss by the loss terms (rows, tokens) of the whole window. When you check your own loop, "
        "compare gradients and not losses." + (" With BatchNorm, use GroupNorm or freeze its statistics." if len(parted) else ""),
        "equivalence",
    )


EXPERIMENT = Experiment(
    title="Is accumulation the same computation as the large batch?",
    question="Are N accumulated micro-batches of b samples the same computation as one batch of B = N·b? And where not, why?",
    prediction="Every accumulated arm without BatchNorm is equivalent, in every optimizer and precision, and for ragged text. "
    "Every BatchNorm arm is different, and a full batch that normalises in chunks of b (Ghost BatchNorm) reproduces it exactly.",
    rule="The verdict of every single arm decides: float64 algebra and counters, then rounding in the target precision. One arm "
    "that falls otherwise refutes the prediction, one that cannot be judged leaves it open. "
    "Convergence over seeds is reported beside it and certifies nothing alone.",
    claims=(same_update, only_approximates, NO_RELATION, eight_and_two),
    answer=answer,
    advice=_may_i_accumulate,
    sections=(
        sections.verdict_matrix,
        sections.algebra,
        sections.gradient_error,
        sections.losses,
        sections.distances,
        sections.batch_norm,
        sections.convergence,
        sections.unjudged,
        sections.vacuity,
    ),
)
