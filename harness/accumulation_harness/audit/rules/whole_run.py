"""Rules about a whole run: windows and steps, learning rates, and what no gradient shows (counters, averages, reports)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from accumulation_harness.audit.compare.floors import is_handed
from accumulation_harness.audit.compare.held import OWN, Apart, laid_out_alike
from accumulation_harness.audit.compare.replayed import ahead
from accumulation_harness.audit.compare.run import RATE, SAME_MEASURED, RunFacts, RunSeen
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.compare.sums import giving
from accumulation_harness.audit.evidence import Backward, Finding, Kind, Step, Vector
from accumulation_harness.audit.rules.finding import MOVED, UNEQUAL, equal, finding, known_weights, listed, made_of
from accumulation_harness.judge.cause import Cause

STRETCHED = 0.03  # of the range of the rates, within which a schedule laid out for more steps reproduces them
STRETCHED_MOVEMENT = 0.2  # and of how far the rates have moved
FEWEST_RATES = 3  # below which any two schedules are stretched ones of each other
SAME_PLACE = 0.1  # steps, by which a place between two steps may be off: rates are put on straight lines between them


def schedule(run: RunFacts) -> list[Finding]:
    """Find a schedule that advances per micro-batch or has another length.

    Args:
        run: What was measured of one optimizer over the run.

    Returns:
        At most one finding.
    """
    if not run.rates_apart:
        return []
    name = min(run.rates_apart, key=lambda each: (run.rates_apart[each], each != RATE))
    mine, theirs = run.mine.rates[name], run.reference.rates[name]
    ways = _ways(run, run.reference) if name == RATE else []
    mine, theirs = next((way for way in ways if _stretched(run, *way)), (mine, theirs))
    counts = run.longer is not None and _goes_through(run, run.longer, name)
    first = run.rates_apart[name]
    calls, usual = max(run.mine.schedule_calls, default=0), max(run.reference.schedule_calls, default=0)
    moves_inside = any(len({b.lrs for b in step.backwards} | {step.lrs}) > 1 for step in run.mine.effective)
    cause, what = Cause.schedule_per_micro_batch, f"the {'learning-rate schedule' if name == RATE else f'schedule of `{name}`'}"
    if name == RATE and _counts_ahead(run):  # first: without corrections rates go with the count
        cause = Cause.optimizer_state_per_micro_batch
        message = "the count of steps by which the optimizer corrects its moments advances per micro-batch"
    elif counts or (name == RATE and (calls > usual or moves_inside)):
        message = f"{what} advances per micro-batch: {_first(mine, first):.4g} instead of {_first(theirs, first):.4g}"
    elif _stretched(run, mine, theirs) or (name == RATE and (_too_long(run) or _is_laid_out_for(run, run.longer))):
        message = f"{what} is laid out for micro-batches, and advances once per optimizer step: it lags behind"
    else:
        cause, what = Cause.unexplained, "the learning rates differ" if name == RATE else f"`{name}` of the optimizer differs"
        told = "" if name == RATE else f": {_first(mine, first):.4g} instead of {_first(theirs, first):.4g}"
        message = f"{what}{told}, and not as if the schedule counted micro-batches"
        times = _one_ratio(mine, theirs) if name == RATE else 0.0
        if times:
            message = f"the learning rate is {times:.4g} times that of N=1 in every step: it is scaled, or updates are made again"
            cause = Cause.schedule_per_micro_batch if run.goes_by_n(times) else cause
        if _same_way(mine, theirs):
            message += (
                f"; {'or ' * bool(times)}it goes the same way at another speed: where its length is that of an epoch, "
                "let its micro-batches fill the last window"
            )
    evidence = {
        "laid_out_otherwise": {path: (own, wanted) for path, own, wanted in run.laid_out},
        f"{name.replace(' ', '_')}s": [each[0] for each in mine if each],
        f"reference_{name.replace(' ', '_')}s": [each[0] for each in theirs if each],
        "schedule_calls_per_step": list(run.mine.schedule_calls),
    }
    return [finding(run, first, cause, "schedule", message, **evidence)]


Rates = tuple[tuple[float, ...], ...]


def _ways(run: RunFacts, other: RunSeen) -> list[tuple[Rates, Rates]]:
    """The rates at which either run's updates follow from its gradients, by each rule that fits both."""
    return [(own, other.ways[rule]) for rule, own in run.mine.ways.items() if rule in other.ways]


def _goes_through(run: RunFacts, longer: RunSeen, name: str) -> bool:
    """Whether what a schedule moves is that of N=1 after so many micro-batches."""
    n = run.accumulation_steps
    pairs = _ways(run, longer) if name == RATE else [(run.mine.rates[name], longer.rates.get(name, ()))]
    return any(_are_the_same(_firsts(own), _firsts(every)[at::n]) for own, every in pairs for at in range(n))


def _is_laid_out_for(run: RunFacts, longer: RunSeen | None) -> bool:
    """Whether its rates are those of N=1 where each micro-batch is a window, step by step."""
    return longer is not None and any(_are_the_same(_firsts(own), _firsts(every)) for own, every in _ways(run, longer))


def _counts_ahead(run: RunFacts) -> bool:
    """Whether updates that were handed over are longer as they are with moments corrected for the number of micro-batches."""
    n, places = run.accumulation_steps, np.arange(run.mine.steps, dtype=float)
    for rule, own in run.mine.ways.items() if run.mine.is_handed else ():
        usual = _firsts(run.reference.ways[rule])
        for first in (n, 1):  # counted within the first window or after it
            factors = ahead(rule, first + n * places)
            if len(factors) == len(usual) > 1 and np.allclose(_firsts(own), factors * usual, rtol=SAME_MEASURED, atol=0):
                return True
    return False


def _are_the_same(rates: Vector, others: Vector) -> bool:
    """Whether two rates or more, which are not one, are those of the other run at these places."""
    pairs = [*zip(rates, others, strict=False)]
    return len({round(math.log(b), 2) for _, b in pairs if b > 0}) > 1 and all(abs(a - b) <= SAME_MEASURED * b for a, b in pairs)


def _too_long(run: RunFacts) -> bool:
    """The schedule is laid out for as many times the reference's steps as there are micro-batches, give or take a window."""
    warm_ups = laid_out_alike(run.mine.run.held, run.reference.run.held)  # that are as long as in the reference
    return any(
        usual > 0 and abs(own + kept - ratio * (usual + kept)) <= run.accumulation_steps
        for _, own, usual in run.laid_out
        for ratio in _micro_batches_per_step(run)
        for kept in (0.0, *warm_ups)
    )


def _micro_batches_per_step(run: RunFacts) -> list[float]:
    """N, and how many there are in the mean, which short windows make fewer; those of 1 left out."""
    mean = sum(run.mine.backwards) / max(1, sum(run.reference.backwards))
    return [ratio for ratio in (run.accumulation_steps, mean) if ratio > 1]


def _stretched(run: RunFacts, mine: Rates, theirs: Rates) -> bool:
    """The candidate's rate at step t is the reference's at t / r, with r the number of backwards per optimizer step.

    Or at (t + 1) / r - 1: warm-ups count from 1.

    Returns:
        True if the schedule advances per micro-batch.
    """
    a, b = _firsts(mine), _firsts(theirs)
    places = [(np.arange(len(a)) + first) / r - first for r in _micro_batches_per_step(run) for first in (0, 1)]
    return any(_on_the_way(a[at >= 0], b, at[at >= 0]) for at in places)


def _same_way(mine: Rates, theirs: Rates) -> bool:
    """Whether the candidate's rates go through the reference's at a constant speed; unknown where these turn around."""
    a, b = _firsts(mine), _firsts(theirs)
    moves = np.sign(np.diff(b))
    if len(b) < FEWEST_RATES or not moves[0] or (moves != moves[0]).any():
        return False
    places = np.interp(moves[0] * a, moves[0] * b, np.arange(len(b)))
    places = places[: np.searchsorted(places, len(b) - 1)]  # not yet at the end of what is known
    if len(places) < FEWEST_RATES:
        return False
    steps = np.arange(len(places))
    tempo, begin = np.polyfit(steps, places, 1)
    return bool(np.abs(begin + tempo * steps - places).max() <= SAME_PLACE)


def _one_ratio(mine: Rates, theirs: Rates) -> float:
    """By which every rate of the first group differs; 0 where it is not one."""
    pairs = [(a, b) for a, b in zip(_firsts(mine), _firsts(theirs), strict=False) if a or b]
    ratios = tuple(a / b if b else 0.0 for a, b in pairs)
    return ratios[0] if ratios and min(ratios) > 0 and equal(ratios) else 0.0


def _firsts(rates: Rates) -> Vector:
    """Of the first group."""
    return np.array([each[0] for each in rates if each])


def _on_the_way(slow: Vector, fast: Vector, places: Vector) -> bool:
    """Whether the slow rates are those of the fast ones at these places, on straight lines between their steps."""
    if min(len(slow), len(fast)) < FEWEST_RATES or not np.ptp(fast):
        return False
    moved = np.abs(slow - slow[0]).max()
    allowed = min(STRETCHED * np.ptp(fast), STRETCHED_MOVEMENT * moved)
    return bool(moved) and bool((np.abs(slow - np.interp(places, np.arange(len(fast)), fast)) <= allowed).all())


def _first(lrs: Sequence[Sequence[float]], index: int) -> float:
    return lrs[index][0] if lrs[index] else math.nan


Told = tuple[int, Cause, str]  # the optimizer step, what is wrong, and how it shows
MANY_MORE = 1.5  # times the reference's optimizer steps, from which on every backward is followed by one


def structure(run: RunFacts, steps: Sequence[StepFacts]) -> list[Finding]:
    """Find another number of steps, other rows, or steps inside a window: what follows cannot be aligned.

    Args:
        run: What was measured of one optimizer over the run.
        steps: What was measured of each aligned pair of steps.

    Returns:
        At most one finding.
    """
    evidence = {
        **_windows(run.mine),
        **{f"reference_{name}": seen for name, seen in _windows(run.reference).items()},
        "rows_repeated": run.repeated,
        "rows_never_seen": run.never,
        "rows_unknown_to_reference": run.foreign,
    }
    found = islice(_structure(run, steps), 1)
    kinds: dict[Cause, Kind] = {Cause.unexplained: "gradient"}
    return [finding(run, place, cause, kinds.get(cause, "seen"), message, **evidence) for place, cause, message in found]


def _windows(seen: RunSeen) -> dict[str, Any]:
    return {
        "optimizer_steps": seen.steps,
        "steps_that_moved_nothing": seen.idle_steps,
        "backwards_per_step": list(seen.backwards),
        "backwards_after_last_step": len(seen.track.pending),
        "windows_with_non_finite_values": list(seen.broken_windows),
        "steps_left_out_by_the_scaler": list(seen.skipped),
    }


def _structure(run: RunFacts, steps: Sequence[StepFacts]) -> Iterator[Told]:
    """What is wrong with the windows, the first one first."""
    mine, reference = run.mine, run.reference
    for step, lost in mine.track.resumed:
        here = next((facts for facts in steps if facts.step == step), None)
        if lost and not (here and _accounted(run, here)):
            what = "another optimizer goes on inside a window: the gradients of the"
            yield step, Cause.resume_in_window, f"{what} {lost} micro-batches before it are lost"
    others = [facts for facts in steps if facts.rows == "different"]
    differs = mine.steps != reference.steps or others or any(not facts.agrees for facts in steps)
    if differs and (mine.broken_windows or reference.broken_windows):
        message = "a micro-batch with non-finite values is left out or passed on by itself; the full batch goes as a whole"
        if mine.skipped != reference.skipped:
            left_out, usual = list(mine.skipped) or "none", list(reference.skipped) or "none"
            message = f"the GradScaler leaves out optimizer steps {left_out}, at N=1 {usual}: only one of the two overflows there"
        yield min((*mine.broken_windows, *reference.broken_windows)), Cause.non_finite_micro_batch, message
    if differs and mine.idle_steps > reference.idle_steps:
        message = f"{mine.idle_steps} optimizer steps inside windows move no parameter but advance the optimizer's state"
        yield 0, Cause.optimizer_state_per_micro_batch, message
    if often := _one_backward_each(run):
        yield 0, Cause.step_every_micro_batch, f"the optimizer steps after every micro-batch: {often}"
    for facts in [facts for facts in others if facts.kept] or others:  # of other windows nobody knows what they gave
        if not _accounted(run, facts):
            yield facts.step, *_other_rows(run, facts)
    for facts in [facts for facts in steps if is_handed(facts.mine) and not facts.gradients_agree]:
        for told in _elsewhere(run, facts):
            yield facts.step, *told
    if mine.steps != reference.steps:
        end = ": the end of the data is left out" if mine.steps < reference.steps else ""
        other = Cause.window_misplaced, f"{mine.steps} optimizer steps instead of {reference.steps}{end}"
        yield min(mine.steps, reference.steps), *(_repeated(run) if run.repeated else other)


def _elsewhere(run: RunFacts, facts: StepFacts) -> Iterator[tuple[Cause, str]]:
    """By what micro-batches give on their own at N=1: these are others, or come again."""
    places, windows = facts.places, run.mine.backwards
    found = [place for place in places if place is not None]
    if facts.step == 0 and facts.backwards < run.accumulation_steps == max(windows):
        message = f"the first window has {windows[0]} micro-batches, and later ones have {max(windows)}"
        yield Cause.window_misplaced, message
    elif facts.step == 0 and _goes_beyond(facts):
        message = f"the first window has {facts.backwards} micro-batches, of which the first {facts.accumulation_steps} are N=1's"
        yield Cause.window_misplaced, message
    elif facts.is_of_alone and any(place not in (k, None) for k, place in enumerate(places)):
        known = listed(tuple(place + 1.0 for place in found))
        message = f"its micro-batches give what those in places {known} of the window give at N=1"
        yield Cause.samples_repeated if len({*found}) < len(found) else Cause.window_misplaced, message


def _goes_beyond(facts: StepFacts) -> bool:
    """Whether the first N micro-batches make up the reference gradient, each as the others, and more follow."""
    n, right = facts.accumulation_steps, facts.parts.weights
    if not n < len(right) or facts.parts.free or not made_of(facts, facts.parts):
        return False
    return min(right[:n]) > 0 and equal(right[:n]) and max(map(abs, right[n:])) <= UNEQUAL * right[0]


def _other_rows(run: RunFacts, facts: StepFacts) -> tuple[Cause, str]:
    if run.foreign and not run.never:
        return Cause.window_misplaced, f"the windows hold {run.foreign} rows that N=1 leaves out"
    if run.foreign and any(b.outside for b in facts.mine.backwards):
        return Cause.stochastic_layers, "the rows themselves are drawn at random per micro-batch"
    if run.foreign and facts.own_rows and (facts.theirs.rows or {}).keys().isdisjoint(facts.mine.backwards[0].rows or ()):
        message = (
            "the windows hold rows that N=1 never saw, and each micro-batch gives what it gives on its own: rows are mixed in it"
        )
        return Cause.non_separable_loss, message
    if run.foreign:
        message = "the windows hold rows that the reference never saw: other data, or rows mixed within a micro-batch"
        return Cause.unexplained, message
    if run.repeated:
        return _repeated(run)
    forwards, usual = facts.mine.forwards, facts.theirs.forwards
    if run.never and facts.backwards < run.accumulation_steps and forwards > usual:
        seen = f"{forwards} forwards and {facts.backwards} backward in a window"
        unused = forwards // max(1, usual) - facts.backwards
        return Cause.micro_batches_lost, f"{seen}: the losses of {unused} micro-batches are never differentiated"
    message = "takes other rows than at N=1: a window is dropped, cut short or straddles the epoch"
    return Cause.window_misplaced, f"optimizer step {facts.step} {message}"


def _repeated(run: RunFacts) -> tuple[Cause, str]:
    return Cause.samples_repeated, f"{run.repeated} rows are used more often than at N=1"


def _accounted(run: RunFacts, facts: StepFacts) -> bool:
    """Whether the gradients agree, or what the backwards gave does, or both do without rows of another loss or cleared ones."""
    weighed = known_weights(facts, facts.parts) and not facts.parts.free  # they hold its rows, however these were padded or cut
    given = weighed or min(facts.sums, facts.without_foreign) <= facts.gate
    without = given or (facts.not_of_the_loss and not _of_other_windows(run, facts))
    cut_off = facts.only and 0 < facts.without_terms < facts.backwards  # other tensors agree, as its rows do
    return facts.gradients_agree or bool(without or cut_off) or _cleared_to_rows_of_the_window(facts)


def _cleared_to_rows_of_the_window(facts: StepFacts) -> bool:
    """Whether gradients are cleared inside the window, and what counts after that are rows of the reference's."""
    since = _since_cleared(facts.mine)
    counted = {row for b in since for row in b.rows or ()}
    return bool(len(since) < facts.backwards and counted) and counted <= (facts.theirs.rows or {}).keys()


def _since_cleared(step: Step) -> tuple[Backward, ...]:
    """The backwards of a window after its gradients were last cleared: what came before may be of another loss."""
    return step.backwards[max((k for k, b in enumerate(step.backwards) if b.start == "cleared"), default=0) :]


def _of_other_windows(run: RunFacts, facts: StepFacts) -> bool:
    """Whether what counts for nothing in the reference's window holds rows that are those of its other windows."""
    own, windows = giving(run.mine.effective[facts.step]), run.reference.effective
    rows = {row for place in facts.not_of_the_loss for row in own[place].rows or ()}
    others = {row for step in windows if step is not windows[facts.step] for row in step.rows or ()}
    return rows <= others and not rows <= (windows[facts.step].rows or {}).keys()


def _one_backward_each(run: RunFacts) -> str:
    """Whether every step follows one backward: N times as many steps, or where runs were ended, so many fewer rows."""
    mine, theirs = run.mine, run.reference
    most, usual = (max((len(_since_cleared(step)) for step in seen.effective), default=1) for seen in (mine, theirs))
    if most > usual or run.accumulation_steps == 1:
        return ""
    if mine.steps > theirs.steps and mine.steps >= MANY_MORE * theirs.steps:
        return f"{mine.steps} steps instead of {theirs.steps}"
    rows = [(a.num_rows, b.num_rows) for a, b in zip(mine.effective, theirs.effective, strict=False)]
    fewer = sum(0 < a * run.accumulation_steps == b for a, b in rows)
    return f"on {rows[0][0]} rows instead of {rows[0][1]}" if mine.run.stopped and fewer > len(rows) // 2 else ""


LOSSES_APART = 10.0  # times the distance of the differentiated losses, within which reported ones agree
LEAST_LOSS, MOST_LOSS = 1e-4, 1e-2  # relative; but no less than a float32 sum can show, and no more than this
UNKNOWN_LOSS = 1e-3  # relative; where the losses that were differentiated are not known
SMALLEST_LOSS = 1e-12  # below which a loss is compared absolutely


def counters(run: RunFacts) -> list[Finding]:
    """The optimizer's own step counter.

    Args:
        run: What was measured of one optimizer over the run.

    Returns:
        At most one finding: at the first step whose counter differs.
    """
    pairs = [(a.state_step, b.state_step) for a, b in zip(run.mine.effective, run.reference.effective, strict=False)]
    first = next((i for i, (a, b) in enumerate(pairs) if a is not None and b is not None and a != b), None)
    if first is None:
        return []
    message = f"the optimizer's own step counter is {pairs[first][0]:g} instead of {pairs[first][1]:g}"
    return [finding(run, first, Cause.optimizer_state_per_micro_batch, "seen", message)]


def held(run: RunFacts, *, unread: bool) -> list[Finding]:
    """Find numbers that are held and move otherwise: averages and copies of the weights, what is trained by hand, schedules.

    Args:
        run: The candidate beside the reference.
        unread: Whether gradients agree, so that no copy takes part in them.

    Returns:
        The findings.
    """
    found = []
    averages = [one for one in run.apart if one.average and one.role in (*OWN, "optimizer")]
    averages += [one for one in run.apart if unread and one.copy and one.role in OWN]
    trained = [one for one in run.apart if one.kept and one.role == "trained" and not one.share]
    kinds: tuple[tuple[Sequence[Apart], Cause, Kind, str], ...] = (
        (averages, Cause.ema_per_micro_batch, "average", "an average or a copy of the weights is updated per micro-batch"),
        (trained, Cause.unexplained, "statistics", "what is trained by hand moves differently than at N=1"),
        (
            run.beside_weights,
            Cause.unexplained,
            "statistics",
            "tensors of the loop that have the shapes of the weights change differently",
        ),
    )
    for those, cause, kind, what in kinds:
        if those:
            first = min(those, key=lambda one: one.window)
            names = ", ".join(f"`{one.path}`" for one in those[:4]) + (", ..." if len(those) > 4 else "")
            still = math.isinf(first.distance)
            by = "which does not move there at N=1" if still else f"{first.distance:.2g} of the movement apart"
            found += [_apart(run, first, cause, kind, f"{what}: {names} ({by})")]
    schedules = [one for one in run.apart if one.role == "schedule" and one.number is not None and one.times > 1]
    if schedules and not run.laid_out and not schedule(run):
        message = f"{schedules[0]}: the learning-rate schedule advances per micro-batch, and has not changed a rate so far"
        found += [_apart(run, schedules[0], Cause.schedule_per_micro_batch, "schedule", message)]
    return found


def unread(run: RunFacts) -> str:
    """What the loop keeps and moves otherwise, and nothing here reads: a log may differ, a statistic for later may not.

    Args:
        run: What was measured of one optimizer over the run.

    Returns:
        A sentence; empty where nothing is kept.
    """
    kept = [one for one in run.apart if one.of_loop]
    what = "the loop keeps it from one window to the next, and no gradient depends on it: harmless if it is only logged"
    return f"{'; '.join(map(str, kept[:4]))}; {what}, what is used later may not" if kept else ""


def ended(run: RunFacts) -> list[Finding]:
    """What is done with the weights after the last step: averages swapped in, pruning, folding, another scale.

    Args:
        run: What was measured of one optimizer over the run.

    Returns:
        At most one finding.
    """
    apart, along = run.moved_after
    if apart <= MOVED * run.mine.run.roundoff:
        return []
    message = f"after the last optimizer step, something moves the parameters differently than at N=1, by {apart:.2g} of them"
    return [finding(run, None, Cause.unexplained, "seen", message, apart=apart, cosine_with_parameters=along)]


def buffers(run: RunFacts) -> list[Finding]:
    """Tensors that a model holds besides its weights, although the gradients agree.

    Args:
        run: What was measured of one optimizer over the run.

    Returns:
        At most one finding.
    """
    off = [one for one in run.apart if one.of_model]
    if not off:
        return []
    message = f"{'; '.join(map(str, off[:2]))}: the model's forward moves it once per micro-batch"
    return [_apart(run, off[0], Cause.batch_statistics, "statistics", message)]


def _apart(run: RunFacts, one: Apart, cause: Cause, kind: Kind, message: str) -> Finding:
    evidence = {"path": one.path, "distance": one.distance, "gate": one.gate, "numbers": one.number}
    return finding(run, max(0, one.window - 1), cause, kind, message, **evidence)


def counts(run: RunFacts) -> list[Finding]:
    """Steps, samples or tokens that the function says it has seen, and that are not those of N=1.

    Args:
        run: What was measured of one optimizer over the run.

    Returns:
        At most one finding.
    """
    mine, theirs = run.mine.run.counts, run.reference.run.counts
    off = [key for key, count in mine.items() if theirs.get(key, count) != count]
    if not off:
        return []
    told = "; ".join(f"{key}: {mine[key]:g} instead of {theirs[key]:g}" for key in off)
    message = f"the function counts differently than at N=1, with equal gradients: {told}"
    return [finding(run, None, Cause.counter_wrong, "report", message)]


def reported(run: RunFacts) -> list[Finding]:
    """Gradients agree, but the losses the function returned do not stand to the losses differentiated as at N=1.

    Args:
        run: What was measured of one optimizer over the run.

    Returns:
        At most one finding.
    """
    mine, theirs = run.mine.run.reported, run.reference.run.reported
    if mine is None or theirs is None or len(mine) != len(theirs):
        return []
    own = run.mine.losses if len(run.mine.losses) == len(mine) else ()
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if math.isfinite(a) and math.isfinite(b) and abs(a - b) > _loss_gate(run, i) * max(abs(b), SMALLEST_LOSS):
            message = f"the reported loss is {a:.5g} where N=1 reports {b:.5g}, with equal gradients"
            differentiated = {"differentiated": own[i]} if own else {}
            return [finding(run, i if own else None, Cause.loss_report_differs, "report", message, **differentiated)]
    return []


def _loss_gate(run: RunFacts, index: int) -> float:
    """Relative distance of two reported losses that the differentiated losses of the two arms explain."""
    if index < min(len(run.mine.losses), len(run.reference.losses)):
        a, b = run.mine.losses[index], run.reference.losses[index]
        if math.isfinite(a) and math.isfinite(b) and b:
            return min(max(LEAST_LOSS, LOSSES_APART * abs(a - b) / abs(b)), MOST_LOSS)
    return UNKNOWN_LOSS
