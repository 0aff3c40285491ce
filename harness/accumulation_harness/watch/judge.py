"""What all windows together say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, TextIO

import numpy as np

from accumulation_harness.compare.linear import proportion
from accumulation_harness.compare.readings import Weighed, near, told
from accumulation_harness.judge.cause import Cause
from accumulation_harness.system.address import page_of
from accumulation_harness.watch.calls import doubtful, is_moved, misplaced, same_labels
from accumulation_harness.watch.costs import Costs, two_sizes
from accumulation_harness.watch.evidence import Finding, MicroBatch, Remark, Window
from accumulation_harness.watch.gradients import ALIKE, OF_WEIGHTS, Sum, apart, summed
from accumulation_harness.watch.replay import Replayed
from accumulation_harness.watch.slopes import Loss
from accumulation_harness.watch.weights import Key, weights_of

CARRIED = (Cause.gradients_not_cleared, Cause.foreign_gradients)
MOST_WEIGHED = 64  # windows whose weights are kept, of each loss: the first and the last ones
PARTS = "backwards differ in kind by their place in the window: they are parts of one loss, not micro-batches"
REACH = "backwards with the same losses reach other tensors by their place in the window: what is cut off of some was not judged"
FEWEST_MARKS = 3  # windows after which a difference between the places of backwards is none of chance
SCALES = (Cause.loss_not_divided, Cause.loss_divided_twice)  # of a loss beside one that is right, which is an auxiliary one
LOST = 1e-3  # of the largest weight of a micro-batch, below which one is 0
TELL_AT_ONCE = 2  # windows that must have been seen before the terminal is told


class Judge:
    """Judges windows once the usual number of micro-batches shows, as two have had it: which one was short shows only then."""

    def __init__(self, accumulation_steps: int | None, tell: TextIO | None, *, rows_apart: bool) -> None:
        self.configured, self._tell, self.rows_apart = accumulation_steps, tell, rows_apart
        self.properties: Mapping[Cause, str] = {}
        self.left_over = 0
        self.windows = self.skipped = self.closures = 0
        self.windows_before = 0  # of a run that is resumed
        self.sizes: Counter[int] = Counter()
        self.first = 0  # micro-batches of the first window, where the run begins with it
        self.findings: dict[Cause, Finding] = {}
        self.remarks: Counter[Remark] = Counter()  # and of how many windows
        self.summed = self.covered = 0  # windows of several micro-batches whose sum was right; whose losses were all weighed
        self.weights: dict[tuple[int, Key], list[Weighed]] = {}  # of every loss of every optimizer
        self._marks: dict[tuple[int, int], tuple[int, list[set[Any]]]] = {}  # optimizer, micro-batches -> windows, by place
        self.replays: list[Replayed] = []
        self.still = 0  # windows whose step moved no weights
        self.clean = self.carried = 0  # windows of one micro-batch that began without, and with, an older gradient
        self.laid_out: set[int] = set()  # steps that the schedules are laid out for
        self.forwards = 0  # most of a window
        self.full = 0  # micro-batches of the longest window in which each forward has a backward
        self.labels: Counter[bool] = Counter()  # windows whose micro-batches have the same labels, and others
        self._waiting: list[Window] = []
        self._last: dict[int, Window] = {}
        self._told: set[Cause] = set()
        self._metrics: dict[str, float] = {}
        self.costs = Costs()

    def see(self, window: Window) -> bool:
        """A window has ended; whether the next ones should be looked at closely."""
        self.windows += 1
        self.forwards, num = max(self.forwards, window.forwards), len(window.micro_batches)
        self.full = max(self.full, num if num == window.forwards else 0)
        if window.skipped or window.closure:
            self.skipped += window.skipped
            self.closures += window.closure
        else:
            self.sizes[num] += 1
            self.first = self.first or (0 if window.index or window.resumed else num)
            self._waiting.append(window)
        suspicious = self._judge_waiting() if self.configured or max(self.sizes.values(), default=0) > 1 else False
        self._say()
        return suspicious

    def _judge_waiting(self) -> bool:
        waiting, self._waiting = self._waiting, []
        return any([self._judge(window) for window in waiting])

    @property
    def usual(self) -> int:
        """Micro-batches of a window."""
        return self.configured or max(self.sizes, key=lambda size: (self.sizes[size], size))

    def _judge(self, window: Window) -> bool:
        last, self._last[window.track] = self._last.get(window.track), window
        if (rest := self._shortened(window)) is not None:
            window, last = rest, None
        total = summed(window, last)
        weights, why = weights_of(window, total, self.rows_apart)
        if total.unequal is not None and (rest := self._without(window, total.weights)) is not None:
            window, total, (weights, why) = rest, Sum(right=True), weights_of(rest, Sum(right=True), self.rows_apart)
            self.remarks[Remark.given_up] += 1
        elif total.weights and not total.findings and weights and all(one.is_right for one in weights.values()):
            # What a micro-batch's loss weighs too much, the sum makes up for.
            total = Sum(error=total.error, weights=total.weights, right=True)
        elif total.unequal is not None and (total.unequal.cause in OF_WEIGHTS or (weights and why is None)):
            total = Sum(error=total.error, findings=[total.unequal])
            weights, why = weights_of(window, total, self.rows_apart)
        if window.resumed and any(f.cause in CARRIED for f in total.findings):
            self.remarks[Remark.resumed] += 1
            return False
        calls = list(misplaced(window))
        for finding in (*total.findings, *calls):
            self._add(finding)
        if is_moved(window) and not calls and not total.findings and not (total.remark is not None and total.remark.is_doubt):
            self.remarks[Remark.moved] += 1
        self.remarks.update({*doubtful(window), *([total.remark] if total.remark is not None else [])})
        if (same := same_labels(window)) is not None:
            self.labels[same] += 1
        self.still += window.still
        self.summed += len(window.micro_batches) > 1 and total.right
        self.carried += any(f.cause is Cause.gradients_not_cleared for f in total.findings)
        self.clean += total.right and window.index > 0
        self._measure(window, total, weights)
        self._mark(window)
        self._weigh(window, weights, why)
        return bool(total.findings) or total.suspicious

    def _shortened(self, window: Window) -> Window | None:
        """Take micro-batches out that were given up before the window began.

        These are a whole window whose step was left out, and another model's losses that passed through this one (a
        generator's through its discriminator): all gradients are cleared after them, and a usual window follows.

        Args:
            window: The window as it was seen.

        Returns:
            The window without them; None where there are none.
        """
        parts = window.micro_batches
        empty = [part.empty or (part.before is not None and not np.any(part.before)) for part in parts]
        lost = any(not math.isfinite(value) for value in window.unused)
        for k in range(len(parts) - 1, 0, -1):
            left_out = lost * (parts[k].forwards - 1)
            bad = left_out > 0 or any(not np.isfinite(m.contribution).all() for m in parts[:k])
            fed = all(m.fed for m in parts[:k]) and not all(m.fed for m in parts[k:])
            turns = [place for place, part in enumerate(parts) if not place or "other step" in part.calls]
            sizes = {b - a for a, b in pairwise([*turns, len(parts)])}
            turn = k == turns[-1] and len(sizes) == 1 < max(sizes)  # optimizers take turns, window by window
            whole = fed or turn or len(parts) - k == self.usual
            if not empty[k] or not (whole or bad):
                continue
            forwards = window.forwards - sum(m.forwards for m in parts[:k]) - left_out
            rest = replace(window, micro_batches=parts[k:], forwards=forwards, unused=())
            weights = weights_of(rest, summed(rest, None), self.rows_apart)[0].values()
            if whole or all(one.is_right for one in weights):  # else the window goes on without what was bad
                self.sizes[len(parts)] -= 1
                self.sizes += Counter({len(parts) - k: 1})
                self.remarks[Remark.left_out if fed or turn or (bad and (whole or weights)) else Remark.given_up] += 1
                return rest
        return None

    def _without(self, window: Window, counted: tuple[float, ...]) -> Window | None:
        """The window without what counts for nothing in its sum, where the losses of the others have the right weights alone."""
        parts = zip(window.micro_batches, counted, strict=False)
        kept = [m for m, weight in parts if abs(weight) > LOST * max(map(abs, counted))]
        if not 1 < len(kept) < len(window.micro_batches):
            return None
        rest = replace(window, micro_batches=kept)
        weights = weights_of(rest, summed(rest, None), self.rows_apart)[0].values()
        return rest if weights and all(one.is_right for one in weights) else None

    def _weigh(self, window: Window, weights: Mapping[Key, Weighed], why: Remark | None) -> None:
        several = len(window.micro_batches) > 1
        after = _after_clip(window)
        if after is not None and not abs(after - 1) <= ALIKE:
            if weights and all(near(share * after, 1, one.tolerance) for one in weights.values() for share in one.shares):
                message = f"gradients are clipped before they are multiplied by {after:.4g}"
                self._add(Finding(cause=Cause.clip_before_unscale, window=window.index, rung="sketch", message=message))
            else:
                self.remarks[Remark.changed_after_clip] += 1
            return
        if not weights:
            if why is not None:
                self.remarks[why] += 1
            return
        if self._left_out(window):
            return
        for key, one in weights.items():
            kept = self.weights.setdefault((window.track, key), [])
            kept.append(one)
            if len(kept) > MOST_WEIGHED:
                del kept[MOST_WEIGHED // 2]
        if several:
            self.covered += why is None
            if why is not None:
                self.remarks[why] += 1
        first = next(iter(weights.values()))
        least = min(first.shares)
        self._metrics["accumulation/weight_spread"] = max(first.shares) / least if least > 0 else math.nan
        self._metrics["accumulation/weight_sum"] = sum(first.parts)
        self._metrics["accumulation/loss_terms"] = first.total
        self._metrics["accumulation/loss_terms_per_second"] = first.total / window.seconds
        if first.positions:
            self._metrics["accumulation/padding"] = 1 - sum(first.terms) / sum(first.positions)

    def _left_out(self, window: Window) -> bool:
        """Whether a micro-batch was computed and not differentiated."""
        num = len(window.micro_batches)
        if window.unused and window.forwards >= num + len(window.unused):
            bad = sum(not math.isfinite(value) for value in window.unused)
            if bad and num < self.full:
                message = f"{bad} losses that are not finite were left out, and the step was taken on the rest"
                self._add(Finding(cause=Cause.non_finite_micro_batch, window=window.index, rung="ledger", message=message))
                return True
        elif not (num < self.usual and window.forwards % num):
            return False
        self.remarks[Remark.forwards] += 1
        return True

    def weighed(self) -> tuple[bool, list[Finding], list[str]]:
        """What all windows say of every loss: whether all are right, what is wrong, and why nothing is known of some."""
        right = {replayed.window for replayed in self.replays if replayed.right}
        of_all = {
            (track, key): told(seen, self.usual, [one for one in seen if one.window in right and track == 0])
            for (track, key), seen in self.weights.items()
        }
        findings, reasons = [], []
        for (track, _), said in of_all.items():
            if said.causes and not self.exchangeable(track):
                reasons.append(PARTS)
            elif said.causes:
                beside = any(other.right for (own, _), other in of_all.items() if own == track)
                first, count = said.windows[0], len(said.windows)
                shown: dict[str, Any] = {"window": first.window, "evidence": first.evidence, "count": count}
                causes = dict.fromkeys(Cause.auxiliary_loss_scale if beside and one in SCALES else one for one in said.causes)
                findings += [Finding(cause=one, message=said.words, rung="ledger", **shown) for one in causes]
            elif said.words:
                reasons.append(said.words)
        rights = [said.right for said in of_all.values()]
        return bool(rights) and all(rights), findings, reasons

    def exchangeable(self, track: int) -> bool:
        """Whether the backwards of a window differ by chance, as micro-batches do; not by what they are, as two losses do."""
        return all(own != track for own, _ in self._by_place())

    @property
    def reaches_by_place(self) -> bool:
        """Whether micro-batches with the same losses give gradients to other tensors, each place always to the same ones."""
        return any(len({losses for losses, _ in marks}) == 1 for _, marks in self._by_place())

    def _by_place(self) -> Iterator[tuple[int, set[Any]]]:
        """Each optimizer whose backwards differ by their place in a window, in every window alike; and their marks."""
        for (track, _), (times, places) in self._marks.items():
            marks = set.union(*places)
            if times >= FEWEST_MARKS and len(marks) > 1 and all(len(of_one) == 1 for of_one in places):
                yield track, marks

    def _mark(self, window: Window) -> None:
        """Remember what each backward of a window was: its losses, constant targets, and the tensors that it did not reach."""
        marks = [_mark_of(m) for m in window.micro_batches]
        if len(marks) > 1 and window.whole and window.first is not None and all(mark is not None for mark in marks):
            times, places = self._marks.get((window.track, len(marks)), (0, [set() for _ in marks]))
            for place, mark in zip(places, marks, strict=True):
                place.add(mark)
            self._marks[window.track, len(marks)] = times + 1, places

    def _measure(self, window: Window, total: Sum, weights: Mapping[Key, Weighed]) -> None:
        known = [m.contribution for m in window.micro_batches]
        self._metrics |= {
            "accumulation/micro_batches": float(len(window.micro_batches)),
            "accumulation/gradient_norm": window.norm,
            "accumulation/sketch_error": total.error,
        }
        self._metrics.pop("accumulation/noise_scale", None)
        self.costs.took(window.seconds, next((one.total for one in weights.values()), math.nan))
        if total.right and len(known) > 1 and window.whole:
            noise, signal = two_sizes(known)
            self.costs.add(noise, signal)
            self._metrics["accumulation/noise_scale"] = noise / signal if signal > 0 else math.nan

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

    def found(self) -> dict[Cause, Finding]:
        """All findings so far."""
        return {finding.cause: finding for finding in self.weighed()[1]} | self.findings

    def _say(self) -> None:
        if self._tell is None or self.windows < TELL_AT_ONCE:
            return
        for cause, finding in self.found().items():
            if cause not in self._told:
                self._told.add(cause)
                where = f"window {finding.window + 1}"
                print(f"accumulation: {cause} ({where}): {finding.message}; {page_of(cause)}", file=self._tell, flush=True)

    def metrics(self) -> Mapping[str, float]:
        """`accumulation/*` of the last window, as far as there are numbers."""
        known = {name: value for name, value in self._metrics.items() if value == value}
        return known | {
            "accumulation/findings": float(len(self.found())),
            "accumulation/window": float(self.windows_before + self.windows),
        }

    def finish(self) -> None:
        """No further window will come."""
        self._judge_waiting()
        self._say()


def _after_clip(window: Window) -> float | None:
    """The factor of the gradient between the last clip and the step, NaN where it is none; None where nothing was clipped."""
    if window.clipped is None or window.at_step is None or not np.isfinite(window.at_step).all():
        return None
    factor, _ = proportion(window.at_step, window.clipped)
    known = factor > 0 and apart(window.at_step / factor, window.clipped, [window.clipped]) <= ALIKE
    return factor if known else math.nan


def _mark_of(m: MicroBatch) -> Any:
    if m.slopes is None:
        return None
    constant = {id(slope): "" if slope.kind is Loss.cross_entropy else f"{slope.labels:g}" for slope in m.slopes}
    losses = frozenset((slope.kind, slope.classes, constant[id(slope)]) for slope in m.slopes)
    return losses, m.contribution.any(axis=1).tobytes()
