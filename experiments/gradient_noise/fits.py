"""The gradient noise scale, estimated from the micro-batches of a run or from per-sample gradients."""

from __future__ import annotations

import numpy as np
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import Interval, statistics

SQUARES = ["micro_batches", "window_samples", "micro_batch_square", "window_square"]


def two_size(rows: DataFrame, population: float = np.inf) -> DataFrame:
    """The rows with their own estimates, `noise_trace` (S) and `gradient_square` (|G|^2), by `statistics.two_batch_sizes`.

    Windows of one micro-batch, and skipped ones, whose gradient was not finite, are left out.
    """
    usable = rows[np.isfinite(rows[SQUARES].astype(float)).all(axis=1)].query("micro_batches > 1")
    columns = {name: usable[name].astype(float) for name in SQUARES}
    trace, square = statistics.two_batch_sizes(**columns, population=population)
    return usable.assign(noise_trace=trace, gradient_square=square)


def noise_scale(estimates: DataFrame) -> Interval:
    """B_simple = tr Sigma / |G|^2 from rows of `two_size`: the ratio of the means over steps, with Fieller's interval."""
    return statistics.ratio_of_means(estimates["noise_trace"].tolist(), estimates["gradient_square"].tolist())


def stretches(estimates: DataFrame, num: int) -> DataFrame:
    """`noise_scale` of `num` equal parts of a training: `step` (the middle of the part), `estimate`, `low`, `high`."""
    steps = estimates["step"]
    width = (steps.max() + 1 - steps.min()) / num
    place = ((steps - steps.min()) // width).astype(int)
    found = [{"step": steps.min() + (k + 0.5) * width, **vars(noise_scale(own))} for k, own in estimates.groupby(place)]
    return DataFrame(found)


def slopes(rows: DataFrame, value: str, by: list[str]) -> DataFrame:
    """Least-squares slope of log `value` over log `batch` in each group of `by`, in a column `slope`."""
    logs = rows[["batch", value]].astype(float).apply(np.log).join(rows[by])
    return tables.cells(logs, by, lambda own: {"slope": np.polyfit(own["batch"], own[value], 1)[0]})
