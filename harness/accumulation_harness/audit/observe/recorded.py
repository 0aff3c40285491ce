"""Files that hold what one rank's runs showed, and a runner that looks runs up in those of all ranks.

A file is a line that names the format, a line with the SHA-256 of the rest, and a pickle: the evidence is a graph of dataclasses
in which many vectors are one object, and pickle keeps them one. Files travel between machines, so what reads them admits the
dataclasses of the evidence and NumPy's arrays, and no other class or function.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from accumulation_harness.audit.evidence import WATCH, Run, special
from accumulation_harness.audit.observe.runs import Job, failed
from accumulation_harness.system.files import write_atomically

FORMAT = b"accumulation-audit evidence 1\n"
REFERENCE = "reference.evidence"  # runs of the independent function
ADMITTED = {
    "accumulation_harness.audit.evidence": {"Backward", "Clip", "Held", "Row", "Run", "Step", "Track"},
    "accumulation_harness.audit.observe.recorded": {"Evidence", "Setting"},
    "numpy": {"dtype", "ndarray"},
    **{f"numpy.{core}.numeric": {"_frombuffer"} for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray": {"_reconstruct", "scalar"} for core in ("core", "_core")},
    "builtins": {"frozenset", "set"},
}

Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all ranks were asked for."""

    function: str
    source: str  # SHA-256 of the file of the function
    reference: str | None  # the independent function
    reference_source: str | None
    batch_size: int
    accumulation_steps: tuple[int, ...]
    max_steps: int
    replicas: int  # ranks that take rows of their own
    accepts: tuple[tuple[str, ...], tuple[str, ...]]  # keyword parameters of the function, and of the independent one
    torch: str  # version


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The runs of one rank, in the order in which they were made."""

    rank: int
    world: int
    setting: Setting
    targets: tuple[str, str | None]  # FILE.py:FUNCTION of function and independent reference, on the machine of the rank
    runs: tuple[tuple[Key, Run], ...]

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        body = pickle.dumps(self, protocol=5)
        write_atomically(path, FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)

    @classmethod
    def read(cls, path: Path) -> Evidence:
        """Raises ValueError, in a line, for a file that is not there, is damaged, or holds something else."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path}: expected evidence of an audit, which cannot be read ({error.strerror})") from error
        if not content.startswith(FORMAT):
            raise ValueError(f"{path}: expected evidence of an audit, got a file of another kind, or of another version")
        digest, _, body = content[len(FORMAT) :].partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            raise ValueError(f"{path}: expected evidence as it was written, got a damaged file (its checksum is another one)")
        try:
            evidence = _Unpickler(io.BytesIO(body)).load()
        except Exception as error:  # a pickle that was made by hand can raise anything
            raise ValueError(f"{path}: expected evidence of an audit, got something else ({error})") from error
        if not isinstance(evidence, cls):
            raise ValueError(f"{path}: expected evidence of an audit, got {type(evidence).__name__}")
        return evidence


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ADMITTED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of it")
        return super().find_class(module, name)


def name_of(rank: int, world: int) -> str:
    """Of the file of a rank."""
    return f"rank-{rank:05d}-of-{world:05d}.evidence"


def key(job: Job) -> Key:
    """What tells a job from the others of a rank; whose weights are followed, and by how much they are moved, follows from it.

    Contributions are kept in all runs of a rank, whether the job asks for it or not.
    """
    what = job.intervention
    asked = {"leads": what.leads, "follow": what.follow is not None, "perturb": bool(what.perturb)}
    changes = tuple(name for name, is_asked in asked.items() if is_asked)
    options = tuple(f"{name}={value}" for name, value in sorted(job.options.items()))
    return (job.accumulation_steps, options, job.independent, changes, *_not_made(job))


MADE: Mapping[str, Any] = {name: getattr(WATCH, name) for name in ("leads", "follow", "perturb", "arithmetic", "keep")}


def _not_made(job: Job) -> tuple[str, ...]:
    """What a job asks for that no rank does: it depends on what other runs have shown."""
    return special(replace(job.intervention, **MADE))


class Recorded:
    """Looks jobs up in the evidence of all ranks."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError, in a line, for a folder without the evidence of all ranks of one audit."""
        self.evidence = _all_of(folder)
        self.setting = self.evidence[0].setting
        self._runs: Sequence[Mapping[Key, Run]] = [dict(each.runs) for each in self.evidence]
        self._alone: Mapping[Key, Run] = {}
        if self.setting.reference is not None:
            alone = Evidence.read(folder / REFERENCE)
            _check_alike(folder / REFERENCE, alone.setting, self.setting)
            self._alone = dict(alone.runs)
        self._missed: dict[str, None] = {}

    def accepts(self, name: str, *, independent: bool = False) -> bool:
        """Whether the function (or the independent one) has a parameter of that name."""
        return name in self.setting.accepts[independent]

    def run(self, job: Job) -> list[Run]:
        """The evidence of every rank; one run with an error where none was made."""
        if missed := _not_made(job):
            self._missed |= dict.fromkeys(missed)
            return [failed(job, "no such run was made")]
        if job.independent:
            return [_found(self._alone, job)]
        return [_found(runs, job) for runs in self._runs]

    @property
    def unseen(self) -> Iterator[str]:
        """What was asked for and could not be looked up."""
        if self._missed:
            yield (
                f"not looked into: {'; '.join(self._missed)}: ranks that were started by others make the same runs "
                "whatever these show (see what `--processes` finds on one machine)"
            )


def _found(runs: Mapping[Key, Run], job: Job) -> Run:
    """The run of a job; where it was not made, with the error of the run at which the rank stopped."""
    if (run := runs.get(key(job))) is not None:
        return run
    errors = [run.error for run in runs.values() if run.error is not None]
    return failed(job, f"{errors[-1]} (in an earlier run)" if errors else "no such run was made")


def _all_of(folder: Path) -> list[Evidence]:
    """By rank."""
    evidence = sorted(map(Evidence.read, folder.glob("rank-*-of-*.evidence")), key=lambda each: each.rank)
    if not evidence:
        raise ValueError(f"{folder}: expected a folder with the evidence of all ranks ({name_of(0, 4)} and so on), got none")
    ranks, worlds = [each.rank for each in evidence], sorted({each.world for each in evidence})
    if len(worlds) > 1 or len({*ranks}) < len(ranks):
        told = " and of ".join(map(str, worlds))
        raise ValueError(f"{folder}: expected the evidence of one audit, got files of {told} ranks: remove the older ones")
    if missing := [str(rank) for rank in range(worlds[0]) if rank not in ranks]:
        told = f"{worlds[0]} ranks, got none of rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise ValueError(f"{folder}: expected the evidence of {told}: ended before it was written")
    for each in evidence:
        _check_alike(folder / name_of(each.rank, each.world), each.setting, evidence[0].setting)
    return evidence


def _check_alike(path: Path, setting: Setting, wanted: Setting) -> None:
    for each in fields(Setting):
        mine, theirs = getattr(setting, each.name), getattr(wanted, each.name)
        if mine != theirs:
            off = f"{each.name} is {mine} instead of {theirs}"
            raise ValueError(f"{path}: expected evidence of the same audit as rank 0's, got another one: {off}")
