"""Do the large batch, its accumulation and the small batch converge alike: to which loss, after how many samples and seconds?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import (
    CONDITIONAL,
    REFUTED,
    UNDECIDED,
    Advice,
    Block,
    ClaimResult,
    Experiment,
    Material,
    Picture,
    Results,
    Section,
    Table,
    band_curve,
    claim,
    curves,
    estimated,
    interval,
    lines,
    needed,
    number,
    over_settings,
    plain,
    section,
    share,
    statistics,
    table,
    table_by,
    undecided,
)
from accumulation_harness.config import TUNING_SEEDS
from accumulation_harness.experiments.convergence import trainings as convergence
from accumulation_harness.experiments.convergence import wastefulness
from accumulation_harness.experiments.convergence.trainings import ARM, FLAT, FRACTIONS, MARGIN, SETTING, arm_name
from accumulation_harness.experiments.convergence.wastefulness import Wasteful
from accumulation_harness.experiments.shared.tuning import DETECTABLE, FEWEST_SEEDS, LEVEL, LONGEST, Contrast
from accumulation_harness.judge.paired import Comparison

TITLES = {"samples": "samples", "optimizer_steps": "optimizer steps", "seconds": "seconds inside the steps"}


def _figure_curves(rows: DataFrame) -> Figure:
    """Probe loss of one setting over samples, optimizer steps and seconds: a line per arm (geometric mean), and its band."""
    curve = [*(f"curve_{cost}" for cost in TITLES), "curve_probe_loss"]
    points = rows[[*ARM, "seed", *curve]].explode(curve).astype(dict.fromkeys(curve, float))
    points["point"] = points.groupby([*ARM, "seed"]).cumcount()

    def cell(own: DataFrame) -> dict[str, float]:
        one = statistics.mean_interval(np.log(own["curve_probe_loss"]).tolist())
        mean, low, high = np.exp([one.estimate, one.low, one.high]).tolist()
        return {**own[curve].mean(), "mean": mean, "low": low, "high": high}

    cells = tables.cells(points, [*ARM, "point"], cell)
    cells["name"] = [arm_name(*key) for key in zip(*(cells[name] for name in ARM), strict=True)]
    shown = {title: lines(cells, "name", f"curve_{cost}", of=band_curve) for cost, title in TITLES.items()}
    return curves(shown, "", "loss on the probe set, nats", axes=("linear", "log"))


def _setting_name(key: tuple[object, ...]) -> str:
    """A setting as the page calls it."""
    workload, norm, optimizer, batch = key
    return f"{workload} ({norm}), {optimizer}, B = {batch}"


def _over_costs(material: Material) -> Section:
    """Mean and band of the probe loss over samples, steps and seconds, with what it took to the targets."""
    rows = convergence.trainings(material.results)
    judged, levels = convergence.judged(rows), convergence.targets(rows)
    needed(judged)
    blocks: list[Block] = []
    for key, own in judged.groupby(list(SETTING)):
        seeds, tuning = own["seed"].nunique(), rows.query(f"seed >= {TUNING_SEEDS}")["seed"].nunique()
        rates_of = f"the rate tuned on {tuning} other seed{'s' if tuning != 1 else ''}" if tuning else "the configured rate"
        name = _setting_name(key)
        blocks.append(Picture(
            f"curves-{plain(name)}",
            _figure_curves(own),
            f"Loss on the probe set of every arm under {name}, over samples, optimizer steps and seconds.",
            f"{name}: loss on the same fixed training samples, geometric mean and 95% t interval over {seeds} judging seeds, "
            f"each arm at {rates_of}. "
            "Seconds are those inside the optimizer steps, on whatever else the machine did at the time.",
        ))  # fmt: skip
        blocks.append(_targets_table(own, levels[key]))
    return section("Learning curves", *blocks)


def _targets_table(rows: DataFrame, levels: tuple[float, ...]) -> Table:
    head = "arm | target | reached by | samples | optimizer steps | seconds"
    cells = []
    for key, own in rows.groupby(list(ARM)):
        for level in levels:
            found = {cost: sorted(convergence.reaches(own, level, cost)) for cost in TITLES}
            middle = [_told(of[(len(of) - 1) // 2], float(own[f"curve_{cost}"].str[-1].max())) for cost, of in found.items()]
            cells.append((arm_name(*key), level, share(sum(map(math.isfinite, found["samples"])), len(own)), *middle))
    caption = (
        f"Cost by which half of the trainings came to {', '.join(f'{share:.0%}' for share in FRACTIONS)} of the way from the "
        "loss at the start to the full batch's last on the tuning seeds. Those that never arrive count as later than all; >: "
        "fewer than half arrived by then."
    )
    return table(head, cells, caption)


def _told(middle: float, last: float) -> str:
    if not math.isfinite(middle):
        return f"> {number(last)}"
    return f"{middle:,.0f}" if middle >= 100 else number(middle)


def _endings(material: Material) -> Section:
    """Test loss, gap and plateau of every arm, and its test loss beside the full batch's."""
    rows = convergence.trainings(material.results)
    judged = convergence.judged(rows)
    needed(judged)
    beside = {one.key: one for one in convergence.beside_full(judged)}
    head = (
        "setting | arm | n | rate | inside the grid | test loss | less the full batch's | detectable | "
        "margin | verdict | spread over the control's | with recalibrated BatchNorm | gap to the probe loss | "
        "plateau: probe loss | validation loss"
    )
    columns = (
        lambda own: _setting_name(tuple(own[[*SETTING]].iloc[0])), lambda own: arm_name(*own[[*ARM]].iloc[0]), "seed n", "rate",
        "interior ended", "test_loss mean",
        *(lambda own, place=place: _beside(beside.get(tuple(own[[*SETTING, *ARM]].iloc[0])))[place] for place in range(5)),
        "recalibrated_test_loss mean", "gap mean", "flat_probe counted", "flat_validation counted",
    )  # fmt: skip
    shown = judged.astype({"recalibrated_test_loss": float}).assign(
        **{
            f"flat_{loss}": judged[f"curve_{loss}_loss"].map(lambda curve: abs(convergence.drift(curve)) < FLAT)
            for loss in ("probe", "validation")
        },
    )
    text = (
        "Each arm at its tuned rate, on seeds that tuned nothing; the seed draws the split, the initial weights and the "
        "order. Same: TOST within half of what the standard deviation of the full batch's test loss between seeds is at least, "
        f"at {LEVEL:g}; lower or higher: paired t tests, Holm-corrected over the table; all else is undecided, also an arm whose "
        f"rate, or the full batch's, is at an end of the grid, and everything below {FEWEST_SEEDS} seeds. A loss is at its "
        f"plateau where it moves by less than {FLAT:.0%} within the last fifth; the probe loss, of samples that are trained on, "
        "may fall on after the validation loss has ended to. Where neither is flat, losses are those after these samples. "
        f"{LONGEST}"
    )
    caption = f"Means over the judging seeds; nats per loss term. {DETECTABLE}"
    return section("Where trainings end", text, table_by(shown, " ".join([*SETTING, *ARM]), head, columns, caption))


def _beside(one: convergence.Beside | None) -> tuple[str, ...]:
    """What an arm's rows say beside those of its full batch; no verdict where either's rate is at an end of the grid."""
    if one is None:
        return ("-",) * 5
    pairs = one.pairs
    detectable, margin, spread = map(number, (pairs.detectable, pairs.margin, one.spread))
    return interval(pairs.differences), detectable, margin, str(pairs.verdict if one.is_usable else Comparison.undecided), spread


def _waste(material: Material) -> Section:
    """Small batches of b in place of N accumulated micro-batches of b, and the advice."""
    rows = convergence.trainings(material.results)
    found = wastefulness.instead_of_accumulating(rows, convergence.judged(rows))
    needed(found)
    said = wastefulness.verdicts(found)
    head = (
        "setting | in place of N micro-batches of b | n | test loss less accumulation's | detectable | "
        "samples to the last target | optimizer steps | seconds | seconds of the full batch | "
        "accumulating is wasteful"
    )
    cells = tuple(
        (_setting_name(one.setting), one.name, len(one.small.of()), interval(one.small.of()),
         statistics.detectable(one.small.of()),
         *(wastefulness.times(one.small.of(cost)) for cost in wastefulness.COSTS), wastefulness.times(one.full_seconds),
         verdict)
        for one, verdict in zip(found, said, strict=True)
    )  # fmt: skip
    text = (
        "A step after every micro-batch of b, at its own learning rate, in place of one after N of them (arXiv 2507.07101). "
        f"{wastefulness.counted(said)} Advice: {wastefulness.advice(found, said)}"
    )
    caption = (
        "Paired by seed, means with 95% t intervals; costs over those of accumulation at the same b, geometric means of the "
        "seeds in which both reach the target. Wasteful: fewer seconds, and a test loss that is not higher by "
        f"{MARGIN:g} nats; not wasteful: more seconds, or a test loss higher by that (Bonferroni over the table); else "
        f"undecided, as below {FEWEST_SEEDS} seeds, and where a rate is at an end of the grid or a seed misses the target. "
        f"Seconds are of this machine and these small models. {DETECTABLE}"
    )
    return section("Is accumulating wasteful on one device?", text, table(head, cells, caption))


# Rules -------------------------------------------------------------------------------------------------------------------------


@claim(
    "C8",
    REFUTED,
    "In settings with both rates inside the grid, at equal samples, paired by seed (Bonferroni over settings): it is so "
    "where the full batch's curve of the probe loss is smoother than the smallest small batch's and its test loss lower "
    f"(both intervals below 0), and not so where the curve is rougher or a gain of {MARGIN:g} nats is excluded. Confirmed "
    "when so in every setting, refuted when not so in every one, conditional when each is one of both; else undecided.",
)
def smoother_and_better(results: Results) -> ClaimResult:
    """C8: compares the full batch's curve and test loss with those of the smallest small batch at equal samples."""
    pairs, level = _pairs(results)
    if not pairs:
        return _too_few()
    found = [(pair, pair.interval(level, "log_roughness"), pair.interval(level)) for pair in pairs]
    holds = [r.high < 0 and one.high < 0 for _, r, one in found]
    fails = [r.low > 0 or one.low > -MARGIN for _, r, one in found]
    told = "; ".join(
        f"{_beside_small(pair)}: roughness {math.exp(r.estimate):.2f} times ({math.exp(r.low):.2f} to {math.exp(r.high):.2f}), "
        f"test loss {estimated(one)}"
        for pair, r, one in found
    )
    return ClaimResult(
        verdict=over_settings(holds, fails),
        condition=_under(pairs, holds),
        measured=max(one.estimate for _, _, one in found),
        threshold=f"roughness below 1 and test loss below 0: so; above 1, or a gain of {MARGIN:g} nats excluded: not so",
        n=_num(pairs),
        explanation="The full batch against the small batch, at equal samples, each at its own tuned rate: "
        f"{told}. {_seen(pairs)}",
    )


@claim(
    "C9",
    REFUTED,
    f"Of settings whose validation loss changes by at most {FLAT:.0%} over the last fifth: conditional when one of the "
    "two articles is right in some, a lower test loss of the full batch (S4), or a higher one with a larger gap to the "
    "training loss at the same weights (S0); refuted when no setting changes by "
    f"more and all lie within ±{MARGIN:g} nats (TOST); else undecided. Bonferroni over settings.",
)
def generalisation(results: Results) -> ClaimResult:
    """C9: compares test loss, and its gap to the training loss at the same weights, of full batch and smallest small batch."""
    pairs, level = _pairs(results)
    if not pairs:
        return _too_few()
    changes = [pair.rows[["drift", "drift_of"]].median().abs().max() for pair in pairs]
    found = [(pair, change <= FLAT, pair.interval(level), pair.interval(level, "gap"))
             for pair, change in zip(pairs, changes, strict=True)]  # fmt: skip
    better = [flat and one.high < 0 for _, flat, one, _ in found]
    overfits = [flat and one.low > 0 and g.low > 0 for _, flat, one, g in found]
    neither = [flat and statistics.equivalence_p(pair.of(), MARGIN) < 1 - level for pair, flat, *_ in found]
    said = [f"{text} {_under(pairs, who)}" for text, who in (("S4", better), ("S0", overfits)) if any(who)]
    told = "; ".join(
        f"{_beside_small(pair)}: test loss {estimated(one)}, gap at the same weights {estimated(g)}"
        f"{'' if flat else f', validation loss still changing by {change:.0%} in the last fifth: not judged'}"
        for (pair, flat, one, g), change in zip(found, changes, strict=True)
    )
    return ClaimResult(
        verdict=CONDITIONAL if said else REFUTED if all(neither) else UNDECIDED,
        condition=" and ".join(said),
        measured=max(one.estimate for _, _, one, _ in found),
        threshold=f"at a plateau (≤ {FLAT:.0%}): test loss below 0 (S4), above 0 with a larger gap (S0), or within ±{MARGIN:g} "
        "nats (TOST: neither)",
        n=_num(pairs),
        explanation=f"The full batch less the small batch at equal samples, each at its own tuned rate: {told}. {_seen(pairs)}",
    )


def _pairs(results: Results) -> tuple[list[Contrast], float]:
    """Those with enough seeds, and the level of their intervals: Bonferroni over settings."""
    found = convergence.pairs(convergence.judged(convergence.trainings(results)))
    return found, 1 - LEVEL / max(1, len(found))


def _too_few() -> ClaimResult:
    return undecided(f"It takes {FEWEST_SEEDS} judging seeds, and rates of both batches inside the grid.")


def _beside_small(pair: Contrast) -> str:
    return f"{_setting_name(pair.key)} against {pair.rows['step_samples_of'].iloc[0]:g}"


def _under(pairs: Sequence[Contrast], chosen: Sequence[bool]) -> str:
    return "under " + ", ".join(_setting_name(pair.key) for pair, one in zip(pairs, chosen, strict=True) if one)


def _num(pairs: Sequence[Contrast]) -> int:
    return sum(len(pair.of()) for pair in pairs)


def _seen(pairs: Sequence[Contrast]) -> str:
    least = max(statistics.detectable(pair.of()) for pair in pairs)
    return f"With 80% power a difference of {number(least)} nats would have been seen in any setting."


def _is_accumulating_wasteful(results: Results) -> Advice:
    """Of the experiment on convergence: small batches of b beside N accumulated micro-batches of b, where any decides."""
    rows = convergence.trainings(results.of("convergence"))
    found = wastefulness.instead_of_accumulating(rows, convergence.judged(rows))
    said = wastefulness.verdicts(found)
    action = wastefulness.advice(found, said)
    logs = [one.small.of("seconds") for one, verdict in zip(found, said, strict=True) if verdict != Wasteful.undecided]
    needed(logs)
    ratios = [math.exp(math.fsum(own) / len(own)) for own in logs if len(own)]
    return Advice(
        "Is accumulating wasteful on one device?",
        wastefulness.counted(said).rstrip("."),
        f"Where it is decided ({len(ratios)} comparisons), a small batch takes {min(ratios):.2g} to {max(ratios):.2g} times the "
        "seconds of accumulation with the same b to the same loss, means over seeds",
        action[0].upper() + action[1:],
        "convergence",
    )


EXPERIMENT = Experiment(
    title="Do the large batch, its accumulation and the small batch converge alike?",
    question="Trained with rates tuned for each, how do the large batch, its accumulation and the small batch compare: in "
    "the loss that they reach, and in samples, optimizer steps and seconds to get there?",
    prediction="Without BatchNorm the accumulated run is the full batch: its test loss is the same, and differs over seeds "
    "as the permuted full batch does. The small batch needs fewer samples and more optimizer steps to every target, its curve is "
    "no rougher on the same samples, and it ends no worse, after fewer seconds than accumulation with the same b.",
    rule=f"Rates are tuned on seeds from {TUNING_SEEDS} on and a validation split, and judged on other seeds and the test "
    "split. Same means TOST within half of the least that the full batch's standard deviation between seeds may be; lower or "
    f"higher, a Holm-corrected paired test; anything else is undecided, as is all below {FEWEST_SEEDS} judging seeds. "
    "Accumulating is wasteful where the small batch takes fewer seconds to the last target and its test loss is not higher by "
    f"{MARGIN:g} nats.",
    claims=(smoother_and_better, generalisation),
    advice=_is_accumulating_wasteful,
    sections=(_over_costs, _endings, _waste),
)
