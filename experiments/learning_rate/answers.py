"""Does accumulation ask for another learning rate, and does a larger batch?"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import numpy as np
import pandas as pd

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    TRAJECTORY_GATE,
    UNDECIDED,
    ClaimResult,
    Experiment,
    Interval,
    Material,
    Picture,
    Results,
    Section,
    claim,
    curves,
    estimated,
    lines,
    mean_curve,
    number,
    section,
    statistics,
    undecided,
)
from accumulation_harness.experiments.learning_rate import rates as learning_rates
from accumulation_harness.experiments.learning_rate.rates import RULES

APART = 1e-2  # relative change of the loss that another learning rate must make for the comparison to mean anything
STABLE = 0.1  # nats of training loss above that at the batch's best rate; a tenth of a nat is 10 % in likelihood
LEAST_SEEDS = 5  # for the comparison of held-out losses
LEVEL = 0.05
MARGIN = 0.02  # nats of held-out loss: 2 % in likelihood
PLATEAU = 0.01  # relative change of the training loss over the last fifth
TRAINED = 1.15  # nats of held-out loss; half of what guessing among ten classes costs
BEST_BATCHES = (32, 512)  # as S0 says


# Rules -------------------------------------------------------------------------------------------------------------------------


@claim(
    "C4",
    CONDITIONAL,
    f"Only where the true batch learned (held-out loss ≤ {TRAINED:g}). Confirmed when accumulation at the true "
    f"batch's rate ends at another loss, by more than {TRAJECTORY_GATE:.0e}; else conditional when under some optimizer "
    "the best rate of the large batch exceeds the small batch's, whichever seed is left out; refuted when under none; "
    "undecided between.",
)
def rate_has_to_be_raised(results: Results) -> ClaimResult:
    """C4: compares accumulation with the true batch at several rates, and the best rates of large and small batches."""
    pairs, rows = learning_rates.against_true_batch(results), learning_rates.trained(results)
    pairs = pairs[pairs["optimizer"].map(pairs.groupby("optimizer")["held_out_loss_full"].max()) <= TRAINED]
    same, other = pairs[pairs["factor"].round(6) == 1], pairs.query("factor > 1.5")
    if same.empty or other.empty or rows.empty:
        reason = f"It takes accumulation beside a true batch that learned (held-out loss ≤ {TRAINED:g}), and small batches."
        return undecided(reason, len(pairs))
    if not other["difference"].min() >= APART:
        return undecided("Another learning rate has to change the result and did not.", len(pairs))
    worst = same["difference"].max()
    ratios, ranges = learning_rates.best_rate_ratios(rows), learning_rates.raised_in_every_subset(rows)
    words = ", ".join(
        f"{name} {ratio:g}" + (f" ({ranges[name][0]:g} to {ranges[name][1]:g}, any seed left out)" if name in ranges else "")
        for name, ratio in ratios.items()
    )
    raised = any(low > 1 for low, _ in ranges.values()) if ranges else max(ratios.values()) > 1
    lower = all(high <= 1 for _, high in ranges.values()) if ranges else max(ratios.values()) <= 1
    return ClaimResult(
        verdict=CONFIRMED if worst > TRAJECTORY_GATE else CONDITIONAL if raised else REFUTED if lower else UNDECIDED,
        condition="against training with the small batch, never against the true batch",
        measured=worst,
        threshold=f"≤ {TRAJECTORY_GATE:.0e} at the unchanged rate; must differ by ≥ {APART:g} at others",
        n=len(pairs) + len(rows),
        explanation=f"Never against the true batch: at its rate accumulation ends at its loss, to {number(worst)}; sqrt N and N "
        f"times the rate are off by {number(other['difference'].min())} or more "
        f"({', '.join(sorted(set(same['optimizer'])))}; all learned). Against the small batch (B/b = "
        f"{rows['batch'].max() / rows['batch'].min():g}, equal samples) the best rate is higher by a factor of {words}.",
    )


@claim(
    "C5",
    CONDITIONAL,
    f"A cell is stable when the interval of its excess over the best rate's training loss ends below {STABLE:g} nats, "
    f"unstable when it begins above, {LEAST_SEEDS} seeds, Bonferroni over cells, and neither when that best rate is on the "
    "edge of the grid. Confirmed when all are stable, refuted when all are unstable, conditional when some are each, else "
    "undecided.",
)
def linear_scaling_is_stable(results: Results) -> ClaimResult:
    """C5: compares the training loss under linear scaling with that at the batch's own best rate, paired by seed."""
    table = learning_rates.scaled(results)
    linear = table.query("rule == 'linear'")
    if linear["optimizer"].nunique() < 2 or linear["batch"].nunique() < 2:
        return undecided("It takes SGD and Adam at two larger batches each.", len(linear))
    if linear["excess_by_seed"].map(len).min() < LEAST_SEEDS:
        return undecided(f"It takes {LEAST_SEEDS} seeds.", len(linear))
    level = 1 - LEVEL / len(linear)  # Bonferroni: the cells are read together
    ends = linear["excess_by_seed"].map(lambda one: _excess_interval(one, level))
    cells = linear.assign(
        name=[f"{optimizer} at B = {batch:g}" for optimizer, batch in zip(linear["optimizer"], linear["batch"], strict=True)],
        ends=ends,
        stable=~linear["on_edge"] & ends.map(lambda one: one.high <= STABLE),
        unstable=~linear["on_edge"] & ends.map(lambda one: one.low > STABLE),
    )
    stable, unstable = (cells[cells[said]]["name"] for said in ("stable", "unstable"))
    settled = CONDITIONAL if len(stable) and len(unstable) else UNDECIDED
    words = "; ".join(
        f"{row['name']}: {', '.join(f'{rule} {_excess(table, row, rule)}' for rule in RULES)}"
        + (" (best rate on the edge of the grid)" if row["on_edge"] else f" (linear: {_from_to(row['ends'])})")
        for row in cells.to_dict("records")
    )
    return ClaimResult(
        verdict=CONFIRMED if cells["stable"].all() else REFUTED if cells["unstable"].all() else settled,
        condition=f"for {', '.join(stable)}; not for {', '.join(unstable)}",
        measured=max(one.estimate for one in ends),
        threshold=f"training loss above the best rate's: ≤ {STABLE:g} nats ({level:.1%} intervals)",
        n=len(learning_rates.trained(results)),
        explanation=f"Training loss above that of the best rate, by scaling: {words}. Without warm-up.",
    )


def _from_to(one: Interval) -> str:
    return f"{number(one.low)} to {number(one.high)}"


def _excess_interval(differences: list[float], level: float) -> Interval:
    """Infinite where some seed's loss became NaN: that is as unstable as it gets."""
    if not all(map(math.isfinite, differences)):
        return Interval(math.inf, math.inf, math.inf)
    return statistics.mean_interval(differences, level=level)


def _excess(table: pd.DataFrame, row: Mapping[Hashable, object], rule: str) -> str:
    own = table[(table[["optimizer", "batch"]] == [row["optimizer"], row["batch"]]).all(axis=1) & (table["rule"] == rule)]
    return number(own["excess"].iloc[0]) if len(own) else "beyond the grid"


@claim(
    "G10",
    REFUTED,
    f"Read as: no batch outside {BEST_BATCHES[0]} to {BEST_BATCHES[1]} is better. Refuted when one is, against every "
    "batch inside that was trained (paired intervals, Bonferroni); otherwise undecided, as one task confirms nothing of all.",
)
def best_batches(results: Results) -> ClaimResult:
    """G10: tests whether some batch outside 32 to 512 is better than every one inside that was trained."""
    rows = learning_rates.trained(results)
    found = learning_rates.better_outside(rows, *BEST_BATCHES)
    if not found or min(len(one) for _, inside in found.values() for one in inside) < LEAST_SEEDS:
        return undecided(
            f"It takes batches inside and outside {BEST_BATCHES[0]} to {BEST_BATCHES[1]}, and {LEAST_SEEDS} seeds.", len(rows)
        )
    level = 1 - LEVEL / sum(len(inside) for _, inside in found.values())
    gains = {
        name: (batch, min((statistics.mean_interval(one, level=level) for one in inside), key=lambda one: one.low))
        for name, (batch, inside) in found.items()
    }
    shown = [name for name, (_, one) in gains.items() if one.low > 0]
    words = "; ".join(f"{name}, B = {batch}: {estimated(one)}" for name, (batch, one) in gains.items())
    return ClaimResult(
        verdict=REFUTED if shown else UNDECIDED,
        measured=max(one.estimate for _, one in gains.values()),
        threshold=f"held-out loss of every batch within {BEST_BATCHES[0]} to {BEST_BATCHES[1]} above that of one outside",
        n=len(rows),
        explanation="A batch outside the range that beats those inside contradicts it; one task cannot confirm it. Loss of the "
        f"nearest batch inside less that of the best outside, at equal samples, rates chosen by other seeds: {words}. Batches "
        f"tried: {', '.join(f'{batch:g}' for batch in sorted(rows['batch'].unique()))}.",
    )


# Page --------------------------------------------------------------------------------------------------------------------------


def _over_rates(material: Material) -> Section:
    """Losses over the learning rate by batch size."""
    text = (
        "Each batch size was trained on the same samples at every rate. The best rate grows with the batch, for both "
        "optimizers, and the range of rates that train at all does not: there linear scaling ends. All losses are those of a "
        "perceptron on 1,500 digits over six epochs."
    )
    measures = {"tail_loss": "training", "held_out_loss": "held-out"}
    panels = {}
    for optimizer, own in learning_rates.trained(material.results).groupby("optimizer"):
        for measure, title in measures.items():
            cells = tables.cells(own, ["batch", "lr"], lambda at, of=measure: tables.paired_comparison(at[of].tolist(), 1.0))  # type: ignore[misc]
            finite = cells[np.isfinite(cells["mean"])].astype({"batch": int})
            panels[f"{optimizer}: {title} loss, nats"] = lines(finite, "batch", "lr", names="batch of {}".format, of=mean_curve)
    picture = Picture(
        "rates",
        curves(panels, "learning rate", "", axes=("steps", "linear"), sharey=False),
        "Training and held-out loss over the learning rate under each optimizer, one line per batch size.",
        "Loss after six epochs over the learning rate, mean and 95% t interval over seeds. Rates at which the loss of some seed "
        "became NaN are left out.",
    )
    return section("Loss over rate and batch size", text, picture)


EXPERIMENT = Experiment(
    title="Does accumulation ask for another learning rate?",
    question="How does the best learning rate compare with that of the true large batch, and with that of the small batch that "
    "one would otherwise train with?",
    prediction="Compared with the true batch nothing changes. Compared with the small batch the best rate grows with B / b, but "
    "less than linearly beyond the noise scale.",
    rule="The rates are octaves, the same for all batch sizes; the best has the lowest mean over seeds. Stable means within "
    f"{STABLE:g} nats of the best rate's training loss. Held-out losses are compared from {LEAST_SEEDS} seeds on. All of it "
    "holds for this model and length.",
    claims=(rate_has_to_be_raised, linear_scaling_is_stable, best_batches),
    sections=(_over_rates,),
)
