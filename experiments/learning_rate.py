"""Does accumulation ask for another learning rate? Does a larger batch? And is what it trains better?"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import pandas as pd

from analysis import learning_rates, optimizers
from analysis.content import Block, Picture, Section, Table, Text, number
from analysis.figures import optimizers as figures
from analysis.learning_rates import RULES
from analysis.load import Results
from analysis.question import Claim, ClaimResult, Experiment, Material, Ruling, undecided
from harness.judge import statistics
from harness.judge.gates import TRAJECTORY_GATE

APART = 1e-2  # relative change of the loss that another learning rate must make for the comparison to mean anything
STABLE = 0.1  # nats of training loss above that at the batch's best rate; a tenth of a nat is 10 % in likelihood
LEAST_SEEDS = 5  # for the comparison of held-out losses


# Rules -------------------------------------------------------------------------------------------------------------------------


def rate_has_to_be_raised(results: Results) -> ClaimResult:
    """C4: compares accumulation with the true batch at several rates, and the best rates of large and small batches."""
    pairs, rows = learning_rates.against_true_batch(results), learning_rates.trained(results)
    same, other = pairs[pairs["factor"].round(6) == 1], pairs[pairs["factor"] > 1.5]
    if same.empty or other.empty or rows.empty:
        return undecided("It takes accumulation beside the true batch at several rates, and small batches.", len(pairs))
    if not other["difference"].min() >= APART:
        return undecided("Another learning rate has to change the result and did not.", len(pairs))
    worst = float(same["difference"].max())
    ratios = learning_rates.best_rate_ratios(rows)
    words = ", ".join(f"{name} {ratio:g}" for name, ratio in ratios.items())
    step = learning_rates.batch_ratio(rows)
    raised = max(ratios.values()) > 1
    return ClaimResult(
        verdict=Ruling.confirmed if worst > TRAJECTORY_GATE else Ruling.conditional if raised else Ruling.refuted,
        measured=worst,
        threshold=f"≤ {TRAJECTORY_GATE:.0e} at the unchanged rate; must differ by ≥ {APART:g} at others",
        n=len(pairs) + len(rows),
        explanation=f"Never against the true batch: at its rate accumulation ends at its loss, to {number(worst)}; sqrt N and N "
        f"times the rate are off by {number(float(other['difference'].min()))} or more. Against the small batch (B/b = {step:g}, "
        f"equal samples) the best rate is higher by a factor of {words}.",
    )


def linear_scaling_is_stable(results: Results) -> ClaimResult:
    """C5: compares the training loss under linear scaling with that at the batch's own best rate."""
    table = learning_rates.scaled(results)
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
        n=len(learning_rates.trained(results)),
        explanation=f"Training loss above that of the best rate, by scaling: {cells}.",
    )


def _excess(table: pd.DataFrame, row: Mapping[Hashable, object], rule: str) -> str:
    own = table[(table["optimizer"] == row["optimizer"]) & (table["batch"] == row["batch"]) & (table["rule"] == rule)]
    return number(float(own["excess"].iloc[0])) if len(own) else "beyond the grid"


def smoother_and_better(results: Results) -> ClaimResult:
    """C8: compares noise per step, and held-out loss at equal steps and at equal samples, each batch at its best rate."""
    rows = learning_rates.trained(results)
    if rows["batch"].nunique() < 2:
        return undecided("It takes two batch sizes.", len(rows))
    table = learning_rates.comparison(rows)
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


def generalisation(results: Results) -> ClaimResult:
    """C9: compares held-out loss, and its gap to the training loss, of the largest and the smallest batch, paired by seed."""
    differences = learning_rates.largest_less_smallest(learning_rates.trained(results))
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


CLAIMS = (
    Claim(
        id="C4",
        expects=Ruling.conditional,
        rule="Refuted when accumulation at the true batch's rate ends at the true batch's loss, to "
        f"{TRAJECTORY_GATE:.0e}, and under no optimizer the best rate of the large batch exceeds the small batch's; conditional "
        "when one does.",
        decide=rate_has_to_be_raised,
    ),
    Claim(
        id="C5",
        expects=Ruling.conditional,
        rule=f"Confirmed when linear scaling stays within {STABLE:g} nats of the best rate's training loss for SGD and Adam at "
        "every larger batch, refuted when it does at none, conditional otherwise.",
        decide=linear_scaling_is_stable,
    ),
    Claim(
        id="C8",
        expects=Ruling.conditional,
        rule="Confirmed when the large batch is less noisy per step and has the lower held-out loss at equal steps and at equal "
        "samples; conditional when it is less noisy or better at equal steps; refuted otherwise.",
        decide=smoother_and_better,
    ),
    Claim(
        id="C9",
        expects=Ruling.refuted,
        rule="Conditional when one of the two texts is right for some optimizer: a lower held-out loss (S4), or a higher one "
        f"with a larger gap to the training loss (S0), by 95% intervals over {LEAST_SEEDS} seeds or more; refuted otherwise.",
        decide=generalisation,
    ),
)


# Page --------------------------------------------------------------------------------------------------------------------------


def true_batch(material: Material) -> Section | None:
    """Held-out losses at the rate of the true batch, and at sqrt N and N times it."""
    pairs = learning_rates.against_true_batch(material.results)
    if pairs.empty:
        return None
    head = ("optimizer", "rate of the true batch", "factor", "seeds", "held-out loss off by, relative")
    cells = tuple(
        (str(optimizer), number(own["lr_full"].iloc[0]), f"{factor:g}", str(len(own)),
         f"{number(own['difference'].median())} ({number(own['difference'].min())} to {number(own['difference'].max())})")
        for (optimizer, factor), own in pairs.assign(factor=pairs["factor"].round(6)).groupby(["optimizer", "factor"])
    )  # fmt: skip
    caption = "Accumulation at 1, sqrt N and N times the rate, against the true batch, in float64: median (range) over seeds."
    return Section("Against the true batch: the same rate", (Table(head, cells, caption),))


def over_rates(material: Material) -> Section | None:
    """Losses over the learning rate by batch size, and under each rule of scaling."""
    rows = learning_rates.trained(material.results)
    if rows.empty:
        return None
    blocks: list[Block] = [
        Text(
            "Each batch size was trained on the same samples at every rate. The best rate grows with the batch, for both "
            "optimizers, and the range of rates that train at all does not: there linear scaling ends. All losses are those of a "
            "perceptron on 1,500 digits over six epochs."
        )
    ]
    for optimizer, own in rows.groupby("optimizer"):
        blocks.append(
            Picture(
                f"rates-{optimizer}",
                figures.figure_rates(own, "batch", lambda value: f"batch of {value:.0f}", ("tail_loss", "held_out_loss")),
                f"Training and held-out loss over the learning rate under {optimizer}, one line per batch size.",
                f"{optimizer}: loss after six epochs over the learning rate, mean and 95% t interval over seeds. Rates at which "
                "the loss of some seed became NaN are left out.",
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
        for row in learning_rates.scaled(results).to_dict("records")
    )  # fmt: skip
    return Table(head, cells, "Rules for the learning rate at equal samples; nats per sample, means over seeds. -: NaN.")


def curves(material: Material) -> Section | None:
    """Noise and held-out losses of the largest and the smallest batch."""
    rows = learning_rates.trained(material.results)
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
        for row in learning_rates.comparison(rows).to_dict("records")
    )
    differences = learning_rates.largest_less_smallest(rows)
    words = [
        f"{name}: {optimizers.interval(own['held_out'])}, n = {len(own)}. {optimizers.power(list(own['held_out']))}"
        for name, own in differences.groupby("optimizer")
    ]
    text = Text(
        f"A batch of {rows['batch'].max():g} against one of {rows['batch'].min():g}, each at the best rate for what is compared. "
        f"At equal steps the large batch sees {learning_rates.batch_ratio(rows):g} times the samples; at equal samples the small "
        f"one takes as many times the steps. Held-out loss at equal samples, large minus small, paired by seed: {' '.join(words)}"
    )
    caption = "Noise: root mean square change of the loss per step over sqrt 2, in the second half. Losses are held out, in nats."
    return Section("Smoother and better?", (text, Table(head, cells, caption)))


EXPERIMENT = Experiment(
    name="learning_rate",
    title="Does accumulation ask for another learning rate?",
    question="How do the best learning rate, the loss curve and the trained model compare with those of the true large batch, "
    "and with those of the small batch that one would otherwise train with?",
    prediction="Compared with the true batch nothing changes. Compared with the small batch the best rate grows with B / b, but "
    "less than linearly beyond the noise scale; curves are smoother per step; at equal samples the small batch is no worse.",
    rule="The rates are octaves, the same for all batch sizes; the best has the lowest mean over seeds. Stable means within "
    f"{STABLE:g} nats of the best rate's training loss. Held-out losses are compared from {LEAST_SEEDS} seeds on. All of it "
    "holds for this model and length.",
    claims=CLAIMS,
    sections=(true_batch, over_rates, curves),
)
