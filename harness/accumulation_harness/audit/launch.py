"""An audit of ranks that another program starts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from accumulation_harness.audit.family import Progress
from accumulation_harness.audit.observe.ranks import Launched, answer
from accumulation_harness.audit.observe.runs import Train
from accumulation_harness.audit.rank import Rank
from accumulation_harness.audit.report import Report, Unseen
from accumulation_harness.audit.request import MAX_STEPS, causes_of, checked
from accumulation_harness.audit.session import judged


def audit_launched(
    train: Train,
    *,
    batch_size: int,
    accumulation_steps: int | Sequence[int],
    reference: Train | None = None,
    replicas: int | None = None,
    max_steps: int | None = MAX_STEPS,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Report | None:
    """The audit of a function that torchrun or srun has started on several ranks.

    Args:
        train: as for `audit`, on every rank the same. The group of all ranks is there when it is called, and its own
            `init_process_group` and `destroy_process_group` do nothing.
        batch_size: samples per optimizer step of one rank.
        accumulation_steps: as for `audit`.
        reference: runs on rank 0 alone, in a process without a group, with the rows of all replicas.
        replicas: ranks that take rows of their own; all of them unless given.
        max_steps: as for `audit`.
        allow: as for `audit`.
        progress: as for `audit`.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        ValueError: where no launcher has started this process, and for arguments that cannot be run.
    """
    rank = Rank.of_environment()
    replicas = rank.world if replicas is None else replicas
    arms = checked(train, reference, batch_size, accumulation_steps, processes=rank.world, max_steps=max_steps)
    if replicas < 1 or rank.world % replicas:
        raise ValueError(f"expected replicas that divide the {rank.world} ranks, got {replicas}")
    permitted = causes_of(allow)
    if rank.number:
        answer(train, rank)
        return None
    with Launched(train, reference, rank, replicas) as ranks:
        report = judged(ranks, arms, batch_size, max_steps, permitted, progress)
        return replace(report, hidden=(*report.hidden, *(Unseen("ranks", what) for what in ranks.gone)))
