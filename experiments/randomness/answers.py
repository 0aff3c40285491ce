"""Does dropout make accumulation a different computation, or only another draw of the same?"""

from __future__ import annotations

from accumulation_harness.analysis.answering import (
    ALGEBRA_GATE,
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    ClaimResult,
    Experiment,
    Material,
    Results,
    Section,
    claim,
    number,
    section,
    table_by,
    undecided,
)

DIFFERS = 0.01  # relative distance of two different gradients: rounding is thirteen decades below
SPREAD = 0.1  # tolerance of the mean ratio of spreads around 1; 200 draws give a spread to a few per cent
SHIFT = 2.0  # limit of the standardised difference of means, which is 1 where the means are the same
FEWEST_DRAWS = 200


@claim(
    "B6",
    CONFIRMED,
    "Confirmed when single runs differ with one dropout layer and with several, their distribution is the same, and "
    "masks drawn by sample make accumulation exact; refuted when no single run differs; conditional otherwise.",
)
def single_runs_differ(results: Results) -> ClaimResult:
    """B6: compares single gradients, their distribution over masks, and gradients whose masks belong to the samples."""
    rows = results.study("randomness")
    if rows["draws"].min() < FEWEST_DRAWS or rows["trial"].nunique() < 2 or rows["dropout_layers"].nunique() < 2:
        return undecided(f"It takes {FEWEST_DRAWS} draws, two trials, and models with one dropout layer and several.", len(rows))
    plain, remedy, repeated = (rows.query("masks == @name") for name in ("accumulated", "masks_of_samples", "masks_repeated"))
    finest = repeated[repeated["accumulation_steps"] == repeated["accumulation_steps"].max()]
    if not finest["spread_ratio"].mean() > 1 + SPREAD:
        return undecided(
            "Masks repeated in every micro-batch are not told apart: the test of the law sees nothing.",
            len(rows),
        )
    one, many = (plain.query(f"dropout_layers {of} 1")["distance"] for of in ("==", ">"))
    single, several = one.median(), many.median()
    by_setting = plain.groupby(["dropout_layers", "accumulation_steps"])[["mean_shift", "spread_ratio"]].mean()
    shift, spread = plain["mean_shift"].mean(), plain["spread_ratio"].mean()
    farthest = (by_setting["spread_ratio"] - 1).abs().max()  # of a setting: a mean over all of them could hide one
    in_law = by_setting["mean_shift"].max() <= SHIFT and farthest <= SPREAD
    exact = remedy["largest_distance"].max() <= ALGEBRA_GATE
    apart = plain["distance"] > DIFFERS
    where = "in part" if (one > DIFFERS).all() else "with several dropout layers; with one and the same generator state, not"
    return ClaimResult(
        verdict=REFUTED if not apart.any() else CONFIRMED if apart.all() and in_law and exact else CONDITIONAL,
        condition=where,
        measured=several,
        threshold=f"distance > {DIFFERS:g}; spread within {SPREAD:.0%}, means ≤ {SHIFT:g}; remedy ≤ {ALGEBRA_GATE:.0e}",
        n=len(rows),
        explanation=f"With several dropout layers single gradients differ by {number(several)} (median), "
        f"with one layer and the same generator state by {number(single)}: then either loop draws the masks "
        f"sample by sample. In law they are {'the same' if in_law else 'not the same'} (spread {spread:.2f} of the full batch's, "
        f"difference of means {shift:.2f}, 1 expected; masks repeated in every micro-batch: spread "
        f"{finest['spread_ratio'].mean():.2f}). Masks drawn by sample agree to {number(remedy['largest_distance'].max())}.",
    )


WORDS = {"accumulated": "by the loop", "masks_of_samples": "by sample (remedy)", "masks_repeated": "repeated (wrong)"}


def _masks_section(material: Material) -> Section:
    """Distances and spreads of gradients, by how the masks were drawn."""
    rows = material.study("randomness")
    head = "dropout layers | masks drawn | N | trials | distance | largest | difference of means | spread / full's"
    text = (
        f"{rows['draws'].min()} draws of masks for one window at fixed weights. Dropout alone spreads the full batch's gradient "
        f"by {number(rows['noise'].median())} of its length. Each loop draws one mask per sample, whatever the weights; measured "
        "are these weights. This does not cover a whole training, or CUDA, whose generator gives every kernel its own stream."
    )
    caption = (
        "distance: of a single gradient to the full batch's from the same generator state, median and largest. difference of "
        "means, spread: compared with independent draws of the full batch; 1 where the distribution is the same. Repeated masks "
        "have the right mean and the wrong spread."
    )
    columns = ("dropout_layers", ("masks", WORDS.get), "accumulation_steps", "trial nunique", "distance median",
               "largest_distance max", "mean_shift mean", "spread_ratio mean")  # fmt: skip
    by = "dropout_layers masks accumulation_steps"
    return section("One gradient, many masks", text, table_by(rows, by, head, columns, caption))


EXPERIMENT = Experiment(
    title="Does dropout make accumulation a different computation?",
    question="Are accumulated gradients under dropout the full batch's, for each draw of masks or in distribution? Does a remedy "
    "make them equal?",
    prediction="Single runs differ, since masks are drawn per micro-batch. Means and spreads over the draws are the same. "
    "Masks that are a function of the sample make accumulation exact.",
    rule=f"Single gradients differ above {DIFFERS:g}. The distribution is the same when spreads agree within {SPREAD:.0%} and "
    f"the standardised difference of means stays below {SHIFT:g}; masks repeated in every micro-batch must fail that. The "
    f"remedy has to be within {ALGEBRA_GATE:.0e}.",
    claims=(single_runs_differ,),
    sections=(_masks_section,),
)
