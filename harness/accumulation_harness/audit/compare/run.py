"""One optimizer's run of a candidate beside the reference's: all that the rules about a whole run read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan

import numpy as np

from accumulation_harness.audit.compare.floors import FACTOR, is_handed
from accumulation_harness.audit.compare.held import Apart, laid_out
from accumulation_harness.audit.compare.replayed import rates
from accumulation_harness.audit.compare.step import StepFacts, further
from accumulation_harness.audit.evidence import HELD, Run, Step, Track

RATE = "learning rate"
SAME_RATE = 1e-9  # relative; rates are computed
SAME_MEASURED, SAME_RATIO = 1e-3, 1e-2  # relative; or measured; and ratios of updates


def _alike(a: Sequence[float], b: Sequence[float], gate: float = 0.0) -> bool:
    """Whether two steps have the same rates, group by group."""
    return len(a) == len(b) and np.allclose(a, b, rtol=max(gate, SAME_RATE), atol=0, equal_nan=True)


@dataclass(frozen=True)
class RunSeen:
    """One optimizer's run, of the candidate or of the reference; tuples have one entry per effective optimizer step."""

    run: Run
    track: Track
    effective: Sequence[Step]
    usual: RunSeen | None = None  # the reference; None where this is it

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.effective)

    @property
    def idle_steps(self) -> int:
        """Those that moved nothing."""
        return len(self.track.steps) - self.steps

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """Of each window."""
        return tuple(len(s.backwards) for s in self.effective)

    @property
    def is_handed(self) -> bool:
        """Whether the function has handed it over."""
        return any(map(is_handed, self.effective))

    @cached_property
    def ways(self) -> dict[int, tuple[tuple[float, ...], ...]]:
        """Learning rates per parameter group; of an optimizer that was handed over one, by each rule that its updates follow."""
        if not self.is_handed:
            return {0: tuple(s.lrs for s in self.effective)}
        found = rates(self.effective) if self.usual is None else rates(self.effective, self.usual.ways)
        return {rule: tuple((rate,) for rate in each) for rule, each in found.items()}

    @property
    def lrs(self) -> tuple[tuple[float, ...], ...]:
        """Per parameter group, by the first of these rules; nothing where there is none."""
        return next(iter(self.ways.values()), ((),) * self.steps)

    @cached_property
    def rates(self) -> dict[str, tuple[tuple[float, ...], ...]]:
        """What a schedule may move: learning rates first, then the other numbers of the groups that every step has."""
        names = self.effective[0].options if self.effective else {}
        others = {name: tuple(s.options.get(name, ()) for s in self.effective) for name in names}
        return {RATE: self.lrs} | {name: each for name, each in others.items() if all(each)}

    @cached_property
    def schedule_calls(self) -> tuple[int, ...]:
        """Of each window."""
        return tuple(s.calls.count("schedule") for s in self.effective)

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """As differentiated, summed over the window."""
        return tuple(sum(b.loss for b in s.backwards) for s in self.effective)

    @cached_property
    def skipped(self) -> tuple[int, ...]:
        """Steps that a GradScaler left out."""
        return tuple(t for t, s in enumerate(self.effective) if s.skipped)

    @cached_property
    def broken_windows(self) -> tuple[int, ...]:
        """Steps whose window had a non-finite forward or gradient; what came after the last step is one more."""
        windows = [(*s.backwards,) for s in self.effective] + [(*self.track.pending,)]
        taken = [np.isfinite(s.gradient).all() for s in self.effective] + [True]
        broken = [any(b.broken_forwards or not b.finite for b in window) for window in windows]
        return tuple(t for t, (bad, good) in enumerate(zip(broken, taken, strict=True)) if bad or not good)

    @cached_property
    def rows(self) -> Counter[str]:
        """How often each row comes in the whole run; empty where none was seen."""
        backwards = [b for step in self.track.steps for b in step.backwards] + self.track.pending
        return Counter(row for b in backwards for row in b.rows or ())


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One optimizer of a candidate."""

    mine: RunSeen
    reference: RunSeen
    nulls: Sequence[Sequence[Step]]
    apart: tuple[Apart, ...]  # what else moved otherwise than in the reference
    enters: bool = False  # whether gradients that are taken are made of some of it, besides what the backwards give
    longer: RunSeen | None = None  # of N=1, a step for each micro-batch

    @property
    def accumulation_steps(self) -> int:
        """N."""
        return self.mine.run.accumulation_steps

    @property
    def track(self) -> str:
        """Name of the optimizer."""
        return self.mine.track.name

    def goes_by_n(self, times: float) -> bool:
        """Whether a ratio is the number of micro-batches, or one by it."""
        return self.accumulation_steps > 1 and abs(max(times, 1 / times) / self.accumulation_steps - 1) <= SAME_RATIO

    @cached_property
    def repeated(self) -> int:
        """Rows that come more often than in the reference's run: in as many rows, where the end of the runs was not their own."""
        mine, theirs, used, repeated = self.mine.rows, self.reference.rows, Counter[str](), 0
        most = Counter[str]()  # in one window of the reference
        for step in self.reference.effective:
            most |= step.rows or Counter()
        for step in self.mine.effective if mine and theirs else ():
            rows = step.rows or Counter()
            used += rows
            is_beyond = self.mine.run.stopped and used.total() > theirs.total()
            more = {row: rows[row] - most[row] if is_beyond else min(rows[row], used[row] - theirs[row]) for row in rows}
            repeated += sum(max(0, more[row]) for row in rows if row in theirs)
        return repeated

    @cached_property
    def never(self) -> int:
        """Rows of the reference's run that the candidate never saw."""
        return len(self.reference.rows.keys() - self.mine.rows.keys()) if self.mine.rows else 0

    @cached_property
    def foreign(self) -> int:
        """Rows of the candidate that the reference never saw."""
        return len(self.mine.rows.keys() - self.reference.rows.keys()) if self.reference.rows else 0

    @cached_property
    def beside_weights(self) -> tuple[Apart, ...]:
        """What the loop keeps in as many numbers as the weights have, tensor by tensor: running sums of gradients, say."""
        kept = [one for one in self.apart if one.of_loop]
        needed = Counter(min(size, HELD) for _, size in self.mine.track.tensors)
        sizes = Counter(one.size for one in kept)
        return tuple(one for one in kept if one.size in needed) if len(needed) > 1 and needed <= sizes else ()

    @cached_property
    def moved_after(self) -> tuple[float, float]:
        """How much further something moved the parameters after the last step, relative to them; its cosine with them."""
        if self.mine.run.stopped or self.reference.run.stopped or not (self.mine.steps and self.reference.steps):
            return 0.0, nan
        return further(self.mine.track.moved_after, self.reference.track.moved_after, self.mine.effective[-1].after)

    @cached_property
    def rates_apart(self) -> dict[str, int]:
        """Of what a schedule may move, the first step at which it is not the reference's."""
        found = dict[str, int]()
        for name, mine in self.mine.rates.items():
            pairs = enumerate(zip(mine, self.reference.rates.get(name, ()), strict=False))
            off = (t for t, (a, b) in pairs if a and b and not _alike(a, b, self._lr_gate(t) if name == RATE else 0.0))
            if (first := next(off, None)) is not None:
                found[name] = first
        return found

    @property
    def rates_fixed(self) -> bool:
        """Whether those that differ are settings, and no schedule moves them: where updates agree, each does what it should."""
        return all(len({*seen.rates[name]}) == 1 for name in self.rates_apart for seen in (self.mine, self.reference))

    def _lr_gate(self, step: int) -> float:
        """How far the rates of equal computations are apart by then: they may be made of weights. 0 for those of a schedule."""
        found = [SAME_MEASURED if is_handed(self.reference.effective[step]) else 0.0]
        for null in self.nulls:
            for mine, usual in zip(null[: step + 1], self.reference.effective, strict=False):
                found += [FACTOR * abs(a / b - 1) for a, b in zip(mine.lrs, usual.lrs, strict=False) if b]
        return max(found)

    @cached_property
    def laid_out(self) -> tuple[tuple[str, float, float], ...]:
        """Numbers of schedules that never move, and are not the reference's."""
        return laid_out(self.mine.run.held, self.reference.run.held)


@dataclass(frozen=True)
class Facts:
    """Everything said of one optimizer of one candidate."""

    run: RunFacts
    steps: tuple[StepFacts, ...]


def steps_of(compared: Sequence[Facts]) -> list[StepFacts]:
    """Collect the steps of all optimizers.

    Args:
        compared: What was measured of each optimizer.

    Returns:
        Their steps, one optimizer after another.
    """
    return [step for item in compared for step in item.steps]
