"""What a watch concluded: a verdict, causes, and what could not be seen."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.audit.report.remedies import remedy
from harness.judge.cause import MEANINGS, Cause
from harness.results.record import write_atomically
from harness.watch.evidence import Finding

if TYPE_CHECKING:
    from harness.watch.judge import Judge

Verdict = Literal["equivalent", "different", "inconclusive"]
FORMAT = "accumulation-watch 1"
PACKAGES = ("torch", "numpy", "transformers", "accelerate", "lightning", "trl", "deepspeed", "accumulation-harness")
MOST_NOTES = 8


@dataclass(frozen=True, kw_only=True)
class Report:
    """The answer of a watched run."""

    verdict: Verdict
    windows: int
    micro_batches: dict[int, int]  # in a window -> in how many
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...]  # why the verdict is not firmer, and what could not be seen
    properties: tuple[str, ...]  # of the model: nothing a loop could change
    checked: dict[str, int]  # windows whose sum, weights and replay were right
    metrics: dict[str, float]

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What is wrong, in the order in which it was seen."""
        return tuple(finding.cause for finding in self.findings)

    @classmethod
    def concluded(cls, judge: Judge) -> Report:
        """From all windows so far."""
        findings = tuple(_kept(judge))
        reasons = tuple(_reasons(judge, findings))
        ledger = judge.weighed > 0 or any(replayed.right for replayed in judge.replays)
        sums = judge.summed > 0 or any(replayed.right for replayed in judge.replays)
        normalised = Cause.batch_statistics in judge.properties and any(size > 1 for size in judge.sizes)
        verdict: Verdict = "different" if findings else "equivalent" if ledger and sums and not normalised else "inconclusive"
        return cls(
            verdict=verdict,
            windows=judge.windows,
            micro_batches=dict(sorted(judge.sizes.items())),
            findings=findings,
            reasons=reasons,
            properties=tuple(judge.properties.values()),
            checked={
                "sums": judge.summed,
                "weights": judge.weighed,
                "replays": sum(replayed.right for replayed in judge.replays),
            },
            metrics=dict(judge.metrics()),
        )

    @property
    def headline(self) -> str:
        """One line."""
        sizes = ", ".join(f"{many} of {size}" for size, many in self.micro_batches.items()) or "none"
        seen = f"{self.windows} windows (micro-batches: {sizes})"
        if self.verdict == "different":
            return f"accumulation: different in {seen}: {', '.join(self.causes)}"
        if self.verdict == "equivalent":
            told = ", ".join(f"{name} of {number}" for name, number in self.checked.items() if number)
            return f"accumulation: equivalent; {seen}; right: {told}"
        return f"accumulation: inconclusive in {seen}"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.headline
        for finding in self.findings:
            times = f", {finding.count} times" if finding.count > 1 else ""
            yield f"{finding.cause} ({finding.rung}, window {finding.window + 1}{times}): {finding.message}"
            for key, value in finding.evidence.items():
                yield f"    {key}: {_short(value)}"
            yield f"    remedy: {MEANINGS[finding.cause].remedy} ({remedy(finding.cause)})"
        for line in self.properties:
            yield f"told: {line}"
        for line in self.reasons:
            yield f"not seen: {line}"

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        return {
            "format": FORMAT,
            "verdict": self.verdict,
            "causes": list(self.causes),
            "windows": self.windows,
            "micro_batches": {str(size): many for size, many in self.micro_batches.items()},
            "findings": [_finite(asdict(finding)) for finding in self.findings],
            "reasons": list(self.reasons),
            "properties": list(self.properties),
            "checked": self.checked,
            "metrics": _finite(self.metrics),
            "versions": versions(),
        }

    def to_json(self) -> str:
        """The report as JSON text; numbers that are not finite are null."""
        return json.dumps(self.as_dict(), indent=1)

    def save(self, path: str | Path) -> Path:
        """Write JSON, or a page for an issue where the name ends in `.md`; whole or not at all."""
        path = Path(path)
        if path.suffix not in (".json", ".md"):
            raise ValueError(f"{path}: expected a name that ends in .json or .md, got {path.suffix or 'none'}")
        write_atomically(path, (self.issue() if path.suffix == ".md" else self.to_json() + "\n").encode())
        return path

    def issue(self) -> str:
        """A page that can be attached to an issue."""
        causes = ", ".join(f"`{cause}`" for cause in self.causes)
        title = {
            "different": f"Accumulated micro-batches are not one large batch: {causes}",
            "equivalent": "Accumulated micro-batches are one large batch, as far as was watched",
            "inconclusive": "Whether accumulated micro-batches are one large batch could not be judged",
        }[self.verdict]
        lines = [f"# {title}", "", self.headline + ".", "", "## Versions", ""]
        lines += [f"- {name} {number}" for name, number in versions().items()]
        for finding in self.findings:
            sentence = MEANINGS[finding.cause].sentence
            lines += ["", f"## Cause: `{finding.cause}`", "", f"{sentence[0].upper()}{sentence[1:]}. {finding.message}", ""]
            lines += [f"Seen first in window {finding.window + 1} ({finding.rung}), {finding.count} times in all.", ""]
            if finding.evidence:
                lines += ["| evidence | value |", "|---|---|"]
                lines += [f"| {key} | {_short(value)} |" for key, value in finding.evidence.items()] + [""]
            lines += [f"**Remedy.** {MEANINGS[finding.cause].remedy} (`{remedy(finding.cause)}`)"]
        for heading, told in (("Properties of the model", self.properties), ("What could not be seen", self.reasons)):
            if told:
                lines += ["", f"## {heading}", "", *(f"- {line}" for line in told)]
        return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _kept(judge: Judge) -> Iterator[Finding]:
    """The findings; an optimizer that steps at every micro-batch leaves gradients behind for that reason."""
    every = judge.carried and judge.clean and set(judge.sizes) == {1}
    for cause, finding in judge.findings.items():
        if cause is Cause.gradients_not_cleared and every:
            yield Finding(
                cause=Cause.step_every_micro_batch, window=finding.window, rung=finding.rung, count=finding.count,
                message="the optimizer steps after every micro-batch, and gradients are cleared after several steps",
                evidence=finding.evidence,
            )  # fmt: skip
        else:
            yield finding
    if (judge.configured or 1) > 1 and set(judge.sizes) == {1} and judge.windows > 2 and not judge.findings:
        message = f"every window has one micro-batch, and {judge.configured} are configured"
        yield Finding(cause=Cause.step_every_micro_batch, window=0, rung="ledger", message=message)


def _reasons(judge: Judge, findings: Sequence[Finding]) -> Iterator[str]:
    if not judge.windows:
        yield "no optimizer step was seen"
    elif judge.sizes and max(judge.sizes) == 1 and not findings:
        yield "no window had more than one micro-batch: nothing was accumulated"
        share = judge.constants[-1][1] if judge.constants else 1.0
        if share and abs(1 / share - round(1 / share)) < 1e-3 and round(1 / share) > 1:
            yield f"with one micro-batch in a window, loss terms weigh 1/{round(1 / share)} of their mean"
    if judge.closures:
        yield f"{judge.closures} steps were taken inside a backward, or differentiated inside themselves (closures), and not judged"
    if judge.skipped:
        yield f"{judge.skipped} windows were left out by the loss scaler: a property of float16"
    if judge.left_over:
        yield f"{judge.left_over} micro-batches came after the last step and were not used in one"
    for note, times in judge.notes.most_common(MOST_NOTES):
        yield f"{note} ({times} windows)"
    for refused in dict.fromkeys(replayed.refused for replayed in judge.replays if replayed.refused):
        yield f"replay: {refused}"
    if not judge.replays:
        yield "no window was replayed (pass `loss`): faults in the loss itself, such as in-batch negatives, were not looked for"
    constants = [share for _, share in judge.constants]
    if constants and not findings:
        yield from _total(judge.constants)


def _total(constants: Sequence[tuple[float, float]]) -> Iterator[str]:
    shares, each = [s for _, s in constants], [c for c, _ in constants]
    if all(abs(s - 1) <= 2e-2 for s in shares):
        return
    low, high = min(shares), max(shares)
    if high - low <= 2e-2 * abs(high):
        yield f"all terms of a window weigh {high:.4g} of their mean, alike in every window: a weight of the loss, or its unit"
    elif max(each) - min(each) <= 2e-2 * abs(max(each)):
        yield f"every loss term weighs {max(each):.4g}, whatever the window holds: a sum, or a fixed divisor"
    else:
        yield f"the terms of a window weigh {low:.4g} to {high:.4g} of their mean, in no way that is known"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return "not finite" if not math.isfinite(value) else f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_short(v) for v in value)
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
