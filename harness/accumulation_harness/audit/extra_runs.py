"""Further runs of an arm that differs: at the reference's own weights, probed, frozen, and without what couples samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accumulation_harness.audit.compare.comparison import ShapeError, facts
from accumulation_harness.audit.compare.facts import Probe
from accumulation_harness.audit.compare.floors import COARSE_GATE
from accumulation_harness.audit.compare.held import carried, moved_inside
from accumulation_harness.audit.compare.place import Place, Where, place_of
from accumulation_harness.audit.compare.probes import rows, separated, terms
from accumulation_harness.audit.compare.run import Facts
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.compare.vacuity import not_rounding, nothing_compared
from accumulation_harness.audit.compare.windows import compare_rows
from accumulation_harness.audit.evidence import FLOAT32, Finding, Held, Intervention, Layer, Run
from accumulation_harness.audit.family import Family, Runs
from accumulation_harness.audit.observe.live import KEPT
from accumulation_harness.audit.rules.computation import ALMOST, moved_state
from accumulation_harness.audit.rules.finding import SAME_ROW, at, weights_of_rows
from accumulation_harness.audit.rules.findings import explain, first_of_each, left_out
from accumulation_harness.compare.linear import distance
from accumulation_harness.judge.cause import Cause

CAUSE_OF: dict[Layer, Cause] = {Layer.dropout: Cause.stochastic_layers, Layer.batch_norm: Cause.batch_statistics}
NAME_OF: dict[Layer, str] = {Layer.dropout: "dropout", Layer.batch_norm: "batch statistics"}
FURTHER = 4.0  # roundings that a further null moves the weights by, where a distance is at most so many gates
AMPLIFIED = 1e3  # roundings; a gate above it is one of a run that makes more of them
COUPLED = (Cause.unexplained, Cause.stochastic_layers, Cause.non_separable_loss)  # what a layer of `CAUSE_OF` may look like


@dataclass(frozen=True)
class Judged:
    """A run beside the reference, and what the rules say of it."""

    compared: Sequence[Facts]
    run: Run

    @property
    def found(self) -> list[Finding]:
        """One finding per cause."""
        return explained(self.compared)

    @property
    def open(self) -> bool:
        """Whether a gradient is unexplained."""
        return any(f.nameless for f in self.found)

    @property
    def averages_differ(self) -> bool:
        """Whether averaged copies of the weights are updated per micro-batch."""
        return any(f.cause is Cause.ema_per_micro_batch for f in self.found)

    @property
    def agrees_when_held(self) -> bool:
        """Whether no gradient differs while tensors that moved otherwise move once per window."""
        return all(s.gradients_agree or s.probe.agrees_when_held for item in self.compared for s in item.steps)

    def learning(self, learn: Callable[[Probe], Probe]) -> Judged:
        """With what was learnt of the windows that differ."""
        learnt = [replace(item, steps=tuple(_learning(step, learn) for step in item.steps)) for item in self.compared]
        return replace(self, compared=learnt)


def _learning(step: StepFacts, learn: Callable[[Probe], Probe]) -> StepFacts:
    return step if step.gradients_agree else step.but(probe=learn(step.probe))


def explained(compared: Sequence[Facts]) -> list[Finding]:
    """The findings of all optimizers, one per cause."""
    found = [finding for item in compared for finding in explain(item.run, item.steps)]
    if any(f.cause is Cause.step_every_micro_batch for f in found):  # gradients of other optimizers then see other weights
        found = [f for f in found if not f.unreproduced]
    return first_of_each(found)


def _is_marginal(compared: Sequence[Facts], roundoff: float) -> bool:
    """Whether gradients differ by not much more than rounding explains, where the run has amplified it: a line search does.

    One unit of rounding is then too little of a null: a sum of micro-batches rounds several times.
    """
    off = _off(compared)
    distances = [max(step.consumed.distance, step.raw.distance) / step.gate for step in off if step.gate > AMPLIFIED * roundoff]
    return bool(off) and len(distances) == len(off) and max(distances) <= FURTHER


class ExtraRuns:
    """The further runs of one arm, until every step can be judged alone."""

    def __init__(self, runs: Runs, family: Family, n: int, *, same_at_one: bool) -> None:
        """`same_at_one`: N=1 differs from the independent reference as well."""
        self.runs, self.family, self.n, self.same_at_one = runs, family, n, same_at_one
        self._grounds: dict[frozenset[Layer], tuple[Run, list[Run]]] = {}
        self._draws: bool | None = None  # whether random numbers count; None before that was asked
        self._tried: set[tuple[object, ...]] = set()  # further nulls: without which layers, and of which kind

    def diagnose(self, free: Sequence[Facts]) -> tuple[Sequence[Facts], list[Finding]]:
        """Facts and findings of the arm. `free`: of its first run, which went its own way."""
        judged = self._followed() or Judged(free, self.family.candidates[self.n])
        if later := _not_kept(judged):
            judged = self._followed(keep=later) or judged
        if judged.open:
            judged, second = self._held(judged)
            if judged.averages_differ and judged.agrees_when_held:  # the averages take part in the loss
                return judged.compared, [f for f in judged.found if not f.unreproduced]
            if second:
                return judged.compared, second
        if judged.open and not (judged.run.dropout_calls or judged.run.norm_calls):
            judged = self._probed(judged)
        if judged.open and not judged.averages_differ:
            judged = self._frozen(judged)
        layered = self._without_layers(judged)
        found = layered or judged.found
        if not any(f.kind == "gradient" for f in found):
            return judged.compared, found
        place = self._place(judged, _layers_of(judged.run) if layered else frozenset())
        if place is not None:
            found = layered or judged.learning(lambda probe: replace(probe, place=place)).found
            chosen = next((f for f in sorted(found, key=lambda f: not f.nameless) if f.kind == "gradient"), None)
            found = [_with_place(f, place) if f is chosen else f for f in found]
        return judged.compared, found

    def _followed(
        self,
        *,
        disable: frozenset[Layer] = frozenset(),
        keep: frozenset[int] = frozenset(),
        hold: tuple[frozenset[str], Held | None] = (frozenset(), None),
    ) -> Judged | None:
        """Candidate and nulls that follow the reference's parameters step by step; None when they cannot."""
        reference, nulls = self._ground(disable)
        follow = replace(_following(reference, disable), keep=keep, hold=hold[0], hold_as=hold[1])
        run = self.runs.candidate(self.n, self.family.options, follow)
        if run.error is not None or reference.error is not None or not run.num_steps:
            return None
        try:
            compared = facts(run, reference, self.family.floor(nulls, drift=False))
            further = self._further(compared, reference) if nulls else {}
            if further and (disable, *further) not in self._tried:
                self._tried.add((disable, *further))
                more = self.runs.baseline(self.family.options, replace(_following(reference, disable), **further))
                nulls += [more] if more.error is None else []
                compared = facts(run, reference, self.family.floor(nulls, drift=False))
        except ShapeError:
            return None
        count = self._draws_count(compared) if not run.dropout_calls else True
        return Judged(compared, run).learning(lambda probe: replace(probe, same_at_one=self.same_at_one, draws_count=count))

    def _draws_count(self, compared: Sequence[Facts]) -> bool:
        """Whether other random numbers give another gradient at N=1; true where none are drawn, or they choose the rows."""
        off = _off(compared)
        if self._draws is None and any(step.drawn_inside or step.drawn_between for step in off):
            run = self.runs.baseline(self.family.options, replace(_following(self.family.reference, frozenset()), redraw=1))
            tracks = zip(run.tracks, self.family.reference.tracks, strict=False)
            pairs = [(a.steps[1], b.steps[1]) for a, b in tracks if a.steps[1:] and b.steps[1:]]
            gate = max((step.gate for step in off), default=0.0)
            same = all(compare_rows(a, b) != "different" and distance(a.gradient, b.gradient) <= gate for a, b in pairs)
            self._draws = not (pairs and same)
        return self._draws is not False

    def _ground(self, disable: frozenset[Layer]) -> tuple[Run, list[Run]]:
        """The reference without these layers, and its nulls so far, each of which follows it; they are made once."""
        if disable not in self._grounds:
            options = self.family.options
            leading = Intervention(disable=disable, leads=True)
            reference = self.runs.baseline(options, leading) if disable else self.family.reference
            follow = _following(reference, disable)
            null = self.runs.baseline(options, replace(follow, perturb=1.0, arithmetic=reference.arithmetic))
            nulls = [null] if null.error is None else []
            nulls += [run for run in self.runs.permuted(options, follow) if self._is_null(run, reference, nulls)]
            self._grounds[disable] = reference, nulls
        return self._grounds[disable]

    @staticmethod
    def _further(compared: Sequence[Facts], reference: Run) -> dict[str, Any]:
        """How a further null is made where the difference may still be rounding; empty where it is none."""
        if _is_marginal(compared, reference.roundoff):
            return {"perturb": FURTHER, "arithmetic": reference.arithmetic}
        off = [step.raw.distance for item in compared for step in item.steps if not step.gradients_agree]
        small = 0 < max(off, default=0.0) <= COARSE_GATE
        if reference.roundoff == FLOAT32 and (small or any(f.cause is Cause.unexplained for f in explained(compared))):
            return {"rounded_once": True}
        return {}

    def _is_null(self, permuted: Run, reference: Run, nulls: Sequence[Run]) -> bool:
        return bool(nulls) and permuted.error is None and not_rounding(permuted, reference, nulls, drift=False) is None

    def _held(self, judged: Judged) -> tuple[Judged, list[Finding]]:
        """With whether gradients agree only while some state moves once per window; and a second fault, which is left then."""
        carried = self._carried(judged)
        moved = (one for item in judged.compared for one in item.run.apart if one.of_model or one.average or one.kept)
        paths = dict.fromkeys([*(one.path for one in moved), *carried])
        if not paths:
            return judged, []
        following, options = _following(self.family.reference, frozenset()), self.family.options
        hold = frozenset(paths), self.runs.baseline(options, replace(following, note=frozenset(paths))).held
        held = self._followed(hold=hold)
        if held is None:
            return judged, []
        if later := _not_kept(held):
            held = self._followed(hold=hold, keep=later) or held
        agreeing = {(step.track, step.step) for item in held.compared for step in item.steps if step.gradients_agree}

        def learnt(step: StepFacts) -> StepFacts:
            agrees = (step.track, step.step) in agreeing
            probe = replace(step.probe, held=tuple(paths), is_bank=any(carried.values()), agrees_when_held=agrees)
            return step.but(probe=probe)

        learned = replace(judged, compared=[replace(item, steps=tuple(map(learnt, item.steps))) for item in judged.compared])
        first = next((step for step in _off(learned.compared) if step.backwards > 1), None)
        if first is None or held.open or not _off(held.compared):
            return learned, []
        only = "weights of the micro-batches explain the difference only where"
        return learned, first_of_each([*moved_state(first, only), *held.found])

    def _carried(self, judged: Judged) -> dict[str, bool]:
        """What a micro-batch of the first window that differs leaves to the next: as another value in its place shows."""
        window = min((s.step for s in _off(judged.compared) if s.backwards > 1), default=None)
        if window is None:
            return {}
        looking = replace(_following(self.family.reference, frozenset()), starts=window)
        usual = self.runs.candidate(self.n, self.family.options, looking).held
        moved = moved_inside(usual)
        shaken = self.runs.candidate(self.n, self.family.options, replace(looking, shake=moved)).held if moved else Held()
        numbers = dict.fromkeys((path for path in moved if path in usual.numbers and usual.role(path) == "model"), False)
        return numbers | carried(shaken, usual)

    def _probed(self, judged: Judged, disable: frozenset[Layer] = frozenset()) -> Judged:
        """Rows and terms of the full window that differs most; and whether the reference's loss couples rows."""
        window = _furthest(judged).step
        probe = Intervention(probe=window, keep=frozenset({window}), disable=disable, leads=bool(disable))
        theirs = self.runs.baseline(self.family.options, probe)
        followed = theirs if disable else self.family.reference
        mine = self.runs.candidate(self.n, self.family.options, replace(probe, follow=followed))
        if theirs.error is not None or mine.error is not None:
            return judged  # hooks of the trainer's own that stand no second differentiation: nothing is known
        coupled, alone = separated(mine, theirs, window), mine.ranks == 1
        by_row = rows(mine, theirs) if alone else None
        learnt = judged.learning(
            lambda probe: replace(
                probe,
                made=True,
                coupled=coupled,
                elementwise=theirs.elementwise,
                mixed=theirs.mixes_rows,
                by_row=by_row,
            )
        )
        if not (alone and len(mine.tracks) == len(theirs.tracks) == len(judged.compared)):
            return learnt
        by_term = [terms((mine, theirs), place, window) for place in range(len(mine.tracks))]
        apart = [
            replace(item, steps=tuple(step.but(probe=replace(step.probe, by_term=of_one)) for step in item.steps))
            for item, of_one in zip(learnt.compared, by_term, strict=True)
        ]
        return replace(learnt, compared=apart)

    def _place(self, judged: Judged, disable: frozenset[Layer]) -> Place | None:
        """The module in which a difference begins that no weights of the micro-batches explain; None where there is none."""
        open_to = [step for step in _off(judged.compared) if step.parts.residual > step.gate and step.sums > step.gate]
        if judged.run.ranks > 1 or not any(not weights_of_rows(step) for step in open_to):
            return None
        place = self._look(_furthest(judged), disable, None)
        if place is not None and place.where in (Where.forward, Where.backward):
            return self._look(_furthest(judged), disable, place.path) or place
        return place

    def _look(self, step: StepFacts, disable: frozenset[Layer], inside: str | None) -> Place | None:
        """Where the window of this step begins to differ, module by module; `inside` one, operation by operation."""
        reference, _ = self._ground(disable)
        looking = replace(_following(reference, disable), place=step.step, inside=inside)
        theirs = self.runs.baseline(self.family.options, looking)
        null = self.runs.baseline(self.family.options, replace(looking, perturb=1.0, arithmetic=reference.arithmetic))
        mine = self.runs.candidate(self.n, self.family.options, looking)
        if any(run.error is not None for run in (theirs, null, mine)):
            return None  # a model that does not bear views of what its modules are handed, or hooks
        return place_of(mine, theirs, null, step.only)

    def _frozen(self, judged: Judged) -> Judged:
        """Gradients that agree only while the weights stand still come from a cached forward."""
        if any(item.steps and not item.steps[0].gradients_agree for item in judged.compared):
            return judged
        options, frozen = self.family.options, Intervention(freeze_weights=True)
        reference, run = self.runs.baseline(options, frozen), self.runs.candidate(self.n, options, frozen)
        null = self.runs.baseline(options, replace(frozen, perturb=1.0, arithmetic=reference.arithmetic))
        if any(each.error is not None for each in (reference, run, null)):
            return judged
        again = facts(run, reference, self.family.floor([null], drift=False))
        agrees = all(step.gradients_agree for item in again for step in item.steps)
        return judged.learning(lambda probe: replace(probe, agrees_when_frozen=agrees))

    # -- without what couples samples ----------------------------------------------------------------------------------

    def _without_layers(self, judged: Judged) -> list[Finding]:
        """The layers that make the difference, and what differs without them too; empty where they make none."""
        suspects = _layers_of(judged.run)
        if not suspects or not any(f.cause in COUPLED for f in judged.found):
            return []
        without = self._followed(disable=suspects)
        if without is None:
            return []
        if later := _not_kept(without):
            without = self._followed(disable=suspects, keep=later) or without
        left = self._probed(without, suspects) if without.open else without
        alone = self._is_compared(left, suspects)
        causes = []
        for suspect in CAUSE_OF:
            rest = suspects - {suspect}
            with_it = (self._followed(disable=rest) if rest else judged) if suspect in suspects else None
            if with_it is None:
                continue
            if _differs_more(with_it, without) or (not left.open and self._rows_differ(with_it, rest)):
                causes.append(replace(_coupling(suspect, with_it, without), alone=alone))
        return causes + left.found if causes else []

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
        if all(step.gradients_agree for item in judged.compared for step in item.steps):
            return False
        probed = self._probed(judged, disable)
        return any(
            s.probe.by_row is not None and s.probe.by_row.outputs > SAME_ROW for item in probed.compared for s in item.steps
        )


def _with_place(finding: Finding, place: Place) -> Finding:
    evidence = {**finding.evidence, "place": str(place)}
    return replace(finding, message=f"{finding.message}; the first difference is {place}", evidence=evidence)


def _layers_of(run: Run) -> frozenset[Layer]:
    """The layers of `CAUSE_OF` that it has called."""
    seen = ((Layer.dropout, run.dropout_calls), (Layer.batch_norm, run.norm_calls))
    return frozenset(layer for layer, calls in seen if calls)


def _furthest(judged: Judged) -> StepFacts:
    """Of the full windows that differ the one that differs most."""
    off = _off(judged.compared)
    most = max(step.backwards for step in off)
    full = [step for step in off if step.backwards == most]
    return max(full, key=lambda step: (step.raw.distance / step.gate if step.gate else math.inf, -step.step))


def _following(reference: Run, disable: frozenset[Layer]) -> Intervention:
    """A run that goes on from the reference's weights after every step."""
    return Intervention(follow=reference, disable=disable)


def _not_kept(judged: Judged) -> frozenset[int]:
    """The first windows that differ without an explanation and without their contributions."""
    steps = [s for item in judged.compared for s in item.steps]
    late = sorted({s.step for s in steps if not s.gradients_agree and not s.kept})
    return frozenset(late[:KEPT]) if judged.open else frozenset()


def _off(compared: Sequence[Facts]) -> list[StepFacts]:
    """The steps whose gradients differ."""
    return [step for item in compared for step in item.steps if not step.gradients_agree]


def _pairs(a: Judged, b: Judged) -> Iterator[tuple[StepFacts, StepFacts]]:
    """The same steps of two runs."""
    for x, y in zip(a.compared, b.compared, strict=True):
        yield from zip(x.steps, y.steps, strict=False)


def _differs_more(with_it: Judged, without: Judged) -> bool:
    """Whether the micro-batches' own computations differ, at some step, and do not when the suspect is taken away."""
    return any(_closed(a, b) for a, b in _pairs(with_it, without))


def _closed(a: StepFacts, b: StepFacts) -> bool:
    """Whether the difference that no weights mend is there in `a`, and (almost) none of it in `b`."""
    return _outside(a) > a.gate and _outside(b) <= max(b.gate, ALMOST * _outside(a))


def _outside(step: StepFacts) -> float:
    """Distance that weights of the micro-batches cannot mend; 0 for equal gradients."""
    if step.gradients_agree:
        return 0.0
    return step.parts.residual if math.isfinite(step.parts.residual) else step.raw.distance


def _coupling(suspect: Layer, with_it: Judged, without: Judged) -> Finding:
    differing = [(a, b) for a, b in _pairs(with_it, without) if not a.gradients_agree]
    a, b = next(((a, b) for a, b in differing if _closed(a, b)), differing[0])
    what = f"{NAME_OF[suspect]} off"
    message = f"the gradients differ by {a.raw.distance:.2g}; with {what} by {b.raw.distance:.2g}"
    return at(a, CAUSE_OF[suspect], "layers", message, distance_without=b.raw.distance, without=what)
