"""What does accumulation keep in memory, and is the articles' arithmetic right? Decided by counting bytes, and by calculating."""

from __future__ import annotations

import pandas as pd

from accumulation_harness.analysis.answering import (
    CONDITIONAL,
    CONFIRMED,
    REFUTED,
    Claim,
    ClaimResult,
    Experiment,
    Material,
    Results,
    Ruling,
    Section,
    claim,
    not_measured,
    number,
    section,
    span,
    table_by,
    takes,
    undecided,
)
from accumulation_harness.experiments.shared.recorded import recorded

ADAM = ("adam", "adamw")
CLOSE = 0.02  # relative tolerance for a result that a text rounds to two or three digits
MODEL_STATE = ["parameter_bytes", "gradient_bytes", "state_bytes"]


RISES = 0.02  # relative: below, the bytes alive count as the same
TEXT_D7 = 10.4  # GB


@claim(
    "D5",
    CONDITIONAL,
    "Of the bytes of gradients and activations that are alive together, at fixed b: confirmed when they rise by more than "
    f"{RISES:.0%} from the smaller to the largest N above 1, conditional when from N = 1 to the next only, refuted when "
    "never.",
)
def gradient_buffer_grows(results: Results) -> ClaimResult:
    """D5: tests whether what is alive at once grows with N at a fixed b: from N = 1 to the next, and from there on."""
    rows = results.study("model_bytes")
    table = rows.pivot_table(index="trial", columns="accumulation_steps", values="alive_bytes")
    if table.shape[1] < 3 or 1 not in table:
        return undecided("It takes the bytes alive at N = 1 and at two larger N, at one b.", len(rows))
    few, many = table.columns[[1, -1]]
    first, later = table[few] / table[1] - 1, table[many] / table[few] - 1
    once, keeps_on = (first > RISES).any(), (later > RISES).any()
    return ClaimResult(
        verdict=CONFIRMED if keeps_on else CONDITIONAL if once else REFUTED,
        condition=f"once, from N = 1 to N = {few}, and constant from there",
        measured=first.max(),
        threshold=f"rise of the bytes alive at fixed b: more than {RISES:.0%} from N = 1 to {few}, from {few} to {many}",
        n=len(table),
        explanation="At fixed b gradients and activations, where together they are most, take "
        f"{span(first)} more of themselves at N = {few} than at N = 1, where backward frees activations as gradients "
        f"come, and {span(later)} more at N = {many} than at N = {few}: the buffer is one of "
        "the parameters' size, and it lives through the forwards from the second micro-batch on.",
    )


@claim(
    "D7",
    CONDITIONAL,
    "Confirmed when Adam's bytes per parameter x 1.3e9 are 10.4 GB within 2% with weights in float32 and on a model cast to "
    "16 bits, conditional when in one of the two, refuted when in neither.",
)
def bytes_per_parameter(results: Results) -> ClaimResult:
    """D7: compares the bytes of parameters, gradients and Adam's state for 1.3e9 parameters with the text's 10.4 GB."""
    rows = results.study("model_bytes")
    adam = rows.query("optimizer in @ADAM")
    pure = adam["kept_in"] == "bfloat16"
    mixed = ~pure & adam["precision"].isin(["float32", "bfloat16", "float16"])
    if not (pure.any() and mixed.any()):
        return undecided("It takes Adam with weights in float32, and on a model cast to 16 bits.", len(adam))
    needed = 1.3 * adam[MODEL_STATE].sum(axis=1) / adam["num_parameters"]
    close = (needed / TEXT_D7 - 1).abs() <= CLOSE
    right_pure, right_mixed = bool(close[pure].all()), bool(close[mixed].all())
    return ClaimResult(
        verdict=CONDITIONAL if right_pure != right_mixed else CONFIRMED if right_pure else REFUTED,
        condition="with weights, gradients and moments all in 16 bits" if right_pure else "with float32 weights",
        measured=needed[pure].median(),
        threshold="10.4 GB within 2%",
        n=len(adam),
        explanation=f"Adam on a model cast to bfloat16 keeps {needed[pure].median() / 1.3:.4g} bytes per parameter: "
        f"{needed[pure].median():.1f} GB for 1.3B parameters. Under autocast, with weights, gradients and two moments in "
        f"float32, it keeps {needed[mixed].median() / 1.3:.4g}: {needed[mixed].median():.1f} GB.",
    )


@claim(
    "D11",
    CONFIRMED,
    "Confirmed when Adam's state takes exactly twice the parameters' bytes in every trial, refuted otherwise.",
)
def adam_copies(results: Results) -> ClaimResult:
    """D11: compares the bytes of Adam's state with twice those of the parameters; S0's plural says how many in neither way."""
    rows = results.study("model_bytes")
    adam = rows.query("optimizer in @ADAM")
    takes("It takes trials with Adam.", adam, n=0)
    copies = adam["state_bytes"] / adam["parameter_bytes"]
    return ClaimResult(
        verdict=CONFIRMED if copies.eq(2).all() else REFUTED,
        measured=copies.median(),
        threshold="2",
        n=len(adam),
        explanation=f"Adam's state is {copies.min():g} to {copies.max():g} times the parameters' bytes: the first and the second "
        "moment, as S3 says. S0 speaks of buffers in the plural, without a number.",
    )


@claim(
    "D3",
    CONDITIONAL,
    "Confirmed when a training forward fills a key-value cache, beyond what is saved for backward, in every recorded release "
    "and way to train of transformers, refuted when in none there is a cache, conditional otherwise.",
)
def key_value_cache(results: Results) -> ClaimResult:
    """D3: tests whether a training forward of a released library fills a key-value cache, and how much of it is a cost."""
    return cache_ruling(recorded("key_value_cache"))


def cache_ruling(rows: pd.DataFrame) -> ClaimResult:
    """Rule on the claim about caches.

    Args:
        rows: One for each version, way and b.

    Returns:
        The ruling, with what was measured.
    """
    rows = rows.assign(
        setting=rows["version"] + " in " + rows["way"].replace({"loop": "a loop by hand", "Trainer": "its Trainer"})
    )
    each = rows.assign(per=rows["cache_bytes"] / rows["micro_batch"]).groupby("setting")
    if each["per"].nunique().gt(1).any():
        return undecided(
            "The bytes of the cache are not in proportion to the micro-batch: something else was counted.", len(rows)
        )
    filled, extra = each["cache_bytes"].min() > 0, each["not_saved_bytes"].max()
    words = {kind: ", ".join(filled[filled == kind].index) or "none" for kind in (True, False)}
    saves = filled & (extra > 0)
    shared = ", which backward holds anyway, so that nothing is saved" if not saves.any() else ""
    return ClaimResult(
        verdict=CONFIRMED if saves.all() else REFUTED if not filled.any() else CONDITIONAL,
        condition=f"where training fills a cache{shared}",
        measured=extra.max(),
        threshold="bytes of the cache that autograd does not hold anyway: above 0",
        n=len(rows),
        explanation="A training forward with default settings fills a key-value cache, in proportion to b, in transformers "
        f"{words[True]}; in {words[False]} it does not. At most {number(extra.max())} of "
        f"{number(rows['cache_bytes'].max())} bytes are not held for backward as well. Recorded by "
        "scoreboard/key_value_cache.py, which needs the library; this row does not change with the trials.",
    )


# What was calculated, or stands in print ---------------------------------------------------------------------------------------


def arithmetic(value: float, claimed: float, explanation: str) -> ClaimResult:
    """A calculation of a text, repeated: right within `CLOSE`. Nothing is measured, and nothing counted.

    Args:
        value: What the calculation gives.
        claimed: What the text says.
        explanation: The calculation, in words.

    Returns:
        The ruling, with what was measured.
    """
    right = abs(value / claimed - 1) <= CLOSE
    return ClaimResult(
        verdict=Ruling.right_by_arithmetic if right else Ruling.wrong_by_arithmetic,
        measured=float("nan"),
        threshold=f"{claimed:g} within 2%; calculated: {value:g}",
        n=0,
        explanation=f"{explanation} Calculated from the text's own numbers, not measured.",
    )


def _calculated(id: str, expects: Ruling, rule: str, value: float, claimed: float, explanation: str) -> Claim:
    """A calculation of a text, repeated."""
    return Claim(id, expects, rule, lambda results: arithmetic(value, claimed, explanation))


READ = (
    _calculated(
        "D8", Ruling.right_by_arithmetic, "Right by arithmetic when 524288 / 8192 is 64; nothing is measured.",
        524288 / 8192, 64, "524288 tokens are 64 micro-batches of 8192, exactly.",
    ),
    not_measured(
        "G6", Ruling.contradicted, 
        "Contradicted by its source when the paper that it appeals to reports other hardware; read, not run.",
        "BERT's paper (Devlin et al., 2019, arXiv 1810.04805, appendix A.2) reports Cloud TPUs in pod configuration: 16 "
        "chips for the base model, 64 for the large one. That stands in print, and was not measured here.",
    ),
    _calculated(
        "G8", Ruling.wrong_by_arithmetic,
        "Wrong by arithmetic when one GPU holds more words than the whole batch has tokens; nothing is measured.",
        16e6, 4e6, "16M words on one GPU are already more than the 4M tokens of the whole batch, if a word is at least a token.",
    ),
    _calculated(
        "G9", Ruling.right_by_arithmetic, "Right by arithmetic when 70e9 parameters x 2 bytes are 140 GB; nothing is measured.",
        70e9 * 2 / 1e9, 140, "At 2 bytes per parameter, weights alone.",
    ),
    not_measured(
        "G5", Ruling.not_testable, "No run can decide it.",
        "What a company runs in production leaves no trace that could be measured.",
    ),
    not_measured(
        "G7", Ruling.not_testable, "No run can decide it.",
        "How a model was trained cannot be measured; its paper gives the batch, and does not say that it was accumulated.",
    ),
)  # fmt: skip


def _byte_table(material: Material) -> Section:
    """Bytes per parameter that stay from one micro-batch to the next."""
    rows = material.study("model_bytes")
    per = rows.assign(**{name: rows[name] / rows["num_parameters"] for name in MODEL_STATE})
    head = "optimizer | precision | weights kept in | N | parameters | gradients | optimizer state"
    columns = ("optimizer", "precision", "kept_in", "accumulation_steps",
               *((f"{name} median", "{:.4g}".format) for name in MODEL_STATE))  # fmt: skip
    caption = "Bytes per parameter that stay from one micro-batch to the next, counted on the live tensors; medians over models."
    by = "optimizer precision kept_in accumulation_steps"
    return section("Bytes that accumulation does not save", table_by(per, by, head, columns, caption, folded=True))


EXPERIMENT = Experiment(
    title="What does accumulation keep in memory, and is the articles' arithmetic right?",
    question="Do parameters, gradients, optimizer state or a cache take fewer (or more) bytes when a batch is accumulated? And "
    "which calculations of the articles are right?",
    prediction="At fixed b, gradients and activations are alive together from the second micro-batch on: their bytes rise once, "
    "from N = 1 to N = 2. Adam's state is two copies of the parameters. The calculations of D8 and G9 are right, that of G8 is "
    "not, and that of D7 is where everything is kept in 16 bits.",
    rule="Bytes are counted on the live tensors of one window at N = 1, 2, 8, 32. Calculations have to agree within 2%, and "
    "count as calculated, not as measured. Claims about how somebody trained, or what a service does, are not testable here.",
    claims=(key_value_cache, gradient_buffer_grows, bytes_per_parameter, READ[0], adam_copies, *READ[1:]),
    sections=(_byte_table,),
)
