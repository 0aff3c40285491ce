"""The size b of what BatchNorm normalises together and the number N of micro-batches, moved apart at one batch B.

At one B plain accumulation moves both, b = B / N. Two remedies move one alone: Ghost BatchNorm normalises groups of b in one
forward (N = 1), two-pass statistics normalise all of B in N micro-batches. With the full batch they are a 2 x 2 design.
"""

from __future__ import annotations

from typing import Any

from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import Material, Results, Section, needed, section, statistics, table_by
from accumulation_harness.experiments.batchnorm.sections import in_points, named
from accumulation_harness.experiments.batchnorm.tables import LEVEL, MARGIN, remedied

BOTH, GROUPS, PARTS = "accumulated", "ghost_full_batch", "two_pass_statistics"  # what moves: b and N, b alone, N alone
CORNERS = [BOTH, GROUPS, PARTS]


def factors(results: Results) -> DataFrame:
    """Separate what b and N cost in held-out accuracy, each averaged over both values of the other.

    With the loss l(g, N) to the full batch of the same seed, for statistics over g samples: of b, (l(b, 1) + l(b, N) - l(B,
    N)) / 2; of N, (l(B, N) + l(b, N) - l(b, 1)) / 2.

    Args:
        results: Those of the question `batchnorm`.

    Returns:
        A row per model, B and b, in points. `of_b`, `of_n`: mean and 95 % t interval over seeds; `b_holm`: t test, Holm over
        the rows; `n_tost`: TOST of |effect of N| < MARGIN points.
    """
    rows = remedied(results)
    chosen = rows.query("arm in @CORNERS")
    key = ["model", "effective_batch", "b"]
    wide = chosen.pivot_table(index=[*key, "seed"], columns="arm", values="lost").reindex(columns=CORNERS).dropna()
    wide = wide.assign(of_b=(wide[GROUPS] + wide[BOTH] - wide[PARTS]) / 2, of_n=(wide[PARTS] + wide[BOTH] - wide[GROUPS]) / 2)

    def effects(own: DataFrame) -> dict[str, Any]:
        of_b, of_n = own["of_b"].tolist(), own["of_n"].tolist()
        return {
            "n": len(own), "of_b": statistics.mean_interval(of_b), "b_p": statistics.t_test(of_b),
            "of_n": statistics.mean_interval(of_n), "n_tost": statistics.equivalence_p(of_n, MARGIN),
        }  # fmt: skip

    frame = tables.cells(wide, key, effects)
    return frame if frame.empty else frame.assign(b_holm=statistics.holm(frame["b_p"].fillna(1.0).tolist()))


def in_words(cells: DataFrame) -> str:
    """In how many cells b costs accuracy, and in how many N is shown to cost none.

    Args:
        cells: What b and N cost, a row for each pair.

    Returns:
        A sentence.
    """
    if cells.empty:
        return "b and N were not moved apart."
    costly = cells[(cells["b_holm"] < LEVEL) & (cells["of_b"].map(lambda one: one.estimate) > 0)]
    same = (cells["n_tost"] < LEVEL).sum()
    sizes = ", ".join(f"{named(model)} at b = {', '.join(map(str, own['b']))}" for model, own in costly.groupby("model"))
    return (
        f"Moved apart at one B, b costs accuracy in {len(costly)} of {len(cells)} cells{f' ({sizes})' if sizes else ''}, and N "
        f"changes it by less than {MARGIN:g} point (TOST) in {same} of {len(cells)}."
    )


def b_and_n(material: Material) -> Section:
    """What b costs and what N costs at one B, each with the other held.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    cells = factors(material.results)
    needed(cells)
    how = (
        "At one B plain accumulation moves both, b = B / N. Ghost BatchNorm in the full batch moves b alone: one forward, groups "
        "of b. Two-pass statistics move N alone: N micro-batches, the statistics of all B. With the full batch they are a 2 x 2 "
        "design, trained from the same seeds."
    )
    head = f"model | B | b | N | seeds | points lost by b | t test, Holm | points lost by N | within {MARGIN:g}: TOST p"
    caption = (
        "Held-out accuracy; each effect averaged over both values of the other factor, paired by seed, with its 95% t interval. "
        "A TOST p below 0.05 shows that N costs less than the margin; one above shows nothing."
    )
    columns = (
        ("model", named), "effective_batch", "b", lambda own: (own["effective_batch"] // own["b"]).iloc[0], "n",
        ("of_b", in_points), "b_holm", ("of_n", in_points), "n_tost",
    )  # fmt: skip
    return section("b or N?", how, in_words(cells), table_by(cells, "", head, columns, caption))
