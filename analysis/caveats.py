"""What has to be known about each combination of normalisation, optimizer and precision of a sweep, with its numbers."""

from __future__ import annotations

import math

from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.content import Section, Text, number, section, table_by
from accumulation_harness.analysis.question import Material
from accumulation_harness.config import State, state_of
from accumulation_harness.judge.cause import INHERENT, Cause, parsed
from accumulation_harness.judge.verdict import Outcome
from accumulation_harness.results.cells import Caveat, by_cell, caveats, spread

DEFAULT_MOMENTUM = 0.1  # of BatchNorm in PyTorch
# What is known of a normalisation, an optimizer, a format, whatever this sweep has found; no advice follows from it.
REMEMBERS = (
    "is updated once per window, as with the large batch. Against optimizer steps on single micro-batches it remembers N times "
    "more samples"
)
NORMS = {
    "group": "GroupNorm normalises each sample by itself.",
    "layer": "LayerNorm normalises each sample by itself.",
    "batch": (
        "BatchNorm in training normalises each micro-batch by its own statistics, and moves its running statistics N times per "
        "step."
    ),
}
STATES = {
    State.buffer: f"Momentum: the buffer {REMEMBERS}; a momentum of β^N keeps the memory.",
    State.moments: (
        f"Adam: the state {REMEMBERS}; β₁^N and β₂^N keep the memory. Adam hides a wrong scale of the gradient from the loss "
        "curve: compare gradients."
    ),
}
FORMATS = {
    "float16": (
        "In float16, unscale once per window, then clip, then step; keep .grad in float32. A window that overflows is skipped "
        "as a whole."
    ),
    "bfloat16": "In bfloat16, keep .grad in float32: a 16-bit sum stops growing once a micro-batch is below 1/256 of it.",
}
INHERENT_OF: dict[str | None, str] = dict([*NORMS.items(), *STATES.items(), *FORMATS.items()])
# What to do, by cause where one was found, else by verdict: the words of a table's cell.
AS_IT_IS = "accumulate as it is"
REMEDIES = {Cause.batch_statistics: "use GroupNorm, or a trained model with its statistics frozen"}
WITHOUT_CAUSE = {
    Outcome.different: "find out why it is a different computation before accumulating",
    Outcome.degraded: "keep the accumulator in float32, or accumulate fewer micro-batches",
    Outcome.inconclusive: "nothing is known where it could not be judged",
}
HEAD = "normalisation | optimizer | precision | what was found | what to do"


def caveats_that_occur(material: Material) -> Section | None:
    """A paragraph for each way in which runs are not equivalent, then a row for each combination that was swept.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section, or None where no arm accumulates.
    """
    arms = tables.in_order(material.arms[material.arms["arm"] == "accumulated"])
    if arms.empty:
        return None
    told = [
        Text(f"{one.finding[:1].upper()}{one.finding[1:]} {one.advice}", lead=_whose(one))
        for one in caveats(by_cell(tables.rows(arms)))
    ]
    told = told or [Text("Every run is equivalent to its large batch: nothing in this sweep has to be avoided.")]
    swept = {column: arms[column].unique().tolist() for column in ("norm", "optimizer", "precision")}
    found = (*swept["norm"], *dict.fromkeys(map(state_of, swept["optimizer"])), *swept["precision"])
    told += [Text(INHERENT_OF[one]) for one in found if one in INHERENT_OF]
    if (bound := arms.query("norm == 'batch'"))["trial"].any():
        told.append(Text(_momenta(bound)))
    if len(clipped := arms.query("clip_norm.notna()")):
        told.append(Text(_clipping(clipped)))
    columns = ("norm", "optimizer", "precision", lambda own: _found(own, material.l4), _advice)
    caption = (
        "One row for each combination that was swept. Gradient difference: relative, in double precision, largest over the "
        "steps. Rounding: error over that of the large batch, median; below 1 accumulation is the more accurate."
    )
    table = table_by(arms, "norm optimizer precision", HEAD, columns, caption, sort=False)
    return section("Caveats", *told, table)


def _whose(caveat: Caveat) -> str:
    """The settings of a caveat, as a reader says them: BatchNorm; sgd, adam; float32."""
    return "; ".join(", ".join(tables.NORM_NAMES.get(value, value) for value in values) for values in caveat.settings.values())


def _found(arms: DataFrame, l4: DataFrame) -> str:
    """Verdicts, gradient difference, rounding, and the held-out loss over seeds."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tables.verdict_counts(arms).items())
    told = [f"{counts}; gradient difference {spread(arms['algebra_error'])}"]
    ratio = float(arms["rounding_ratio"].median())
    if not math.isnan(ratio) and not arms["verdict"].eq("different").any():
        told.append(f"rounding {number(ratio)}")
    first = arms.iloc[0]
    names = ["norm", "optimizer", "precision"]
    cells = l4.query("measure == 'held_out_loss' and arm == 'accumulated' and n >= 2") if len(l4) else l4
    cells = cells[(cells[names] == first[names].to_list()).all(axis=1)] if len(cells) else cells
    if len(cells):
        worst = cells.iloc[int(cells["mean"].abs().to_numpy().argmax())]
        told.append(
            f"held-out loss {number(abs(worst['mean']))} {'below' if worst['mean'] < 0 else 'above'} the large batch's "
            f"at N = {worst['accumulation_steps']} "
            f"(95% {number(worst['low'])} to {number(worst['high'])}, {worst['n']} seeds)"
        )
    return "; ".join(told)


def _advice(arms: DataFrame) -> str:
    """What to do about what was found, in a few words: from verdicts and causes alone, whatever the settings are called."""
    told: dict[str, None] = {}
    for verdict, text in zip(arms["verdict"], arms["cause"], strict=True):
        if verdict == Outcome.equivalent:
            continue
        causes = [cause for cause in parsed(text) if cause is not Cause.unexplained]
        named = [REMEDIES.get(cause, f"{'know of' if cause in INHERENT else 'fix'} {cause}") for cause in causes]
        told |= dict.fromkeys(named or [WITHOUT_CAUSE[Outcome(verdict)]])
    return "; ".join(told) or AS_IT_IS


def _clipping(arms: DataFrame) -> str:
    """Whether clipping was at work, without which nothing is known about it."""
    active = int((arms["clipped_share"] > 0).sum())
    return (
        f"Clipping (clip_norm {spread(arms['clip_norm'])}) was active in {active} of {len(arms)} runs; median share of the "
        f"windows: {100 * float(arms['clipped_share'].median()):.0f}%. Clip once per window, after the last backward and after "
        "unscaling: clipping each micro-batch is a different computation. Where it was never active, nothing is known about it."
    )


def _momenta(arms: DataFrame) -> str:
    """The momentum with which BatchNorm's running statistics move as with the large batch: 1 - (1 - m)^(1/N)."""
    numbers = sorted(arms["accumulation_steps"].unique())
    momenta = ", ".join(f"{corrected(DEFAULT_MOMENTUM, num):.3g} at N = {num}" for num in numbers)
    return (
        f"A BatchNorm momentum of {momenta} moves the running statistics in a window as "
        f"{DEFAULT_MOMENTUM} does with the large batch."
    )


def corrected(momentum: float, num: int) -> float:
    """Correct the momentum of running statistics for accumulation: 1 - (1 - m)^(1/N).

    N updates with it forget as much as one update with m.

    Args:
        momentum: m of a BatchNorm layer, from 0 to 1.
        num: N.

    Returns:
        The momentum that each micro-batch should use.
    """
    return float(1 - (1 - momentum) ** (1 / num))


def cells_table(arms: DataFrame) -> DataFrame:
    """The verdicts by cell, as a table to hand on: one row per combination and N.

    Args:
        arms: Judged arms, a row each.

    Returns:
        The table.
    """
    columns = ["workload", "norm", "optimizer", "precision", "accumulation_steps", "verdict", "agreeing", "trials", "cause",
               "algebra_error", "rounding_ratio"]  # fmt: skip
    table = tables.matrix(arms).query("arm == 'accumulated'")[columns].rename(columns={"algebra_error": "gradient_error"})
    table.loc[table["verdict"] == Outcome.different, "rounding_ratio"] = (
        math.nan
    )  # no rounding is that of a different computation
    return table


def to_latex(frame: DataFrame) -> bytes:
    """A table of LaTeX (booktabs), with numbers of two digits.

    Args:
        frame: Any table.

    Returns:
        UTF-8.
    """
    text = frame.rename(columns=lambda name: str(name).replace("_", " "))
    return text.to_latex(index=False, escape=True, na_rep="", float_format=lambda value: f"{value:.1e}").encode()
