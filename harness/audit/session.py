"""Run a training function with and without accumulation, compare, and say why where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from harness.audit.compare.comparison import Facts, ShapeError, facts, rows, separated, stitched, terms
from harness.audit.compare.floors import Floor
from harness.audit.compare.windows import distance
from harness.audit.evidence import WATCH, Finding, Intervention, Run
from harness.audit.observe.live import KEPT
from harness.audit.observe.ranks import Ranks, disagreement, pooled
from harness.audit.observe.recorder import SHADOW_SEARCH
from harness.audit.observe.runs import Job, Local, Train
from harness.audit.report import ArmResult, Report
from harness.audit.rules.findings import explain, first_of_each
from harness.audit.rules.gradient_rules import SAME_ROW
from harness.audit.visibility import hidden
from harness.judge.cause import Cause

COARSE = 1e-2  # a gate above this is not taken from runs that drift apart: steps are compared one by one
REPEATED = 100.0  # roundings by which two runs with the same arguments may differ
CALMED = {"dropout": "stochastic_layers", "batch_norm": "batch_statistics"}


def audit(
    train: Train,
    *,
    batch_size: int,
    accumulation_steps: Sequence[int],
    reference: Train | None = None,
    processes: int = 1,
) -> Report:
    """Is `train(batch_size // N, N)` the same computation as `train(batch_size, 1)`, for each N; where not, why?

    `train` gets the micro-batch and the number of them per optimizer step; it must seed itself, take its samples in a fixed order
    and take a handful of optimizer steps. Keyword parameters it may have: `dtype`; `order_seed`; and, for frameworks that are not
    torch, `weights`, a callback that takes the named arrays of all weights, once before training and after each optimizer step.
    With `reference`, every arm (N=1 as well) is compared with `reference(batch_size, 1)`. `processes` runs it on that many ranks
    with `torch.distributed` initialised; the reference then runs on one, with all rows. Nothing raised by `train` escapes: see
    `Report.problems`. Raises ValueError for arguments that cannot be run.
    """
    steps = _checked(batch_size, accumulation_steps, processes)
    arms = ([1] if reference is not None else []) + [n for n in steps if n != 1]
    if not arms:
        raise ValueError("expected accumulation_steps above 1, or a reference to compare N=1 with, got 1 alone")
    if processes > 1:
        with Ranks(train, reference, processes) as ranks:
            return Session(ranks, batch_size, arms, reference is not None).report()
    return Session(Local(train, reference), batch_size, arms, reference is not None).report()


def _checked(batch_size: int, accumulation_steps: Sequence[int], processes: int) -> list[int]:
    if batch_size < 1:
        raise ValueError(f"expected batch_size of 1 or more, got {batch_size}")
    if processes < 1:
        raise ValueError(f"expected processes of 1 or more, got {processes}")
    steps = sorted(set(accumulation_steps))
    if not steps:
        raise ValueError("expected at least one number of accumulation_steps, got none")
    for n in steps:
        if n < 1 or batch_size % n:
            raise ValueError(f"expected accumulation_steps that divide batch_size={batch_size}, got {n}")
    return steps


@dataclass
class Family:
    """The reference and its nulls under one set of options: what every candidate of it is compared with."""

    options: Mapping[str, Any]
    reference: Run
    nulls: list[Run]
    candidates: dict[int, Run] = field(default_factory=dict)


class Session:
    """One audit: which runs are made, and what is concluded from them."""

    def __init__(self, runner: Any, batch_size: int, arms: Sequence[int], independent: bool) -> None:
        self.runner, self.batch_size, self.arms, self.independent = runner, batch_size, arms, independent
        self.problems: list[str] = []
        self.repeatable = True  # causes are named only for a function that does the same twice
        self.results: list[ArmResult] = []

    def report(self) -> Report:
        families = [self._family({})]
        accepted = self.runner.accepts("dtype") and (not self.independent or self.runner.accepts("dtype", independent=True))
        if accepted and not self.problems:
            families.append(self._family({"dtype": torch.float64}))
        for family in families:
            if family.reference.error is None and family.reference.num_steps:
                for n in self.arms:
                    self._arm(family, n)
                self._check_comparable(family.reference)
        return Report(
            batch_size=self.batch_size,
            results=tuple(self.results),
            problems=tuple(dict.fromkeys(self.problems)),
            hidden=tuple(hidden(families[0].reference, families[0].candidates, self.results)),
        )

    # -- runs -----------------------------------------------------------------------------------------------------------

    def _run(self, n: int, options: Mapping[str, Any], intervention: Intervention = WATCH, *, baseline: bool = False) -> Run:
        job = Job(
            batch_size=self.batch_size // n,
            accumulation_steps=n,
            intervention=intervention,
            options=options,
            independent=baseline and self.independent,
        )
        return pooled(self.runner.run(job))

    def _baseline(self, options: Mapping[str, Any], intervention: Intervention = WATCH) -> Run:
        return self._run(1, options, intervention, baseline=True)

    def _family(self, options: Mapping[str, Any]) -> Family:
        """The reference twice (is it deterministic?), and perturbed or permuted: the floor."""
        reference = self._baseline(options)
        family = Family(options, reference, [])
        if self._unusable(reference, "N=1"):
            return family
        again = self._baseline(options)
        perturbed = self._baseline(options, Intervention(perturb=reference.roundoff))
        family.nulls = [run for run in (again, perturbed) if run.error is None]
        if self.runner.accepts("order_seed", independent=self.independent):
            permuted = self._baseline({**options, "order_seed": 1})
            family.nulls += [permuted] if permuted.error is None else []
        self._check_repeatable(reference, again)
        return family

    def _unusable(self, run: Run, label: str) -> bool:
        if run.error is not None:
            self.problems.append(f"{label}: the training function raised {run.error} after {run.num_steps} optimizer steps")
            return True
        if run.num_steps == 0:
            self.problems.append(f"{label}: {_why_no_step(run)}")
            return True
        return False

    def _check_repeatable(self, reference: Run, again: Run) -> None:
        """Kernels that are not deterministic differ by roundings; a function that is not, by more."""
        if again.error is not None:
            return
        try:
            same = facts(again, reference, Floor([], drift=True))
        except ShapeError as error:
            self.repeatable = False
            self.problems.append(f"the function is not deterministic: run twice, it makes {error}")
            return
        for item in same:
            allowed = REPEATED * reference.roundoff
            off = next((s for s in item.steps if s.distance > max(s.gate, allowed)), None)
            if off is not None or item.run.steps != item.run.reference_steps:
                where = f"gradients {off.distance:.2g} apart at step {off.step}" if off else "another number of steps"
                self.repeatable = False
                self.problems.append(
                    f"the function is not deterministic: run twice with the same arguments, {where}; it must seed everything, "
                    "take samples in a fixed order and build its model and optimizer anew"
                )
                return

    # -- arms ------------------------------------------------------------------------------------------------------------

    def _arm(self, family: Family, n: int) -> None:
        candidate = self._run(n, family.options)
        family.candidates[n] = candidate
        if candidate.error is not None:
            self.problems.append(
                f"N={n}: the training function raised {candidate.error} after {candidate.num_steps} optimizer steps"
            )
        if not candidate.num_steps:
            if candidate.error is None:
                self.problems.append(f"N={n}: {_why_no_step(candidate)}")
            return
        try:
            compared = facts(candidate, family.reference, Floor(family.nulls, drift=True))
        except ShapeError as error:
            self.problems.append(f"N={n}: the model is not the one of N=1: {error}; it must not depend on the arguments")
            return
        self._check_start(candidate, family.reference)
        found = _explain(compared) if self.repeatable else []
        if self.repeatable and any(not step.agrees or step.gate > COARSE for item in compared for step in item.steps):
            compared, found = self._diagnose(family, n, compared, found)
        split = disagreement(candidate, max((s.gate for item in compared for s in item.steps), default=0.0))
        if split:  # what one rank's gradient looks like then says nothing of the window
            found = split + [f for f in found if f.evidence.get("what") != "gradient"]
        if candidate.error is not None:
            found = [f for f in found if f.cause != "window_misplaced"]  # the run was cut short by the exception
        self.results.append(
            ArmResult(n, _dtype_name(family.options), tuple(compared), tuple(first_of_each(found)), _evidence(candidate))
        )

    def _check_start(self, candidate: Run, reference: Run) -> None:
        """Other weights from the start are no matter of accumulation: runs that follow the reference would hide them."""
        allowed = REPEATED * max(candidate.roundoff, reference.roundoff)
        for mine, theirs in zip(stitched(candidate), stitched(reference), strict=True):
            if mine.start is None or theirs.start is None:
                continue
            apart = distance(mine.start, theirs.start)
            if apart > allowed and self.repeatable:
                self.problems.append(
                    f"N={candidate.accumulation_steps}: {mine.name} starts from other weights than N=1 ({apart:.2g} apart); "
                    "the function must seed its model alike at every N"
                )

    def _check_comparable(self, reference: Run) -> None:
        """NaN equals NaN, and nothing equals nothing: what comes after is equal for no good reason."""
        for track in reference.tracks:
            broken = next((t for t, step in enumerate(track.steps) if not np.isfinite(step.after).all()), None)
            if broken is not None:
                where = f"N=1: the weights of {track.name} are not finite after optimizer step {broken}"
                self.problems.append(f"{where}; what follows cannot be judged")
            given = any(step.total is not None and step.total.any() for step in track.steps)
            if given and not any(step.gradient.any() for step in track.steps):
                self.problems.append(
                    f"N=1: {track.name} steps without gradients, which were cleared after the backward: nothing can be compared"
                )

    def _diagnose(self, family: Family, n: int, free: list[Facts], found: list[Finding]) -> tuple[list[Facts], list[Finding]]:
        """Run again at the reference's own parameters, and without what couples samples, until every step can be judged alone."""
        compared, found, run = self._followed(family, n) or (free, found, family.candidates[n])
        if later := _not_kept(compared, found):
            compared, found, run = self._followed(family, n, keep=later) or (compared, found, run)
        if _open(found) and any(f.cause == "ema_per_micro_batch" for f in found) and self._follows_averages(family, n, compared):
            return compared, [f for f in found if f.evidence.get("what") != "gradient"]
        if _open(found) and not (run.dropout_calls or run.norm_calls):
            compared = self._probed(family, n, compared)
            found = _explain(compared)
        if _open(found) and not any(f.cause == "ema_per_micro_batch" for f in found):
            compared = self._held(family, n, compared)
            found = _explain(compared)
        suspects = [c for c, seen in (("dropout", run.dropout_calls), ("batch_norm", run.norm_calls)) if seen]
        if not suspects or not any(f.cause in (Cause.unexplained, "stochastic_layers", "non_separable_loss") for f in found):
            return compared, found
        calmed = self._followed(family, n, calm=frozenset(suspects))
        if calmed is None:
            return compared, found
        left = calmed[1]
        if _open(left):
            left = _explain(self._probed(family, n, calmed[0], calm=frozenset(suspects)))
        causes = []
        for suspect in suspects:
            rest = frozenset(s for s in suspects if s != suspect)
            with_it = self._followed(family, n, calm=rest) if rest else (compared, found, run)
            if with_it is None:
                continue
            if _differs_more(with_it[0], calmed[0]) or (not _open(left) and self._rows_differ(family, n, with_it[0], rest)):
                causes.append(_coupling(n, CALMED[suspect], with_it[0], calmed[0]))
        if not causes:
            return compared, found
        return compared, causes + left

    def _rows_differ(self, family: Family, n: int, compared: list[Facts], calm: frozenset[str]) -> bool:
        """Whether the model gives other outputs for the same rows at equal parameters."""
        if all(step.gradients_agree for item in compared for step in item.steps):
            return False
        probed = self._probed(family, n, compared, calm)
        return any(s.by_row is not None and s.by_row.outputs > SAME_ROW for item in probed for s in item.steps)

    def _probed(self, family: Family, n: int, compared: list[Facts], calm: frozenset[str] = frozenset()) -> list[Facts]:
        """Rows and terms of the first window that differs; and whether the reference's loss couples rows."""
        window = min(step.step for item in compared for step in item.steps if not step.gradients_agree)
        theirs = self._baseline(family.options, Intervention(probe=window, calm=calm))
        mine = self._run(n, family.options, Intervention(probe=window, follow=theirs if calm else family.reference, calm=calm))
        if theirs.error is not None or mine.error is not None:
            return compared  # hooks of the trainer's own that stand no second differentiation: nothing is known
        alone = mine.ranks == 1
        by_row, by_term = (rows(mine, theirs), terms(mine, theirs, window)) if alone else (None, None)
        return _marked(
            compared,
            coupled=separated(mine, theirs, window),
            mixed=theirs.mixes_rows,
            by_row=by_row,
            by_term=by_term,
            probed=True,
        )

    def _follows_averages(self, family: Family, n: int, compared: list[Facts]) -> bool:
        """Whether gradients agree once averaged copies of the weights are the reference's: then these take part in the loss."""
        same = self._followed(family, n, averages=True)
        if same is None:
            return False
        pairs = [(a, b) for x, y in zip(compared, same[0], strict=True) for a, b in zip(x.steps, y.steps, strict=False)]
        known = [(a, b) for a, b in pairs if b.step >= SHADOW_SEARCH]
        return all(b.gradients_agree for _, b in known) and not all(a.gradients_agree for a, _ in known)

    def _held(self, family: Family, n: int, compared: list[Facts]) -> list[Facts]:
        """Whether all windows agree when the weights never move: what differs then remembers older weights."""
        if any(item.steps and not item.steps[0].gradients_agree for item in compared):
            return compared
        still = Intervention(hold=True)
        reference, run = self._baseline(family.options, still), self._run(n, family.options, still)
        null = self._baseline(family.options, Intervention(hold=True, perturb=reference.roundoff))
        if any(each.error is not None for each in (reference, run, null)):
            return compared
        held = facts(run, reference, Floor([null], drift=False))
        same = all(step.gradients_agree for item in held for step in item.steps)
        return _marked(compared, held=same)

    def _followed(
        self,
        family: Family,
        n: int,
        *,
        calm: frozenset[str] = frozenset(),
        keep: frozenset[int] = frozenset(),
        averages: bool = False,
    ) -> tuple[list[Facts], list[Finding], Run] | None:
        """Candidate and nulls that follow the reference's parameters step by step; None when they cannot."""
        reference = self._baseline(family.options, Intervention(calm=calm)) if calm else family.reference
        null = self._baseline(family.options, Intervention(perturb=reference.roundoff, follow=reference, calm=calm))
        run = self._run(n, family.options, Intervention(follow=reference, calm=calm, keep=keep, averages=averages))
        if run.error is not None or reference.error is not None or not run.num_steps:
            return None
        nulls = [null] if null.error is None else []
        if self.runner.accepts("order_seed", independent=self.independent):
            nulls.append(self._baseline({**family.options, "order_seed": 1}, Intervention(follow=reference, calm=calm)))
        try:
            compared = facts(run, reference, Floor(nulls, drift=False))
        except ShapeError:
            return None
        compared = _marked(compared, same_at_one=self._same_at_one(family))
        return compared, _explain(compared), run

    def _same_at_one(self, family: Family) -> bool:
        """Whether N=1 as well differs from the independent reference."""
        name = _dtype_name(family.options)
        return any(r.accumulation_steps == 1 and r.findings for r in self.results if r.arithmetic == name)


def _marked(compared: Sequence[Facts], **known: Any) -> list[Facts]:
    """With what was learnt of the windows that differ."""
    return [
        replace(item, steps=tuple(step if step.gradients_agree else replace(step, **known) for step in item.steps))
        for item in compared
    ]


def _open(found: Sequence[Finding]) -> bool:
    """Whether a gradient is unexplained."""
    return any(f.cause == Cause.unexplained and f.evidence.get("what") == "gradient" and "distance" in f.evidence for f in found)


def _not_kept(compared: Sequence[Facts], found: Sequence[Finding]) -> frozenset[int]:
    """The first windows that differ without an explanation and without their contributions."""
    late = sorted({s.step for item in compared for s in item.steps if not s.gradients_agree and not s.kept})
    return frozenset(late[:KEPT]) if _open(found) else frozenset()


def _explain(compared: Sequence[Facts]) -> list[Finding]:
    return first_of_each([finding for item in compared for finding in explain(item.run, item.steps)])


def _differs_more(with_it: Sequence[Facts], without: Sequence[Facts]) -> bool:
    """Whether the micro-batches' own computations differ, at some step, and do not when the suspect is taken away."""
    pairs = [(a, b) for x, y in zip(with_it, without, strict=True) for a, b in zip(x.steps, y.steps, strict=False)]
    return any(_outside(a) > a.gate and _outside(b) <= b.gate for a, b in pairs)


def _outside(step: Any) -> float:
    """Distance that weights of the micro-batches cannot mend; 0 for equal gradients."""
    return 0.0 if step.gradients_agree else step.fits.get("span", step.raw_distance)


def _coupling(n: int, cause: str, with_it: Sequence[Facts], without: Sequence[Facts]) -> Finding:
    pairs = [(a, b) for x, y in zip(with_it, without, strict=True) for a, b in zip(x.steps, y.steps, strict=False)]
    differing = [(a, b) for a, b in pairs if not a.gradients_agree]
    a, b = next(((a, b) for a, b in differing if _outside(a) > a.gate and _outside(b) <= b.gate), differing[0])
    what = "dropout off" if cause == "stochastic_layers" else "batch statistics off"
    evidence: dict[str, Any] = {
        "optimizer": a.track,
        "distance": a.raw_distance,
        "gate": a.gate,
        "distance_without": b.raw_distance,
        "without": what,
    }
    if cause == "batch_statistics":
        evidence["updates_of_running_statistics"] = [item.run.norm_updates for item in with_it]
        evidence["reference_updates_of_running_statistics"] = [item.run.reference_norm_updates for item in with_it]
    message = f"the gradients differ by {a.raw_distance:.2g}; with {what} by {b.raw_distance:.2g}"
    return Finding(n, a.step, cause, evidence, message)


def _why_no_step(run: Run) -> str:
    if run.backwards:
        return (
            f"{run.backwards} backward passes were seen and no step of a torch.optim optimizer: the audit needs a "
            "function that steps optimizers of torch.optim in this process"
        )
    return (
        "no optimizer of torch.optim and no backward pass were seen: the function must train in the calling process, with "
        "torch.optim; training in a process of its own cannot be watched"
    )


def _dtype_name(options: Mapping[str, Any]) -> str:
    return str(options.get("dtype", "as trained")).removeprefix("torch.")


def _evidence(run: Run) -> dict[str, Any]:
    tracks = run.tracks
    return {
        "steps": run.num_steps,
        "optimizers": [track.name for track in tracks],
        "backwards_per_step": [len(step.backwards) for step in tracks[0].steps] if tracks else [],
        "calls_of_first_window": list(tracks[0].steps[0].calls) if tracks and tracks[0].steps else [],
        "reported": run.reported,
    }
