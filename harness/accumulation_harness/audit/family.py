"""The runs of one audit: N micro-batches or one batch, with what options and interventions; the reference with its nulls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from accumulation_harness.audit.compare.floors import Floor
from accumulation_harness.audit.convention import Names
from accumulation_harness.audit.evidence import WATCH, Intervention, Run, special
from accumulation_harness.audit.observe.handed import Most
from accumulation_harness.audit.observe.pooling import pooled
from accumulation_harness.audit.observe.runs import Functions, Job

Progress = Callable[[str], None]  # is told, in a line, what is run and what is seen


@dataclass(frozen=True)
class Runs:
    """What can be run: `batch_size` samples per optimizer step; `independent`: N=1 is another function than the audited one."""

    runner: Functions
    batch_size: int
    independent: bool
    most: Most
    progress: Progress
    total: bool = False  # the function is given the samples of an optimizer step in place of a micro-batch's
    apart: bool = False  # its evaluations leave no trace on the random numbers of training
    _numbers: Iterator[int] = field(default_factory=partial(count, 1))
    _alone: list[Run] = field(default_factory=list)  # the first run of the independent function
    _names: Names = field(default_factory=Names)

    def candidate(self, n: int, options: Mapping[str, Any], intervention: Intervention = WATCH) -> Run:
        """The audited function with N micro-batches, its ranks pooled."""
        return self._run(n, options, intervention, independent=False)

    def baseline(self, options: Mapping[str, Any], intervention: Intervention = WATCH) -> Run:
        """The reference: N=1, of the independent function where there is one."""
        return self._run(1, options, intervention, independent=self.independent)

    def alone(self, n: int, steps: int, options: Mapping[str, Any], intervention: Intervention) -> Run:
        """The reference, as many steps of it, with the rows of one of N micro-batches to each."""
        one = replace(self, batch_size=self.batch_size // n, most=Most(steps))
        return one.baseline(options, intervention)

    def _run(self, n: int, options: Mapping[str, Any], intervention: Intervention, *, independent: bool) -> Run:
        job = Job(
            batch_size=self.batch_size // n,
            accumulation_steps=n,
            intervention=intervention,
            options=options,
            independent=independent,
            most=self.most,
            total=self.total and not independent,
            apart=self.apart,
        )
        self.progress(f"run {next(self._numbers)}: N={n}{_besides(options, intervention)}")
        run = self._names.given(pooled(self.runner.run(job), *self._alone))
        if independent and not self._alone:
            self._alone.append(run)
        return run

    def permuted(self, options: Mapping[str, Any], intervention: Intervention = WATCH) -> list[Run]:
        """The reference with its samples in another order; none where the function has no `order_seed`."""
        accepted = self.runner.accepts("order_seed", independent=self.independent)
        return [self.baseline({**options, "order_seed": 1}, intervention)] if accepted else []

    def accept_dtype(self) -> bool:
        """Whether both functions can be run in another arithmetic."""
        return self.runner.accepts("dtype") and (not self.independent or self.runner.accepts("dtype", independent=True))


def _besides(options: Mapping[str, Any], intervention: Intervention) -> str:
    """What is special about a run, in words; empty for one that is only watched."""
    said = [str(options["dtype"]).removeprefix("torch.")] if "dtype" in options else []
    said += ["rows in another order"] if options.get("order_seed") else []
    said += special(intervention)
    return f" ({', '.join(said)})" if said else ""


@dataclass
class Family:
    """The reference and its nulls under one set of options: what every candidate of it is compared with."""

    options: Mapping[str, Any]
    reference: Run
    nulls: Sequence[Run] = ()
    candidates: dict[int, Run] = field(default_factory=dict)  # by N
    kept: dict[str, bool | None] = field(default_factory=dict)  # by path, whether something goes on from what it was
    enters: bool = False  # whether the gradients that are taken are made of some of that, besides what the backwards give

    def floor(self, nulls: Sequence[Run], *, drift: bool) -> Floor:
        """What runs are compared by."""
        return Floor(nulls, drift, self.kept, self.enters)

    @property
    def arithmetic(self) -> str:
        """`as trained`, or the dtype that the function was given."""
        return str(self.options.get("dtype", "as trained")).removeprefix("torch.")
