"""What the events of a run say: how many micro-batches a step holds, how much each counts, and what happens for each."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from accumulation_harness.judge.cause import Cause
from accumulation_harness.lint import words
from accumulation_harness.lint.hit import Hit
from accumulation_harness.lint.lengths import lengths, written
from accumulation_harness.lint.run import N, Run, runs
from accumulation_harness.lint.source import Source
from accumulation_harness.lint.values import Event, Term

PER_MICRO_BATCH = {
    "clip": (Cause.clip_per_micro_batch, "gradients are clipped after every micro-batch, not once their sum is whole"),
    "schedule": (Cause.schedule_per_micro_batch, "the schedule advances with every micro-batch"),
    "average": (Cause.ema_per_micro_batch, "the average of the weights moves with every micro-batch"),
    "decay": (Cause.weight_decay_per_micro_batch, "the weights decay with every micro-batch"),
    "rescale": (
        Cause.sum_rescaled_in_window,
        "the sum of the gradients is divided with every micro-batch: earlier ones count less",
    ),
    "update": (Cause.scaler_updated_in_window, "the loss scale is updated with every micro-batch"),
    "unscale_": (Cause.scaler_updated_in_window, "the loss scale is taken out with every micro-batch"),
}
PENALTY = "a part of the loss is divided by the number of micro-batches, and what is added to it is not"
ENTERED = "`accumulate` is entered twice for one micro-batch, and counts two: one context takes several models"
ENGINE = "the loss is divided by the number of micro-batches, and DeepSpeed's engine divides by its own"
UNTOLD = "`accumulate` defers no step: the Accelerator of this file is not told the number of micro-batches"
SAID = {  # what happens once and is wrong at once
    "untold": (Cause.step_every_micro_batch, UNTOLD),
    "entered": (Cause.window_misplaced, ENTERED),
    "left_out": (
        Cause.replicas_not_synchronised,
        "`accumulate` is not given all models that are trained: the others synchronise",
    ),
    "uncounted": (Cause.window_misplaced, "DeepSpeed's engine counts its own steps: each of these backwards is a window to it"),
    "twice": (Cause.loss_divided_twice, ENGINE),
}
AGAIN = "this optimizer has stepped on these gradients already, by its scaler"
STALE = "this step takes the gradients of the window before as well: they are not cleared between"
LATE = re.compile("DistributedData|DDP|no_backward_sync")
FREEZES = re.compile(r"requires_grad|toggle|freeze|inputs=|autograd\.grad")  # what keeps gradients of a loss from parameters
CLEARED = "gradients are cleared with every micro-batch: the last one counts"


@dataclass(frozen=True)
class Window:
    """What happened from behind one step of the optimizers to behind the next; `after`: what follows before the next backward."""

    events: tuple[Event, ...]
    after: tuple[Event, ...]

    @property
    def all(self) -> tuple[Event, ...]:
        """What happened, and what follows."""
        return self.events + self.after

    @property
    def backwards(self) -> list[Event]:
        """The backwards of the window."""
        return [event for event in self.events if event.kind == "backward"]

    @property
    def step(self) -> Event:
        """The first step at its end."""
        return next(event for event in self.events if event.kind == "step")

    @property
    def last(self) -> Event:
        """The last one."""
        return self.events[-1]

    @property
    def optimizers(self) -> frozenset[str]:
        """What steps at its end."""
        return frozenset(event.name for event in self.events if event.kind == "step")

    @property
    def size(self) -> int:
        """The number of micro-batches."""
        return len({event.loops for event in self.backwards})

    @property
    def is_flat(self) -> bool:
        """Whether the step stands in the loop over micro-batches."""
        around = [loop[0] for loop in self.step.loops]
        return bool(around) and all(event.loops and event.loops[-1][0] in around for event in self.backwards)

    @property
    def is_whole(self) -> bool:
        """Whether all of its backwards are of one pass of the loop."""
        return (
            all(event.loops for event in self.backwards)
            and len({(event.loops[:-1], event.loops[-1][0]) for event in self.backwards}) == 1
        )

    def weights(self) -> list[list[tuple[Term, float]]] | None:
        """Return, for each place of a term, what it weighs in each micro-batch; None where that is unknown.

        Backwards of which each micro-batch has one (in one branch or the other) are one place.

        Returns:
            A list for each place, with a term and its weight for each micro-batch; None where a weight is unknown.
        """
        rows: dict[tuple[ast.AST, int], list[tuple[Term, float]]] = {}
        for event in self.backwards:
            for place, term in enumerate(event.loss.terms if event.loss else ()):
                if term.weight is None:
                    return None
                weight = term.weight
                for literal in term.literals:
                    weight /= literal if literal == self.size and literal > 1 else 1
                rows.setdefault((event.node, place), []).append((term, weight))
        if len(self.backwards) == self.size and {len(event.loss.terms) for event in self.backwards if event.loss} == {1}:
            return [[pair for row in rows.values() for pair in row]]
        return [row for row in rows.values() if len(row) >= self.size]  # others are of no micro-batch


def apart(events: list[Event]) -> list[list[Event]]:
    """Return what happened for each group of optimizers that step together: backwards go to the steps that follow them.

    Args:
        events: What happens on a way through a function.

    Returns:
        One list for each group.
    """
    followed = _followed_by(events)
    groups = {frozenset(names) for names in followed.values()}
    stepping = frozenset().union(*groups)
    if len(groups) < 2 or len(stepping) < sum(map(len, groups)):
        return [events]
    return [
        [
            event
            for event in events
            if (event.kind == "backward" and followed.get(event.place, set()) == names)
            or (event.kind == "step" and event.name in names)
            or (event.kind in ("clear", "deferred") and event.name not in stepping - names)
            or event.kind == "update"
        ]
        for names in groups
    ]


def _followed_by(events: list[Event]) -> dict[tuple[object, ...], set[str]]:
    """Return of each backward's place the optimizers that step before the next one."""
    followed: dict[tuple[object, ...], set[str]] = {}
    backward = None
    for event in events:
        if event.kind == "backward":
            backward = event.place
        elif event.kind == "step" and backward is not None:
            followed.setdefault(backward, set()).add(event.name)
    return followed


def windows(events: list[Event]) -> list[Window]:
    """Return the windows between steps, if all optimizers step together.

    Args:
        events: What happens on a way through a function.

    Returns:
        The windows in order.
    """
    groups: list[list[Event]] = [[]]
    stepped = False
    for event in events:
        if event.kind == "backward" and stepped:
            groups.append([])
            stepped = False
        stepped |= event.kind == "step"
        groups[-1].append(event)
    found = []
    for group in groups:
        last = max((place for place, event in enumerate(group) if event.kind == "step"), default=-1)
        if last >= 0 and any(event.kind == "backward" for event in group):
            found.append(Window(tuple(group[: last + 1]), tuple(group[last + 1 :])))
    return found if len({window.optimizers for window in found}) <= 1 else []


def hits(source: Source) -> Iterator[Hit]:
    """Yield what is wrong on the ways through the functions of a file.

    What a setting may mend is told only where every way that comes by there shows it.

    Args:
        source: A module.

    Yields:
        The hits.
    """
    for ways in runs(source):
        shown: dict[tuple[int, int, Cause], tuple[Hit, set[tuple[ast.AST, ...]], int]] = {}
        passed: list[tuple[set[ast.AST], bool]] = []  # and whether several micro-batches make a window
        accumulates = False  # on one way or another
        for run in ways:
            if run.not_finite is not None or run.is_of_one:
                continue
            each = [windows(events) for events in apart(run.events)]
            here = _of_run(source, run) + [told for found in each for told in _of_windows(source, run, found)]
            places = {(hit.line, hit.column, hit.cause): (hit, anchors) for hit, anchors in here}
            if run.otherwise == "last":
                shown |= {
                    place: (hit, {()}, 1) for place, (hit, _) in places.items() if hit.cause is Cause.short_window_divided_by_n
                }
                continue
            sizes = Counter(window.size for found in each for window in found)
            several = bool(sizes) and sizes.most_common(1)[0][0] > 1
            accumulates |= several
            nodes: set[ast.AST] = {event.node for found in each for window in found for event in window.all}
            passed.append((nodes, several))
            if run.is_cut and passed[:-1]:
                passed.pop()  # its last window may be any
                continue
            for place, (hit, anchors) in places.items():
                before, others, times = shown.get(place, (hit, set(), 0))
                shown[place] = (before if before.sure else hit, others | {anchors}, times + 1)  # sure on one way is sure
        told = source.speaks_of_lightning or not any(event.name == "automatic" for run in ways for event in run.events)
        for hit, each_way, times in shown.values():
            if () not in each_way and accumulates and hit.cause is Cause.step_every_micro_batch:
                continue  # a setting tells whether it does
            ways_by = (any(nodes.issuperset(one) for one in each_way) for nodes, several in passed if several or not accumulates)
            if () in each_way or times >= sum(ways_by):
                yield hit if told else replace(hit, sure=False)
        yield from _passed_over(ways)
        yield from _of_one(ways)


Told = tuple[Hit, tuple[ast.AST, ...]]  # with what has to show it whenever a run comes by all of that; (): one run is enough


def _of_run(source: Source, run: Run) -> list[Told]:
    of_accelerate = [(_hit(event.node, *SAID[event.kind]), ()) for event in run.events if event.kind in SAID]
    return [*_clipped_before(source, run), *_divided_twice(run), *_foreign(source, run), *of_accelerate]


def _of_windows(source: Source, run: Run, found: list[Window]) -> Iterator[Told]:
    sizes = Counter(window.size for window in found if window.is_whole)
    if not sizes:
        return
    usual = max(sizes, key=lambda size: (sizes[size], size))
    full = [window for window in found if window.size == usual and window.is_whole]
    yield from _held(source, found, usual)
    if usual == 1:
        if not run.handling and not run.given & run.asked.keys():  # accelerate, or the caller, says when it steps
            yield from _stepped_inside(full)
        return
    if not run.unsure and {window.size for window in found[1:-1]} == {1, N - 1} and full[0].is_flat:
        yield (
            _hit(full[0].step.node, Cause.step_every_micro_batch, "the optimizer steps after every micro-batch but each N-th"),
            (),
        )
        return
    for window in full:
        yield from _for_each(source, window)
        yield from _scale_changed(window)
        yield from _too_long(source, window)
        yield from _not_synchronised(source, window)
    yield from _misplaced(run, found[0], full[0])
    named = full[0].is_flat or full[0].backwards[0].loops[-1][2]
    if source.weighs_gradients:
        return
    yield from _weighed(source, full[0], named)
    if all(abs(_total(window) - 1) < 1e-6 for window in full):
        yield from _irregular(run, found, full)


def _for_each(source: Source, window: Window) -> Iterator[Told]:
    """What happens in every iteration in which there is a backward."""
    iterations = {event.loops for event in window.backwards}
    depth = max(map(len, iterations))
    for kind, (cause, sentence) in PER_MICRO_BATCH.items():
        places: dict[ast.AST, list[Event]] = {}
        for event in window.all:
            if event.kind == kind:
                places.setdefault(event.node, []).append(event)
        for node, events in places.items():
            as_made = kind == "schedule" and any(one.is_of_micro_batches for one in lengths(source, node))
            if iterations <= {event.loops[:depth] for event in events} and not as_made:
                yield _hit(node, cause, sentence), ()


def _scale_changed(window: Window) -> Iterator[Told]:
    """The scaler of the step is updated between a backward and the step: for another optimizer, or too early."""
    for event in window.events[window.events.index(window.backwards[0]) : window.events.index(window.step)]:
        if event.kind == "update" and event.name == window.step.scaled:
            sentence = "the loss scale is updated while scaled gradients wait for their step"
            yield _hit(event.node, Cause.scaler_updated_in_window, sentence), ()


def _too_long(source: Source, window: Window) -> Iterator[Told]:
    """A schedule that advances with the steps was made for as many as there are micro-batches, or is written out so."""
    counted = Counter(event.name for event in window.all if event.kind == "count")
    once = {name for name, times in counted.items() if times == 1}
    for event in (event for event in window.all if event.kind == "rate" and once):
        for length in written(source, event.node, once):
            if length.is_of_micro_batches and not length.unsure:
                sentence = "the rate goes by the count of steps, and by as many as there are micro-batches"
                yield _hit(event.node, Cause.schedule_per_micro_batch, sentence), ()
    advances = [event for event in window.all if event.kind == "schedule"] or [window.step]
    for event in advances if len(advances) == 1 and window.is_flat else ():
        for made in lengths(source, event.node) if event.loops == window.step.loops else ():
            if made.is_of_micro_batches and not made.unsure and made.at is not None:
                sentence = "the schedule is made for as many steps as there are micro-batches, and advances once for N of them"
                yield _hit(made.at, Cause.schedule_per_micro_batch, sentence), ()


def _hit(node: ast.AST, cause: Cause, sentence: str) -> Hit:
    assert isinstance(node, (ast.expr, ast.stmt))
    return Hit.at(node, cause, sentence)


def _held(source: Source, found: list[Window], usual: int) -> Iterator[Told]:
    """What the gradients hold when an optimizer steps: part of a window, or what it stepped on before."""
    clears = {event.kind: event for window in found for event in window.all if event.kind in ("clear", "deferred")}
    taken: Event | None = None  # the step on what was not cleared since
    for window in found if not source.keeps_gradients else ():
        new: Event | None = None
        for event in window.all:
            if event.kind == "backward":
                new = event
            elif event.kind == "clear":
                is_part = new is not None and window.is_whole and window.size == usual and not _has_closure(window)
                if is_part and _takes(window, event, found):
                    sentence = CLEARED if window.size > 1 else "gradients are cleared between the last backward and the step"
                    yield _hit(event.node, Cause.gradients_cleared_in_window, sentence), (window.step.node,)
                new = taken = None
            elif event.kind == "step":
                if taken is not None and taken.name == event.name and taken.loops[:-1] == event.loops[:-1]:
                    again = new is None and taken.loops == event.loops and bool(taken.scaled) is not bool(event.scaled)
                    if again:
                        yield _hit(event.node, Cause.gradients_not_cleared, AGAIN), (event.node, taken.node)
                    elif new is not None and clears and (window.size > 1 or _are_around(clears.values(), event)):
                        yield _hit(clears.get("deferred", event).node, Cause.gradients_not_cleared, STALE), (event.node,)
                taken, new = event, None
    is_made = (source.makes_optimizers and usual > 1) or _is_made_before(source, found[0])
    if len(found) > 1 and not clears and not source.clears and (is_made or _is_of_caller(found[0])):
        yield _hit(found[0].step.node, Cause.gradients_not_cleared, "nothing in this file clears the gradients"), ()


def _are_around(clears: Iterable[Event], step: Event) -> bool:
    """Whether gradients are cleared outside of the loop alone that steps, which is no window: once for an epoch."""
    return bool(step.loops) and not step.loops[-1][2] and all(len(clear.loops) < len(step.loops) for clear in clears)


def _is_made_before(source: Source, window: Window) -> bool:
    """Whether the optimizer is made before the loop in which it steps, by the function around that."""
    made = re.search(r"@(\d+)_", window.step.name)
    loop = window.step.loops[-1][0] if window.step.loops else None
    if made is None or not isinstance(loop, ast.For | ast.AsyncFor | ast.While):
        return False
    line = int(made[1])
    is_outside = not loop.lineno <= line <= (loop.end_lineno or 0)
    return window.is_flat and is_outside and source.function_at(line) is source.function_at(loop.lineno)


def _is_of_caller(window: Window) -> bool:
    """Whether a loop differentiates losses and steps an optimizer that its function was given: who gave it cannot clear it."""
    of = words.receiver(window.step.node) if isinstance(window.step.node, ast.Call) else None
    is_optimizer = isinstance(of, ast.Name) and words.OPTIMIZER.search(of.id.lower()) is not None
    is_loop = all(isinstance(loop[0], ast.For | ast.AsyncFor | ast.While) for loop in window.step.loops)
    loops = [loop[0] for loop in window.step.loops]
    set_there = {one.id for loop in loops for one in words.inside(loop, ast.Name) if isinstance(one.ctx, ast.Store)}
    is_given = "(" not in window.step.name and getattr(of, "id", "") not in set_there  # not made here
    return is_given and is_optimizer and is_loop and window.is_flat and window.is_whole and not _has_closure(window)


def _has_closure(window: Window) -> bool:
    """Whether the step is handed a function that does a backward of its own."""
    call = window.step.node
    return isinstance(call, ast.Call) and bool(call.args) and not window.step.scaled


def _takes(window: Window, clear: Event, found: list[Window]) -> bool:
    """Whether what is cleared is what the window's optimizer steps on: it, or the only model of a single optimizer."""
    if clear.name in window.optimizers or not clear.name:
        return True
    others = {event.name for one in found for event in one.all if event.kind == "clear"} - window.optimizers
    return len(window.optimizers) == len(others) == 1 and words.OPTIMIZER.search(words.end(clear.name)) is None


def _stepped_inside(full: list[Window]) -> Iterator[Told]:
    """The optimizer steps after every backward, in a loop over the micro-batches, or with losses divided by their number."""
    for window in full[:1]:
        (first, *_) = window.backwards
        inner = first.loops[-1] if first.loops else None
        counted = inner is not None and inner[2] and inner[0] in [loop[0] for loop in window.step.loops]
        header = getattr(inner[0], "iter", None) if inner and counted else None
        counted = header is not None and any(map(words.STRICT.search, words.identifiers(header)))
        divided = any(term.by_number < 1 for term in _terms(window))
        weighed = not any(term.weight is None for term in _terms(window))
        evidence = _at_every_nth(full)
        if len(full) > 1 and (evidence or ((divided or counted) and weighed)):
            sentence = "the optimizer steps after every micro-batch"
            yield _hit(window.last.node, Cause.step_every_micro_batch, sentence), (window.last.node, *evidence)


def _at_every_nth(full: list[Window]) -> Sequence[ast.AST]:
    """Return what clips or clears at each N-th alone of micro-batches that a call steps one by one."""
    mine = [window for window in full if window.last.node is full[0].last.node]
    times = Counter(
        event.node
        for kind in ("clear", "clip")
        for window in mine
        for event in window.all
        if event.kind == kind and (kind == "clip" or event.name in window.optimizers)
    )
    return [node for node, many in times.items() if many > 1 and N - 1 < len(mine) / many < N + 1][:1]


def _terms(window: Window) -> list[Term]:
    return [term for event in window.backwards if event.loss for term in event.loss.terms]


def _not_synchronised(source: Source, window: Window) -> Iterator[Told]:
    last = window.backwards[-1]
    quiet = [event for event in window.events if event.kind == "quiet"]
    if not last.synchronised and not re.search(r"all_reduce\(.*grad", source.text):
        sentence = "the last backward of a window does not synchronise the replicas: what decides it comes too late, or is off"
        yield _hit(quiet[-1].node if quiet else last.node, Cause.replicas_not_synchronised, sentence), ()
    for event in quiet:
        if event.name and LATE.search(source.text) and last.synchronised:
            sentence = "`no_sync` begins after the forward, in which DDP decides: every micro-batch is synchronised"
            yield _hit(event.node, Cause.replicas_not_synchronised, sentence), ()


def _divided_twice(run: Run) -> Iterator[Told]:
    firsts = {event.node: event for event in reversed(run.events)}.values()  # later a name may hold what it held before
    for event in firsts:
        terms = event.loss.terms if event.loss else ()
        if terms and all(term.by_number < 1 / N and term.weight is not None and term.weight < 1 / N for term in terms):
            by = ast.unparse(event.node.func) if isinstance(event.node, ast.Call) else "Lightning"
            sentence = f"the loss is divided by the number of micro-batches, and `{by}` divides by it again"
            yield _hit(event.node, Cause.loss_divided_twice, sentence), ()


def _total(window: Window) -> float:
    """Return how often the mean of the micro-batches counts in a window: 1 is right; 0 where that is unknown."""
    totals = {round(sum(weight for _, weight in row), 6) for row in window.weights() or ()}
    return totals.pop() if len(totals) == 1 else 0.0


def _weighed(source: Source, window: Window, named: bool) -> Iterator[Told]:
    """How the micro-batches of a whole window are weighed."""
    (backward, *_) = window.backwards
    anchor = backward.node
    whole = [term.whole for term in _terms(window) if term.whole and _near(term.by_number, 1 / N)]
    if whole:
        sentence = f"the loss is divided by `{whole[0]}`, and by the number of micro-batches once more"
        yield _hit(anchor, Cause.loss_divided_twice, sentence), (anchor,)
    for term in _terms(window):
        if term.at is not None and term.by_number > 1 and term.weight is not None:
            yield _hit(term.at, Cause.loss_not_divided, "the loss is multiplied by the number of micro-batches"), ()
    divisors = [round(math.prod(term.literals) / (term.by_number or 1), 6) for term in _terms(window)]
    if divisors == [*range(1, window.size + 1)]:
        sentence = "the loss is divided by the number of micro-batches so far: the first counts most"
        yield _hit(anchor, Cause.counter_wrong, sentence), ()
        return
    rows = window.weights()
    if not rows:
        return
    totals = [sum(weight for _, weight in row) for row in rows]
    once, never = 1.0, float(window.size)
    placed = [row[0][0] for row in rows]
    if all(_near(total, never) for total in totals):
        likely = [term.kind == "mean" or (term.kind == "model" and named) for term in placed]
        if named and not any(term.literals or term.kind in ("sum", "rows") for term in placed):
            sure = any(likely)
            sentence = f"the micro-batches' {'mean ' if sure else ''}losses are added: none is divided by their number"
            yield Hit.at(anchor, Cause.loss_not_divided, sentence, sure=sure), (anchor,)
    elif any(_near(total, once) for total in totals):
        odd = [term for term, total in zip(placed, totals, strict=True) if _near(total, never)]
        if odd and all(term.kind != "unknown" for term in odd):
            yield _hit(anchor, Cause.auxiliary_loss_scale, PENALTY), (anchor,)
        is_of_model = all(term.kind == "model" for term in placed) and source.counts_labels and backward.name != "automatic"
        of_labels = [
            term for term, total in zip(placed, totals, strict=True) if _near(total, once) and (term.padded or is_of_model)
        ]
        if of_labels:
            sentence = "each micro-batch is averaged over its own valid labels, and the means count alike"
            yield Hit.at(of_labels[0].at or anchor, Cause.mean_of_means, sentence, sure=source.counts_labels), (anchor,)


def _misplaced(run: Run, first: Window, usual: Window) -> Iterator[Told]:
    """The first window, or each, is shorter or longer than N."""
    steps_alike = usual.is_flat and first.step.node is usual.step.node and first.is_whole
    expected = N if run.counts and abs(usual.size - N) == 1 else usual.size
    if first.size != expected and steps_alike and not (run.unsure or run.handling) and run.otherwise != "last":
        sentence = (
            f"the first step comes after {first.size} instead of {int(expected)} micro-batches (here with N = {int(expected)})"
        )
        yield _hit(first.step.node, Cause.window_misplaced, sentence), (first.step.node,)


def _irregular(run: Run, found: list[Window], full: list[Window]) -> Iterator[Told]:
    """Windows of other lengths, whose losses are divided as if they were whole."""
    usual = full[0].size
    for place, window in enumerate(found):
        if window.size >= usual or not window.is_whole or not _near(_total(window), window.size / usual) or run.unsure:
            continue
        if place and found[place - 1].backwards[-1].loops[:-1] == window.backwards[0].loops[:-1]:
            sentence = "the last window of an epoch may hold fewer micro-batches than the number by which its losses are divided"
            yield _hit(window.backwards[-1].node, Cause.short_window_divided_by_n, sentence), ()


def _near(one: float, other: float) -> bool:
    return abs(one - other) < 1e-6


def _clipped_before(source: Source, run: Run) -> Iterator[Told]:
    """Gradients are clipped while the loss scale is still in them, or before they are divided."""
    clips: list[Event] = []
    scaled = "elsewhere" if source.unscales_nothing else ""  # by the backward before the first that is followed
    for event in run.events:
        match event.kind:
            case "backward":
                scaled, clips = event.scaled, []
            case "unscale_":
                scaled = ""
            case "clip" if scaled and not event.scaled:
                clips.append(event)
            case "step" if event.scaled:
                for clip in clips:
                    yield (
                        _hit(clip.node, Cause.clip_before_unscale, "gradients are clipped while the loss scale is still in them"),
                        (clip.node, event.node),
                    )
    for clip, later in zip(run.events, run.events[1:], strict=False):
        if clip.kind == "clip" and later.kind == "divide":
            sentence = "gradients are clipped before they are divided by the number of micro-batches"
            yield _hit(clip.node, Cause.clip_before_unscale, sentence), ()


def _passed_over(ways: list[Run]) -> Iterator[Hit]:
    """A micro-batch with a non-finite loss is passed over, and the rest of its window goes on."""
    for run in ways:
        if run.not_finite is None or run.passed_over is None:
            continue
        plain = next(one for one in ways if one.otherwise == run.otherwise)
        usual, odd = windows(plain.events), windows(run.events)
        if usual and odd and usual[0].size > odd[0].size > 0 and usual[0].step.loops == odd[0].step.loops:
            sentence = "a micro-batch that is not finite is left out, and its window goes on without it"
            yield _hit(run.passed_over, Cause.non_finite_micro_batch, sentence)


def _of_one(ways: list[Run]) -> Iterator[Hit]:
    """What happens with one micro-batch to a window alone, or with several alone."""
    usual = [run for run in ways if not run.is_of_one]
    for one in ways:
        if not one.is_of_one:
            continue
        mine, theirs = one.of_kind, usual[0].of_kind  # under the same assumptions
        if mine["backward"] and len(theirs["step"]) > 1 and not any(run.of_kind["backward"] for run in usual):
            sentence = "with several micro-batches to a window nothing is differentiated: this backward is for one alone"
            yield _hit(mine["backward"][0].node, Cause.window_misplaced, sentence)
        if theirs["clear"] and len(windows(one.events)) > 1 and not mine["clear"]:
            sentence = "with one micro-batch to a window (N = 1) the gradients are never cleared"
            yield _hit(theirs["clear"][0].node, Cause.gradients_not_cleared, sentence)
        count = len(theirs["backward"])
        is_stepped = len(mine["step"]) >= count > 2 * N and not any(run.is_wide for run in usual)
        is_flat = is_stepped and mine["step"][0].loops[-1][0] is theirs["backward"][0].loops[-1][0]
        if is_flat and all(len(run.of_kind["step"]) <= count / (2 * N) for run in usual):
            sentence = "with several micro-batches to a window this step comes far too seldom, or never"
            yield _hit(mine["step"][0].node, Cause.window_misplaced, sentence)


def _foreign(source: Source, run: Run) -> Iterator[Told]:
    """The generator's loss is differentiated through the discriminator, whose gradients wait for its own step and keep that."""
    if not run.counts or FREEZES.search(source.text):
        return
    followed = _followed_by(run.events)
    steppers = set().union(*followed.values())
    named = {name for name in steppers if words.JUDGE.search(words.end(name))}
    called: dict[tuple[object, ...], set[str]] = {}
    here: set[str] = set()
    for event in run.events:
        if event.kind == "call" and words.JUDGE.search(event.name):
            here.add("itself" if "detach()" in words.text(event.node) else "through")
        elif event.kind == "backward":
            called.setdefault(event.place, set()).update(here)
            here = set()
    own = [
        node
        for node, how in called.items()
        if "itself" in how or (not any(called.values()) and followed.get(node, set()) & named)
    ]
    judges = named or {name for node in own for name in followed.get(node, ())}
    filled: Event | None = None
    for event in run.events:
        if event.kind == "backward" and own and event.place not in own and (called[event.place] or not any(called.values())):
            filled = event
        elif event.kind == "clear" and event.name not in steppers - judges:
            filled = None
        elif event.kind == "step" and event.name in judges and filled is not None:
            sentence = "this backward fills the discriminator's gradients as well, and its optimizer steps on them"
            yield _hit(filled.node, Cause.foreign_gradients, sentence), ()
            filled = None
