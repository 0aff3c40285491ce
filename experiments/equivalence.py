"""Are N accumulated micro-batches of b the same computation as one batch of B = N·b?"""

from __future__ import annotations

import pandas as pd

from analysis import sections, tables
from experiments import Answer, Experiment
from harness.verdict import ALGEBRA_GATE

BATCH_NORM = "batch"


def answer(arms: pd.DataFrame) -> Answer:
    """Refuted by one judged arm that fell otherwise; held when every arm was judged and both kinds of arms were there."""
    accumulated = arms[arms["arm"] == "accumulated"]
    sees_chunks = (accumulated["norm"] == BATCH_NORM) & (accumulated["micro_batch"] < accumulated["effective_batch"])
    free, bound = accumulated[~sees_chunks], accumulated[sees_chunks]
    null = arms[arms["arm"] == "permuted"]
    sentences = tuple(filter(None, (_without(free), _with(bound), _null(null))))
    by_batch_statistics = bound["verdict"].eq("different") & bound["explained"] & bound["cause"].eq("batch_statistics")
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
    explained = different[different["explained"] & different["cause"].eq("batch_statistics")]
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


EXPERIMENT = Experiment(
    name="equivalence",
    title="Is accumulation the same computation as the large batch?",
    question="Are N accumulated micro-batches of b samples the same computation as one batch of B = N·b? And where not, why?",
    prediction="Every accumulated arm without BatchNorm is equivalent, in every optimizer and precision, and for ragged text. "
    "Every BatchNorm arm is different, and a full batch that normalises in chunks of b (Ghost BatchNorm) reproduces it exactly.",
    rule="The verdict of every single arm decides: float64 algebra and counters, then rounding in the target precision. One arm "
    "that falls otherwise refutes the prediction, one that cannot be judged leaves it open. "
    "Convergence over seeds is reported beside it and certifies nothing alone.",
    margin=0.02,
    margin_reason="0.02 nats of loss is a change of perplexity of 2%",
    claims=("A1", "A2", "A3", "A5", "A6"),
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
