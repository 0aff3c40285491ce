"""All that the plain numbers of one optimizer's run say: its windows, its steps one by one, then what gradients cannot show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from accumulation_harness.audit.compare.floors import is_handed, stands_in
from accumulation_harness.audit.compare.held import Apart, numbers
from accumulation_harness.audit.compare.replayed import fed
from accumulation_harness.audit.compare.run import Facts, RunFacts, RunSeen, steps_of
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.compare.windows import slices
from accumulation_harness.audit.evidence import Finding
from accumulation_harness.audit.rules.computation import ALONG_WEIGHTS
from accumulation_harness.audit.rules.finding import UNEQUAL, equal, known_weights, listed
from accumulation_harness.audit.rules.gradient_rules import BY_CHANCE, ONE_NORM, explain_step
from accumulation_harness.audit.rules.weights import growth
from accumulation_harness.audit.rules.whole_run import (
    buffers,
    counters,
    counts,
    ended,
    held,
    reported,
    schedule,
    structure,
)
from accumulation_harness.compare.linear import CERTAIN, cosine, norm
from accumulation_harness.judge.cause import Cause

OF_THE_WHOLE = (Cause.counter_wrong, Cause.loss_not_divided, Cause.loss_divided_twice)  # factors of all gradients of a run
FED = {
    "each": (Cause.optimizer_state_per_micro_batch, "and updates as of an optimizer that is given each micro-batch's gradient"),
    "again": (Cause.step_every_micro_batch, "and updates as of an optimizer that takes several steps on the window's gradient"),
}
GOES_ON, SAME_WAY = 0.5, 0.9999  # cosines
FEWEST_WINDOWS = 3  # in which micro-batches reach the same tensors by their place, and not by chance
ENOUGH = 8  # wrong windows that were looked at closely: the first ones, and as many that an extra run was asked to keep


def explain(run: RunFacts, steps: Sequence[StepFacts]) -> list[Finding]:
    """Explain one optimizer of one candidate, in the order of the steps.

    Args:
        run: What was measured of one optimizer over the run.
        steps: What was measured of each aligned pair of steps.

    Returns:
        The findings.
    """
    found = structure(run, steps)
    rated = schedule(run) if _shows_rates(steps) and not (run.rates_fixed and all(facts.agrees for facts in steps)) else []
    changed = min(run.rates_apart.values(), default=math.inf) if rated else math.inf  # a number of the optimizer's is another
    limit = min((f.optimizer_step for f in found if f.optimizer_step is not None), default=math.inf)
    broken_off = bool(found)
    pure = True  # nothing before this step made the state another
    differed = False
    for facts in steps:
        if facts.step >= limit and broken_off:
            break
        if differed and is_handed(facts.mine) and not np.array_equal(facts.mine.before, facts.theirs.before):
            break  # the loop does not go on with the weights that it is given
        said = explain_step(facts, judge_update=pure and facts.step < changed)
        pure = pure and facts.gradients_agree
        if broken_off and facts.rows == "unknown":  # a misplaced window explains it as well
            said = [one for one in said if one.is_named]
        found += said
        differed = differed or not facts.agrees
        nothing_seen = not facts.backwards and not facts.theirs.backwards
        if not facts.agrees and nothing_seen and (stands_in(facts.mine) or not is_handed(facts.mine)):
            break  # its state may be another from here on
    if broken_off:  # rates of before are no consequence
        found += [f for f in rated if f.is_named and (f.optimizer_step or 0) < limit]
    else:
        found += rated + counters(run)
        goes_elsewhere = any(is_handed(facts.mine) and not facts.agrees for facts in steps)
        if not goes_elsewhere:  # with weights of its own all that a loop keeps differs
            found += held(run, unread=all(facts.gradients_agree for facts in steps))
        found += ended(run)
        found = found or buffers(run)
        clean = not found and all(facts.agrees for facts in steps)
        found += reported(run) + counts(run) if clean else []
    return first_of_each(_Together(run, steps, found).read())


def _shows_rates(steps: Sequence[StepFacts]) -> bool:
    """Whether learning rates are known: those of arrays handed over are found where gradients are the same, and decay is."""
    handed = [facts for facts in steps if is_handed(facts.mine)]
    return all(facts.gradients_agree and not facts.update.along_weights <= ALONG_WEIGHTS for facts in handed)


def _giving(facts: StepFacts) -> tuple[int, ...]:
    """The places, from the window's end, of the micro-batches that give something."""
    parts = [b.contribution for b in facts.mine.backwards]
    return tuple(k - len(parts) for k, part in enumerate(parts) if part is not None and part.any())


class _Together:
    """The findings of one optimizer, each read again beside the others: a window may show what another one does not."""

    def __init__(self, run: RunFacts, steps: Sequence[StepFacts], found: list[Finding]) -> None:
        self.run, self.steps, self.found = run, steps, found
        self.off = [facts for facts in steps if not facts.gradients_agree]

    def read(self) -> list[Finding]:
        """All readings, one after the other."""
        self._by_own_state()
        self._seen_closely()
        self._lost_again()
        self._cut_off()
        self._made_of_kept()
        self._told_apart()
        self._clipped_again()
        self._multiples()
        self._own_divisors()
        return self.found

    @property
    def nameless(self) -> list[Finding]:
        """Those of gradients that no cause explains."""
        return [f for f in self.found if f.nameless]

    def _call(self, chosen: Sequence[Finding], cause: Cause, more: str = "", **changed: Any) -> None:
        """Those that are chosen have this cause; `more` is said in addition."""
        self.found = [
            replace(f, **{"cause": cause, "message": f.message + more, **changed}) if f in chosen else f for f in self.found
        ]

    def _say_also(self, known: Finding | None, others: Sequence[Finding]) -> None:
        """A known one was made at the steps of these others as well."""
        if known is not None:
            self.found = [replace(known, optimizer_step=f.optimizer_step) if f in others else f for f in self.found]

    def _leave_out(self, chosen: Callable[[Finding], bool]) -> None:
        self.found = [f for f in self.found if not chosen(f)]

    def _lost_again(self) -> None:
        """Where micro-batches were lost in a window, those that give nothing at its places in another one are lost as well."""
        giving: dict[int | None, tuple[int, ...]] = {
            facts.step: _giving(facts) for facts in self.off if facts.kept and 0 < facts.without_terms < facts.backwards
        }
        lost = {
            giving[f.optimizer_step] for f in self.found if f.cause is Cause.micro_batches_lost and f.optimizer_step in giving
        }
        again = [f for f in self.nameless if f.optimizer_step in giving and giving[f.optimizer_step] in lost]
        self._call(again, Cause.micro_batches_lost)

    def _cut_off(self) -> None:
        """Tensors that get nothing from micro-batches at the same places of every window, while others get all that they should.

        What they should be given there is not known. Rows that reach some tensors by chance do not do so by their place.
        """
        off = [facts for facts in self.off if facts.kept and facts.backwards > 1]
        alike = len(off) >= FEWEST_WINDOWS and len({*map(_giving, off)}) == 1
        if alike and all(f.only and 0 < f.without_terms < f.backwards for f in off):
            names, places = ", ".join(off[0].only[:4]), listed(tuple(k + off[0].backwards + 1.0 for k in _giving(off[0])))
            message = f"{names} get gradients from micro-batches {places} of the window alone, and the others from all"
            self._call(self.nameless, Cause.micro_batches_lost, message=message)

    def _by_own_state(self) -> None:
        """Arrays handed over, equal gradients, another update: what rules say of it, or what variables keep beside weights."""
        run, others = self.run, [f for f in self.found if not f.is_named and f.kind == "update"]
        if not others or not run.mine.is_handed:
            return
        if way := fed(run.mine.effective, run.reference.ways, run.accumulation_steps):
            cause, message = FED[way]
            self._call(others, cause, message=f"equal gradients, {message}")
            return
        along = [facts.goes for facts in self.steps if facts.step in {f.optimizer_step for f in others} and facts.goes]
        if along and len(along) == len(others) and all(map(run.goes_by_n, along)):
            self._call(others, Cause.schedule_per_micro_batch)
            return
        kept = [one.path for one in run.apart if _is_kept(one, run.reference)]
        names = ", ".join(f"`{path}`" for path in kept[:4])
        self._call(others if kept else [], Cause.optimizer_state_per_micro_batch, f", and other states: {names}")

    def _made_of_kept(self) -> None:
        """Sums are right, and the step takes what the loop makes of them and of tensors that it keeps: moments, factors."""
        summed = {facts.step for facts in self.steps if min(facts.scaled_sum, facts.sums) <= facts.gate < facts.own_sum}
        kept = [one for one in self.run.apart if one.of_loop] if self.run.enters else []
        names = ", ".join(f"`{one.path}`" for one in kept[:4])
        what = f": the step uses tensors that the loop keeps ({names}), and that move per micro-batch"
        made = [f for f in self.nameless if kept and f.optimizer_step in summed]
        self._call(made, Cause.optimizer_state_per_micro_batch, what)

    def _seen_closely(self) -> None:
        """Without what is unexplained where contributions were not kept, if a cause explains ENOUGH steps at which they were.

        And without what is said of some tensors there, where it is known of them that no backward reaches others as well.
        """
        if any(facts.by_itself for facts in self.steps):
            shared = {facts.step for facts in self.steps if facts.only and not facts.by_itself}
            self._leave_out(lambda f: f.optimizer_step in shared and f.kind == "predicted")
        kept = {facts.step for facts in self.off if facts.kept}
        nameless = [f for f in self.found if not f.is_named and f.optimizer_step is not None]
        if len(kept) >= ENOUGH and len(nameless) < len(self.found) and not any(f.optimizer_step in kept for f in nameless):
            self._leave_out(lambda f: f in nameless)

    def _told_apart(self) -> None:
        """Short windows are ambiguous: K/N is 1/N where K is 1; a growing scale looks like unequal terms where K is 2 or 3."""
        whole = [t for t, count in enumerate(self.run.mine.backwards) if count == self.run.accumulation_steps]
        if any(f.cause is Cause.loss_divided_twice and f.optimizer_step in whole for f in self.found):
            single = [facts.step for facts in self.steps if facts.backwards == 1]
            self._leave_out(lambda f: f.cause is Cause.short_window_divided_by_n and f.optimizer_step in single)
        weights: dict[int | None, tuple[float, ...]] = {facts.step: facts.parts.weights for facts in self.steps}
        growths = [growth(weights[f.optimizer_step]) for f in self.found if _predicted(f, Cause.scaler_updated_in_window)]
        if any(
            _predicted(f, Cause.loss_not_divided) and "factor" in f.evidence for f in self.found
        ):  # the whole, and so its terms
            self._leave_out(lambda f: _predicted(f, Cause.auxiliary_loss_scale) and "term" in f.evidence)
        self._leave_out(
            lambda f: (
                (_predicted(f, Cause.mean_of_means) or f.nameless)
                and any(_grows(weights[f.optimizer_step], factor) for factor in growths)
            )
        )

    def _clipped_again(self) -> None:
        """What makes gradients smaller as clipping does in other windows is that, where it happens once or by one factor."""
        shrunk = {facts.step for facts in self.steps if facts.shrunk}
        clipped = next((f for f in self.found if _predicted(f, Cause.clip_per_micro_batch)), None)
        self._say_also(clipped, [f for f in self.nameless if f.optimizer_step in shrunk])

    def _multiples(self) -> None:
        """A wrong count makes all gradients multiples of the right one: some are ratios of small numbers, all are on its line."""
        on_line, nameless = {facts.step for facts in self.steps if facts.line <= facts.gate}, self.nameless
        off = [facts for facts in self.steps if facts.step in {f.optimizer_step for f in nameless}]
        if unlike := [f for f in nameless if f.optimizer_step not in on_line]:
            multiples = [f for f in self.found if f.optimizer_step in on_line and any(_predicted(f, c) for c in OF_THE_WHOLE)]
            known = {f.cause for f in multiples} if len(multiples) <= len(unlike) else {Cause.counter_wrong}
            self._leave_out(lambda f: f.kind == "predicted" and f.cause in known)
            return
        counted = [f for f in self.found if _predicted(f, Cause.counter_wrong)]
        if counted and (factors := _rescaled_otherwise(self.steps)):
            message = f"what the backwards give is taken times {factors}, step by step: it is not a count that is wrong"
            self._call(counted, Cause.unexplained, message=message, kind="gradient")
        elif nameless and (more := _held_divisor(self.run, off) or _more_terms(off)):
            self._call(nameless, Cause.counter_wrong, message=more, kind="predicted")
        elif counted:
            self._leave_out(lambda f: f in nameless)
        elif (size := _one_norm(off)) and not _one_norm([facts.but(a=facts.g) for facts in off]):
            message = f"every gradient that differs was clipped to a norm of {size:.4g}: how much too large it was does not show"
            self._call(nameless, Cause.unexplained, message=message)

    def _own_divisors(self) -> None:
        """Micro-batches divided by numbers of their own that no count of terms gives: they come and go with the rows.

        Weights that are the same in every window go by the place in it, and weights that only rise (or fall) in each go by the
        time.
        """
        off, nameless = [f for f in self.off if f.sum_line <= f.gate < f.line], self.nameless
        known = {f.step: f.parts.weights for f in off if known_weights(f, f.parts)}
        if not nameless or any(f.optimizer_step not in known for f in nameless):
            return
        windows = [known[f.optimizer_step] for f in nameless if f.optimizer_step is not None]
        means = next((f for f in self.found if _predicted(f, Cause.mean_of_means)), None)
        if means is not None and all(map(_clamped, windows)):  # the same divisors, where some number of terms is below the least
            self._say_also(means, nameless)
            return
        by_place = any(_proportional(a, b) for a, b in pairwise(windows))
        by_time = any(all(list(w) == sorted(w, reverse=falls) for w in windows) for falls in (True, False))
        if len(windows) < 2 or by_place or by_time:
            return
        first, others = nameless[0], nameless[1:]
        message = (
            "every micro-batch is divided by a number of its own, which is not its number of loss terms (a padded length, say); "
            f"right weights: {listed(windows[0])}"
        )
        steps_seen = tuple(f.optimizer_step for f in nameless if f.optimizer_step is not None)
        self._leave_out(lambda f: f in others)
        self._call([first], Cause.normaliser_depends_on_split, message=message, kind="predicted", steps=steps_seen)


def _is_kept(one: Apart, usual: RunSeen) -> bool:
    """Whether it is a tensor that goes on from what it was, and no gradient, update or weights of the step before."""
    last = min(len(usual.run.held.states) - 1, usual.steps)
    before, now = (usual.run.held.at(window, one.path) for window in (last - 1, last))
    if one.number is not None or one.share or before is None or now is None or not cosine(before, now) > GOES_ON:
        return False
    step = usual.effective[last - 1]
    known = [
        vector[place] for vector in (step.gradient, step.movement, step.after) for place in (slice(None), *slices(step).values())
    ]
    alike = [vector for vector in known if vector.size == now.size]
    return bool(alike) and all(abs(cosine(now, vector)) < SAME_WAY for vector in alike)


def left_out(compared: Sequence[Facts]) -> list[Finding]:
    """What `explain` looks at only where nothing else was found; empty where gradients or updates differ.

    Args:
        compared: What was measured of each optimizer.

    Returns:
        The findings.
    """
    if not all(step.agrees for step in steps_of(compared)):
        return []
    return [one for item in compared for one in (*buffers(item.run), *reported(item.run), *counts(item.run))]


def _one_norm(steps: Sequence[StepFacts]) -> float:
    """The norm that all gradients have; 0 where they have others, or are too few to tell."""
    sizes = tuple(norm(facts.a) for facts in steps)
    return sizes[0] if len(sizes) >= FEWEST_WINDOWS and max(sizes) - min(sizes) <= ONE_NORM * max(sizes) else 0.0


def _held_divisor(run: RunFacts, steps: Sequence[StepFacts]) -> str:
    """The number that the code holds, and that is as many times the reference's as the gradients are too small, in every window.

    Of numbers that are many, or known to few digits, chance finds one. Those that the function is called with are always N
    times the reference's or a part of them, and say nothing.

    Returns:
        A sentence with its name; empty where no number fits.
    """
    asked = (run.accumulation_steps, 1 / run.accumulation_steps)
    mine, theirs, fitting = run.mine.run.held, run.reference.run.held, dict[str, tuple[float, float]]()
    for facts in steps:
        known = min(UNEQUAL, CERTAIN * max(facts.line, facts.roundoff))
        pairs = [pair for window in (facts.step, facts.step + 1) for pair in numbers(mine, theirs, window).items()]
        fits = {p: (a, b) for p, (a, b) in pairs if a and b and abs(b / a / facts.raw.scale - 1) <= known and b / a not in asked}
        fitting = {p: fitting.get(p, fits[p]) for p in fits if p in fitting or facts is steps[0]}
        if not fitting or (len(steps) == 1 and len(pairs) * known > BY_CHANCE):
            return ""
    path, (own, wanted) = next(iter(fitting.items()))
    times = f"the gradient is the reference's times {steps[0].raw.scale:.6g}"
    return f"{times}, as `{path}` is {own:g} instead of {wanted:g}: a wrong divisor"


def _more_terms(steps: Sequence[StepFacts]) -> str:
    """Whether every window is divided by N - 1 terms more (or fewer) than at N=1: by one more in every micro-batch.

    With T terms the factor is T / (T + N - 1), hence T = (N - 1) F / (1 - F), a whole number in every window.

    Returns:
        A sentence; empty where it is not so.
    """
    chance, terms = 1.0, list[int]()
    for facts in steps:
        factor, more = facts.raw.scale, facts.backwards - 1
        if not more or factor == 1:
            return ""
        number = more * factor / (1 - factor)
        known = max(facts.line, facts.roundoff) * CERTAIN * abs(more) / (1 - factor) ** 2
        if abs(abs(number) - round(abs(number))) > known or round(abs(number)) <= more:
            return ""
        chance, terms = chance * min(1.0, 2 * known), [*terms, round(number)]
    if not terms or chance > BY_CHANCE or len({t > 0 for t in terms}) > 1:
        return ""
    which = "more" if terms[0] > 0 else "fewer"
    return f"the divisor counts one term {which} in every micro-batch: {listed(tuple(map(float, map(abs, terms))))} terms at N=1"


def _rescaled_otherwise(steps: Sequence[StepFacts]) -> str:
    """The factors by which steps took what their backwards gave, where these are not one, and are at N=1; else empty."""
    factors, usual = (tuple(one[place] for one in (facts.multiples for facts in steps)) for place in (0, 1))
    known = not any(math.isnan(f) or f <= 0 for f in (*factors, *usual))
    return listed(factors) if known and equal(usual) and not equal(factors) else ""


def _clamped(weights: Sequence[float]) -> bool:
    """Whether means may count so that are divided by no less than some number: the smallest weights are too large."""
    above, least = sum(weights) - len(weights), min(weights)
    return 0 < above < sum(w for w in weights if w <= least * (1 + UNEQUAL))


def _proportional(a: Sequence[float], b: Sequence[float]) -> bool:
    ratios = tuple(x / y for x, y in zip(a, b, strict=False))
    return equal(ratios)


def _predicted(f: Finding, cause: Cause) -> bool:
    return f.cause is cause and f.kind == "predicted"


def _grows(weights: tuple[float, ...], factor: float | None) -> bool:
    """Whether the weights of a window too short to tell fall as they do in longer ones."""
    ratios = [a / b for a, b in pairwise(weights)]
    return bool(ratios) and factor is not None and all(abs(ratio / factor - 1) <= UNEQUAL for ratio in ratios)


def first_of_each(findings: Sequence[Finding]) -> list[Finding]:
    """Keep one finding per cause, arm and optimizer, the first; `unexplained` only after nothing else.

    An unexplained gradient stays beside explained ones: it is another difference. An update after a wrong gradient is not.

    Args:
        findings: All findings, in the order of the steps.

    Returns:
        Those that are kept, each with the steps it was seen at.
    """
    kept: dict[tuple[int, Cause, str | None], Finding] = {}
    steps: dict[tuple[int, Cause, str | None], set[int]] = {}
    for one in findings:
        key = (one.accumulation_steps, one.cause, one.track)
        kept.setdefault(key, one)
        seen = one.steps if one.steps or one.optimizer_step is None else (one.optimizer_step,)
        steps.setdefault(key, set()).update(seen)
    explained = {one.accumulation_steps for one in kept.values() if one.is_named}
    return [
        replace(one, steps=tuple(sorted(steps[key])), evidence={**one.evidence, "steps": sorted(steps[key])})
        for key, one in kept.items()
        if one.is_named or one.accumulation_steps not in explained or one.unreproduced
    ]
