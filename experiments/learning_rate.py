"""Does accumulation ask for another learning rate? Does a larger batch? And is what it trains better?"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import pandas as pd

from analysis import optimizers
from analysis.content import Block, Picture, Section, Table, Text, number
from analysis.figures import optimizers as figures
from analysis.load import Results
from analysis.optimizers import of_study
from analysis.question import Claim, ClaimResult, Experiment, Material, Ruling, undecided
from harness.judge import statistics

SAME = 1e-9  # relative, of a loss after 72 float64 steps: the gate of L0 on trajectories
APART = 1e-2  # what another learning rate must change it by, for the comparison to mean anything
STABLE = 0.1  # nats of training loss above the best rate's at the same batch; a tenth of a nat is 10 % in likelihood
LEAST_SEEDS = 5  # of the comparison of held-out losses
RULES = {"no": 0.0, "square root": 0.5, "linear": 1.0}  # exponent of B / b


# Numbers -----------------------------------------------------------------------------------------------------------------------


def trained(results: Results) -> pd.DataFrame:
    """Every batch size at every rate and seed; a loss that is not a number is infinite, so that no such rate is ever best."""
    rows = of_study(results, "batch_sizes")
    losses = ["tail_loss", "held_out_loss", "early_held_out_loss"]
    return rows.assign(**{name: rows[name].astype(float).fillna(math.inf) for name in losses})


def best(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """One row per optimizer, batch and seed: at the rate whose mean of `measure` over seeds is lowest."""
    return optimizers.at_best_rate(rows, ["optimizer", "batch"], measure)


def scaled(results: Results) -> pd.DataFrame:
    """Training loss under each rule, from the best rate of the smallest batch: per optimizer, rule and larger batch, the mean
    over seeds (`loss`), that at the batch's own best rate (`tuned`), and `excess`; a rate beyond the grid is left out.
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
    """Accumulated at 1, sqrt N and N times the lowest rate, beside the full batch at the lowest: relative difference of the
    held-out loss, per optimizer, seed and factor.
    """
    rows = of_study(results, "convergence")
    full = rows[rows["arm"] == "full"]
    base = full[full["lr"] == full.groupby("optimizer")["lr"].transform("min")]
    pairs = rows[rows["arm"] == "accumulated"].merge(base, on=["optimizer", "seed"], suffixes=("", "_full"))
    off = (pairs["held_out_loss"].astype(float) / pairs["held_out_loss_full"].astype(float) - 1).abs()
    return pairs.assign(factor=pairs["lr"] / pairs["lr_full"], difference=off.fillna(math.inf))


# Rules -------------------------------------------------------------------------------------------------------------------------


def rate_has_to_be_raised(results: Results) -> ClaimResult:
    """C4: never against the true batch; against the small batch as much as the best rates differ."""
    pairs, rows = against_true_batch(results), trained(results)
    same, other = pairs[pairs["factor"].round(6) == 1], pairs[pairs["factor"] > 1.5]
    if same.empty or other.empty or rows.empty:
        return undecided("It takes accumulation beside the true batch at several rates, and small batches.", len(pairs))
    if not other["difference"].min() >= APART:
        return undecided("Another learning rate has to change the result and did not.", len(pairs))
    worst = float(same["difference"].max())
    ratios = best_rate_ratios(rows)
    words = ", ".join(f"{name} {ratio:g}" for name, ratio in ratios.items())
    step = batch_ratio(rows)
    raised = max(ratios.values()) > 1
    return ClaimResult(
        verdict=Ruling.confirmed if worst > SAME else Ruling.conditional if raised else Ruling.refuted,
        measured=worst,
        threshold=f"≤ {SAME:.0e} at the unchanged rate; must differ by ≥ {APART:g} at others",
        n=len(pairs) + len(rows),
        explanation=f"Never against the true batch: at its rate accumulation ends at its loss, to {number(worst)}; sqrt N and N "
        f"times the rate are off by {number(float(other['difference'].min()))} or more. Against the small batch (B/b = {step:g}, "
        f"equal samples) the best rate is higher by a factor of {words}.",
    )


def best_rate_ratios(rows: pd.DataFrame) -> dict[str, float]:
    """By optimizer, the best rate (training loss) of the largest batch over that of the smallest."""
    rates = best(rows, "tail_loss").groupby(["optimizer", "batch"])["lr"].first().unstack()
    return {str(name): float(own[rates.columns.max()] / own[rates.columns.min()]) for name, own in rates.iterrows()}


def batch_ratio(rows: pd.DataFrame) -> float:
    return float(rows["batch"].max() / rows["batch"].min())


def linear_scaling_is_stable(results: Results) -> ClaimResult:
    """C5: the training loss under linear scaling, over that at the batch's own best rate."""
    table = scaled(results)
    linear = table[table["rule"] == "linear"]
    if linear["optimizer"].nunique() < 2 or linear["batch"].nunique() < 2:
        return undecided("It takes SGD and Adam at two larger batches each.", len(linear))
    stable = linear["excess"] <= STABLE
    cells = "; ".join(
        f"{row['optimizer']} at B = {row['batch']:g}: {', '.join(f'{rule} {_excess(table, row, rule)}' for rule in RULES)}"
        for row in linear.to_dict("records")
    )
    return ClaimResult(
        verdict=Ruling.confirmed if stable.all() else Ruling.conditional if stable.any() else Ruling.refuted,
        measured=float(stable.mean()),
        threshold=f"share of cells within {STABLE:g} nats of the best rate's loss: 1",
        n=len(trained(results)),
        explanation=f"Training loss above that of the best rate, by scaling: {cells}.",
    )


def _excess(table: pd.DataFrame, row: Mapping[Hashable, object], rule: str) -> str:
    own = table[(table["optimizer"] == row["optimizer"]) & (table["batch"] == row["batch"]) & (table["rule"] == rule)]
    return number(float(own["excess"].iloc[0])) if len(own) else "beyond the grid"


def smoother_and_better(results: Results) -> ClaimResult:
    """C8: noise per step, and held-out loss at equal steps and at equal samples; each batch at its best rate."""
    rows = trained(results)
    if rows["batch"].nunique() < 2:
        return undecided("It takes two batch sizes.", len(rows))
    table = comparison(rows)
    smoother = bool((table["noise_large"] < table["noise_small"]).all())
    steps, samples = (bool((table[f"{name}_large"] < table[f"{name}_small"]).all()) for name in ("steps", "samples"))
    verdict = Ruling.confirmed if smoother and steps and samples else Ruling.conditional if smoother or steps else Ruling.refuted
    words = "; ".join(
        f"{row['optimizer']}: noise per step {number(row['noise_large'])} against {number(row['noise_small'])}, held-out loss at "
        f"equal steps {number(row['steps_large'])} against {number(row['steps_small'])}, at equal samples "
        f"{number(row['samples_large'])} against {number(row['samples_small'])}"
        for row in table.to_dict("records")
    )
    return ClaimResult(
        verdict=verdict,
        measured=float((table["noise_large"] / table["noise_small"]).max()),
        threshold="noise < 1 and lower loss at equal steps and at equal samples: confirmed",
        n=len(rows),
        explanation=f"The window's batch against the smallest, each at its best rate, means over seeds: {words}.",
    )


def comparison(rows: pd.DataFrame) -> pd.DataFrame:
    """Per optimizer, the largest (`_large`) and the smallest batch (`_small`): `noise` of the loss per step, held-out loss at
    equal `steps` and at equal `samples`, each at the best rate of its measure; means over seeds.
    """
    sizes = {"large": int(rows["batch"].max()), "small": int(rows["batch"].min())}
    measures = {"noise": ("tail_loss", "step_noise"), "steps": ("early_held_out_loss",) * 2, "samples": ("held_out_loss",) * 2}
    columns: dict[str, pd.Series[float]] = {}
    for name, (tuned_by, measure) in measures.items():
        means = best(rows, tuned_by).groupby(["optimizer", "batch"])[measure].mean().unstack()
        columns |= {f"{name}_{size}": means[batch] for size, batch in sizes.items()}
    return pd.DataFrame(columns).reset_index()


def generalisation(results: Results) -> ClaimResult:
    """C9: held-out loss, and its gap to the training loss, of the largest batch less the smallest's, paired by seed."""
    differences = largest_less_smallest(trained(results))
    seeds = int(differences.groupby("optimizer").size().min()) if len(differences) else 0
    if seeds < LEAST_SEEDS:
        return undecided(f"It takes {LEAST_SEEDS} seeds, to tell a difference of held-out losses from noise.", len(differences))
    each = {
        str(name): (statistics.mean_interval(list(own["held_out"])), statistics.mean_interval(list(own["gap"])))
        for name, own in differences.groupby("optimizer")
    }
    better = any(loss.high < 0 for loss, _ in each.values())
    overfits = any(loss.low > 0 and gap.low > 0 for loss, gap in each.values())
    words = "; ".join(
        f"{name}: held-out loss {number(loss.estimate)} ({number(loss.low)} to {number(loss.high)}), gap to the training loss "
        f"{number(gap.estimate)} ({number(gap.low)} to {number(gap.high)})"
        for name, (loss, gap) in each.items()
    )
    return ClaimResult(
        verdict=Ruling.conditional if better or overfits else Ruling.refuted,
        measured=max(loss.estimate for loss, _ in each.values()),
        threshold="held-out loss below 0 (S4), or above 0 with a larger gap (S0); 95% intervals",
        n=len(differences),
        explanation=f"The largest batch less the smallest, at tuned rates and equal samples: {words}. For this model and length.",
    )


def largest_less_smallest(rows: pd.DataFrame) -> pd.DataFrame:
    """Per optimizer and seed, at the best rates for the held-out loss: `held_out`, and `gap` = held-out less training loss."""
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


CLAIMS = (
    Claim(
        id="C4",
        expects=Ruling.conditional,
        rule=f"Refuted when accumulation at the true batch's rate ends at its loss to {SAME:.0e} and no best rate of the large "
        f"batch exceeds the small batch's; conditional when one does.",
        decide=rate_has_to_be_raised,
    ),
    Claim(
        id="C5",
        expects=Ruling.conditional,
        rule=f"Confirmed when linear scaling stays within {STABLE:g} nats of the best rate's training loss for SGD and Adam at "
        f"every larger batch, refuted when nowhere, conditional between.",
        decide=linear_scaling_is_stable,
    ),
    Claim(
        id="C8",
        expects=Ruling.conditional,
        rule="Confirmed when the large batch is less noisy per step and has the lower held-out loss at equal steps and at equal "
        "samples; conditional when only some of it holds.",
        decide=smoother_and_better,
    ),
    Claim(
        id="C9",
        expects=Ruling.refuted,
        rule="Conditional when one of the two texts is right for some optimizer: a lower held-out loss (S4), or a higher one "
        f"with a larger gap to the training loss (S0), 95% intervals over {LEAST_SEEDS} seeds or more; else refuted.",
        decide=generalisation,
    ),
)


# Page --------------------------------------------------------------------------------------------------------------------------


def true_batch(material: Material) -> Section | None:
    pairs = against_true_batch(material.results)
    if pairs.empty:
        return None
    head = ("optimizer", "rate of the true batch", "factor", "seeds", "held-out loss off by, relative")
    cells = tuple(
        (str(optimizer), number(own["lr_full"].iloc[0]), f"{factor:g}", str(len(own)),
         f"{number(own['difference'].median())} ({number(own['difference'].min())} to {number(own['difference'].max())})")
        for (optimizer, factor), own in pairs.assign(factor=pairs["factor"].round(6)).groupby(["optimizer", "factor"])
    )  # fmt: skip
    caption = "Accumulated at 1, sqrt N and N times the rate, against the true batch: float64, median (range) over seeds."
    return Section("Against the true batch: the same rate", (Table(head, cells, caption),))


def over_rates(material: Material) -> Section | None:
    rows = trained(material.results)
    if rows.empty:
        return None
    blocks: list[Block] = [
        Text(
            "Each batch size trained on the same samples at every rate. The best rate grows with the batch, for both optimizers, "
            "and the range of rates that train at all does not grow with it: that is where linear scaling ends. All losses hold "
            "for a perceptron on 1,500 digits and six epochs."
        )
    ]
    for optimizer, own in rows.groupby("optimizer"):
        blocks.append(
            Picture(
                f"rates-{optimizer}",
                figures.figure_rates(own, "batch", lambda value: f"batch of {value:.0f}", ("tail_loss", "held_out_loss")),
                f"Training and held-out loss over the learning rate under {optimizer}, one line per batch size.",
                f"{optimizer}: loss after six epochs over the learning rate, mean and 95% t interval over seeds. Rates at which "
                f"a seed ended without a number are left out.",
            )
        )
    return Section("Loss over rate and batch size", (*blocks, _rule_table(material.results)))


def _rule_table(results: Results) -> Table:
    head = ("optimizer", "batch", "scaling from the smallest batch", "rate", "training loss", "at its best rate", "excess")
    cells = tuple(
        (
            str(row["optimizer"]),
            f"{row['batch']:.0f}",
            str(row["rule"]),
            *(number(row[name]) for name in ("lr", "loss", "tuned", "excess")),
        )
        for row in scaled(results).to_dict("records")
    )  # fmt: skip
    return Table(head, cells, "Rules for the learning rate, equal samples; nats per sample, means over seeds. -: no number.")


def curves(material: Material) -> Section | None:
    rows = trained(material.results)
    if rows.empty or rows["batch"].nunique() < 2:
        return None
    head = (
        "optimizer",
        "noise per step: large",
        "small",
        "loss at equal steps: large",
        "small",
        "at equal samples: large",
        "small",
    )
    cells = tuple(
        (
            str(row["optimizer"]),
            *(number(row[f"{name}_{size}"]) for name in ("noise", "steps", "samples") for size in ("large", "small")),
        )
        for row in comparison(rows).to_dict("records")
    )
    differences = largest_less_smallest(rows)
    words = [
        f"{name}: {optimizers.interval(own['held_out'])}, n = {len(own)}. {optimizers.power(list(own['held_out']))}"
        for name, own in differences.groupby("optimizer")
    ]
    text = Text(
        f"A batch of {rows['batch'].max():g} against one of {rows['batch'].min():g}, each at the best rate for what is compared. "
        f"Equal steps give the large batch as many times more samples; equal samples give the small one as many times more "
        f"steps. Held-out loss at equal samples, large less small, paired by seed: {' '.join(words)}"
    )
    caption = "Noise: root mean square change of the loss per step over sqrt 2, second half. Losses held out, in nats."
    return Section("Smoother and better?", (text, Table(head, cells, caption)))


EXPERIMENT = Experiment(
    name="learning_rate",
    title="Does accumulation ask for another learning rate?",
    question="Against the true large batch, and against the small batch that one would otherwise train with: which rate, which "
    "curve, which model?",
    prediction="Against the true batch nothing changes. Against the small batch the best rate grows with B / b, less than "
    "linearly once the noise scale is passed; curves are smoother per step; at equal samples the small batch is no worse.",
    rule=f"Rates in octaves, the same for all batch sizes; best means lowest mean over seeds. Stable means within {STABLE:g} "
    f"nats of the best rate's training loss. Held-out losses are compared from {LEAST_SEEDS} seeds on. All of it for this model "
    f"and length.",
    claims=CLAIMS,
    sections=(true_batch, over_rates, curves),
)
