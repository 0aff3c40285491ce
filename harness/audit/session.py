"""Run a training function with and without accumulation, compare, and say why where they differ."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from harness.audit.comparison import Facts, Floor, ShapeError, facts
from harness.audit.evidence import Finding, Run
from harness.audit.findings import UNEXPLAINED, explain, first_of_each
from harness.audit.intervention import WATCH, Intervention
from harness.audit.recorder import Recorder
from harness.audit.replicas import disagreement, pooled
from harness.audit.report import ArmResult, Report
from harness.audit.tensors import losses_in
from harness.audit.visibility import hidden

Train = Callable[..., Any]
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
        from harness.audit.processes import Ranks

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


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of the training function."""

    batch_size: int
    accumulation_steps: int
    intervention: Intervention = WATCH
    options: Mapping[str, Any] = field(default_factory=dict)  # `dtype`, `order_seed`
    independent: bool = False  # the function given as `reference`


class Local:
    """Runs jobs in this process."""

    def __init__(self, train: Train, reference: Train | None) -> None:
        self.functions = {False: train, True: reference}

    def accepts(self, name: str, *, independent: bool = False) -> bool:
        return accepts(self.functions[independent], name)

    def run(self, job: Job) -> list[Run]:
        """The evidence of every rank; here of one."""
        function = self.functions[job.independent]
        assert function is not None
        return [watch(function, job)]


def accepts(function: Train | None, name: str) -> bool:
    """Whether the function has a parameter of that name."""
    return function is not None and name in inspect.signature(function).parameters


def watch(train: Train, job: Job) -> Run:
    """One watched call from the same generator state each time; the caller's generators are put back."""
    run = Run(batch_size=job.batch_size, accumulation_steps=job.accumulation_steps)
    namespaces = [train.__globals__] if hasattr(train, "__globals__") else []
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        try:
            with Recorder(run, job.intervention, namespaces) as recorder:
                result = _call(train, job, recorder)
            run.reported = losses_in(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            run.error = "".join(traceback.format_exception_only(error)).strip() + _place(error)
        finally:
            np.random.set_state(numpy_state)
    return run


def _call(train: Train, job: Job, recorder: Recorder) -> Any:
    """By name where the function has these names, by position where it has others."""
    options = dict(job.options)
    if accepts(train, "weights"):
        options["weights"] = recorder.hand_over
    sizes = {"batch_size": job.batch_size, "accumulation_steps": job.accumulation_steps}
    parameters = inspect.signature(train).parameters.values()
    if all(accepts(train, name) for name in sizes) or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return train(**sizes, **options)
    return train(*sizes.values(), **options)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


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

    def _diagnose(self, family: Family, n: int, free: list[Facts], found: list[Finding]) -> tuple[list[Facts], list[Finding]]:
        """Run again at the reference's own parameters, and without what couples samples, until every step can be judged alone."""
        compared, found, run = self._followed(family, n, frozenset()) or (free, found, family.candidates[n])
        if any(f.cause == UNEXPLAINED and f.evidence.get("what") == "gradient" for f in found) and not (
            run.dropout_calls or run.norm_calls
        ):
            compared = self._probed(family, compared)
            found = _explain(compared)
        suspects = [c for c, seen in (("dropout", run.dropout_calls), ("batch_norm", run.norm_calls)) if seen]
        if not suspects or not any(f.cause in (UNEXPLAINED, "stochastic_layers", "non_separable_loss") for f in found):
            return compared, found
        calmed = self._followed(family, n, frozenset(suspects))
        if calmed is None:
            return compared, found
        _, left, _ = calmed
        causes = []
        for suspect in suspects:
            rest = frozenset(s for s in suspects if s != suspect)
            with_it = self._followed(family, n, rest) if rest else (compared, found, run)
            if with_it is not None and _differs_more(with_it[0], calmed[0]):
                causes.append(_coupling(n, CALMED[suspect], with_it[0], calmed[0]))
        if not causes:
            return compared, found
        return compared, causes + left

    def _probed(self, family: Family, compared: list[Facts]) -> list[Facts]:
        """Ask the reference whether its loss couples rows."""
        coupled = self._baseline(family.options, Intervention(probe=True)).coupled
        return [replace(item, steps=tuple(replace(step, coupled=coupled) for step in item.steps)) for item in compared]

    def _followed(self, family: Family, n: int, calm: frozenset[str]) -> tuple[list[Facts], list[Finding], Run] | None:
        """Candidate and nulls that follow the reference's parameters step by step; None when they cannot."""
        reference = self._baseline(family.options, Intervention(calm=calm)) if calm else family.reference
        null = self._baseline(family.options, Intervention(perturb=reference.roundoff, follow=reference, calm=calm))
        run = self._run(n, family.options, Intervention(follow=reference, calm=calm))
        if run.error is not None or reference.error is not None or not run.num_steps:
            return None
        nulls = [null] if null.error is None else []
        if self.runner.accepts("order_seed", independent=self.independent):
            nulls.append(self._baseline({**family.options, "order_seed": 1}, Intervention(follow=reference, calm=calm)))
        try:
            compared = facts(run, reference, Floor(nulls, drift=False))
        except ShapeError:
            return None
        return compared, _explain(compared), run


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
    a, b = next((a, b) for a, b in pairs if _outside(a) > a.gate and _outside(b) <= b.gate)
    what = "dropout off" if cause == "stochastic_layers" else "batch statistics off"
    evidence = {
        "optimizer": a.track,
        "distance": a.raw_distance,
        "gate": a.gate,
        "distance_without": b.raw_distance,
        "without": what,
    }
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
