"""The gradient noise scale, estimated from the micro-batches of a run or from per-sample gradients."""

from __future__ import annotations

import numpy as np
from pandas import DataFrame

from accumulation_harness.analysis import tables
from accumulation_harness.analysis.answering import Interval, statistics

SQUARES = ["micro_batches", "window_samples", "micro_batch_square", "window_square"]


def two_size(rows: DataFrame, population: float = np.inf) -> DataFrame:
    """The rows with their own unbiased estimates, `noise_trace` (S) and `gradient_square` (|G|^2).

    S = (m - g) / (1/b - 1/B) and |G|^2 = g - S / B with b = B / N, where m is `micro_batch_square` and g `window_square`
    (McCandlish et al. 2018, appendix A.1). `population`: the number of samples D from which a window is drawn without
    replacement, if it is; g - S / B then estimates |G|^2 - S / D, and S / D is added. Windows of one micro-batch, and skipped
    ones, whose gradient was not finite, are left out.
    """
    usable = rows[np.isfinite(rows[SQUARES].astype(float)).all(axis=1)]
    usable = usable.query("micro_batches > 1")
    samples, num = usable["window_samples"].astype(float), usable["micro_batches"].astype(float)
    trace = (usable["micro_batch_square"] - usable["window_square"]) * samples / (num - 1)
    return usable.assign(noise_trace=trace, gradient_square=usable["window_square"] - trace / samples + trace / population)


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
