"""What a watch concluded: a verdict, causes, and what could not be seen."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.judge.status import Status, plain, short
from accumulation_harness.observe.fence import Refused
from accumulation_harness.system.address import page_of
from accumulation_harness.system.files import write_atomically
from accumulation_harness.system.packages import version
from accumulation_harness.watch.evidence import Finding

FORMAT = "accumulation-watch 1"
SUFFIXES = (".json", ".md")
PACKAGES = ("torch", "numpy", "transformers", "accelerate", "lightning", "trl", "deepspeed", "accumulation-harness")
SEEN_BY = {
    "ledger": "the weights of loss terms and the order of calls",
    "sketch": "sums of gradients",
    "replay": "a replay",
}
CHECKED = {"sums": "sums of gradients", "weights": "weights of loss terms", "replays": "replays"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a watched run."""

    verdict: Status
    windows: int
    micro_batches: dict[int, int]  # in a window -> in how many
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...]  # why the verdict is not firmer, and what could not be seen
    properties: tuple[str, ...]  # of the model: nothing a loop could change
    checked: dict[str, int]  # windows whose sum, weights and replay were right
    metrics: dict[str, float]
    unseen: tuple[str, ...] = ()  # what no watch sees, or this one did not; also among the reasons

    @classmethod
    def ended(cls, reason: str) -> Report:
        """Return the report of a watch that failed before it had seen anything.

        Args:
            reason: Why.

        Returns:
            An inconclusive report.
        """
        return cls(
            verdict=Status.inconclusive, windows=0, micro_batches={}, findings=(), reasons=(reason,), properties=(), checked={},
            metrics={},
        )  # fmt: skip

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Report:
        """Return the report that `as_dict` has written.

        Args:
            found: The mapping.

        Returns:
            An equal report.
        """
        kept = {each.name: found[each.name] for each in fields(cls)}
        sizes = {int(size): many for size, many in found["micro_batches"].items()}
        findings = tuple(Finding(**{**one, "cause": Cause(one["cause"])}) for one in found["findings"])
        told = {name: tuple(found[name]) for name in ("reasons", "properties", "unseen")}
        return cls(**{**kept, **told, "verdict": Status(found["verdict"]), "micro_batches": sizes, "findings": findings})

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The causes of all findings, in the order in which they were seen."""
        return tuple(finding.cause for finding in self.findings)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        sizes = ", ".join(f"{many} with {size}" for size, many in self.micro_batches.items()) or "none with"
        seen = f"{self.windows} windows ({sizes} micro-batches)"
        if self.verdict is Status.different:
            return f"accumulation: different in {seen}: {', '.join(self.causes)}"
        if self.verdict is Status.equivalent:
            told = ", ".join(f"{CHECKED[name]} in {number}" for name, number in self.checked.items() if number)
            return f"accumulation: equivalent; {seen}; right: {told}; not checked: {len(self.unseen)} things (report.unseen)"
        return f"accumulation: inconclusive in {seen}"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.headline
        for finding in self.findings:
            times = f", {finding.count} times in all" if finding.count > 1 else ""
            first = f"first in window {finding.window + 1}{times}; seen in {SEEN_BY[finding.rung]}"
            yield f"{finding.cause} ({first}): {finding.message}"
            for key, value in finding.evidence.items():
                yield f"    {key}: {short(value)}"
            yield f"    remedy: {MEANINGS[finding.cause].remedy} ({page_of(finding.cause)})"
        for line in self.properties:
            yield f"note: {line}"
        for line in self.reasons:
            yield f"not checked: {line}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report in JSON types, with the causes and the versions of packages."""
        return {"format": FORMAT, **plain(asdict(self)), "causes": list(self.causes), "versions": versions()}

    def to_json(self) -> str:
        """The report as JSON text; numbers that are not finite are null."""
        return json.dumps(self.as_dict(), indent=1)

    def save(self, path: str | Path) -> Path:
        """Write the report to a file, atomically.

        Args:
            path: A name that ends in `.json`, or in `.md` for a page for an issue.

        Returns:
            The path.

        Raises:
            Refused: The name has another ending.
        """
        path = Path(path)
        check(path)
        write_atomically(path, (self.issue() if path.suffix == ".md" else self.to_json() + "\n").encode())
        return path

    def issue(self) -> str:
        """Return the report as a page in markdown that can be attached to an issue."""
        causes = ", ".join(f"`{cause}`" for cause in self.causes)
        title = {
            Status.different: f"Accumulated micro-batches are not one large batch: {causes}",
            Status.equivalent: "Accumulated micro-batches are one large batch, as far as was watched",
            Status.inconclusive: "Whether accumulated micro-batches are one large batch could not be judged",
        }[self.verdict]
        lines = [f"# {title}", "", self.headline + ".", "", "## Versions", ""]
        lines += [f"- {name} {number}" for name, number in versions().items()]
        for finding in self.findings:
            sentence = MEANINGS[finding.cause].sentence
            lines += ["", f"## Cause: `{finding.cause}`", "", f"{sentence[0].upper()}{sentence[1:]}. {finding.message}", ""]
            first = f"Seen first in window {finding.window + 1}, in {SEEN_BY[finding.rung]}; {finding.count} times in all."
            lines += [first, ""]
            if finding.evidence:
                lines += ["| evidence | value |", "|---|---|"]
                lines += [f"| {key} | {short(value)} |" for key, value in finding.evidence.items()] + [""]
            lines += [f"**Remedy.** {MEANINGS[finding.cause].remedy} (`{page_of(finding.cause)}`)"]
        for heading, told in (("Properties of the model", self.properties), ("What could not be seen", self.reasons)):
            if told:
                lines += ["", f"## {heading}", "", *(f"- {line}" for line in told)]
        return "\n".join(lines) + "\n"


def check(path: str | Path, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Refuse a path to which nothing can be written, before a run has begun.

    Args:
        path: The file of a report, or of a table.
        suffixes: Endings that it may have.

    Raises:
        Refused: Its ending is another one, or its folder is not there.
    """
    path = Path(path)
    if path.suffix not in suffixes:
        raise Refused(f"path: expected a name that ends in {' or '.join(suffixes)}, got {path}")
    if not path.parent.is_dir():
        raise Refused(f"path: expected a file in a folder that is there, got {path}")


@cache
def versions() -> Mapping[str, str]:
    """Name what a report was made with.

    Returns:
        Package -> version of what is installed.
    """
    return {"python": platform.python_version()} | {name: found for name in PACKAGES if (found := version(name))}
