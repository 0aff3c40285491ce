"""Batch sizes trained at many learning rates: from measurements to the numbers that `experiments/learning_rate.py` decides by."""

from __future__ import annotations

import math
from itertools import product

import pandas as pd
from pandas import DataFrame

from accumulation_harness.analysis.load import Results
from accumulation_harness.experiments.shared.tuning import at_best_rate

RULES = {"no": 0.0, "square root": 0.5, "linear": 1.0}  # scaling of the learning rate: its exponent of B / b


def trained(results: Results) -> DataFrame:
    """Trainings of every batch size at every rate and seed. A loss that is NaN becomes infinite, so that no such rate is best.

    Args:
        results: What a store holds.

    Returns:
        The rows.
    """
    rows = results.study("batch_sizes")
    losses = ["tail_loss", "held_out_loss", "tuning_loss", "judged_loss"]
    return rows.assign(**{name: rows[name].astype(float).fillna(math.inf) for name in losses})


def scaled(results: Results) -> DataFrame:
    """Compare the rules by which a learning rate is scaled to another batch.

    Args:
        results: Those of the question `learning_rate`.

    Returns:
        Training loss when the best rate of the smallest batch is scaled by each rule; a row per optimizer, rule and larger
        batch. `loss`: mean over seeds; `tuned`: the same at the batch's own best rate; `excess` = loss - tuned. A rule whose
        rate was not trained has no row.
    """
    rows = trained(results)
    found = []
    for optimizer, own in rows.groupby("optimizer"):
        seeds = own.pivot_table(index="seed", columns=["batch", "lr"], values="tail_loss")
        means = seeds.mean()
        smallest, *larger = sorted({*own["batch"]})
        base = means[smallest].idxmin()
        for batch, (rule, exponent) in product(larger, RULES.items()):
            rates, lr = means[batch], base * (batch / smallest) ** exponent
            for near in (rate for rate in rates.index if math.isclose(rate, lr, rel_tol=1e-6)):
                tuned = rates.idxmin()
                found.append({
                    "optimizer": optimizer, "rule": rule, "batch": batch, "lr": lr, "loss": rates[near], "tuned": rates[tuned],
                    "excess": rates[near] - rates[tuned], "on_edge": tuned in (rates.index.min(), rates.index.max()),
                    "excess_by_seed": (seeds[batch][near] - seeds[batch][tuned]).tolist(),
                })  # fmt: skip
    return DataFrame(found)


def _others_choose(rows: DataFrame, measure: str) -> DataFrame:
    """Choose for each seed the training at the rate whose mean over the other seeds is lowest.

    A seed that chose its own rate would flatter the batch sizes whose results vary most.

    Args:
        rows: Trainings, with `optimizer`, `batch`, `lr` and `seed`.
        measure: The column that chooses.

    Returns:
        One row per optimizer, batch and seed.
    """
    chosen = [rows.iloc[:0]]
    for _, same in rows.groupby(["optimizer", "batch"]):
        for seed, own in same.groupby("seed"):
            means = same[same["seed"] != seed].groupby("lr")[measure].mean()
            if len(means) and math.isfinite(means.min()):
                chosen.append(own[own["lr"] == means.idxmin()])
    return pd.concat(chosen, ignore_index=True)


def against_true_batch(results: Results) -> DataFrame:
    """Compare accumulation at 1, sqrt N and N times a rate with the full batch at it.

    Args:
        results: Those of the question `learning_rate`.

    Returns:
        Relative `difference` of the held-out loss, a row per optimizer, seed and `factor` of the rate; the full batch's rate
        is the lowest that was trained.
    """
    rows = results.study("convergence")
    full = rows.query("arm == 'full'")
    base = full[full["lr"] == full.groupby("optimizer")["lr"].transform("min")]
    pairs = rows.query("arm == 'accumulated'").merge(base, on=["optimizer", "seed"], suffixes=("", "_full"))
    off = (pairs["held_out_loss"].astype(float) / pairs["held_out_loss_full"].astype(float) - 1).abs()
    return pairs.assign(factor=pairs["lr"] / pairs["lr_full"], difference=off.fillna(math.inf))


def best_rate_ratios(rows: DataFrame) -> dict[str, float]:
    """The best rate (by training loss) of the largest batch over that of the smallest, by optimizer.

    Args:
        rows: From `trained`.

    Returns:
        Optimizer -> ratio.
    """
    rates = at_best_rate(rows, ["optimizer", "batch"], "tail_loss").groupby(["optimizer", "batch"])["lr"].first().unstack()
    return {str(name): float(own[rates.columns.max()] / own[rates.columns.min()]) for name, own in rates.iterrows()}


def raised_in_every_subset(rows: DataFrame) -> dict[str, tuple[float, float]]:
    """Smallest and largest `best_rate_ratios` when each seed in turn is left out, by optimizer.

    Args:
        rows: From `trained`.

    Returns:
        Optimizer -> (smallest, largest); empty for one seed.
    """
    if rows["seed"].nunique() < 2:
        return {}
    found = DataFrame([best_rate_ratios(rows[rows["seed"] != seed]) for seed in rows["seed"].unique()])
    return {str(name): (own.min(), own.max()) for name, own in found.items()}


def better_outside(rows: DataFrame, low: int, high: int) -> dict[str, tuple[int, list[list[float]]]]:
    """Ask whether a batch outside a range is better than those inside.

    Rates are chosen by the other seeds on one half of the held-out samples; losses are those of the other half.

    Args:
        rows: Trainings.
        low: The smallest batch of the range.
        high: The largest.

    Returns:
        By optimizer: the best batch outside, and by each batch inside the loss there less that outside, by seed.
    """
    found = {}
    for name, own in _others_choose(rows, "tuning_loss").groupby("optimizer"):
        wide = own.pivot_table(index="seed", columns="batch", values="judged_loss")
        sizes = sorted(own["batch"].unique())
        inside = [batch for batch in sizes if low <= batch <= high]
        outside = {batch: wide[batch].mean() for batch in sizes if batch not in inside}
        if inside and outside:
            winner = min(outside, key=outside.__getitem__)
            found[str(name)] = (winner, [(wide[b] - wide[winner]).dropna().tolist() for b in inside])
    return found
