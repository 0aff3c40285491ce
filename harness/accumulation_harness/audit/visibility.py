"""What an audit could not see, and what to change so that it can."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from accumulation_harness.audit.compare.floors import COARSE_ROUNDOFF, is_handed, moves, stands_in
from accumulation_harness.audit.compare.held import Apart
from accumulation_harness.audit.compare.run import steps_of
from accumulation_harness.audit.compare.sums import emptied_at_last
from accumulation_harness.audit.evidence import Run, Step
from accumulation_harness.audit.report import ArmResult, Unseen
from accumulation_harness.audit.rules.finding import UNEQUAL
from accumulation_harness.judge.cause import Cause

FEWEST_STEPS = 3  # in which stale gradients, schedules and short windows show
MOST = 0.5  # share of the elements whose update is known, below which nothing is said of what the optimizer makes


def hidden(reference: Run, nulls: Sequence[Run], candidates: Mapping[int, Run], results: Sequence[ArmResult]) -> Iterator[Unseen]:
    """One statement each; empty when every class of fault would have shown.

    Args:
        reference: The run with whole batches.
        nulls: Runs that differ from the reference by rounding alone.
        candidates: Number of accumulation steps -> its run.
        results: Verdicts of the arms.

    Yields:
        Statements of what these runs could not have shown.
    """
    steps = reference.steps
    if not steps:
        return
    if any(map(is_handed, steps)):
        yield from _handed(reference, nulls)
        yield from _coarse(reference)
        return
    yield from _parts([reference, *candidates.values()])
    yield from _samples(reference)
    yield from _windows(
        reference, candidates, shown=any(f.cause is Cause.mean_of_means for result in results for f in result.findings)
    )
    if any(_unseen(track.steps[0]) for run in candidates.values() for track in run.tracks if track.steps):
        what = "what each micro-batch gave was not seen (sharded out of sight): wrong weights of micro-batches cannot be named"
        yield Unseen("micro_batches", what)
    yield from _split_at_one(reference, steps)
    yield from _clipping(steps)
    yield from _cleared(steps)
    yield from _schedules(steps)
    yield from _counters(results)
    yield from _rescaled(results)
    yield from _updates(results)
    yield from _coarse(reference)
    if len(steps) < FEWEST_STEPS:
        what = f"only {len(steps)} optimizer steps: stale gradients, schedules and short windows need at least three"
        yield Unseen("few_steps", what, "let it take more")
    if all(not any(step.options.get("weight_decay", ())) for step in steps):
        yield Unseen("weight_decay", "weight decay is 0", "set it to see whether it is applied per micro-batch")


def _handed(reference: Run, nulls: Sequence[Run]) -> Iterator[Unseen]:
    steps = reference.steps
    if any(step.backwards for step in steps):
        yield Unseen("handed_over", "arrays were handed over: rows and the optimizer's state were not seen")
    elif not all(map(stands_in, steps)):
        what = "weights and gradients were handed over, and not what each micro-batch gave"
        yield Unseen("handed_over", what, "`hand(contribution=...)`")
    else:
        what = "only weights were seen: under Adam, or under a clip, a wrong scale cannot show, under plain SGD it can"
        yield Unseen("handed_over", what, "`hand(gradient=...)`")
    if not any(moves([step], usual) for null in nulls for step, usual in zip(null.steps, steps, strict=False)):
        what = "rounding was not measured, but taken from the formats of numbers"
        yield Unseen("precision", what, "go on with the weights that `hand` returns")


def _coarse(reference: Run) -> Iterator[Unseen]:
    if reference.roundoff > COARSE_ROUNDOFF:
        yield Unseen(
            "precision",
            f"arithmetic is rounded to {reference.roundoff:.1e}: smaller differences than the measured floor cannot be seen",
            "give the function a `dtype` parameter to judge the algebra in float64",
        )


def _parts(runs: Sequence[Run]) -> Iterator[Unseen]:
    for groups in dict.fromkeys(run.parts for run in runs if run.parts):
        listed = " | ".join(", ".join(str(rank) for rank in group) for group in groups)
        yield Unseen(
            "ranks",
            f"ranks {listed} start from different weights and were taken for the parts of one model: of replicas that are not "
            "initialised alike, nothing else would show",
        )


def _samples(reference: Run) -> Iterator[Unseen]:
    for track in reference.tracks:
        kept, count = sum(track.steps[-1].kept), sum(n for _, n in track.tensors)
        if track.steps[-1].kept:
            yield Unseen(
                "sampled",
                f"{kept:,} of the {count:,} elements of {track.name} were compared one by one, the others in sums: distances are "
                f"known to about {100 / math.sqrt(kept):.1g} %",
            )


def _windows(reference: Run, arms: Mapping[int, Run], *, shown: bool) -> Iterator[Unseen]:
    """`shown`: whether unequal weights were found, whatever the inputs look like."""
    short = any(len(step.backwards) < n for n, run in arms.items() for step in run.steps)
    sizes = {sum(step.rows.values()) for step in reference.steps if step.rows}
    if not sizes:
        what = "rows were not seen (no module was called): dropped or repeated rows show only in the number of steps"
        yield Unseen("rows", what)
    if arms and not short and len(sizes) <= 1:
        what, change = (
            "every window is full: short windows cannot show",
            "take data that the window does not divide, for two epochs",
        )
        if dropped := max(run.dropped for run in (reference, *arms.values())):
            rest = f"the loader drops the rest of an epoch ({dropped} rows, `drop_last`), so that {what}"
            what, change = rest, "set `drop_last=False` if they are to be seen"
        yield Unseen("short_windows", what, change)
    if arms and not shown and _equal_weights(arms):
        yield Unseen(
            "unequal_terms",
            "all micro-batches have inputs of one size: unless their numbers of loss terms differ (masks, class weights), a mean "
            "of means cannot show",
            "use sequences of unequal length",
        )


def _split_at_one(reference: Run, steps: Sequence[Step]) -> Iterator[Unseen]:
    """The reference accumulates as well: its backwards hold a batch together, and rows of their own each."""
    held = [[set(b.rows) for b in step.backwards if b.rows] for step in steps]
    size = reference.batch_size * reference.accumulation_steps
    whole = [rows for rows in held if sum(map(len, rows)) == len(set.union(set(), *rows)) == size]
    parts = max((len(rows) for rows in whole), default=1)
    if parts > 1:
        yield Unseen(
            "accumulating_reference",
            f"N=1 takes its batch in {parts} parts itself: the report says how N differs from that, and a fault that both have "
            "cannot show",
            "give a `reference` that takes it whole",
        )


def _unseen(step: Step) -> bool:
    """Whether there were several backwards, and neither what they added to the gradients nor what they gave is known."""
    return len(step.backwards) > 1 and step.total is None and not all(b.locals for b in step.backwards)


def _equal_weights(arms: Mapping[int, Run]) -> bool:
    """Whether all micro-batches had one number of rows and rows of one length, as far as the model's input shows."""
    seen = [(n, b) for n, run in arms.items() for step in run.steps for b in step.backwards]
    sizes = {(n, len(b.rows)) for n, b in seen if b.rows is not None}
    return len(sizes) <= len(arms) and all(b.lengths <= 1 for _, b in seen)


def _clipping(steps: Sequence[Step]) -> Iterator[Unseen]:
    calls = [clip for step in steps for clip in step.clips]
    if calls and all(clip.active for clip in calls):
        what = "clipping was active at every step: scale faults are hidden from the update (and judged before it)"
        yield Unseen("clipping", what)
    elif calls and not any(clip.active for clip in calls):
        yield Unseen("clipping", "clipping was never active: faults of where it is applied cannot show", "lower its limit")


def _cleared(steps: Sequence[Step]) -> Iterator[Unseen]:
    names = set.intersection(*(set(emptied_at_last(step, step.gradient)) for step in steps))
    if names and any(step.gradient.any() for step in steps):
        listed = ", ".join(sorted(names)[:4])
        what = f"gradients of {listed} are cleared before every step, also at N=1"
        yield Unseen("cleared_gradients", what, "give a `reference` to see whether that is meant")


def _schedules(steps: Sequence[Step]) -> Iterator[Unseen]:
    if len({step.lrs for step in steps}) == 1:
        what = "the learning rate is constant: a schedule that advances per micro-batch cannot show"
        yield Unseen("schedule", what, "use a schedule")


def _rescaled(results: Sequence[ArmResult]) -> Iterator[Unseen]:
    """Gradients that the loop itself brings to some length: what they were before does not show in what is taken."""
    for result in results:
        for item in result.facts:
            factors, given = [step.multiples[0] for step in item.steps], [step.given for step in item.steps]
            one = len(factors) < 2 or (min(factors) > 0 and max(factors) - min(factors) <= UNEQUAL * max(factors))
            if not one and not result.findings and all(abs(ratio - 1) > UNEQUAL for ratio in given):
                what = f"what the backwards give is {given[0]:.4g} times that of N=1, and is normalised to a length or a sign"
                said = f"N={result.accumulation_steps}: {what} before the step: a loss that is not divided cannot show"
                yield Unseen("rescaled_gradients", said)
                return


def _counters(results: Sequence[ArmResult]) -> Iterator[Unseen]:
    """What the loop itself holds that goes with the micro-batches, and with the steps at N=1: numbers, and whole tensors."""
    for result in results:
        told = [
            one
            for item in result.facts
            for one in item.run.apart
            if one.role is None
            and not one.kept  # judged
            and (one.number is None or (one.plain and one.times == result.accumulation_steps))
        ]
        if told and not result.findings:
            yield _counting(result.accumulation_steps, told)
            return


def _counting(n: int, told: Sequence[Apart]) -> Unseen:
    """Most loops count micro-batches, which is right: what is said is no fault, but what was not reached."""
    names = ", ".join(f"`{one.path}`" for one in told[:4])
    if all(one.number is not None for one in told):
        what = f"N={n}: {names} counts micro-batches, as a counter may: code that uses it later"
    else:
        what = f"N={n}: the loop keeps {names}, which goes with the micro-batches, as a log may: code that reads it later"
    return Unseen("counters", f"{what} than this run goes was not seen")


def _updates(results: Sequence[ArmResult]) -> Iterator[Unseen]:
    """Known no better in any arithmetic."""
    known: dict[str, float] = {}
    for result in results:
        least = min((step.update.known for step in steps_of(result.facts)), default=1.0)
        known[result.arithmetic] = min(known.get(result.arithmetic, 1.0), least)
    if known and max(known.values()) < MOST:
        yield Unseen(
            "updates",
            "rounding alone changes the optimizer's update by a tenth or more (a basis of eigenvectors, say): gradients were "
            "compared, but not what it makes of them",
        )
