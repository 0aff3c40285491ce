"""What a watched run costs, over all of its windows: gradient noise, seconds and memory, which `advise` reads."""

from __future__ import annotations

import math
import resource
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from accumulation_harness.system.files import append
from accumulation_harness.watch.evidence import Window

COLUMNS = ("window", "micro_batch", "loss", "loss_terms", "gradient_norm")  # the norm of a sketch
MOST = 4096  # windows that are kept one by one; beyond, neighbours are added up
BLOCKS = 10  # of neighbouring windows, which are alike: the interval comes from what is left without one of them
T_95 = 2.262  # of BLOCKS - 1 degrees of freedom


class Costs:
    """Of the windows so far."""

    def __init__(self) -> None:
        self._noise: list[tuple[float, float]] = []  # by window: unbiased estimates of tr(Sigma), in micro-batches, and of |G|^2
        self._seconds: deque[float] = deque(maxlen=MOST)
        self._terms = self._with_terms = 0.0

    def add(self, noise: float, signal: float) -> None:
        """A window whose micro-batches were compared with their sum."""
        self._noise.append((noise, signal))
        if len(self._noise) > MOST:
            pairs = zip(self._noise[::2], self._noise[1::2], strict=False)
            self._noise = [(a + c, b + d) for (a, b), (c, d) in pairs]

    def took(self, seconds: float, terms: float) -> None:
        """A window; NaN of what is not known of it."""
        if seconds == seconds:
            self._seconds.append(seconds)
        if terms == terms:
            self._terms, self._with_terms = self._terms + terms, self._with_terms + 1

    def metrics(self) -> Mapping[str, float]:
        """`run/*`: the noise scale in micro-batches as a ratio of means, its 95% interval, a window's seconds and loss terms."""
        found = {"run/windows_with_noise": float(len(self._noise)), "run/peak_bytes": float(peak())}
        if self._noise:
            found |= dict(
                zip(("run/noise_scale", "run/noise_scale_low", "run/noise_scale_high"), _ratio(self._noise), strict=True)
            )
        if self._seconds:
            found["run/seconds_per_window"] = float(np.median(self._seconds))
        if self._with_terms:
            found["run/loss_terms_per_window"] = self._terms / self._with_terms
        return {name: value for name, value in found.items() if math.isfinite(value)}


def tabulate(path: Path, window: Window, number: int) -> None:
    """Append a line for each micro-batch of a window to a table.

    Args:
        path: A CSV file, which is begun if it is not there.
        window: The window.
        number: Its number in the run, from 1.
    """
    lines = [] if path.exists() else [",".join(COLUMNS)]
    for k, m in enumerate(window.micro_batches, start=1):
        norm = math.sqrt(np.square(m.contribution).mean(axis=1).sum()) if window.whole else math.nan
        terms = sum(slope.terms for slope in (m.slopes or ())[:1]) or math.nan
        lines.append(",".join("" if math.isnan(value) else f"{value:.9g}" for value in (number, k, m.loss, terms, norm)))
    append(path, "".join(f"{line}\n" for line in lines).encode())


def two_sizes(parts: Sequence[npt.NDArray[np.float64]]) -> tuple[float, float]:
    """Estimate a window's gradient noise from its micro-batches (McCandlish et al. 2018, appendix A).

    Args:
        parts: What each micro-batch added to the gradient, [T, WIDTH] as sketches.

    Returns:
        tr(Sigma) in micro-batches, and |G|^2; both unbiased.
    """
    n = len(parts)
    small = float(np.mean([np.square(part * n).mean(axis=1).sum() for part in parts]))  # of one micro-batch's mean gradient
    large = float(np.square(np.sum(parts, axis=0)).mean(axis=1).sum())
    return (small - large) / (1 - 1 / n), (n * large - small) / (n - 1)


def peak() -> int:
    """Measure the most memory that this process has taken.

    Returns:
        Bytes: the allocator's of a card, where one is used, else what was resident.
    """
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Of the means, and its 95% interval from a jackknife over blocks; a mean |G|^2 that may be zero leaves no end."""
    sums = [block.sum(axis=0) for block in np.array_split(np.array(pairs), min(BLOCKS, len(pairs)))]
    noise, signal = np.sum(sums, axis=0)
    if signal <= 0 or len(sums) < BLOCKS:
        return (float(noise / signal) if signal > 0 else math.nan), math.nan, math.nan
    without = [(noise - a) / (signal - b) for a, b in sums]
    if min(without) <= 0 or min(signal - b for _, b in sums) <= 0:
        return float(noise / signal), math.nan, math.nan
    logs = np.log(without)
    spread = T_95 * math.sqrt((BLOCKS - 1) / BLOCKS * float(np.square(logs - logs.mean()).sum()))
    centre = float(noise / signal)
    return centre, centre * math.exp(-spread), centre * math.exp(spread)
