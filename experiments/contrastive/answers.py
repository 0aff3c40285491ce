"""Is accumulation the large batch where negatives come from the batch, and what is worth its memory instead?"""

from __future__ import annotations

import math
from collections.abc import Callable

from pandas import DataFrame

from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    UNDECIDED,
    Advice,
    ClaimResult,
    Experiment,
    Results,
    claim,
    estimated,
    needed,
    number,
    over_settings,
    span,
    takes,
    undecided,
)
from accumulation_harness.experiments.contrastive import sections as shown
from accumulation_harness.experiments.contrastive.sections import EXACT, TRAINED, decided, difference

APART = 1e-3  # relative error of another gradient: nine decades above the gate
EQUAL = 1.10  # bytes over those of accumulation, up to which a bank is said to have equal memory
MARGIN = 0.5  # points of mean reciprocal rank: half a query in a hundred from the second place to the first
PLATEAU = 1.0  # points that the last quarter of a training may add at most
FEWEST_SEEDS = 5
UNBALANCED = math.log(1.5)  # |log| of the ratio of gradient norms from which on towers are called out of balance


def _of_one_corpus(decide: Callable[[Results], ClaimResult]) -> Callable[[Results], ClaimResult]:
    """The rule, which decides nothing over rows of several corpora: other versions of the libraries have other pairs."""

    def decided_on_one(results: Results) -> ClaimResult:
        rows = results.measurements
        corpora = sorted(set(rows["corpus"])) if "corpus" in rows else []
        if len(corpora) > 1:
            return undecided(f"The trials are of {len(corpora)} corpora ({', '.join(corpora)}): one is to be chosen.", len(rows))
        return decide(results)

    return decided_on_one


@claim(
    "F1c",
    REFUTED,
    f"Refuted when every accumulated gradient is more than {APART:g} off the full batch's and within "
    f"{ALGEBRA_GATE:.0e} of the oracle (scores masked to the micro-batches); confirmed when all are within the gate of the "
    "full batch's.",
)
@_of_one_corpus
def any_loss(results: Results) -> ClaimResult:
    """F1c: compares accumulated gradients of losses with in-batch negatives with the full batch's, and with masked scores."""
    rows = results.study(EXACT, ["oracle_error"]).query("dropout == 0")
    plain = rows.query("arm == 'accumulated'")
    takes("It takes trials of study=negatives.", plain, n=0)
    smallest, oracle = plain["gradient_error"].min(), plain["oracle_error"].max()
    cached = rows.query("arm == 'grad_cache'")["gradient_error"].max()
    over = plain.groupby("accumulation_steps")["gradient_error"].median()
    same = plain["gradient_error"].max() <= ALGEBRA_GATE
    listed = ", ".join(f"{number(value)} at N = {num}" for num, value in over.items())
    return ClaimResult(
        verdict=REFUTED if smallest > APART and oracle <= ALGEBRA_GATE else CONFIRMED if same else CONDITIONAL,
        condition="where the negatives outside the micro-batch hardly count",
        measured=smallest,
        threshold=f"> {APART:g}, oracle ≤ {ALGEBRA_GATE:.0e}",
        n=len(plain),
        explanation=f"Accumulated gradients are off the full batch's by {listed} (medians); scores masked to the micro-batches "
        f"reproduce them to {oracle:.0e}. GradCache, with a second forward, is the full batch to {cached:.0e}.",
    )


@claim(
    "F2c",
    CONDITIONAL,
    f"Banks of at most {EQUAL:g} times accumulation's bytes, each method at the learning rate that other seeds chose, "
    f"at a plateau (the last quarter adds at most {PLATEAU:g} point), {FEWEST_SEEDS} seeds or more. Confirmed when the 95% "
    f"interval of the paired difference of mean reciprocal ranks is above 0 at every N; refuted when below {MARGIN:g} point "
    "at every N; conditional when each N is one of both; else, or with a rate at an end of the grid, undecided.",
)
@_of_one_corpus
def banks_beat_accumulation(results: Results) -> ClaimResult:
    """F2c: compares ContAccum with accumulation at the same b, where its bytes are nearly those of accumulation."""
    every = results.study(TRAINED)
    rows = decided(every)
    takes("It takes trials of study=retrieval, and seeds that choose the learning rate.", rows, n=len(every))
    found = []
    for _, bank in rows[rows["arm"].str.startswith("dual_bank@")].groupby(["accumulation_steps", "arm"]):
        arm, num = bank[["arm", "accumulation_steps"]].iloc[0]
        plain = rows.query("arm == 'accumulated' and accumulation_steps == @num")
        if bank["total_bytes"].median() <= EQUAL * plain["total_bytes"].median():
            apart, each = difference(rows, (arm, num), ("accumulated", num))
            ends = 100 * max(one["gain_of_last_quarter"].mean() for one in (bank, plain))
            found.append((arm, f"N = {num}, {shown.words(arm)}", apart, len(each), ends))
    if not found:
        return undecided(f"No bank has at most {EQUAL:g} times the bytes of accumulation.", len(rows))
    pairs = DataFrame(found, columns=["arm", "name", "apart", "n", "ends"])
    n = pairs["n"].min()
    if n < FEWEST_SEEDS:
        return undecided(f"It takes {FEWEST_SEEDS} seeds, there are {n}.", n)
    if pairs["ends"].max() > PLATEAU:
        return undecided(f"The last quarter of the training added more than {PLATEAU:g} point: no plateau yet.", n)
    better = pairs["apart"].map(lambda one: one.low > 0)
    compared = rows[rows["arm"].isin(["accumulated", *pairs["arm"]])]
    at_end = sorted({shown.words(arm) for arm in compared.loc[~compared["interior"].astype(bool), "arm"]})
    listed = "; ".join(f"{name}: {estimated(apart)}" for name, apart in zip(pairs["name"], pairs["apart"], strict=True))
    edge = f"The best learning rate is at an end of those tried for: {', '.join(at_end)}. " if at_end else ""
    return ClaimResult(
        verdict=UNDECIDED if at_end else over_settings([*better], [one.high < MARGIN for one in pairs["apart"]]),
        condition=f"at {'; '.join(pairs['name'][better])}",
        measured=min(one.estimate for one in pairs["apart"]),
        threshold=f"confirmed > 0, refuted < {MARGIN:g} point, at every N",
        n=n,
        explanation=f"Points of mean reciprocal rank that ContAccum has over accumulation at equal bytes: {listed}. "
        f"{edge}Towers start at random; banks that are used late alone meet towers that hardly move any more.",
    )


@claim(
    "F3c",
    REFUTED,
    "Refuted when no tensor in any bank requires or has a gradient.",
)
@_of_one_corpus
def banks_hold_gradients(results: Results) -> ClaimResult:
    """F3c: looks at what the banks hold."""
    rows = results.study(EXACT, ["held_with_gradient", "bank_entries", "held_numbers_per_pair"]).query("bank_entries > 0")
    takes("It takes trials of study=negatives with a bank that is not empty.", rows, n=0)
    most = rows["held_with_gradient"].max()
    return ClaimResult(
        verdict=REFUTED if most == 0 else CONFIRMED,
        measured=most,
        threshold="0 tensors with a gradient",
        n=len(rows),
        explanation=f"No tensor of a bank requires or has a gradient: it holds up to {rows['held_numbers_per_pair'].max():.0f} "
        "numbers for each past pair, its representations.",
    )


@claim(
    "F4c",
    CONFIRMED,
    "Confirmed when the bytes of a step are below the full batch's in every trial and a window takes longer than "
    "accumulation in most; refuted when no bytes are saved.",
)
@_of_one_corpus
def memory_for_time(results: Results) -> ClaimResult:
    """F4c: compares bytes and seconds of ContAccum with those of the full batch, accumulation and GradCache."""
    rows = results.study(TRAINED)
    # The median window of a bank that is used late is one without it.
    banks = sorted({arm for arm in rows["arm"] if arm.startswith("dual_bank@") and "+" not in arm})
    if not banks:
        return undecided("It takes trials of study=retrieval with dual_bank.")
    beside, sizes = ["total_bytes", "seconds"], " or ".join(bank.partition("@")[2] for bank in banks)
    own = rows[rows["arm"].isin(banks)].sort_values("arm", kind="stable").set_index(["trial", "accumulation_steps"])[beside]
    full = rows.query("arm == 'full'").set_index("trial")["total_bytes"].to_dict()
    shares = {arm: own / rows.query("arm == @arm").set_index(own.index.names)[beside] for arm in ("accumulated", "grad_cache")}
    saves = (own["total_bytes"] / own.index.get_level_values("trial").map(full)).dropna()
    time, cached = (one["seconds"].dropna() for one in shares.values())
    dearer = (saves < 1).all() and (time > 1).mean() > 0.5
    return ClaimResult(
        verdict=REFUTED if (saves >= 1).all() else CONFIRMED if dearer else CONDITIONAL,
        condition="for some sizes of the bank",
        measured=time.median(),
        threshold="bytes below the full batch's in every trial; more seconds than accumulation in most",
        n=len(saves),
        explanation=f"Bytes of a step are {span(saves)} times the full batch's and "
        f"{span(shares['grad_cache']['total_bytes'].dropna())} times GradCache's; a window takes {number(time.median())} times "
        f"as long as accumulation (median, {span(time)}) and {number(cached.median())} times as "
        f"long as GradCache ({span(cached)}), by the size of the bank ({sizes} pairs).",
    )


@claim(
    "F5c",
    CONFIRMED,
    "Confirmed when in every trial the ratio of the towers' gradient norms is nearer to 1 (in |log|) with two banks "
    "than with one of the same size, whose ratio is off by more than 1.5; refuted when in none; else conditional on the "
    "learning rates at which one bank's is that far off in the median.",
)
@_of_one_corpus
def banks_balance(results: Results) -> ClaimResult:
    """F5c: compares the ratio of the towers' gradient norms with one bank and with two of the same size."""
    rows = results.study(TRAINED)
    banks = {arm for arm in rows["arm"] if arm.startswith("passage_bank@")}
    if not banks:
        return undecided("It takes trials of study=retrieval with passage_bank.")
    kinds = {"one": banks, "two": {arm.replace("passage", "dual") for arm in banks}, "none": {"grad_cache"}}
    chosen = {kind: rows[rows["arm"].isin(arms)].set_index(["trial", "accumulation_steps"]) for kind, arms in kinds.items()}
    table = DataFrame({kind: own["norm_ratio"] for kind, own in chosen.items()}).dropna()
    of_trial = chosen["one"]["lr"].reindex(table.index)
    if of_trial.nunique() < 2:
        return undecided("It takes trials at two learning rates with one bank, two banks and none.", len(table))
    far = table.map(lambda ratio: abs(math.log(ratio)))
    nearer = far["two"] < far["one"]
    verdict = CONFIRMED if nearer.all() and (far["one"] > UNBALANCED).all() else CONDITIONAL if nearer.any() else REFUTED
    middle = table.median()
    rates = far["one"].groupby(of_trial).median()
    out = ", ".join(f"{lr:g}" for lr in rates.index[rates > UNBALANCED])
    condition = f"at learning rates of {out}, where one bank is out of balance" if out else "in some trials"
    return ClaimResult(
        verdict=verdict,
        condition=condition,
        measured=middle["two"],
        threshold="|log ratio| of two banks below that of one, which is above log 1.5, in every trial",
        n=len(table),
        explanation=f"Norm of the query tower's gradient over the passage tower's, medians: {number(middle['one'])} with a bank "
        f"of passages, {number(middle['two'])} with two banks, {number(middle['none'])} with none (GradCache, the full batch).",
    )


def _and_with_in_batch_negatives(results: Results) -> Advice:
    """Of the experiment on contrastive losses: gradients over N, beside GradCache's."""
    rows = results.of("contrastive").study("negatives")
    rows = rows.query("dropout == 0")
    plain, cached = (rows.query("arm == @arm") for arm in ("accumulated", "grad_cache"))
    needed(plain, cached)
    over = plain.groupby("accumulation_steps")["gradient_error"].median()
    told = ", ".join(f"{number(float(error))} at N = {num:g}" for num, error in over.items())
    return Advice(
        "And with in-batch negatives (CLIP, retrieval)?",
        "It is another loss: fewer negatives",
        f"Gradient off the large batch's by {told}; GradCache's by at most {number(float(cached['gradient_error'].max()))}",
        "Use GradCache: representations of the whole window first, then a second forward per micro-batch.",
        "contrastive",
    )


EXPERIMENT = Experiment(
    title="What replaces accumulation where the negatives come from the batch?",
    question="With in-batch negatives a micro-batch has another loss. How far off is the accumulated gradient, which methods "
    "are the full batch, and what is each worth at equal memory?",
    prediction="The error of accumulation grows with N and is exactly that of scores masked to the micro-batches. GradCache is "
    "the full batch at two forwards. Banks are a different computation: whether it is a better one depends on how fast "
    "representations age.",
    rule="Gradients are compared in float64 at the same weights. Recall is over 1,000 held-out passages of other modules, "
    "after the same pairs, paired by seed; learning rates are chosen for each method on seeds that do not decide. Bytes are "
    "counted.",
    claims=(any_loss, banks_beat_accumulation, banks_hold_gradients, memory_for_time, banks_balance),
    advice=_and_with_in_batch_negatives,
    sections=(shown.retrieval_section, shown.memory_section, shown.gradients_section),
)
