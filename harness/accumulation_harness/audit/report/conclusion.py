"""What an audit concluded, as a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from accumulation_harness.audit.compare.run import Facts
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.evidence import Finding, Site
from accumulation_harness.audit.report.subject import Subject, seen_from
from accumulation_harness.judge.cause import Cause
from accumulation_harness.judge.status import Status

if TYPE_CHECKING:
    import pandas as pd


COLUMNS = (
    *("accumulation_steps", "arithmetic", "optimizer", "optimizer_step", "tensor", "distance", "scale", "cosine", "gate"),
    *("update_distance", "learning_rate", "reference_learning_rate", "micro_batches", "equivalent"),
)


class Problem(str):
    """Why something could not be judged; said of one number of accumulation steps, or (None) of all."""

    accumulation_steps: int | None

    def __new__(cls, what: str, accumulation_steps: int | None = None) -> Problem:
        """The sentence, which begins with the number of accumulation steps."""
        made = super().__new__(cls, what if accumulation_steps is None else f"N={accumulation_steps}: {what}")
        made.accumulation_steps = accumulation_steps
        return made

    def said_by(self, sentence: str) -> Problem:
        """The same problem in other words."""
        made = Problem(sentence)
        made.accumulation_steps = self.accumulation_steps
        return made


Blind = Literal[  # what a run may be unable to show
    "later_steps",
    "short_windows",
    "unequal_terms",
    "schedule",
    "clipping",
    "weight_decay",
    "few_steps",
    "counters",
    "rows",
    "micro_batches",
    "silent_term",
    "rescaled_gradients",
    "cleared_gradients",
    "accumulating_reference",
    "equal_factors",
    "updates",
    "precision",
    "sampled",
    "handed_over",
    "ranks",
]


class Unseen(str):
    """Something that a run could not have shown: a sentence, which ends with what would show it."""

    what: Blind
    sentence: str
    change: str  # empty where nothing is to be done

    def __new__(cls, what: Blind, sentence: str, change: str = "") -> Unseen:
        """Both in one line."""
        made = super().__new__(cls, f"{sentence}; {change}" if change else sentence)
        made.what, made.sentence, made.change = what, sentence, change
        return made


@dataclass(frozen=True)
class ArmResult:
    """One number of accumulation steps, in one arithmetic."""

    accumulation_steps: int
    arithmetic: str  # `as trained`, or the dtype the function was given
    facts: tuple[Facts, ...]  # per optimizer
    findings: tuple[Finding, ...]
    evidence: dict[str, Any]
    allowed: tuple[Finding, ...] = ()  # found, and permitted beforehand
    empty: str = ""  # why it would say nothing if all that was compared agreed


def _seen_as(finding: Finding, there: Callable[[str], str]) -> Finding:
    """A notebook runs as a script that is made of it, whose lines it does not have."""
    if finding.location is None:
        return finding
    site = finding.location.site
    file = there(site.file)
    moved = site._replace(file=file, line=0 if file.endswith(".ipynb") else site.line)
    return replace(finding, location=finding.location._replace(site=moved))


@dataclass(frozen=True)
class Line:
    """One optimizer of one arm, as a line of a table."""

    arm: ArmResult
    facts: Facts
    said: str  # the causes, or the verdict on the arm

    @property
    def steps(self) -> str:
        """Optimizer steps taken, and those of the reference."""
        return f"{self.facts.run.mine.steps} of {self.facts.run.reference.steps}"

    @property
    def farthest(self) -> StepFacts | None:
        """The step whose gradient is farthest beyond its gate."""
        return max(self.facts.steps, key=lambda s: s.raw.distance / s.gate if s.gate else s.raw.distance, default=None)

    @property
    def first(self) -> StepFacts | None:
        """The first step that differs; where none does, the one nearest to its gate."""
        return next((step for step in self.facts.steps if not step.agrees), self.farthest)

    def rates(self, step: StepFacts) -> tuple[float, float]:
        """Learning rates of the step: of the arm and of the reference."""
        mine, reference = self.facts.run.mine.lrs[step.step], self.facts.run.reference.lrs[step.step]
        return (mine[0] if mine else math.nan), (reference[0] if reference else math.nan)

    def rows(self, step: StepFacts) -> Iterator[dict[str, Any]]:
        """Of a step: the whole gradient (`all`), then tensor by tensor."""
        rate, reference_rate = self.rates(step)
        for tensor, seen in {"all": step.raw, **step.tensors}.items():
            yield {
                "accumulation_steps": self.arm.accumulation_steps,
                "arithmetic": self.arm.arithmetic,
                "optimizer": step.track,
                "optimizer_step": step.step,
                "tensor": tensor,
                **vars(seen),
                "gate": step.gate,
                "update_distance": step.update.distance if seen is step.raw else math.nan,
                "learning_rate": rate,
                "reference_learning_rate": reference_rate,
                "micro_batches": step.backwards,
                "equivalent": step.agrees,
            }


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The answer: `equivalent` only when every arm ran, was judged, and no finding was made."""

    batch_size: int
    results: tuple[ArmResult, ...]
    problems: tuple[Problem, ...]  # why something could not be judged; partial evidence is in `results`
    hidden: tuple[Unseen, ...]  # what this run could not have shown, and what to change
    subject: Subject | None = None  # None: a function that was handed over in Python
    notes: tuple[str, ...] = ()  # how the function was called, and what it did besides training
    seconds: float = 0.0  # that the audit took

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One per arm, cause and optimizer, in whichever arithmetic it was seen first."""
        kept: dict[tuple[int, Cause, str | None], Finding] = {}
        for result in self.results:
            for finding in result.findings:
                kept.setdefault((finding.accumulation_steps, finding.cause, finding.track), finding)
        return tuple(kept[key] for key in sorted(kept, key=lambda key: key[0]))

    @property
    def allowed(self) -> tuple[Finding, ...]:
        """What was found and permitted beforehand, one per arm and cause."""
        kept = {(f.accumulation_steps, f.cause): f for result in reversed(self.results) for f in result.allowed}
        return tuple(kept[key] for key in sorted(kept))

    def seen_as(self, there: Callable[[str], str]) -> Self:
        """The same with other names of files, in problems and locations."""
        problems = tuple(problem.said_by(there(problem)) for problem in self.problems)
        results = tuple(replace(one, findings=tuple(_seen_as(f, there) for f in one.findings)) for one in self.results)
        return replace(self, problems=problems, results=results)

    def seen_file(self, site: Site) -> str:
        """Its file, as seen from the folder of the call."""
        return seen_from(Path(site.file), Path.cwd() if self.subject is None else self.subject.folder)

    def where(self, finding: Finding) -> str:
        """`finetune.py:18: schedule.step()`, as seen from the folder of the call; empty where the line is not known."""
        if finding.location is None:
            return ""
        site, call, text = finding.location
        through = f" ({call}, by {site.through})" if site.through else ""
        return f"{self.seen_file(site)}{f':{site.line}' * (site.line > 0)}: {text or call}{through}"

    @property
    def causes(self) -> dict[Cause, list[Finding]]:
        """Cause -> its findings, in their order."""
        kept: dict[Cause, list[Finding]] = {}
        for finding in self.findings:
            kept.setdefault(finding.cause, []).append(finding)
        return kept

    @property
    def callers(self) -> tuple[str, ...]:
        """Packages whose code called the first backward, innermost first."""
        return tuple(name for result in self.results[:1] for name in result.evidence.get("callers", ()))

    @property
    def equivalent(self) -> bool:
        """Whether every arm ran and was judged, and nothing was found."""
        return bool(self.results) and not self.findings and not self.problems

    @property
    def verdict(self) -> Status:
        """`inconclusive` when nothing was found, and not everything could be judged."""
        if self.findings:
            return Status.different
        return Status.equivalent if self.equivalent else Status.inconclusive

    @property
    def exit_code(self) -> int:
        """Of the command: 0 equivalent, 1 different, 2 could not be judged."""
        return [*Status].index(self.verdict)

    def problems_of(self, accumulation_steps: int) -> tuple[Problem, ...]:
        """The problems that concern an arm: its own, and those of N=1, which are of all."""
        return tuple(problem for problem in self.problems if problem.accumulation_steps in (None, 1, accumulation_steps))

    def verdict_of(self, arm: ArmResult) -> Status:
        """Of one arm in one arithmetic."""
        return Status.different if arm.findings else self._verdict_without_findings(arm)

    def _verdict_without_findings(self, arm: ArmResult) -> Status:
        return Status.inconclusive if self.problems_of(arm.accumulation_steps) else Status.equivalent

    @property
    def lines(self) -> Iterator[Line]:
        """One per arm, arithmetic and optimizer."""
        for arm in self.results:
            for item in arm.facts:
                causes = sorted({f.cause for f in arm.findings if f.track in (None, item.run.track)})
                allowed = sorted({f"{f.cause} (allowed)" for f in arm.allowed if f.track in (None, item.run.track)})
                yield Line(arm, item, ", ".join([*causes, *allowed]) or self._verdict_without_findings(arm))

    @property
    def frame(self) -> pd.DataFrame:
        """One row per arm, arithmetic, optimizer, optimizer step and tensor; the tensor `all` is the whole gradient.

        The one thing of an audit that needs pandas.
        """
        import pandas as pd

        rows = (row for line in self.lines for step in line.facts.steps for row in line.rows(step))
        return pd.DataFrame(list(rows), columns=COLUMNS)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of whole gradients, as values."""
        return [next(line.rows(step)) for line in self.lines for step in line.facts.steps]
