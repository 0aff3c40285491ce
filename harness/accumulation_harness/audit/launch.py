"""An audit of ranks that another program starts: every rank makes the same runs and writes a file; the files are judged later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from accumulation_harness.audit.evidence import Intervention, Run
from accumulation_harness.audit.family import Progress, Runs
from accumulation_harness.audit.observe.launched import Launched, Rank, setting_of
from accumulation_harness.audit.observe.recorded import Recorded, Setting
from accumulation_harness.audit.observe.runs import Train
from accumulation_harness.audit.report import Report
from accumulation_harness.audit.report.subject import Place, Subject
from accumulation_harness.audit.request import MAX_STEPS, arms_of, checked
from accumulation_harness.audit.session import Session


def record(
    train: Train,
    *,
    batch_size: int,
    accumulation_steps: Sequence[int],
    evidence: str | os.PathLike[str],
    reference: Train | None = None,
    replicas: int | None = None,
    max_steps: int = MAX_STEPS,
    progress: Progress | None = None,
) -> Path:
    """Run one rank's part of an audit under torchrun or srun, and write what it shows to a file.

    Call it on every rank with the same arguments; `merge` judges the files. The process group of all ranks is initialised here,
    and `init_process_group` in `train` does nothing.

    Args:
        train: As for `audit`.
        batch_size: Samples of one optimizer step on one rank.
        accumulation_steps: As for `audit`.
        evidence: A folder that all ranks share.
        reference: As for `audit`; runs on rank 0 alone, with the samples of all replicas.
        replicas: How many ranks take samples of their own; all of them, unless given.
        max_steps: As for `audit`.
        progress: As for `audit`, on rank 0.

    Returns:
        The path of this rank's file. An exception that `train` raises is part of the evidence.

    Raises:
        ValueError: An argument cannot be run.
        OSError: The file cannot be written.
    """
    rank = Rank.of_environment()
    replicas = rank.world if replicas is None else replicas
    steps = checked(train, reference, batch_size, accumulation_steps, processes=rank.world, max_steps=max_steps)
    if replicas < 1 or rank.world % replicas:
        raise ValueError(f"expected replicas that divide the {rank.world} ranks, got {replicas}")
    setting = setting_of(
        train, reference, batch_size=batch_size, accumulation_steps=tuple(steps), max_steps=max_steps, replicas=replicas
    )
    arms = arms_of(setting.accumulation_steps, independent=reference is not None)
    with Launched(train, reference, rank, setting, Path(evidence).absolute()) as ranks:
        _make(_runs(ranks, setting, progress if rank.number == 0 else None), arms)
        return ranks.write()


def merge(evidence: str | os.PathLike[str], progress: Progress | None = None) -> Report:
    """Judge the evidence that all ranks have written with `record`.

    Args:
        evidence: The folder with the files of all ranks of one audit.
        progress: Called with a line for each step of the judgement.

    Returns:
        The report, as of `audit`.

    Raises:
        ValueError: A file is missing or damaged, or belongs to another audit, source, torch or number of ranks.
    """
    recorded = Recorded(Path(evidence))
    setting = recorded.setting
    runs = _runs(recorded, setting, progress)
    report = Session(runs, arms_of(setting.accumulation_steps, independent=setting.reference is not None)).report()
    return replace(report, hidden=(*report.hidden, *recorded.unseen), subject=_subject(recorded, Path(evidence)))


def _subject(recorded: Recorded, folder: Path) -> Subject:
    (train, reference), setting = recorded.evidence[0].targets, recorded.setting
    return Subject(
        train=Place.of(train),
        reference=None if reference is None else Place.of(reference),
        batch_size=setting.batch_size,
        accumulation_steps=setting.accumulation_steps,
        processes=len(recorded.evidence),
        evidence=folder,
        replicas=setting.replicas,
        folder=Path.cwd(),
    )


def _runs(runner: Launched | Recorded, setting: Setting, progress: Progress | None) -> Runs:
    quiet = progress or (lambda line: None)
    return Runs(runner, setting.batch_size, setting.reference is not None, setting.max_steps, quiet, is_recorded=True)


def _make(runs: Runs, arms: Sequence[int]) -> None:
    """The runs of every rank, the same ones in the same order whatever they show: no rank can wait for what another decides.

    Those of the reference come first, since an independent one runs before the ranks join.
    """
    families: list[Mapping[str, Any]] = [{}, *([{"dtype": torch.float64}] if runs.accept_dtype() else [])]
    references = [(options, _make_references(runs, options)) for options in families]
    for options, reference in references:
        for n in arms:
            runs.candidate(n, options)
        for n in arms:
            runs.candidate(n, options, Intervention(follow=reference))


def _make_references(runs: Runs, options: Mapping[str, Any]) -> Run:
    """N=1, again, perturbed and permuted; the last two once more, on the weights of the first."""
    reference = runs.baseline(options, Intervention(leads=True))
    runs.baseline(options)
    for intervention in (Intervention(), Intervention(follow=reference)):
        runs.baseline(options, replace(intervention, perturb=1.0, arithmetic=reference.arithmetic))
        runs.permuted(options, intervention)
    return reference
