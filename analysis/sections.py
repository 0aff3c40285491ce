"""Sections of the page that several experiments share. Each is None where its experiment has nothing to show."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.content import (
    Block,
    Cell,
    Matrix,
    Picture,
    Section,
    Text,
    ends,
    number,
    section,
    share,
    span,
    table_by,
)
from accumulation_harness.analysis.figures import judged as figures
from accumulation_harness.analysis.load import needed
from accumulation_harness.analysis.question import Material
from accumulation_harness.judge.gates import ALGEBRA_GATE, ROUNDING_GATE

SYMBOLS = {"equivalent": "=", "degraded": "≈", "explained": "≠", "different": "≠!", "inconclusive": "?"}
MEANINGS = {
    "equivalent": "equivalent",
    "degraded": "degraded: the same computation, rounded worse than the large batch",
    "explained": "different; simulating its cause reproduces it exactly",
    "different": "different, and nothing explains it",
    "inconclusive": "inconclusive: could not be judged",
}
MAX_LISTED = 20
MAX_FOLDED = 400
L4_HEAD = (
    "workload | norm | optimizer | precision | arm | measure | n | mean | 95% interval | TOST p | times the control | p | Holm"
)
TRAJECTORY_FACTOR = 10.0  # L3: d_t against the null


def verdict_matrix(material: Material) -> Section:
    """Show the matrix of verdicts: workload, norm and optimizer by precision and N.

    Args:
        material: The results of an experiment that judges arms.

    Returns:
        The section.

    Raises:
        Unmeasured: There is no correct arm.
    """
    cells = tables.matrix(material.arms)
    needed(cells)
    made = {tuple(row[name] for name in tables.CELL): _cell(row) for row in cells.to_dict("records")}
    columns = {name: own for name in tables.PRECISIONS if (own := sorted({key[4:] for key in made if key[3] == name}))}
    keys = [(name, *key) for name, own in columns.items() for key in own]
    bodies: dict[str, list[tuple[str, str, tuple[Cell | None, ...]]]] = {}
    for workload, norm, optimizer in dict.fromkeys(key[:3] for key in made):
        row = tuple(made.get((workload, norm, optimizer, *key)) for key in keys)
        bodies.setdefault(workload, []).append((norm, optimizer, row))
    matrix = Matrix(
        precisions=tuple((name, len(own)) for name, own in columns.items()),
        columns=tuple("control" if arm == "permuted" else f"N={n}" for _, arm, n in keys),
        bodies=tuple((workload, tuple(rows)) for workload, rows in bodies.items()),
        caption=f"{_batches(material.arms)} The fraction: trials (seeds) with that verdict over all of the cell; where they "
        "disagree the worst is shown. Control: the large batch with its rows shuffled, which has to be equivalent, or the test "
        "itself is wrong.",
    )
    return section("Verdicts", matrix)


def _cell(row: Mapping[Hashable, Any]) -> Cell:
    verdict, agreeing, n, cause = (row[name] for name in ("verdict", "agreeing", "trials", "cause"))
    state = "explained" if verdict == "different" and row["explained"] else verdict
    words = f"{MEANINGS[state]}; {agreeing} of {n} trials" + (f"; cause: {cause}" if cause else "")
    return Cell(state, SYMBOLS[state], f"{agreeing}/{n}", words)


def _batches(arms: DataFrame) -> str:
    sizes = sorted(set(arms["effective_batch"]))
    return f"Effective batch B = {', '.join(map(str, sizes))}, micro-batches of b = B/N."


def gradient_error(material: Material) -> Section:
    """Show the gradient's error ||g - g64|| / ||g64|| in the precision of the run over N, beside the full batch's own.

    Args:
        material: The results of an experiment that judges arms.

    Returns:
        The section.

    Raises:
        Unmeasured: No arm has such an error.
    """
    arms = material.arms[np.isfinite(material.arms["arm_error"])]
    needed(arms)
    good = arms.query("arm == 'accumulated' and verdict == 'equivalent'")
    ratios = good["rounding_ratio"].dropna()
    summary = (
        f"In {len(ratios)} equivalent arms the error is {number(ratios.min())} to {number(ratios.max())} times the full batch's "
        f"(median {number(ratios.median())}; gate {ROUNDING_GATE:g}). Below 1, accumulation is the more accurate of the two."
    )
    picture = Picture(
        "gradient-error",
        figures.figure_gradient_error(arms),
        "Relative error of the gradient against float64 over the number of accumulation steps, per model and precision, with "
        "the full batch's own error beside it.",
        "Error of the gradient against float64 at the initial weights, in the precision of the run, over N: medians and ranges "
        "over trials. Points inside or below the full batch's band round no worse than the full batch does; points decades above "
        "it are a different computation.",
    )
    return Section("Error of the gradient", (Text(summary), picture) if len(ratios) else (picture,))


def algebra(material: Material) -> Section | None:
    """Show how far every arm is from the full batch in float64, beside the gate.

    Args:
        material: The results of an experiment that judges arms.

    Returns:
        The section; None where no arm was compared in float64.
    """
    arms = material.arms
    if arms["algebra_error"].notna().sum() == 0:
        return None
    errors = arms.query("arm == 'accumulated'")["algebra_error"]
    good, bad = errors[errors <= ALGEBRA_GATE], errors[errors > ALGEBRA_GATE]
    text = f"{share(len(good), len(errors))} accumulated arms pass" + (
        f", the worst of them at {number(good.max())}." if len(good) else "."
    )
    if len(bad) and good.max() > 0:
        decades = np.log10(bad.min() / good.max())
        text += (
            f" The nearest that fails is at {number(bad.min())}: {decades:.0f} decades lie between, so no statistics are needed."
        )
    picture = Picture(
        "algebra",
        figures.figure_algebra(arms),
        "Float64 differences to the full batch over N per normalisation on a logarithmic axis, with the gate.",
        "How far the gradients of N micro-batches are from those of one batch, in float64, where rounding cannot hide anything. "
        "Below the dashed line: the same computation. Above: a different one. Points are medians with ranges over trials. Black "
        "diamonds: BatchNorm's difference to a full batch that normalises in the same chunks. N = 1: the large batch, shuffled.",
    )
    return section("The algebra, in float64", text, picture)


def losses(material: Material) -> Section | None:
    """Show loss curves by precision, and their distance to that of the full batch.

    Args:
        material: The results of an experiment, with the rows of its steps.

    Returns:
        The section, a figure for each precision; None without rows.
    """
    pictures: list[Block] = []
    for precision in tables.PRECISIONS:
        rows = material.steps[material.steps["precision"] == precision]
        if len(rows):
            pictures.append(
                Picture(
                    f"loss-{precision}",
                    figures.figure_losses(rows),
                    f"Training loss in {precision} per model, and its distance to the full batch's over the controls' band.",
                    f"{precision}, one trial per model. Above: the losses; curves of equivalent arms lie on one another. Below: "
                    "their distance to the full batch's loss. In the grey band, an arm differs no more than a full batch whose "
                    "rows were permuted; gaps are steps without any difference.",
                )
            )
    return section("Loss curves", *pictures) if pictures else None


def distances(material: Material) -> Section:
    """Show the distance of the parameters to the full batch's, d = ‖θ_acc - θ_full‖ / ‖θ_full - θ_0‖, over the optimizer steps.

    Args:
        material: The results of an experiment, with the rows of its steps.

    Returns:
        The section.

    Raises:
        Unmeasured: There are no rows of steps.
    """
    needed(material.steps)
    arms = material.arms
    good = arms.query("arm == 'accumulated' and verdict == 'equivalent' and trajectory_ratio.notna()")
    inside = (good["trajectory_ratio"] <= TRAJECTORY_FACTOR).sum()
    text = (
        f"{share(inside, len(good))} equivalent arms stay within {TRAJECTORY_FACTOR:g} times the largest control until its "
        "own first jump. This is reported and never a gate: rounding that flips one ReLU separates correct runs by decades, in "
        "the control as well."
    )
    picture = Picture(
        "distance",
        figures.figure_distances(material.steps),
        "Relative distance of the parameters to the full batch's over the optimizer steps, per model and precision.",
        "One trial per model, d = ‖θ_acc - θ_full‖ / ‖θ_full - θ_0‖. The grey band covers the control runs: two full batches in "
        "another order, and one with a single weight moved by one unit in the last place. In 16-bit formats reordering changes "
        "almost nothing: there arms above the band are no sign of a fault, and their rounding is judged against float64.",
    )
    return section("Distance of the parameters", text, picture)


def batch_norm(material: Material) -> Section:
    """Show what BatchNorm does to gradients and losses, and how much of it the simulation of its cause explains.

    Args:
        material: The results of an experiment that judges arms.

    Returns:
        The section.

    Raises:
        Unmeasured: No arm with BatchNorm was simulated.
    """
    arms = material.arms[material.arms["norm"] == "batch"]
    accumulated = arms.query("arm == 'accumulated' and oracle_error.notna()")
    needed(accumulated)
    l4 = material.l4[(material.l4["norm"] == "batch") & (material.l4["measure"] == "held_out_loss")]
    means = l4.query("arm == 'accumulated'").groupby("accumulation_steps")["mean"].agg(span)
    columns = ("accumulation_steps", "micro_batch", "arm n", "gradient_error median", "oracle_error max",
               ("accumulation_steps", lambda n: means.get(n, "- to -")))  # fmt: skip
    text = (
        f"BatchNorm normalises with the statistics of the micro-batch: its {len(accumulated)} arms compute another function. A "
        "full batch that normalises in chunks of b (Ghost BatchNorm) reproduces their gradients and running statistics to "
        f"{number(accumulated['oracle_error'].max())} or better: batch statistics are the whole difference."
    )
    if (accumulated["oracle_error"] > ALGEBRA_GATE).any():
        left = number(accumulated["oracle_error"].max())
        text = f"Batch statistics do not explain every arm: Ghost BatchNorm, the same chunks in one batch, leaves up to {left}."
    head = "N | b | arms | gradient difference, median | oracle error, worst | held-out loss - full batch's, means"
    caption = (
        "Held-out losses are means over seeds, from the lowest configuration to the highest, below zero "
        "where the accumulated run has the lower one. They are evaluated with running statistics, which accumulation moves N "
        "times per step: in runs as short as these they catch up sooner. The page on BatchNorm compares the same weights with "
        "recalibrated statistics."
    )
    return section("BatchNorm", text, table_by(accumulated, "accumulation_steps", head, columns, caption))


def convergence(material: Material) -> Section:
    """Show losses over seeds, each paired with the full batch of its seed: L4.

    Args:
        material: The results of an experiment that judges arms.

    Returns:
        The section.

    Raises:
        Unmeasured: No configuration has two seeds.
    """
    margin, l4 = material.experiment.margin, material.l4
    cells = l4.query("measure == 'held_out_loss' and arm == 'accumulated' and n >= 2")
    needed(cells)
    columns = (
        "workload", "norm", "optimizer", "precision", _arm_name,
        ("measure", lambda name: name.removesuffix("_loss").replace("_", "-")), "n", "mean", ends, "tost_p", "apart", "apart_p",
        "apart_holm",
    )  # fmt: skip
    caption = (
        f"Paired differences to the full batch; the first {min(MAX_FOLDED, len(l4))} of {len(l4)} rows. tail: mean loss of the "
        "last tenth of the run."
    )
    picture = Picture(
        "convergence",
        figures.figure_convergence(l4, margin),
        "Mean held-out loss difference to the full batch over N with its 95% interval per configuration, with the margin shaded.",
        f"Mean over seeds and 95% t interval; shaded: the margin of ±{margin:.3g} ({material.experiment.margin_reason}). The "
        "axis is linear within it and logarithmic beyond. N = 1: the full batch with its rows permuted.",
    )
    numbers = table_by(l4.head(MAX_FOLDED), "", L4_HEAD, columns, caption, folded=True)
    return section("Convergence over seeds", *_l4_text(cells, margin), picture, numbers)


def _l4_text(cells: DataFrame, margin: float) -> tuple[str, str]:
    seeds = f"{cells['n'].min()}" if cells["n"].nunique() == 1 else f"{cells['n'].min()} to {cells['n'].max()}"
    inside, wide = cells[cells["tost_p"] < tables.LEVEL], cells[cells["apart_holm"] < tables.LEVEL]
    scattered = ", ".join(f"{count} with norm {norm}" for norm, count in wide["norm"].value_counts().sort_index().items())
    found = (
        f"{share(len(inside), len(cells))} configurations have a held-out loss within ±{margin:.3g} of the full "
        f"batch's (TOST, 5%). {share(len(wide), len(cells))} lie farther from the full batch than its permuted runs do "
        "(permutation test, Holm, 5%)"
        f"{': ' + scattered if scattered else ''}."
    )
    unable = (cells["detectable"] > margin).sum()
    power = (
        f"With {seeds} seeds the power is small. The smallest difference that a paired t test would have found (5%, power 80%) "
        f"is {number(cells['detectable'].median())} nats at the median and {number(cells['detectable'].max())} at worst; for "
        f"{unable} of {len(cells)} it is above the margin. This level certifies nothing alone: arms whose gradients are 10% off "
        "can pass it."
    )
    return found, power


def unjudged(material: Material) -> Section:
    """List arms without a clear verdict, and why, leaving out those that are wrong on purpose.

    Args:
        material: The results of an experiment that judges arms.

    Returns:
        The section; it also says so where there are none.

    Raises:
        Unmeasured: No arm was judged.
    """
    arms = material.arms[~material.arms["fault"]]
    needed(arms)
    unclear = arms.query("verdict in ['inconclusive', 'degraded'] or (verdict == 'different' and not explained)")
    title = "What could not be judged or explained"
    if unclear.empty:
        return section(title, f"Nothing: all {len(arms)} arms have a verdict, and every difference a cause.")
    listed = tables.in_order(unclear).head(MAX_LISTED)
    more = f" The first {MAX_LISTED} are listed; verdicts.csv has all." if len(unclear) > MAX_LISTED else ""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tables.verdict_counts(unclear).items())
    caption = f"{len(unclear)} of {len(arms)} arms: {counts}.{more}"
    columns = ("trial", _arm_name, "verdict", "reasons")
    return section(title, table_by(listed, "", "trial | arm | verdict | reason", columns, caption))


def _arm_name(row: DataFrame) -> str:
    arm, num = row[["arm", "accumulation_steps"]].iloc[0]
    return "permuted" if arm == "permuted" else f"{arm} N={num}"


def vacuity(material: Material) -> Section:
    """Count how often the conditions occurred under which faults show.

    Args:
        material: The results of an experiment that judges arms.

    Returns:
        The section.

    Raises:
        Unmeasured: There is no accumulated arm.
    """
    found = tables.vacuity(material.arms)
    needed(found)
    head = "model | trials | clipping active | short windows | unequal terms | float64 steps, at least | float64 floor"
    caption = (
        "In how many accumulated arms the float64 test met what reveals faults: a window that was clipped, a window shorter than "
        "B, micro-batches with unequal numbers of loss terms. A zero means that the verdicts say nothing about that case. "
        "Floor: the difference of a permuted full batch, the least that can be told apart."
    )
    columns = (
        lambda own: " ".join(own[["workload", "norm"]].iloc[0]), "n",
        *(lambda own, of=of: share(*own[[of, "arms"]].iloc[0]) for of in ("clipped", "short", "unequal")), "fewest_steps",
        "floor",
    )  # fmt: skip
    return section("Was the test able to fail?", table_by(found, "", head, columns, caption))
