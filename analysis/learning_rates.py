"""Batch sizes trained at many learning rates: from measurements to the numbers that `experiments/learning_rate.py` decides by."""

from __future__ import annotations

import math

import pandas as pd

from analysis import optimizers
from analysis.load import Results
from analysis.optimizers import of_study

RULES = {"no": 0.0, "square root": 0.5, "linear": 1.0}  # scaling of the learning rate: its exponent of B / b


def trained(results: Results) -> pd.DataFrame:
    """Trainings of every batch size at every rate and seed. A loss that is NaN becomes infinite, so that no such rate is best."""
    rows = of_study(results, "batch_sizes")
    losses = ["tail_loss", "held_out_loss", "early_held_out_loss"]
    return rows.assign(**{name: rows[name].astype(float).fillna(math.inf) for name in losses})


def best(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """One row per optimizer, batch and seed: the training at the rate whose mean of `measure` over seeds is lowest."""
    return optimizers.at_best_rate(rows, ["optimizer", "batch"], measure)


def scaled(results: Results) -> pd.DataFrame:
    """Training loss when the best rate of the smallest batch is scaled by each rule; a row per optimizer, rule and larger batch.

    `loss`: mean over seeds; `tuned`: the same at the batch's own best rate; `excess` = loss - tuned. A rule whose rate was not
    trained has no row.
    """
    rows = trained(results)
    means = rows.groupby(["optimizer", "batch", "lr"])["tail_loss"].mean()
    found = []
    for optimizer, own in means.groupby(level="optimizer"):
        losses = own.droplevel("optimizer")
        smallest = min(losses.index.get_level_values("batch"))
        base = float(losses[smallest].idxmin())
        for batch in sorted(set(losses.index.get_level_values("batch")) - {smallest}):
            rates = losses[batch]
            for rule, exponent in RULES.items():
                lr = base * (batch / smallest) ** exponent
                near = [rate for rate in rates.index if math.isclose(rate, lr, rel_tol=1e-6)]
                if near:
                    loss, tuned = float(rates[near[0]]), float(rates.min())
                    found.append((optimizer, rule, batch, lr, loss, tuned, loss - tuned))
    return pd.DataFrame(found, columns=["optimizer", "rule", "batch", "lr", "loss", "tuned", "excess"])


def against_true_batch(results: Results) -> pd.DataFrame:
    """Relative `difference` of the held-out loss between accumulation at 1, sqrt N and N times a rate and the full batch at it.

    A row per optimizer, seed and `factor` of the rate; the full batch's rate is the lowest that was trained.
    """
    rows = of_study(results, "convergence")
    full = rows[rows["arm"] == "full"]
    base = full[full["lr"] == full.groupby("optimizer")["lr"].transform("min")]
    pairs = rows[rows["arm"] == "accumulated"].merge(base, on=["optimizer", "seed"], suffixes=("", "_full"))
    off = (pairs["held_out_loss"].astype(float) / pairs["held_out_loss_full"].astype(float) - 1).abs()
    return pairs.assign(factor=pairs["lr"] / pairs["lr_full"], difference=off.fillna(math.inf))


def best_rate_ratios(rows: pd.DataFrame) -> dict[str, float]:
    """The best rate (by training loss) of the largest batch over that of the smallest, by optimizer."""
    rates = best(rows, "tail_loss").groupby(["optimizer", "batch"])["lr"].first().unstack()
    return {str(name): float(own[rates.columns.max()] / own[rates.columns.min()]) for name, own in rates.iterrows()}


def batch_ratio(rows: pd.DataFrame) -> float:
    """The largest batch over the smallest."""
    return float(rows["batch"].max() / rows["batch"].min())


def comparison(rows: pd.DataFrame) -> pd.DataFrame:
    """The largest (`_large`) and the smallest batch (`_small`), a row per optimizer; means over seeds, each at its best rate.

    `noise`: of the training loss from step to step; `steps`, `samples`: held-out loss at equal steps and at equal samples.
    """
    sizes = {"large": int(rows["batch"].max()), "small": int(rows["batch"].min())}
    measures = {"noise": ("tail_loss", "step_noise"), "steps": ("early_held_out_loss",) * 2, "samples": ("held_out_loss",) * 2}
    columns: dict[str, pd.Series[float]] = {}
    for name, (tuned_by, measure) in measures.items():
        means = best(rows, tuned_by).groupby(["optimizer", "batch"])[measure].mean().unstack()
        columns |= {f"{name}_{size}": means[batch] for size, batch in sizes.items()}
    return pd.DataFrame(columns).reset_index()


def largest_less_smallest(rows: pd.DataFrame) -> pd.DataFrame:
    """Differences largest - smallest batch per optimizer and seed, at the best rates for the held-out loss.

    `held_out`: of the held-out loss; `gap`: of held-out - training loss.
    """
    chosen = best(rows, "held_out_loss")
    if chosen.empty or chosen["batch"].nunique() < 2:
        return pd.DataFrame(columns=["optimizer", "seed", "held_out", "gap"])
    chosen = chosen.assign(gap=chosen["held_out_loss"] - chosen["tail_loss"])
    wide = chosen.pivot_table(index=["optimizer", "seed"], columns="batch", values=["held_out_loss", "gap"])
    large, small = chosen["batch"].max(), chosen["batch"].min()
    columns = {
        "held_out": wide["held_out_loss"][large] - wide["held_out_loss"][small],
        "gap": wide["gap"][large] - wide["gap"][small],
    }
    return pd.DataFrame(columns).dropna().reset_index()
