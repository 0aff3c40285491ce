"""Do released trainers accumulate rightly? Decided by the audits of `scoreboard/`, whose rows are kept in `recorded/`."""

from __future__ import annotations

import pandas as pd
from pandas import DataFrame

from accumulation_harness.analysis.question import CONDITIONAL, CONFIRMED, REFUTED, Claim, ClaimResult, Experiment, undecided
from accumulation_harness.experiments.shared.recorded import recorded


def of(name: str) -> DataFrame:
    """The audited arms of one record, which `make scoreboard` writes.

    Args:
        name: Name of the record.

    Returns:
        The rows.
    """
    audits = recorded("released_trainers")
    return audits[audits["name"] == name]


def accelerate_handles(arms: DataFrame) -> ClaimResult:
    """G1: `accumulate()` around a plain loop, and with the documented summing and dividing by hand; misuse is left out.

    Args:
        arms: Audited arms of accelerate.

    Returns:
        The ruling, with what was measured.
    """
    plain, documented = arms.query("function == 'naive'"), arms.query("function == 'documented'")
    if plain.empty or documented.empty:
        return undecided("It takes the audit of accelerate: make trainer NAME=accelerate.", len(arms))
    by_itself, by_hand = (bool(own["verdict"].eq("equivalent").all()) for own in (plain, documented))
    return ClaimResult(
        verdict=CONFIRMED if by_itself else CONDITIONAL if by_hand else REFUTED,
        condition="with unequal lengths or a short window only if the loss is summed and divided by hand, as documented",
        measured=plain["distance"].max(),
        threshold="every arm of the plain loop equivalent; distance of its first gradient",
        n=len(plain) + len(documented),
        explanation=f"{_versions(arms)}: {_each(pd.concat([plain, documented]))}. The documented recipe "
        "without its factor is a misuse, shown below and not counted here.",
    )


def lightning_handles(arms: DataFrame) -> ClaimResult:
    """G2: a conjunction: is accumulation on by default (the recorded default), and is it right where it is on (the audit)?

    Args:
        arms: Audited arms of Lightning.

    Returns:
        The ruling, with what was measured.
    """
    known = recorded("defaults").query("framework == 'lightning' and setting == 'accumulate_grad_batches'")
    if arms["function"].nunique() < 2 or known.empty:
        return undecided("It takes the audit of lightning: make trainer NAME=lightning.", len(arms))
    value = known["value"].iloc[-1]
    right = arms["verdict"].eq("equivalent")
    handled = CONFIRMED if right.all() else CONDITIONAL if right.any() else REFUTED
    return ClaimResult(
        verdict=REFUTED if value == 1 else handled,
        condition=f"equivalent in {_settings(arms[right])}",
        measured=value,
        threshold="Trainer().accumulate_grad_batches above 1",
        n=len(arms),
        explanation=f"The second half is wrong: Trainer().accumulate_grad_batches is {value} in lightning "
        f"{known['version'].iloc[-1]} (recorded from the library). The first half, when it is set ({_versions(arms)}): "
        f"{_each(arms)}."
        if value == 1
        else f"Trainer().accumulate_grad_batches is {value}. {_versions(arms)}: {_each(arms)}.",
    )


def by_hand(arms: DataFrame) -> ClaimResult:
    """G3: a GradientTape loop with accumulators: divided by N, undivided, and with a remainder carried over or applied.

    Args:
        arms: Audited arms of the loop.

    Returns:
        The ruling, with what was measured.
    """
    one = {name: own["verdict"].eq("equivalent") for name, own in arms.groupby("function")}
    if not {"divided", "undivided", "divided_remainder"} <= set(one):
        reason = "It takes the audit of a GradientTape loop: make trainer NAME=keras-by-hand. Keras' own option is another thing."
        return undecided(reason, len(arms))
    possible, everywhere = bool(one["divided"].all()), all(bool(own.all()) for own in one.values())
    return ClaimResult(
        verdict=REFUTED if not possible else CONFIRMED if everywhere else CONDITIONAL,
        condition="if the loop divides by N, and no epoch ends inside a window",
        measured=arms.query("function == 'divided'")["largest_distance"].max(),
        threshold="distance of the weights, within the audit's gate",
        n=len(arms),
        explanation=f"{_versions(arms)}, by hand with a GradientTape: {_each(arms)}.",
    )


def _each(arms: DataFrame) -> str:
    """What each audited function is, in words."""
    words = []
    for name, own in arms.groupby("function", sort=False):
        causes = sorted({one for one in own["causes"] if one})
        found = "equivalent" if own["verdict"].eq("equivalent").all() else f"different ({', '.join(causes) or 'no cause'})"
        words.append(f"{str(name).replace('_', ' ')}: {found}")
    return "; ".join(words)


def _versions(arms: DataFrame) -> str:
    return ", ".join(sorted({f"{row.name_} {row.version}" for row in arms.rename(columns={"name": "name_"}).itertuples()}))


def _settings(arms: DataFrame) -> str:
    """The audited functions, by their names."""
    return ", ".join(name.replace("_", " ") for name in dict.fromkeys(arms["function"])) or "no setting"


CLAIMS = (
    Claim(
        "G1",
        CONDITIONAL,
        "By itself means a plain loop inside `accumulate()`, with unequal lengths and a short window: confirmed when it is "
        "equivalent to the full batch, conditional when the documented recipe is and it is not, refuted when neither is.",
        lambda _: accelerate_handles(of("accelerate")),
        is_recorded=True,
    ),
    Claim(
        "G2",
        REFUTED,
        "A conjunction. Refuted when the default of accumulate_grad_batches is 1, an exact contradiction of its second "
        "half; otherwise confirmed when every audited setting is equivalent, conditional when some are, and refuted when none "
        "is.",
        lambda _: lightning_handles(of("lightning")),
        is_recorded=True,
    ),
    Claim(
        "G3",
        CONDITIONAL,
        "Of a GradientTape loop by hand: refuted when the divided sum is not the full batch, confirmed when the undivided "
        "sum and both ways to treat a remainder are too, conditional otherwise.",
        lambda _: by_hand(of("keras-by-hand")),
        is_recorded=True,
    ),
)


EXPERIMENT = Experiment(
    title="Do released trainers accumulate rightly?",
    question="Which released trainers compute with accumulation what they compute with the full batch, and in which settings?",
    prediction="Each is right with equal lengths and full windows, and wrong in some setting with unequal lengths, a remainder, "
    "or a moving average.",
    rule="The audit's verdict decides, per release and setting: the same training function at N = 1, 4 and 16 (docs/audit.md). "
    "It holds for that release and setting. Run an audit with make trainer NAME=<name>: each has an environment of its own. "
    "All of them: docs/findings/scoreboard.md.",
    claims=CLAIMS,
    sections=(),
)
