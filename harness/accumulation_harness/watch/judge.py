"""What all windows together say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TextIO

import numpy as np

from accumulation_harness.audit.report.remedies import remedy
from accumulation_harness.judge.cause import Cause
from accumulation_harness.watch.calls import doubtful, is_moved, misplaced, same_labels
from accumulation_harness.watch.evidence import Finding, Remark, Rung, Window
from accumulation_harness.watch.gradients import ALIKE, Sum, proportion, summed
from accumulation_harness.watch.replay import Replayed
from accumulation_harness.watch.weights import judged, near, weights_of

CARRIED = (Cause.gradients_not_cleared, Cause.foreign_gradients)
TELL_AT_ONCE = 2  # windows that must have been seen before the terminal is told


class Judge:
    """Judges each window when the next one has ended: whether it was short shows only then."""

    def __init__(self, accumulation_steps: int | None, tell: TextIO | None) -> None:
        self.configured, self._tell = accumulation_steps, tell
        self.properties: Mapping[Cause, str] = {}
        self.left_over = 0
        self.windows = self.skipped = self.closures = 0
        self.sizes: Counter[int] = Counter()
        self.findings: dict[Cause, Finding] = {}
        self.remarks: Counter[Remark] = Counter()  # and of how many windows
        self.summed = self.weighed = self.looked = 0  # windows of several micro-batches whose sum, and weights, were right
        self.replays: list[Replayed] = []
        self.still = 0  # windows whose step moved no weights
        self.clean = self.carried = 0  # windows of one micro-batch that began without, and with, an older gradient
        self.constants: list[tuple[float, float]] = []  # of windows: what a term weighs, and all of them
        self.laid_out: set[int] = set()  # steps that the schedules are laid out for
        self.labels: Counter[bool] = Counter()  # windows whose micro-batches have the same labels, and others
        self._waiting: dict[int, Window] = {}
        self._last: dict[int, Window] = {}
        self._told: set[Cause] = set()
        self._metrics: dict[str, float] = {}

    def see(self, window: Window) -> bool:
        """A window has ended; whether the next ones should be looked at closely. What is said is said of the one before."""
        self.windows += 1
        waiting = self._waiting.pop(window.track, None)
        if window.skipped or window.closure:
            self.skipped += window.skipped
            self.closures += window.closure
        else:
            self.sizes[len(window.micro_batches)] += 1
            self._waiting[window.track] = window
        suspicious = waiting is not None and self._judge(waiting)
        self._say()
        return suspicious

    @property
    def usual(self) -> int:
        """Micro-batches of a window."""
        return self.configured or max(self.sizes, key=lambda size: (self.sizes[size], size))

    def _judge(self, window: Window) -> bool:
        last, self._last[window.track] = self._last.get(window.track), window
        if self._shortened(window):
            last = None
        total = summed(window, last)
        if window.resumed and any(f.cause in CARRIED for f in total.findings):
            self.remarks[Remark.resumed] += 1
            return False
        calls = list(misplaced(window))
        for finding in (*total.findings, *calls):
            self._add(finding)
        if is_moved(window) and not calls and not total.findings and not (total.remark is not None and total.remark.is_doubt):
            self.remarks[Remark.moved] += 1
        if len({m.fed for m in window.micro_batches}) > 1:
            self.remarks[Remark.fed] += 1
        self.remarks.update(doubtful(window))
        if (same := same_labels(window)) is not None:
            self.labels[same] += 1
        self.still += window.still
        if window.buffers_moved and len(window.micro_batches) > 1:
            self.remarks[Remark.buffers_moved] += 1
        if total.remark is not None:
            self.remarks[total.remark] += 1
        self.summed += len(window.micro_batches) > 1 and total.right
        self.carried += any(f.cause is Cause.gradients_not_cleared for f in total.findings)
        self.clean += total.right and window.index > 0
        self._measure(window, total)
        self._weigh(window, total)
        return bool(total.findings) or total.suspicious

    def _shortened(self, window: Window) -> bool:
        """Take micro-batches out that were given up before the window began.

        These are a whole window whose step was left out, and another model's losses that passed through this one (a generator's
        through its discriminator): all gradients are cleared after them, and a usual window follows.
        """
        parts = window.micro_batches
        for k in range(len(parts) - 1, 0, -1):
            cleared = parts[k].empty or (parts[k].before is not None and not np.any(parts[k].before))
            fed = all(m.fed for m in parts[:k]) and not all(m.fed for m in parts[k:])
            bad = any(m.contribution is not None and not np.isfinite(m.contribution).all() for m in parts[:k])
            if cleared and (fed or bad or (len(parts) > self.usual and len(parts) - k == self.usual)):
                self.sizes[len(parts)] -= 1
                self.sizes += Counter({len(parts) - k: 1})
                window.micro_batches = parts[k:]
                self.remarks[Remark.left_out if fed or bad else Remark.given_up] += 1
                return True
        return False

    def _weigh(self, window: Window, total: Sum) -> None:
        weights, why = weights_of(window, total)
        if weights is None:
            if why is not None:
                self.remarks[why] += 1
            return
        if weights.num > 1:
            self.looked += 1
        scaled = abs(total.factor - 1) > weights.tolerance and weights.world == 1
        if scaled and abs(weights.shares[0] - 1) <= weights.tolerance:
            scaled = False
        after = _after_clip(window)
        if after is not None and abs(after - 1) > ALIKE:
            if weights.equal and weights.heads == 1 and near(weights.shares[0] * after, 1, weights.tolerance):
                message = f"gradients are clipped before they are multiplied by {after:.4g}"
                self._add(Finding(cause=Cause.clip_before_unscale, window=window.index, rung=Rung.sketch, message=message))
            else:
                self.remarks[Remark.changed_after_clip] += 1
            return
        if len(window.micro_batches) < self.usual and window.forwards % len(window.micro_batches):
            self.remarks[Remark.forwards] += 1
            return
        found = judged(weights, self.usual, resumed=window.resumed, scaled=scaled or bool(total.findings))
        for finding in found:
            self._add(finding)
        if weights.num > 1 and not found:
            remark = weights.why_incomplete if weights.equal else Remark.unequal
            if remark is None:
                self.weighed += 1
            else:
                self.remarks[remark] += 1
        self.constants.append((weights.each[0], weights.shares[0]))
        del self.constants[:-64]
        self._metrics["accumulation/weight_spread"] = max(weights.each) / min(weights.each) if min(weights.each) > 0 else math.nan
        self._metrics["accumulation/weight_sum"] = sum(c * n for c, n in zip(weights.each, weights.terms, strict=True))
        self._metrics["accumulation/loss_terms"] = weights.total

    def _measure(self, window: Window, total: Sum) -> None:
        known = [m.contribution for m in window.micro_batches if m.contribution is not None]
        self._metrics |= {
            "accumulation/micro_batches": float(len(window.micro_batches)),
            "accumulation/gradient_norm": window.norm,
            "accumulation/sketch_error": total.error,
        }
        self._metrics.pop("accumulation/noise_scale", None)
        if total.right and len(known) > 1 and window.whole:
            self._metrics["accumulation/noise_scale"] = noise_scale(known)

    def replayed(self, replayed: Replayed) -> None:
        """A window has been replayed."""
        self.replays.append(replayed)
        del self.replays[:-64]
        if not math.isnan(replayed.error):
            self._metrics |= {"accumulation/replay_error": replayed.error, "accumulation/replay_floor": replayed.floor}
        for finding in replayed.findings:
            self._add(finding)

    def _add(self, finding: Finding) -> None:
        known = self.findings.get(finding.cause)
        if known is None:
            self.findings[finding.cause] = finding
        else:
            known.count += 1

    def _say(self) -> None:
        if self._tell is None or self.windows < TELL_AT_ONCE:
            return
        for cause, finding in self.findings.items():
            if cause not in self._told:
                self._told.add(cause)
                where = f"window {finding.window + 1}"
                print(f"accumulation: {cause} ({where}): {finding.message}; {remedy(cause)}", file=self._tell, flush=True)

    def metrics(self) -> Mapping[str, float]:
        """`accumulation/*` of the last window."""
        return dict(self._metrics) | {"accumulation/findings": float(len(self.findings))}

    def finish(self) -> None:
        """No further window will come."""
        self._judge_waiting()
        self._say()

    def _judge_waiting(self) -> None:
        for waiting in list(self._waiting.values()):
            self._judge(waiting)
        self._waiting.clear()


def _after_clip(window: Window) -> float | None:
    """The factor of the gradient between the last clip and the step; None where nothing was clipped, or it is no factor."""
    if window.clipped is None or window.at_step is None or not np.isfinite(window.at_step).all():
        return None
    factor, off = proportion(window.at_step, window.clipped)
    return factor if off <= ALIKE else None


def noise_scale(parts: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]) -> float:
    """tr(Sigma) / ||G||^2 in micro-batches (McCandlish et al. 2018, appendix A), from the parts' own squared norms."""
    n = len(parts)
    small = float(np.mean([np.square(part * n).mean(axis=1).sum() for part in parts]))  # of one micro-batch's mean gradient
    large = float(np.square(np.sum(parts, axis=0)).mean(axis=1).sum())
    signal, noise = (n * large - small) / (n - 1), (small - large) / (1 - 1 / n)
    return noise / signal if signal > 0 else math.nan
