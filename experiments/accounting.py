"""What does accumulation keep in memory, and is the texts' arithmetic right? Decided by counting bytes, and by calculating."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pandas as pd

from analysis.content import Section, Table
from analysis.load import Results
from analysis.question import Claim, ClaimResult, Experiment, Material, Ruling, undecided

ADAM = ("adam", "adamw")
CLOSE = 0.02  # relative tolerance for a result that a text rounds to two or three digits
MODEL_STATE = ["parameter_bytes", "gradient_bytes", "state_bytes"]


def spread_over_n(rows: pd.DataFrame, columns: list[str]) -> float:
    """The largest relative change of the summed bytes from one N to another, over the trials."""
    totals = rows.assign(total=rows[columns].sum(axis=1)).groupby("trial")["total"]
    return float((totals.max() / totals.min() - 1).max())


def models_become_larger(results: Results) -> ClaimResult:
    """D4: tests whether the bytes of weights, gradients and optimizer state depend on N; if not, no larger model fits."""
    rows = results.measurements
    spread = spread_over_n(rows, MODEL_STATE)
    return ClaimResult(
        verdict=Ruling.refuted if spread == 0 else Ruling.conditional,
        measured=spread,
        threshold="model state at N over N = 1, less 1: 0",
        n=len(rows),
        explanation="Weights, gradients and optimizer state take the same bytes at every N: accumulation saves activations, it "
        "makes room for no larger model state.",
    )


def gradient_buffer_grows(results: Results) -> ClaimResult:
    """D5: tests whether the bytes of the gradients depend on N."""
    rows = results.measurements
    spread = spread_over_n(rows, ["gradient_bytes"])
    return ClaimResult(
        verdict=Ruling.refuted if spread == 0 else Ruling.confirmed,
        measured=spread,
        threshold="gradient bytes at N over N = 1, less 1: 0",
        n=len(rows),
        explanation="One buffer of the parameters' size holds the sum, whatever N.",
    )


def bytes_per_parameter(results: Results) -> ClaimResult:
    """D7: compares the bytes of parameters, gradients and Adam's state for 1.3e9 parameters with the text's 10.4 GB."""
    rows = results.measurements
    adam = rows[rows["optimizer"].isin(ADAM)]
    if adam.empty:
        return undecided("It takes trials with Adam.", 0)
    each = adam[MODEL_STATE].sum(axis=1) / adam["num_parameters"]
    needed = 1.3e9 * float(each.median()) / 1e9
    return ClaimResult(
        verdict=Ruling.confirmed if abs(needed / 10.4 - 1) <= CLOSE else Ruling.refuted,
        measured=needed,
        threshold="10.4 GB within 2%",
        n=len(adam),
        explanation=f"Adam under autocast keeps {each.median():.4g} bytes per parameter (weights, gradients and two moments in "
        f"float32): {needed:.1f} GB for 1.3B parameters. 10.4 GB is weights and gradients alone.",
    )


def adam_copies(results: Results) -> ClaimResult:
    """D11: compares the bytes of Adam's state with those of the parameters. Text S3 says twice as many, S0 as many."""
    rows = results.measurements
    adam = rows[rows["optimizer"].isin(ADAM)]
    if adam.empty:
        return undecided("It takes trials with Adam.", 0)
    copies = adam["state_bytes"] / adam["parameter_bytes"]
    return ClaimResult(
        verdict=Ruling.conditional if copies.eq(2).all() else Ruling.refuted,
        measured=float(copies.median()),
        threshold="2 (S3), not 1 (S0)",
        n=len(adam),
        explanation="Two copies: the first and the second moment. S3 is right, S0 is not.",
    )


# Arithmetic --------------------------------------------------------------------------------------------------------------------


def arithmetic(value: float, claimed: float, explanation: str, results: Results) -> ClaimResult:
    """A calculation of a text, repeated: confirmed within `CLOSE`."""
    return ClaimResult(
        verdict=Ruling.confirmed if abs(value / claimed - 1) <= CLOSE else Ruling.refuted,
        measured=value,
        threshold=f"{claimed:g} within 2%",
        n=1,
        explanation=explanation,
    )


def not_testable(explanation: str, results: Results) -> ClaimResult:
    """A claim that no run can decide, and why."""
    return ClaimResult(verdict=Ruling.not_testable, measured=float("nan"), threshold="", n=0, explanation=explanation)


def claim(name: str, expects: Ruling, rule: str, decide: Callable[[Results], ClaimResult]) -> Claim:
    """A claim with its rule."""
    return Claim(id=name, expects=expects, rule=rule, decide=decide)


CANNOT = {
    "D3": "Training keeps no key-value cache: there is nothing to save.",
    "G4": "How often a service runs out of memory is no experiment's; make audit-composer says what it computes.",
    "G5": "What a company runs in production leaves no trace that could be measured.",
    "G6": "How a model was trained in 2018 cannot be measured; its paper reports TPU pods.",
    "G7": "How a model was trained cannot be measured; its paper gives the batch, and does not say that it was accumulated.",
    "G10": "Without task, model and criterion there is no best batch size; the same text praises millions of tokens.",
}

CLAIMS = (
    claim("D4", Ruling.refuted, "Refuted when the bytes of the model state are the same at every N.", models_become_larger),
    claim("D5", Ruling.refuted, "Refuted when the bytes of the gradients are the same at every N.", gradient_buffer_grows),
    claim(
        "D7",
        Ruling.refuted,
        "Refuted when Adam's bytes per parameter x 1.3e9 differ from 10.4 GB by more than 2%.",
        bytes_per_parameter,
    ),
    claim(
        "D8",
        Ruling.confirmed,
        "Confirmed when 524288 / 8192 is 64.",
        partial(arithmetic, 524288 / 8192, 64, "524288 tokens are 64 windows of 8192, exactly."),
    ),
    claim("D11", Ruling.conditional, "Conditional when Adam's state takes twice the parameters' bytes.", adam_copies),
    claim(
        "G8",
        Ruling.refuted,
        "Refuted when one GPU holds more words than the whole batch has tokens.",
        partial(arithmetic, 16e6, 4e6, "16M words on one GPU are already more than the 4M tokens of the whole batch."),
    ),
    claim(
        "G9",
        Ruling.confirmed,
        "Confirmed when 70e9 parameters x 2 bytes are 140 GB.",
        partial(arithmetic, 70e9 * 2 / 1e9, 140, "At 2 bytes per parameter, weights alone."),
    ),
    *(claim(name, Ruling.not_testable, "No run can decide it.", partial(not_testable, why)) for name, why in CANNOT.items()),
)


def byte_table(material: Material) -> Section | None:
    """Bytes per parameter that stay from one micro-batch to the next."""
    rows = material.measurements
    if rows.empty:
        return None
    per = rows.assign(**{name: rows[name] / rows["num_parameters"] for name in MODEL_STATE})
    grouped = per.groupby(["optimizer", "precision", "accumulation_steps"], as_index=False)[MODEL_STATE].median()
    head = ("optimizer", "precision", "N", "parameters", "gradients", "optimizer state")
    cells = tuple(
        (row["optimizer"], row["precision"], str(row["accumulation_steps"]), *(f"{row[name]:.4g}" for name in MODEL_STATE))
        for row in grouped.to_dict("records")
    )
    caption = "Bytes per parameter that stay from one micro-batch to the next, counted on the live tensors; medians over models."
    return Section("Bytes that accumulation does not save", (Table(head, cells, caption, folded=True),))


EXPERIMENT = Experiment(
    name="accounting",
    title="What does accumulation keep in memory, and is the texts' arithmetic right?",
    question="Do parameters, gradients or optimizer state take fewer (or more) bytes when a batch is accumulated? And which "
    "calculations of the texts are right?",
    prediction="The model state takes the same bytes at every N. Adam's state is two copies of the parameters. The calculations "
    "of D8 and G9 are right, those of D7 and G8 are not.",
    rule="Bytes are counted on the live tensors of one window at N = 1, 2, 8, 32 and have to be the same at every N. "
    "Calculations have to agree within 2%. Claims about how somebody trained, or what a service does, are not testable here.",
    claims=CLAIMS,
    sections=(byte_table,),
)
