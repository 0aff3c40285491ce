"""Loss curves in text: a letter for each training, and a band of what seeds alone make of the large batch's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

WIDTH, HEIGHT = 64, 14
BAND, SEVERAL = "░", "*"


def lines(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Draw means over seeds of the probe loss over the samples; the first training has the band of all its seeds.

    Losses are drawn in logarithms where all of them are positive.

    Args:
        arms: Training -> its rows, one for each seed, with `curve_samples` and `curve_probe_loss`.

    Yields:
        The lines of the drawing, `WIDTH` columns beside their labels, and its legend.
    """
    curves = {name: np.array([row["curve_probe_loss"] for row in rows], dtype=float) for name, rows in arms.items()}
    samples = next(iter(arms.values()))[0]["curve_samples"]
    picked = np.interp(np.linspace(0, samples[-1], WIDTH), samples, range(len(samples))).round().astype(int)
    first = next(iter(curves.values()))[:, picked]
    low, high = first.min(0), first.max(0)
    means = {name: own.mean(0)[picked] for name, own in curves.items()}
    seen = np.concatenate([*means.values(), low, high])
    seen = seen[np.isfinite(seen)]
    if not len(seen) or seen.min() == seen.max():
        return
    scale = np.log if seen.min() > 0 else np.asarray
    top, bottom = scale(seen.max()), scale(seen.min())

    def row(loss: float) -> int:
        return round(float((top - scale(loss)) / (top - bottom) * (HEIGHT - 1))) if math.isfinite(loss) else HEIGHT

    grid = [[" "] * WIDTH for _ in range(HEIGHT + 1)]  # the last is for what is no number, and not shown
    for x in range(WIDTH):
        for y in range(row(high[x]), row(low[x]) + 1):
            grid[y][x] = BAND
        for name, mean in means.items():
            y = row(mean[x])
            grid[y][x] = name[0] if grid[y][x] in (" ", BAND) else SEVERAL
    for y, content in enumerate(grid[:HEIGHT]):
        label = f"{seen.max():.3g}" if y == 0 else f"{seen.min():.3g}" if y == HEIGHT - 1 else ""
        yield f"{label:>9} |{''.join(content)}".rstrip()
    yield f"{'':>9} +{'-' * WIDTH}"
    yield f"{'':>9}  0 to {samples[-1]:,} samples; {', '.join(means)}; {BAND} the large batch's seeds; {SEVERAL} several"
