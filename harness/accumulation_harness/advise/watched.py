"""Advice from a run that was watched: other numbers of its micro-batches, by the noise and the seconds that it showed.

Of a window's T seconds a share f is the update's, which no watch tells apart. With N' in the place of N micro-batches the samples
to a target are times (N' + n) / (N + n), n the noise scale in micro-batches (McCandlish et al. 2018), and the seconds times
(1 + n / N') ((1 - f) N' / N + f) / (1 + n / N). So each row says for which f it is faster than the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from accumulation_harness.judge.status import Status
from accumulation_harness.system.terminal import in_columns
from accumulation_harness.watch.compare import read
from accumulation_harness.watch.report import Report

MOST = 4  # times the run's N
FEWEST = 10  # windows, below which the noise says nothing


@dataclass(frozen=True)
class Run:
    """What a report says of its costs."""

    num: int  # N, of most windows
    noise: tuple[float, float, float]  # in micro-batches, and its interval
    seconds: float  # of a window
    terms: float  # of its loss

    @classmethod
    def of(cls, report: Report) -> Run:
        """NaN for what the report does not say."""

        def told(name: str) -> float:
            return report.metrics.get(f"run/{name}", math.nan)

        return cls(
            num=max(report.micro_batches, key=lambda size: report.micro_batches[size], default=1),
            noise=(told("noise_scale"), told("noise_scale_low"), told("noise_scale_high")),
            seconds=told("seconds_per_window"),
            terms=told("loss_terms_per_window"),
        )

    def samples(self, num: int, noise: float) -> float:
        """To a target, times those of the run."""
        return (num + noise) / (self.num + noise)

    def times(self, num: int, noise: float, share: float) -> float:
        """Seconds to a target over those of the run, where the update takes `share` of a window."""
        return self.samples(num, noise) * self.num / num * ((1 - share) * num / self.num + share)

    def even_at(self, num: int, noise: float) -> float:
        """The share at which both take as long: below it the smaller number is the faster."""
        plain, all_update = self.times(num, noise, 0.0), self.times(num, noise, 1.0)
        return (1 - plain) / (all_update - plain)


def advised(path: Path) -> Iterator[str]:
    """Say what a watched run shows of other N.

    Args:
        path: A report that a watch has written.

    Yields:
        Lines for a terminal.

    Raises:
        ValueError: The file is no report.
    """
    report = Report.of(read(path))
    run = Run.of(report)
    yield from _measured(run, report.metrics)
    if report.verdict is Status.different:
        yield f"fix the run first, which computes something else than one batch: {', '.join(report.causes)}"
    estimate, low, high = run.noise
    seen = report.metrics.get("run/windows_with_noise", 0)
    if not (seen >= FEWEST and math.isfinite(low) and math.isfinite(high)):
        yield f"cannot tell: the noise scale; {seen:.0f} windows show it, at least {FEWEST} that agree are needed (N = 1: none)"
        return
    numbers = [num for num in (1, *(2**k for k in range(1, 20))) if num <= MOST * run.num] + [run.num]
    head = ("", "N", "samples to a target", "seconds to a target", "rate: SGD, Adam", "beta2")
    yield from in_columns([head, *(_row(run, num, estimate) for num in sorted(set(numbers)))])
    one = [run.even_at(1, own) for own in (low, high)]
    if run.num > 1:
        yield (
            f"N = 1 is faster where the update takes less than {min(one):.0%} of a window, slower from {max(one):.0%} on; "
            "between these it cannot be told from this run"
        )
    for sentence in report.properties:
        yield f"cannot tell: what another micro-batch would compute; {sentence}"
    yield (
        "cannot tell: another micro-batch b, its memory and its seconds (advise workload=custom ... measures them); where "
        "it ends (converge)"
    )


def _measured(run: Run, metrics: Mapping[str, float]) -> Iterator[str]:
    estimate, low, high = run.noise
    rate = f", {run.terms / run.seconds:.4g} loss terms a second" if math.isfinite(run.terms / run.seconds) else ""
    yield f"N = {run.num}: {run.seconds:.3g} s a window{rate}; at most {metrics.get('run/peak_bytes', math.nan) / 1e9:.3g} GB"
    if math.isfinite(estimate):
        terms = f", {estimate * run.terms / run.num:.3g} loss terms" if math.isfinite(run.terms) else ""
        yield f"noise scale: {estimate:.3g} micro-batches ({low:.3g} to {high:.3g}){terms}"


def _row(run: Run, num: int, noise: float) -> tuple[str, ...]:
    rate = (1 + noise / run.num) / (1 + noise / num)
    if num == run.num:
        return ("as it is", str(num), "x 1.00", "x 1.00", "x 1.00, x 1.00", "as it is")
    even, which = run.even_at(num, noise), "below" if num < run.num else "above"
    best = f"x {run.times(num, noise, 0.0):.2f} if updates cost nothing; faster if one takes {which} {even:.0%} of a window"
    return (
        "",
        str(num),
        f"x {run.samples(num, noise):.2f}",
        best,
        f"x {rate:.2f}, x {math.sqrt(rate):.2f}",
        f"^{num / run.num:g}",
    )
