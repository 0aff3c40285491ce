"""Which remedy to take for BatchNorm at a given micro-batch: accuracy and cost of each, and the momenta to set."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pandas import DataFrame, Series

from accumulation_harness.analysis.answering import Material, Section, Table, number, section, statistics, table
from accumulation_harness.analysis.caveats import corrected
from accumulation_harness.experiments.batchnorm.sections import in_points, named
from accumulation_harness.experiments.batchnorm.tables import WU_HE, forwards_of, gone_on, remedied

WORDS = {
    "accumulated": "none: plain accumulation",
    "corrected_momentum": "momentum 1 - (1 - m)^(1/N)",
    "recalibrated": "recalibrated statistics (precise BatchNorm)",
    "ghost_full_batch": "Ghost BatchNorm in the full batch",
    "frozen_statistics": "frozen statistics of the untrained model",
    "group_norm": "GroupNorm",
    "two_pass_statistics": "two-pass statistics",
}
AS_PLAIN = {"recalibrated": "accumulated", "group_norm": "accumulated"}  # trained by the plain loop, with its forwards
EXTRA = {
    "recalibrated": " and the training set once before an evaluation",
    "frozen_statistics": " in the first window, which sets the statistics; no extra forward later",
}
FROM_THERE = {  # from a trained model
    "accumulated": "plain accumulation",
    "frozen_statistics": "accumulation, frozen statistics of the trained model",
    "frozen_full_batch": "full batch, frozen statistics",
    "trained": "the trained model itself",
}
WHOLE = ("frozen_full_batch", "trained")  # of the full batch: they have no b
MOMENTA = (0.1, 0.03, 0.01)  # PyTorch's default, and two smaller ones
STEPS = (2, 4, 8, 16, 32, 64)


def which_remedy(material: Material) -> Section:
    """Points of accuracy lost over b with every remedy, what each costs, and the momenta.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = remedied(material.results).query("arm in @WORDS")
    forwards = forwards_of(material.results)
    groups = rows.groupby(["model", "effective_batch"])
    blocks = [_table(str(model), int(str(size)), own, forwards) for (model, size), own in groups]
    return section("Which remedy at my b?", *blocks, _momenta(), SYNCHRONISED, REACH)


def from_a_trained_model(material: Material) -> Section:
    """Points of accuracy lost over b where training goes on from a trained model, its statistics moving and frozen.

    Args:
        material: Results and step rows of the experiment.

    Returns:
        The section.
    """
    rows = gone_on(material.results)
    return section("And from a trained model?", FROM_TRAINED, *(
        _gone_on_table(str(model), int(str(size)), own) for (model, size), own in rows.groupby(["model", "effective_batch"])
    ))  # fmt: skip


def _gone_on_table(model: str, size: int, rows: DataFrame) -> Table:
    caption = (
        f"{named(model).capitalize()}, B = {size}: held-out accuracy in %, and points lost to the full batch that goes on with "
        f"moving statistics ({number(rows.drop_duplicates('seed')['full'].mean())}%; mean and 95% t interval, paired by seed, "
        "not corrected for the number of cells). Frozen statistics cost no extra forward. The last two rows have no b."
    )
    return _over_b("training that goes on", FROM_THERE, rows, sorted({*rows["b"]} - {size}), caption)


def _over_b(what: str, words: Mapping[str, str], rows: DataFrame, sizes: list[int], caption: str, **more: Any) -> Table:
    """A row for each arm, a column for each b; `more`: other columns, each from the arm."""
    cells = (
        (told, *(_cell(own if arm in WHOLE else own.query("b == @b")) for b in sizes), *(of(arm) for of in more.values()))
        for arm, told in words.items()
        for own in [rows.query("arm == @arm")]
        if len(own)
    )
    return table(" | ".join([what, *(f"b = {b}" for b in sizes), *more]), cells, caption)


def _table(model: str, size: int, rows: DataFrame, forwards: Series[float]) -> Table:
    full = rows.drop_duplicates("seed")["full"]
    caption = (
        f"{named(model).capitalize()}, B = {size}: held-out accuracy in %, and points lost to the large batch (mean and 95% t "
        f"interval, paired by seed, not corrected for the number of cells: one that holds 0 shows no loss, and not that there is "
        f"none). The large batch: {number(full.mean())}% "
        f"(n = {len(full)}). Cost: samples that go through the model, over the window's. Ghost BatchNorm takes the memory of "
        "the full batch, and is plain accumulation's mathematics: only rounding tells the two rows apart."
    )
    cost = {"cost: forwards": partial(_cost, model, forwards)}
    return _over_b("remedy", WORDS, rows, sorted({*rows["b"]}), caption, **cost)


def _cell(rows: DataFrame) -> str:
    return "-" if rows.empty else f"{number(rows['accuracy'].mean())}; lost {_points(rows['lost'].tolist())}"


def _points(values: list[Any]) -> str:
    return f"{in_points(statistics.mean_interval(values))[:-1]}; n = {len(values)})"


def _cost(model: str, forwards: Series[float], arm: str) -> str:
    key = (model, AS_PLAIN.get(arm, arm))
    return "not measured" if key not in forwards.index else f"{number(float(forwards[key]))}{EXTRA.get(arm, '')}"


def _momenta() -> Table:
    cells = tuple((f"m = {m:g}", *(f"{corrected(m, num):.2g}" for num in STEPS)) for m in MOMENTA)
    caption = (
        "The momentum to set on every BatchNorm layer, 1 - (1 - m)^(1/N), computed and not measured: the running statistics then "
        "forget in a window what they forgot in a large batch's step. It changes evaluation alone; the gradient stays as it is."
    )
    return table(" | ".join(["in the large batch", *(f"N = {num}" for num in STEPS)]), cells, caption)


SYNCHRONISED = (
    "SyncBatchNorm does not help here: it pools the statistics of one forward over the replicas and never over the micro-batches "
    "of a window. With R replicas a layer normalises over R b samples: look the table up at R b instead of b."
)
FROM_TRAINED = (
    "A model is trained with the full batch; from its weights and statistics all train again, as long, on the same data, with a "
    "fresh optimizer and schedule. With frozen statistics BatchNorm is a fixed scale and shift: accumulation is then the full "
    "batch with frozen statistics at every b, and what remains to be lost is lost by freezing."
)
REACH = (
    "What this does not show: fine-tuning on other data than the model was trained on; deeper nets and larger images, where Wu & "
    f"He (2018) report that BatchNorm's error rises from {WU_HE[32][0]}% at b = 32 to {WU_HE[8][0]}, {WU_HE[4][0]} and "
    f"{WU_HE[2][0]}% at b = 8, 4 and 2. The learning rate was not tuned for each remedy."
)
