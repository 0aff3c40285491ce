"""Further runs of an arm that differs: at the reference's own weights, probed, frozen, and without what couples samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np

from accumulation_harness.audit.compare.comparison import ShapeError, facts
from accumulation_harness.audit.compare.floors import COARSE_GATE, is_handed
from accumulation_harness.audit.compare.held import carried, moved_inside
from accumulation_harness.audit.compare.place import Place, Where, place_of
from accumulation_harness.audit.compare.probes import elements_of, leaves_something, of_all, rows, separated, terms
from accumulation_harness.audit.compare.run import Facts, RunSeen, steps_of
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.compare.vacuity import not_rounding, nothing_compared
from accumulation_harness.audit.compare.windows import compare_rows, effective
from accumulation_harness.audit.evidence import FLOAT32, KEPT, Finding, Held, Intervention, Layer, Run, Step, norms_by
from accumulation_harness.audit.family import Family, Runs
from accumulation_harness.audit.rules.computation import ALMOST, moved_state
from accumulation_harness.audit.rules.finding import SAME_ROW, at
from accumulation_harness.audit.rules.findings import explain, first_of_each, left_out
from accumulation_harness.compare.linear import distance, norm
from accumulation_harness.judge.cause import Cause

CAUSE_OF: dict[Layer, Cause] = {"dropout": Cause.stochastic_layers, "batch_norm": Cause.batch_statistics}
NAME_OF: dict[Layer, str] = {"dropout": "dropout", "batch_norm": "batch statistics"}
FURTHER = 4.0  # roundings that a further null moves the weights by, where a distance is at most so many gates
AMPLIFIED = 1e3  # roundings; a gate above it is one of a run that makes more of them
LEFT_BEHIND = 100.0  # roundings; what later micro-batches give is no other where it moves by less
COUPLED = (Cause.unexplained, Cause.stochastic_layers, Cause.non_separable_loss)  # what a layer of `CAUSE_OF` may look like
OWN_DIVISORS = (Cause.mean_of_means, Cause.normaliser_depends_on_split)


@dataclass(frozen=True)
class Judged:
    """A run beside the reference, and what is said of it."""

    compared: Sequence[Facts]
    run: Run
    said: Sequence[Finding] = ()  # what other runs have shown, in place of what the rules say
    settled: bool = False  # whether no other run would say more

    @cached_property
    def found(self) -> list[Finding]:
        """One finding per cause."""
        return list(self.said) or explained(self.compared)

    @property
    def open(self) -> bool:
        """Whether a gradient is unexplained."""
        return any(f.nameless for f in self.found)

    @property
    def of_means(self) -> bool:
        """Whether divisors of the micro-batches' own explain a gradient: so do functions of their means, which couple rows."""
        return any(f.cause in OWN_DIVISORS and f.kind == "predicted" for f in self.found)

    @property
    def averages_differ(self) -> bool:
        """Whether averaged copies of the weights are updated per micro-batch."""
        return any(f.cause is Cause.ema_per_micro_batch for f in self.found)

    @property
    def steps(self) -> list[StepFacts]:
        """Those of all optimizers."""
        return steps_of(self.compared)

    @property
    def off(self) -> list[StepFacts]:
        """The steps whose gradients differ."""
        return [step for step in self.steps if not step.gradients_agree]

    @property
    def furthest(self) -> StepFacts:
        """Of the full windows that differ the one that differs most."""
        most = max(step.backwards for step in self.off)
        full = [step for step in self.off if step.backwards == most]
        return max(full, key=lambda step: (step.raw.distance / step.gate if step.gate else math.inf, -step.step))

    @property
    def not_kept(self) -> frozenset[int]:
        """The first windows that differ without an explanation and without their contributions."""
        late = sorted({step.step for step in self.off if not step.kept})
        return frozenset(late[:KEPT]) if late and self.open else frozenset()

    @property
    def is_handed(self) -> bool:
        """Whether hooks of torch saw nothing of what is compared."""
        return all(is_handed(step.mine) for step in self.steps)

    @property
    def layers(self) -> frozenset[Layer]:
        """The layers of `CAUSE_OF` that the run has called."""
        calls: dict[Layer, int] = {"dropout": self.run.dropout_calls, "batch_norm": self.run.norm_calls}
        return frozenset(layer for layer in calls if calls[layer])

    def learning(self, learn: Callable[[int, StepFacts], Mapping[str, Any]]) -> Judged:
        """With what was learnt of the windows that differ: by the place of their optimizer."""

        def learnt(place: int, step: StepFacts) -> StepFacts:
            return step if step.gradients_agree else step.but(probe=replace(step.probe, **learn(place, step)))

        compared = [
            replace(item, steps=tuple(learnt(place, step) for step in item.steps)) for place, item in enumerate(self.compared)
        ]
        return replace(self, compared=compared)


def explained(compared: Sequence[Facts]) -> list[Finding]:
    """The findings of all optimizers, one per cause.

    Args:
        compared: What was measured of each optimizer.

    Returns:
        The findings, those of one cause merged.
    """
    found = [finding for item in compared for finding in explain(item.run, item.steps)]
    if any(f.cause is Cause.step_every_micro_batch for f in found):  # gradients of other optimizers then see other weights
        found = [f for f in found if not f.unreproduced]
    windows = {item.run.track: item.run.mine.backwards for item in compared}
    misplaced = [f for f in found if f.cause is Cause.window_misplaced]
    ends = {windows.get(f.track or ""): f.optimizer_step for f in misplaced}

    def is_in_time(f: Finding) -> bool:
        """Optimizers that step together have the same windows: what comes after a misplaced one is no fault of another."""
        end = ends.get(windows.get(f.track or ""))
        return f in misplaced or end is None or f.optimizer_step is None or f.optimizer_step < end

    return first_of_each([f for f in found if is_in_time(f)])


def _is_marginal(judged: Judged, roundoff: float) -> bool:
    """Whether gradients differ by not much more than rounding explains, where the run has amplified it: a line search does.

    One unit of rounding is then too little of a null: a sum of micro-batches rounds several times.

    Returns:
        True if a difference may be rounding all the same.
    """
    amplified = judged.off and all(step.gate > AMPLIFIED * roundoff for step in judged.off)
    return bool(amplified) and all(max(step.consumed.distance, step.raw.distance) <= FURTHER * step.gate for step in judged.off)


class ExtraRuns:
    """The further runs of one arm, until every step can be judged alone."""

    def __init__(self, runs: Runs, family: Family, n: int, *, same_at_one: bool) -> None:
        """`same_at_one`: N=1 differs from the independent reference as well."""
        self.runs, self.family, self.n, self.same_at_one = runs, family, n, same_at_one
        self._at_one = partial(runs.baseline, family.options)
        self._at_n = partial(runs.candidate, n, family.options)
        self._grounds: dict[frozenset[Layer], tuple[Run, list[Run]]] = {}
        self._draws: bool | None = None  # whether random numbers count; None before that was asked
        self._tried: set[tuple[object, ...]] = set()  # further nulls: without which layers, and of which kind

    def diagnose(self, free: Sequence[Facts]) -> tuple[Sequence[Facts], list[Finding]]:
        """Facts and findings of the arm. `free`: of its first run, which went its own way."""
        judged = self._followed() or Judged(free, self.family.candidates[self.n])
        if not judged.is_handed:
            judged = self._looked_into(judged)
        if not judged.settled:
            judged = self._without_layers(judged)
        if judged.open:
            judged = self._one_by_one(judged)
        if judged.open and judged.is_handed:
            judged = self._at_another_n(judged)
        if judged.open and judged.is_handed:
            judged = self._frozen(judged)
        if not (judged.settled or judged.is_handed):
            judged = self._placed(judged)
        if any(f.kind == "schedule" and not f.is_named for f in judged.found):
            judged = self._paced(judged)
        return judged.compared, judged.found

    def _looked_into(self, judged: Judged) -> Judged:
        """With what hooks of torch show of states, rows and cached forwards."""
        if judged.open:
            judged = self._held(judged)
        if (judged.open or judged.of_means) and not judged.layers:
            judged = self._probed(judged)
        if judged.open and not judged.averages_differ:
            judged = self._leaving(judged)
        if judged.open and not judged.averages_differ:
            judged = self._frozen(judged)
        return judged

    def _followed(self, disable: frozenset[Layer] = frozenset(), **what: Any) -> Judged | None:
        """Candidate and nulls that follow the reference's parameters step by step; None when they cannot. `what`: else to do."""
        reference, nulls = self._ground(disable)
        follow = replace(_following(reference, disable), **what)
        run = self._at_n(follow)
        if run.error is not None or reference.error is not None or not run.num_steps:
            return None

        def judged() -> Judged:
            return Judged(facts(run, reference, self.family.floor(nulls, drift=False)), run)

        try:
            found = judged()
            further = self._further(found, reference) if nulls else {}
            if further and (disable, *further) not in self._tried:
                self._tried.add((disable, *further))
                more = self._at_one(replace(_following(reference, disable), **further))
                nulls += [more] if more.error is None else []
                found = judged()
        except ShapeError:
            return None
        count = run.dropout_calls > 0 or self._draws_count(found)
        found = found.learning(lambda *_: {"same_at_one": self.same_at_one, "draws_count": count})
        later = frozenset() if "keep" in what else found.not_kept
        return (self._followed(disable, keep=later, **what) if later else None) or found

    def _draws_count(self, judged: Judged) -> bool:
        """Whether other random numbers give another gradient at N=1; true where none are drawn, or they choose the rows."""
        if self._draws is None and any(step.drawn_inside or step.drawn_between for step in judged.off):
            run = self._at_one(replace(_following(self.family.reference), redraw=1))
            tracks = zip(run.tracks, self.family.reference.tracks, strict=False)
            pairs = [(a.steps[1], b.steps[1]) for a, b in tracks if a.steps[1:] and b.steps[1:]]
            gate = max(step.gate for step in judged.off)
            same = all(compare_rows(a, b) != "different" and distance(a.gradient, b.gradient) <= gate for a, b in pairs)
            self._draws = not (pairs and same)
        return self._draws is not False

    def _ground(self, disable: frozenset[Layer]) -> tuple[Run, list[Run]]:
        """The reference without these layers, and its nulls so far, each of which follows it; they are made once."""
        if disable not in self._grounds:
            leading = Intervention(disable=disable, leads=True)
            reference = self._at_one(leading) if disable else self.family.reference
            follow = _following(reference, disable)
            null = self._at_one(replace(follow, perturb=1.0, arithmetic=reference.arithmetic))
            nulls = [null] if null.error is None else []
            for run in self.runs.permuted(self.family.options, follow) if nulls else ():
                nulls += [run] if not_rounding(run, reference, nulls, drift=False) is None else []
            self._grounds[disable] = reference, nulls
        return self._grounds[disable]

    @staticmethod
    def _further(judged: Judged, reference: Run) -> dict[str, Any]:
        """How a further null is made where the difference may still be rounding; empty where it is none."""
        if _is_marginal(judged, reference.roundoff):
            return {"perturb": FURTHER, "arithmetic": reference.arithmetic}
        small = 0 < max((step.raw.distance for step in judged.off), default=0.0) <= COARSE_GATE
        if reference.roundoff == FLOAT32 and (small or any(not f.is_named for f in judged.found)):
            return {"rounded_once": True}
        return {}

    def _held(self, judged: Judged) -> Judged:
        """With whether gradients agree only while some state moves once per window; and a second fault, which is left then."""
        carried = self._carried(judged)
        apart = [one for item in judged.compared for one in item.run.apart]
        averages = {one.path for one in apart if one.average or one.is_copied}
        moved = {one.path: None for one in apart if one.of_model or one.kept or one.path in averages}
        paths = (*dict.fromkeys([*moved, *carried]),)
        if not paths:
            return judged
        following = _following(self.family.reference)
        usual = self._at_one(replace(following, note=frozenset(paths))).held
        held = self._followed(hold=frozenset(paths), hold_as=usual)
        if held is None or _gives_the_same(judged, held):
            return judged
        agreeing = {(step.track, step.step) for step in held.steps if step.gradients_agree}
        known = {"held": paths, "is_bank": any(carried.values()), "is_average": bool(moved) and averages.issuperset(moved)}
        judged = judged.learning(lambda _, step: known | {"agrees_when_held": (step.track, step.step) in agreeing})
        if judged.averages_differ and all(step.probe.agrees_when_held for step in judged.off):  # they take part in the loss
            return replace(judged, said=[f for f in judged.found if not f.unreproduced], settled=True)
        first = next((step for step in judged.off if step.backwards > 1), None)
        if first is None or held.open or not held.off:
            return judged
        only = "weights of the micro-batches explain the difference only where"
        return replace(judged, said=first_of_each([*moved_state(first, only), *held.found]), settled=True)

    def _carried(self, judged: Judged) -> dict[str, bool]:
        """What a micro-batch of the first window that differs leaves to the next: as another value in its place shows."""
        window = min((s.step for s in judged.off if s.backwards > 1), default=None)
        if window is None:
            return {}
        looking = replace(_following(self.family.reference), starts=window)
        usual = self._at_n(looking).held
        moved = moved_inside(usual)
        shaken = self._at_n(replace(looking, shake=moved)).held if moved else Held()
        numbers = dict.fromkeys((path for path in moved if path in usual.numbers and usual.role(path) == "model"), False)
        return numbers | carried(shaken, usual)

    def _probed(self, judged: Judged, disable: frozenset[Layer] = frozenset()) -> Judged:
        """Rows and terms of the full window that differs most; and whether the reference's loss couples rows."""
        if judged.is_handed:
            return judged
        window = judged.furthest.step
        probe = Intervention(probe=window, keep=frozenset({window}), disable=disable, leads=bool(disable))
        theirs = self._at_one(probe)
        followed = theirs if disable else self.family.reference
        mine = self._at_n(replace(probe, follow=followed))
        if theirs.error is not None or mine.error is not None:
            return judged  # hooks of the trainer's own that stand no second differentiation: nothing is known
        alone = mine.ranks == 1
        of_terms = alone and len(mine.tracks) == len(theirs.tracks) == len(judged.compared)
        known = {
            "coupled": separated(mine, theirs, window),
            "of_all": of_all(theirs, window),
            "elementwise": theirs.elementwise,
            "mixed": theirs.mixes_rows,
            "by_row": rows(mine, theirs) if alone else None,
        }
        only = [next((step.only for step in item.steps if step.step == window), ()) for item in judged.compared]
        by_term = [terms((mine, theirs), place, window, own) if of_terms else None for place, own in enumerate(only)]
        return judged.learning(lambda place, _: known | {"by_term": by_term[place]})

    def _leaving(self, judged: Judged) -> Judged:
        """With whether a window's first micro-batch leaves something to the later ones."""
        window = judged.furthest.step
        kept = replace(_following(self.family.reference), keep=frozenset({window}))
        usual, other = self._at_n(kept), self._at_n(replace(kept, leaves=window))
        gate = max(judged.furthest.gate, LEFT_BEHIND * usual.roundoff)  # of tensors without a gradient at N=1 none is known
        leaves = other.error is None and usual.ranks == 1 and leaves_something(usual, other, window, gate)
        return judged.learning(lambda *_: {"leaves": leaves})

    def _one_by_one(self, judged: Judged) -> Judged:
        """With what each micro-batch gives on its own; after `hand`, with whether one leaves something behind."""
        first, n = judged.off[0], self.n
        if judged.run.ranks > 1 or judged.said:
            return judged
        usual = [max(1, len(step.theirs.backwards)) for step in judged.compared[0].steps]
        sizes = [step.backwards // k or n for step, k in zip(judged.compared[0].steps, usual, strict=True)]
        most = max(sizes) if judged.is_handed else n
        sizes = [n if size == most < n else size for size in sizes]  # those that are lost were not handed over
        ends = (0, *accumulate(sizes))
        alone = Intervention(follow=self.family.reference, each=ends[1:])

        def given(what: Intervention, last: StepFacts) -> list[Sequence[Step]]:
            run = self.runs.alone(n, ends[last.step + 1], self.family.options, what)
            return [effective(track) for track in run.tracks]

        every = given(alone, judged.off[-1])
        if len(every) != len(judged.compared):
            return judged

        def of(step: StepFacts, each: Sequence[Step]) -> dict[str, Any]:
            its = each[ends[step.step] : ends[step.step + 1]]
            own = tuple(elements_of(one.unclipped, one, step.only) for one in its)
            return {"alone": own} if all(vector.shape == step.a.shape for vector in own) else {}

        judged = judged.learning(lambda place, step: of(step, every[place]))
        if not (judged.is_handed and any(step.own_rows for step in judged.off)):
            return judged
        other = given(replace(alone, leaves=ends[first.step]), first)
        pairs = [pair for own, left in zip(every, other, strict=False) for pair in zip(own[1:], left[1:], strict=False)]
        apart = [(one.unclipped, two.unclipped) for one, two in pairs]
        leaves = any(a.shape == b.shape and distance(b, a) > first.gate for a, b in apart)
        mixed = not leaves and self._reaches_some_alone(first.gate)
        return judged.learning(lambda *_: {"leaves": leaves, "mixed": mixed})

    def _reaches_some_alone(self, gate: float) -> bool:
        """Whether rows that are alone give nothing to some tensors, those before statistics of the batch, and more to others."""
        size, reference = self.runs.batch_size, self.family.reference
        each = (size, 2 * size)  # weights after a step as well: before it a bias is 0, and a ReLU beside it shut
        run = self.runs.alone(size, each[-1], self.family.options, Intervention(follow=reference, each=each))
        if run.error is not None:
            return False
        rows, usual = effective(run.tracks[0]), effective(reference.tracks[0])[0]
        given = np.sum([norms_by(row.counts, row.unclipped) for row in rows], axis=0)
        wanted = norms_by(usual.counts, usual.unclipped)
        reached = given[wanted > gate * norm(wanted)] > gate * norm(given)
        return bool(reached.any() and not reached.all())

    def _at_another_n(self, judged: Judged) -> Judged:
        """With the gradients of another number of micro-batches: by how much a term is off goes by it."""
        size = self.runs.batch_size
        other = next((k for k in range(2, size) if size % k == 0 and k != self.n), 0)
        run = self.runs.candidate(other, self.family.options, _following(self.family.reference)) if other else None
        if run is None or len(run.tracks) != len(judged.compared) or judged.said:
            return judged
        every = [effective(track) for track in run.tracks]

        def of(step: StepFacts, each: Sequence[Step]) -> dict[str, Any]:
            one = each[step.step] if step.step < len(each) else None
            own = None if one is None else elements_of(one.unclipped, one, step.only)
            return {"at_other": (other, own)} if own is not None and own.shape == step.a.shape else {}

        return judged.learning(lambda place, step: of(step, every[place]))

    def _paced(self, judged: Judged) -> Judged:
        """With the learning rates of N=1 at as many steps as there are micro-batches."""
        steps = max(len(item.steps) for item in judged.compared) * self.n
        alone = Intervention(follow=self.family.reference, each=tuple(range(self.n, steps + 1, self.n)))
        run = self.runs.alone(self.n, steps, self.family.options, alone)
        if run.error is not None or len(run.tracks) != len(judged.compared) or judged.said:
            return judged
        pairs = zip(judged.compared, run.tracks, strict=True)
        longer = [(item, RunSeen(run, track, effective(track), item.run.reference)) for item, track in pairs]
        return replace(judged, compared=[replace(item, run=replace(item.run, longer=one)) for item, one in longer])

    def _placed(self, judged: Judged) -> Judged:
        """With the module in which a difference begins that no weights of the micro-batches explain."""
        open_to = [step for step in judged.off if step.parts.residual > step.gate and step.sums > step.gate]
        of_gradients = any(f.kind == "gradient" for f in judged.found)
        if not of_gradients or judged.run.ranks > 1 or all(step.counted for step in open_to):
            return judged
        disable = judged.layers if judged.said else frozenset[Layer]()
        step, place = judged.furthest, self._look(judged.furthest, disable, None)
        if place is None or (place.where is Where.after and step.bare_sums > step.gate):  # hooks of the loop's may do that
            return judged
        if place.where in (Where.forward, Where.backward):
            inside = self._look(step, disable, place.path)
            place = inside if inside is not None and inside.path == place.path else place  # compiled code runs otherwise there
        found = judged.learning(lambda *_: {"place": place}).found
        chosen = next((f for f in sorted(found, key=lambda f: not f.nameless) if f.kind == "gradient"), None)
        return replace(judged, said=[_with_place(f, place) if f is chosen else f for f in found])

    def _look(self, step: StepFacts, disable: frozenset[Layer], inside: str | None) -> Place | None:
        """Where the window of this step begins to differ, module by module; `inside` one, operation by operation."""
        reference, _ = self._ground(disable)
        looking = replace(_following(reference, disable), place=step.step, inside=inside)
        theirs = self._at_one(looking)
        null = self._at_one(replace(looking, perturb=1.0, arithmetic=reference.arithmetic))
        mine = self._at_n(looking)
        if any(run.error is not None for run in (theirs, null, mine)):
            return None  # a model that does not bear views of what its modules are handed, or hooks
        return place_of(mine, theirs, null, step.only)

    def _frozen(self, judged: Judged) -> Judged:
        """Gradients that agree only while the weights stand still come from a cached forward."""
        if any(item.steps and not item.steps[0].gradients_agree for item in judged.compared):
            return judged
        frozen = Intervention(freeze_weights=True)
        reference, run = self._at_one(frozen), self._at_n(frozen)
        null = self._at_one(replace(frozen, perturb=1.0, arithmetic=reference.arithmetic))
        if any(each.error is not None for each in (reference, run, null)):
            return judged
        again = facts(run, reference, self.family.floor([null], drift=False))
        clear = max(s.raw.distance for s in judged.off) > FURTHER * max(s.gate for s in steps_of(again))  # would show there
        agrees = clear and all(step.gradients_agree for step in steps_of(again))
        return judged.learning(lambda *_: {"agrees_when_frozen": agrees})

    # -- without what couples samples ----------------------------------------------------------------------------------

    def _without_layers(self, judged: Judged) -> Judged:
        """With the layers that make the difference, and what differs without them too."""
        suspects = judged.layers
        if judged.is_handed and any(_outside(step) > step.gate or _is_changed(step) for step in judged.off):
            suspects = frozenset(CAUSE_OF)  # which of them are called shows where they are taken out
        if not suspects or not any(f.cause in COUPLED for f in judged.found):
            return judged
        without = self._followed(suspects)
        if without is None:
            return judged
        suspects &= without.layers if judged.is_handed else suspects
        left = self._probed(without, suspects) if without.open else without
        alone = self._is_compared(left, suspects)
        found = []
        for suspect in sorted(suspects, key=[*CAUSE_OF].index):
            rest = suspects - {suspect}
            with_it = self._followed(rest) if rest else judged
            if with_it is None:
                continue
            pairs = [
                (a, b)
                for x, y in zip(with_it.compared, without.compared, strict=True)
                for a, b in zip(x.steps, y.steps, strict=False)
                if not a.gradients_agree
            ]
            closed = [(a, b) for a, b in pairs if _closed(a, b)]
            if closed or (pairs and not left.open and self._rows_differ(with_it, rest)):
                found.append(replace(_coupling(suspect, *(closed or pairs)[0]), alone=alone))
        return replace(judged, said=[*found, *left.found]) if found else judged

    def _is_compared(self, without: Judged, disable: frozenset[Layer]) -> bool:
        """Whether all was compared without these layers, and agreed but for the buffers that they move."""
        moved = {CAUSE_OF[layer] for layer in disable}
        found = [*without.found, *left_out(without.compared)]
        if any(f.kind != "statistics" or f.cause not in moved for f in found):
            return False
        reference, _ = self._ground(disable)
        one = self.family.candidates.get(1, reference)
        return nothing_compared(without.run, reference, one, without.compared) is None

    def _rows_differ(self, judged: Judged, disable: frozenset[Layer]) -> bool:
        """Whether the model gives other outputs for the same rows at equal parameters."""
        by_row = (step.probe.by_row for step in self._probed(judged, disable).steps)
        return any(rows is not None and rows.outputs > SAME_ROW for rows in by_row)


def _with_place(finding: Finding, place: Place) -> Finding:
    evidence = {**finding.evidence, "place": str(place), "module": place.path}
    return replace(finding, message=f"{finding.message}; the first difference is {place}", evidence=evidence)


def _following(reference: Run, disable: frozenset[Layer] = frozenset()) -> Intervention:
    """A run that goes on from the reference's weights after every step."""
    return Intervention(follow=reference, disable=disable)


def _closed(a: StepFacts, b: StepFacts) -> bool:
    """Whether the difference that no weights mend is there in `a`, and (almost) none of it in `b`."""
    if not 0 < norm(b.g) < math.inf:  # nothing is left, or it is no number
        return False
    if _is_changed(a):
        return b.gradients_agree
    return _outside(a) > a.gate and _outside(b) <= max(b.gate, ALMOST * _outside(a))


def _is_changed(step: StepFacts) -> bool:
    """Whether what was handed over adds up to the right gradient, and the one that the optimizer takes is no multiple of it."""
    return is_handed(step.mine) and step.sums <= step.gate < min(step.sum_line, step.own_sum) < math.inf


def _gives_the_same(usual: Judged, held: Judged) -> bool:
    """Whether the backwards of every window that differs give the same: what was held is of their sum, and of no forward."""
    now = {(step.track, step.step): step.mine.total for step in held.steps}
    pairs = [(step, now.get((step.track, step.step))) for step in usual.off]
    return all(
        total is not None and step.mine.total is not None and distance(total, step.mine.total) <= step.gate
        for step, total in pairs
    )


def _outside(step: StepFacts) -> float:
    """Distance that weights of the micro-batches cannot mend; 0 for equal gradients."""
    if step.gradients_agree:
        return 0.0
    return step.parts.residual if math.isfinite(step.parts.residual) else step.raw.distance


def _coupling(suspect: Layer, with_it: StepFacts, without: StepFacts) -> Finding:
    drawn = suspect == "dropout" and is_handed(with_it.mine)
    what, left = "one number for every random draw" if drawn else f"{NAME_OF[suspect]} off", without.raw.distance
    message = f"the gradients differ by {with_it.raw.distance:.2g}; with {what} by {left:.2g}"
    return at(with_it, CAUSE_OF[suspect], "layers", message, distance_without=left, without=what)
