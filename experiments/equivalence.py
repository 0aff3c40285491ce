"""Are N accumulated micro-batches of b the same computation as one batch of B = N·b?"""

from __future__ import annotations

import pandas as pd

from analysis import sections, tables
from analysis.load import Results
from analysis.question import Answer, Claim, ClaimResult, Experiment, Ruling, undecided
from harness.judge.cause import Cause
from harness.judge.gates import ALGEBRA_GATE

BATCH_NORM = "batch"
UNDIVIDED = Cause.loss_not_divided
GATE = f"≤ {ALGEBRA_GATE:.0e}"
SCALE_TOLERANCE = 1e-2  # float16 rounds a gradient to about 1e-3


def answer(arms: pd.DataFrame) -> Answer:
    """Refuted by one judged arm that fell otherwise; held when every arm was judged, with BatchNorm and without."""
    accumulated = arms[arms["arm"] == "accumulated"]
    sees_chunks = (accumulated["norm"] == BATCH_NORM) & (accumulated["micro_batch"] < accumulated["effective_batch"])
    free, bound = accumulated[~sees_chunks], accumulated[sees_chunks]
    null = arms[arms["arm"] == "permuted"]
    sentences = tuple(filter(None, (_without(free), _with(bound), _null(null))))
    by_batch_statistics = bound["verdict"].eq("different") & bound["explained"] & bound["cause"].eq(Cause.batch_statistics)
    as_predicted = pd.concat([free["verdict"].eq("equivalent"), by_batch_statistics, null["verdict"].eq("equivalent")])
    open_cases = pd.concat([part["verdict"].eq("inconclusive") for part in (free, bound, null)])
    if not (as_predicted | open_cases).all():
        return Answer(sentences, False)
    return Answer(sentences, None if open_cases.any() or free.empty or bound.empty else True)


def _without(arms: pd.DataFrame) -> str:
    if arms.empty:
        return ""
    good = arms[arms["verdict"] == "equivalent"]
    worst = f" (largest float64 difference {good['algebra_error'].max():.0e}, gate {ALGEBRA_GATE:.0e})" if len(good) else ""
    rest = _others(arms, "equivalent")
    return f"{len(good)} of {len(arms)} accumulated arms without BatchNorm are equivalent to the full batch{worst}{rest}."


def _with(arms: pd.DataFrame) -> str:
    if arms.empty:
        return ""
    different = arms[arms["verdict"] == "different"]
    explained = different[different["explained"] & different["cause"].eq(Cause.batch_statistics)]
    share = "all" if len(explained) == len(different) else f"{len(explained)} of them"
    oracle = f"largest oracle error {explained['oracle_error'].max():.0e}" if len(explained) else "no oracle agrees"
    reason = f", {share} explained exactly by batch statistics ({oracle})" if len(different) else ""
    return f"{len(different)} of {len(arms)} BatchNorm arms are different{reason}{_others(arms, 'different')}."


def _null(arms: pd.DataFrame) -> str:
    if arms.empty:
        return ""
    good = int((arms["verdict"] == "equivalent").sum())
    return f"The check on the test itself, a full batch in another order, is called equivalent {good} of {len(arms)} times."


def _others(arms: pd.DataFrame, usual: str) -> str:
    """The verdicts that are not the usual one, in words."""
    others = tables.verdict_counts(arms).drop(usual, errors="ignore")
    return "".join(f"; {count} {verdict}" for verdict, count in others.items())


# Claims ------------------------------------------------------------------------------------------------------------------------


def _accumulated(results: Results, *, batch_norm: bool) -> pd.DataFrame:
    arms = results.arms[results.arms["arm"] == "accumulated"]
    return arms[(arms["norm"] == BATCH_NORM) == batch_norm]


def same_update(results: Results) -> ClaimResult:
    """A1: tests whether accumulated arms are equivalent, without BatchNorm and with it."""
    free, bound = _accumulated(results, batch_norm=False), _accumulated(results, batch_norm=True)
    if free.empty or bound.empty:
        return undecided("It takes arms with BatchNorm and without.", len(free) + len(bound))
    same, parted = free["verdict"].eq("equivalent"), bound["verdict"].eq("different")
    verdict = Ruling.refuted if not same.any() else Ruling.confirmed if same.all() and not parted.any() else Ruling.conditional
    return ClaimResult(
        verdict=verdict,
        measured=float(free["algebra_error"].max()),
        threshold=GATE,
        n=len(free) + len(bound),
        explanation=f"The same without BatchNorm ({int(same.sum())} of {len(free)} arms, largest float64 difference measured "
        f"here), another computation with it ({int(parted.sum())} of {len(bound)} arms).",
    )


def only_approximates(results: Results) -> ClaimResult:
    """A2: tests whether arms without BatchNorm agree with the full batch in float64, and not only approximately."""
    free = _accumulated(results, batch_norm=False)
    if free.empty:
        return undecided("It takes arms without BatchNorm.", 0)
    exact = free["algebra_error"] <= ALGEBRA_GATE
    return ClaimResult(
        verdict=Ruling.refuted if exact.all() else Ruling.confirmed if not exact.any() else Ruling.conditional,
        measured=float(free["algebra_error"].max()),
        threshold=GATE,
        n=len(free),
        explanation=f"{int(exact.sum())} of {len(free)} arms without BatchNorm agree with the full batch in float64; what is "
        "left in lower precision is rounding, no more than the full batch's own.",
    )


def sum_of_gradients(results: Results) -> ClaimResult:
    """A3: tests which sums of losses give the full batch's gradient, and which N times that."""
    wrong = results.arms[results.arms["arm"] == UNDIVIDED]
    right = _accumulated(results, batch_norm=False)
    if wrong.empty or right.empty:
        return undecided("It takes arms that sum mean losses.", 0)
    ratio = wrong["scale"] / wrong["accumulation_steps"]
    off = float((ratio - 1).abs().max())
    conditional = off < SCALE_TOLERANCE and right["verdict"].eq("equivalent").all()
    return ClaimResult(
        verdict=Ruling.conditional if conditional else Ruling.refuted,
        measured=off,
        threshold=f"scale / N within {SCALE_TOLERANCE:g} of 1",
        n=len(wrong),
        explanation="True for losses summed over the window's terms; the sum of mean losses is N times the full batch's "
        "gradient (measured: largest relative deviation from N).",
    )


def no_relation(results: Results) -> ClaimResult:
    """A5: tests whether N·b = B in every arm whose windows hold the full batch's samples."""
    even = results.arms[results.arms["arm"].eq("accumulated") & ~results.arms["ragged"] & results.arms["counters_ok"]]
    if even.empty:
        return undecided("It takes arms with equal micro-batches.", 0)
    off = (even["accumulation_steps"] * even["micro_batch"] - even["effective_batch"]).abs()
    return ClaimResult(
        verdict=Ruling.refuted if (off == 0).all() else Ruling.confirmed,
        measured=float(off.max()),
        threshold="|N·b - B| = 0",
        n=len(even),
        explanation="B = N·b binds them: arms whose windows hold the full batch's samples have N micro-batches of b = B/N.",
    )


def eight_and_two(results: Results) -> ClaimResult:
    """A6: tests B = 8 as 4 x 2, with the loss divided and left undivided."""
    arms = results.arms[(results.arms["effective_batch"] == 8) & (results.arms["accumulation_steps"] == 4)]
    right, wrong = arms[arms["arm"] == "accumulated"], arms[arms["arm"] == UNDIVIDED]
    if right.empty or wrong.empty:
        return undecided("It takes B = 8 with N = 4.", 0)
    same, parted = right["verdict"].eq("equivalent").all(), wrong["verdict"].eq("different").all()
    return ClaimResult(
        verdict=Ruling.confirmed if same and parted else Ruling.refuted,
        measured=float(right["algebra_error"].max()),
        threshold=GATE,
        n=len(right),
        explanation=f"With the mean loss divided by N: {len(right)} arms are equivalent. Undivided, {len(wrong)} arms are not.",
    )


CLAIMS = (
    Claim(
        id="A1",
        expects=Ruling.conditional,
        rule="Conditional when arms without BatchNorm are equivalent and arms with it are not.",
        decide=same_update,
    ),
    Claim(
        id="A2",
        expects=Ruling.refuted,
        rule="Refuted when every arm without BatchNorm agrees with the full batch within the gate of L0.",
        decide=only_approximates,
    ),
    Claim(
        id="A3",
        expects=Ruling.conditional,
        rule="Conditional when sums of summed losses give the full batch's gradient, and sums of mean losses N times that.",
        decide=sum_of_gradients,
    ),
    Claim(id="A5", expects=Ruling.refuted, rule="Refuted when N·b = B in every arm with the right samples.", decide=no_relation),
    Claim(
        id="A6",
        expects=Ruling.confirmed,
        rule="Confirmed when B = 8 as 4 x 2 is equivalent with the division, and different without it.",
        decide=eight_and_two,
    ),
)

EXPERIMENT = Experiment(
    name="equivalence",
    title="Is accumulation the same computation as the large batch?",
    question="Are N accumulated micro-batches of b samples the same computation as one batch of B = N·b? And where not, why?",
    prediction="Every accumulated arm without BatchNorm is equivalent, in every optimizer and precision, and for ragged text. "
    "Every BatchNorm arm is different, and a full batch that normalises in chunks of b (Ghost BatchNorm) reproduces it exactly.",
    rule="The verdict of every single arm decides: float64 algebra and counters, then rounding in the target precision. One arm "
    "that falls otherwise refutes the prediction, one that cannot be judged leaves it open. "
    "Convergence over seeds is reported beside it and certifies nothing alone.",
    claims=CLAIMS,
    answer=answer,
    sections=(
        sections.verdict_matrix,
        sections.gradient_error,
        sections.algebra,
        sections.losses,
        sections.distances,
        sections.batch_norm,
        sections.convergence,
        sections.unjudged,
        sections.vacuity,
    ),
)
