"""What a training function means by its two numbers, and what its evaluations do to the samples, as its first runs show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from accumulation_harness.audit.evidence import Backward, Run


def takes_the_whole_batch(run: Run, reference: Run) -> bool:
    """Whether most windows of `run` held 1/N of the reference's rows, in N parts: it has cut a micro-batch once more.

    Args:
        run: A recorded run.
        reference: The run with whole batches.

    Returns:
        True where it has to be given the whole batch.
    """
    n, mine = run.accumulation_steps, _windows(run)
    rows = max(map(sum, _windows(reference)), default=0)
    return 2 * sum(len(window) == n and 0 < sum(window) * n == rows for window in mine) > len(mine)


def cuts_the_same_windows(run: Run, reference: Run) -> bool:
    """Whether its windows hold as many rows as the reference's, the full ones in N parts.

    Args:
        run: A recorded run.
        reference: The run with whole batches.

    Returns:
        True where both have the same windows.
    """
    mine, theirs = _windows(run), _windows(reference)
    full = max(map(sum, theirs), default=0)
    parts = {len(window) for window in mine if sum(window) == full}
    return [*map(sum, mine)] == [*map(sum, theirs)] and parts <= {run.accumulation_steps}


def _windows(run: Run) -> list[list[int]]:
    """Rows of the backwards of each window; empty where they were not seen."""
    steps = [step for track in run.tracks[:1] for step in track.steps]
    if any(b.rows is None for step in steps for b in step.backwards):
        return []
    return [[len(b.rows or ()) for b in step.backwards] for step in steps]


def rows_of(run: Run) -> Counter[str]:
    """Count all rows that the windows of a run held; those that are computed from weights are left out.

    Args:
        run: A recorded run.

    Returns:
        Fingerprint of a row -> how often it was seen.
    """
    backwards = [b for track in run.tracks[:1] for step in track.steps for b in step.backwards if not b.computed]
    return Counter(row for b in backwards for row in b.rows or ())


def other_rows(run: Run, reference: Run) -> bool:
    """Whether both trained on as many rows, and some of the run's are none of the reference's.

    Args:
        run: A recorded run.
        reference: The run with whole batches.

    Returns:
        True where the two numbers change which rows are taken.
    """
    mine, theirs = rows_of(run), rows_of(reference)
    return bool(mine) and mine.total() == theirs.total() and not mine.keys() <= theirs.keys()


@dataclass
class Names:
    """How the first run calls sequences, by hashes of them whole, without padding and shorter by one; how often each came."""

    known: dict[tuple[str, str], str] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)

    def given(self, run: Run) -> Run:
        """Call the sequences of a run as in the first one where they are the same but for how far they are padded.

        `model(ids[:, :-1])` takes padding from some rows, and from the longest of a micro-batch its last element.

        Args:
            run: The run, whose names are changed in place.

        Returns:
            The run.
        """
        rows, is_first, names = rows_of(run), not self.times, dict[str, str]()
        for row in rows:
            whole, *others = row.split(".")
            if others:
                bare, shorter = others
                name = self.known.get(("whole", whole)) or self.known.get(("bare", bare))
                if not is_first and name is None:
                    longer = self.known.get(("shorter", bare)) or self.known.get(("bare", shorter), "")
                    name = longer if rows[longer] + rows[row] <= self.times[longer] else None
                names[row] = name = name or row
                if is_first:
                    self.known |= {("whole", whole): name, ("bare", bare): name, ("shorter", shorter): name}

        def of(b: Backward) -> Backward:
            return replace(b, rows=None if b.rows is None else tuple(names.get(row, row) for row in b.rows))

        for track in run.tracks if any(row != name for row, name in names.items()) else ():
            track.steps[:] = [replace(step, backwards=tuple(map(of, step.backwards))) for step in track.steps]
            track.pending[:] = map(of, track.pending)
        self.times.update(rows_of(run) if is_first else ())
        return run
