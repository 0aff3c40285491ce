"""Does accumulation ask for another learning rate? Does a larger batch? And is what it trains better?"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import numpy as np
import pandas as pd

from analysis import learning_rates, optimizers
from analysis.content import Block, Picture, Section, Table, Text, number
from analysis.figures import optimizers as figures
from analysis.learning_rates import RULES
from analysis.load import Results
from analysis.question import Claim, ClaimResult, Experiment, Material, Ruling, undecided
from harness.judge import statistics
from harness.judge.gates import TRAJECTORY_GATE
from harness.judge.resampling import Interval

APART = 1e-2  # relative change of the loss that another learning rate must make for the comparison to mean anything
STABLE = 0.1  # nats of training loss above that at the batch's best rate; a tenth of a nat is 10 % in likelihood
LEAST_SEEDS = 5  # for the comparison of held-out losses
LEVEL = 0.05
MARGIN = 0.02  # nats of held-out loss: 2 % in likelihood
PLATEAU = 0.01  # relative change of the training loss over the last fifth
TRAINED = 1.15  # nats of held-out loss; half of what guessing among ten classes costs
BEST_BATCHES = (32, 512)  # as S0 says


# Rules -------------------------------------------------------------------------------------------------------------------------


def rate_has_to_be_raised(results: Results) -> ClaimResult:
    """C4: compares accumulation with the true batch at several rates, and the best rates of large and small batches."""
    pairs, rows = learning_rates.against_true_batch(results), learning_rates.trained(results)
    pairs = pairs[pairs["optimizer"].map(pairs.groupby("optimizer")["held_out_loss_full"].max()) <= TRAINED]
    same, other = pairs[pairs["factor"].round(6) == 1], pairs[pairs["factor"] > 1.5]
    if same.empty or other.empty or rows.empty:
        reason = f"It takes accumulation beside a true batch that learned (held-out loss ≤ {TRAINED:g}), and small batches."
        return undecided(reason, len(pairs))
    if not other["difference"].min() >= APART:
        return undecided("Another learning rate has to change the result and did not.", len(pairs))
    worst = float(same["difference"].max())
    ratios, ranges = learning_rates.best_rate_ratios(rows), learning_rates.raised_in_every_subset(rows)
    words = ", ".join(
        f"{name} {ratio:g}" + (f" ({ranges[name][0]:g} to {ranges[name][1]:g}, any seed left out)" if name in ranges else "")
        for name, ratio in ratios.items()
    )
    raised = any(low > 1 for low, _ in ranges.values()) if ranges else max(ratios.values()) > 1
    lower = all(high <= 1 for _, high in ranges.values()) if ranges else max(ratios.values()) <= 1
    if worst > TRAJECTORY_GATE:
        verdict = Ruling.confirmed
    else:
        verdict = Ruling.conditional if raised else Ruling.refuted if lower else Ruling.undecided
    return ClaimResult(
        verdict=verdict,
        condition="against training with the small batch, never against the true batch" if verdict == Ruling.conditional else "",
        measured=worst,
        threshold=f"≤ {TRAJECTORY_GATE:.0e} at the unchanged rate; must differ by ≥ {APART:g} at others",
        n=len(pairs) + len(rows),
        explanation=f"Never against the true batch: at its rate accumulation ends at its loss, to {number(worst)}; sqrt N and N "
        f"times the rate are off by {number(float(other['difference'].min()))} or more "
        f"({', '.join(sorted(set(same['optimizer'])))}; all learned). Against the small batch (B/b = "
        f"{learning_rates.batch_ratio(rows):g}, equal samples) the best rate is higher by a factor of {words}.",
    )


def linear_scaling_is_stable(results: Results) -> ClaimResult:
    """C5: compares the training loss under linear scaling with that at the batch's own best rate, paired by seed."""
    table = learning_rates.scaled(results)
    linear = table[table["rule"] == "linear"]
    if linear["optimizer"].nunique() < 2 or linear["batch"].nunique() < 2:
        return undecided("It takes SGD and Adam at two larger batches each.", len(linear))
    if linear["excess_by_seed"].map(len).min() < LEAST_SEEDS:
        return undecided(f"It takes {LEAST_SEEDS} seeds.", len(linear))
    level = 1 - LEVEL / len(linear)  # Bonferroni: the cells are read together
    each = [_excess_interval(one, level) for one in linear["excess_by_seed"]]
    cells = [f"{row['optimizer']} at B = {row['batch']:g}" for row in linear.to_dict("records")]
    closed = ~linear["on_edge"].to_numpy()
    stable = [name for name, one, inside in zip(cells, each, closed, strict=True) if inside and one.high <= STABLE]
    unstable = [name for name, one, inside in zip(cells, each, closed, strict=True) if inside and one.low > STABLE]
    if len(stable) == len(cells):
        verdict = Ruling.confirmed
    elif len(unstable) == len(cells):
        verdict = Ruling.refuted
    else:
        verdict = Ruling.conditional if stable and unstable else Ruling.undecided
    words = "; ".join(
        f"{name}: {', '.join(f'{rule} {_excess(table, row, rule)}' for rule in RULES)}"
        f"{' (best rate on the edge of the grid)' if row['on_edge'] else f' (linear: {number(one.low)} to {number(one.high)})'}"
        for name, row, one in zip(cells, linear.to_dict("records"), each, strict=True)
    )
    return ClaimResult(
        verdict=verdict,
        condition=f"for {', '.join(stable)}; not for {', '.join(unstable)}" if verdict == Ruling.conditional else "",
        measured=max(one.estimate for one in each),
        threshold=f"training loss above the best rate's: ≤ {STABLE:g} nats ({level:.1%} intervals)",
        n=len(learning_rates.trained(results)),
        explanation=f"Training loss above that of the best rate, by scaling: {words}. Without warm-up.",
    )


def _excess_interval(differences: list[float], level: float) -> Interval:
    """Infinite where some seed's loss became NaN: that is as unstable as it gets."""
    if not all(map(math.isfinite, differences)):
        return Interval(math.inf, math.inf, math.inf)
    return statistics.mean_interval(differences, level=level)


def _excess(table: pd.DataFrame, row: Mapping[Hashable, object], rule: str) -> str:
    own = table[(table["optimizer"] == row["optimizer"]) & (table["batch"] == row["batch"]) & (table["rule"] == rule)]
    return number(float(own["excess"].iloc[0])) if len(own) else "beyond the grid"


def _intervals(differences: Mapping[str, list[float]]) -> dict[str, Interval]:
    """95 % intervals of each optimizer's differences, corrected for reading all of them (Bonferroni)."""
    level = 1 - LEVEL / max(1, len(differences))
    return {name: statistics.mean_interval(own, level=level) for name, own in differences.items()}


def _said(one: Interval) -> str:
    return f"{number(one.estimate)} ({number(one.low)} to {number(one.high)})"


def smoother_and_better(results: Results) -> ClaimResult:
    """C8: compares the roughness of the loss of the same samples, and final held-out losses, at equal samples and equal steps."""
    rows = learning_rates.trained(results)
    rows = rows.assign(log_noise=np.log(rows["probe_noise"].astype(float)))
    rough = learning_rates.large_less_small(rows, "log_noise", "tail_loss")
    samples = learning_rates.large_less_small(rows, "judged_loss", "tuning_loss")
    steps = learning_rates.large_less_small(rows, "early_held_out_loss", "early_held_out_loss")
    if not rough or min(map(len, rough.values())) < LEAST_SEEDS or not samples:
        return undecided(
            f"It takes two batch sizes, {LEAST_SEEDS} seeds, and the loss of the same samples along each.", len(rows)
        )
    noise, equal, early = _intervals(rough), _intervals(samples), _intervals(steps)
    holds = [name for name in noise if noise[name].high < 0 and equal[name].high < 0]
    fails = [name for name in noise if noise[name].low > 0 or equal[name].low > -MARGIN]
    at_steps = [name for name in early if early[name].high < 0]
    if len(holds) == len(noise):
        verdict = Ruling.confirmed
    elif len(holds) + len(fails) < len(noise):
        verdict = Ruling.undecided
    else:
        verdict = Ruling.conditional if holds or len(at_steps) == len(noise) else Ruling.refuted
    where = (
        f"under {', '.join(holds)}"
        if holds
        else "at equal steps, which for the large batch are more samples; not at equal samples"
    )
    words = "; ".join(
        f"{name}: roughness of the loss of the same samples {math.exp(noise[name].estimate):.2f} times the small batch's "
        f"({math.exp(noise[name].low):.2f} to {math.exp(noise[name].high):.2f}), held-out loss at equal samples "
        f"{_said(equal[name])}, at equal steps {_said(early[name])}"
        for name in noise
    )
    return ClaimResult(
        verdict=verdict,
        condition=where if verdict == Ruling.conditional else "",
        measured=max(math.exp(one.estimate) for one in noise.values()),
        threshold=f"roughness below 1 and held-out loss below 0: confirmed; above 1, or a gain of {MARGIN:g} nats excluded: "
        "not so",
        n=sum(map(len, rough.values())),
        explanation="The window's batch against the smallest at equal samples, rates chosen by other seeds, paired by seed: "
        f"{words}. {_seen(samples)}",
    )


def _seen(differences: Mapping[str, list[float]]) -> str:
    """What these pairs could have shown."""
    least = {name: statistics.detectable(own) for name, own in differences.items()}
    return "With 80% power seen would be " + ", ".join(f"{number(value)} under {name}" for name, value in least.items()) + "."


def generalisation(results: Results) -> ClaimResult:
    """C9: compares held-out loss, and its gap to the training loss at the same weights, of the largest and the smallest batch."""
    rows = learning_rates.trained(results)
    rows = rows.assign(gap=rows["judged_loss"] - rows["probe_loss"])
    losses, gaps = (learning_rates.large_less_small(rows, measure, "tuning_loss") for measure in ("judged_loss", "gap"))
    seeds = min(map(len, losses.values()), default=0)
    if seeds < LEAST_SEEDS:
        return undecided(f"It takes {LEAST_SEEDS} seeds, to tell a difference of held-out losses from noise.", len(rows))
    ends = learning_rates.others_choose(rows[rows["batch"].isin([rows["batch"].max(), rows["batch"].min()])], "tuning_loss")
    moving = ends.groupby(["optimizer", "batch"])["plateau_change"].median().groupby("optimizer").max()
    settled = [str(name) for name, change in moving.items() if change <= PLATEAU]
    loss, gap = _intervals(losses), _intervals(gaps)
    better = [name for name in settled if loss[name].high < 0]
    overfits = [name for name in settled if loss[name].low > 0 and gap[name].low > 0]
    equal = [name for name in settled if statistics.equivalence_p(losses[name], MARGIN) < LEVEL / len(loss)]
    neither = Ruling.refuted if len(equal) == len(loss) else Ruling.undecided
    verdict = Ruling.conditional if better or overfits else neither
    said = [f"{text} under {', '.join(names)}" for text, names in (("S4", better), ("S0", overfits)) if names]
    words = "; ".join(
        f"{name}: held-out loss {_said(loss[name])}, gap at the same weights {_said(gap[name])}"
        f"{'' if name in settled else f', still changing by {moving[name]:.0%} in the last fifth: undertrained, not judged'}"
        for name in loss
    )
    return ClaimResult(
        verdict=verdict,
        condition=" and ".join(said) if verdict == Ruling.conditional else "",
        measured=max(one.estimate for one in loss.values()),
        threshold=f"on a plateau (≤ {PLATEAU:.0%}): held-out loss below 0 (S4), above 0 with a larger gap (S0), or within "
        f"±{MARGIN:g} nats (TOST: neither)",
        n=sum(map(len, losses.values())),
        explanation="The largest batch less the smallest at equal samples, rates chosen by other seeds on one half of the "
        f"held-out images and judged on the other: {words}. {_seen(losses)} This rests on a perceptron and 1,500 digits.",
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
    words = "; ".join(f"{name}, B = {batch}: {_said(one)}" for name, (batch, one) in gains.items())
    return ClaimResult(
        verdict=Ruling.refuted if shown else Ruling.undecided,
        measured=max(one.estimate for _, one in gains.values()),
        threshold=f"held-out loss of every batch within {BEST_BATCHES[0]} to {BEST_BATCHES[1]} above that of one outside",
        n=len(rows),
        explanation="A batch outside the range that beats those inside contradicts it; one task cannot confirm it. Loss of the "
        f"nearest batch inside less that of the best outside, at equal samples, rates chosen by other seeds: {words}. Batches "
        f"tried: {', '.join(f'{batch:g}' for batch in sorted(rows['batch'].unique()))}.",
    )


CLAIMS = (
    Claim(
        id="C4",
        expects=Ruling.conditional,
        rule=f"Only where the true batch learned (held-out loss ≤ {TRAINED:g}). Confirmed when accumulation at the true "
        f"batch's rate ends at another loss, by more than {TRAJECTORY_GATE:.0e}; else conditional when under some optimizer "
        "the best rate of the large batch exceeds the small batch's, whichever seed is left out; refuted when under none; "
        "undecided between.",
        decide=rate_has_to_be_raised,
    ),
    Claim(
        id="C5",
        expects=Ruling.conditional,
        rule=f"A cell is stable when the interval of its excess over the best rate's training loss ends below {STABLE:g} nats, "
        f"unstable when it begins above, {LEAST_SEEDS} seeds, Bonferroni over cells, and neither when that best rate is on the "
        "edge of the grid. Confirmed when all are stable, refuted when all are unstable, conditional when some are each, else "
        "undecided.",
        decide=linear_scaling_is_stable,
    ),
    Claim(
        id="C8",
        expects=Ruling.conditional,
        rule="At equal samples, on the same probe samples, paired by seed, for every optimizer: confirmed when the large batch "
        f"is smoother and ends better (both intervals below 0); not so where it is rougher or a gain of {MARGIN:g} nats is "
        "excluded. Conditional when it is not so, but better at equal steps, or so under some optimizer; refuted when not even "
        "that; else undecided.",
        decide=smoother_and_better,
    ),
    Claim(
        id="C9",
        expects=Ruling.refuted,
        rule=f"Of optimizers whose training loss changes by at most {PLATEAU:.0%} over the last fifth, rates chosen by other "
        "seeds on other images: conditional when one of the two articles is right for some, a lower held-out loss (S4), or a "
        f"higher one with a larger gap at the same weights (S0); refuted when all lie within ±{MARGIN:g} nats (TOST); else "
        "undecided.",
        decide=generalisation,
    ),
    Claim(
        id="G10",
        expects=Ruling.refuted,
        rule=f"Read as: no batch outside {BEST_BATCHES[0]} to {BEST_BATCHES[1]} is better. Refuted when one is, against every "
        "batch inside that was trained (paired intervals, Bonferroni); otherwise undecided, as one task confirms nothing of all.",
        decide=best_batches,
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
        "roughness: large",
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
    caption = (
        "Roughness: of the loss of the same samples after every window, second differences of the second half. Losses in nats."
    )
    return Section("Smoother and better?", (text, Table(head, cells, caption)))


EXPERIMENT = Experiment(
    name="learning_rate",
    title="Does accumulation ask for another learning rate?",
    question="How do the best learning rate, the loss curve and the trained model compare with those of the true large batch, "
    "and with those of the small batch that one would otherwise train with?",
    prediction="Compared with the true batch nothing changes. Compared with the small batch the best rate grows with B / b, but "
    "less than linearly beyond the noise scale; its curve is no smoother on the same samples; at equal samples the small batch "
    "is no worse.",
    rule="The rates are octaves, the same for all batch sizes; the best has the lowest mean over seeds. Stable means within "
    f"{STABLE:g} nats of the best rate's training loss. Held-out losses are compared from {LEAST_SEEDS} seeds on. All of it "
    "holds for this model and length.",
    claims=CLAIMS,
    sections=(true_batch, over_rates, curves),
)
