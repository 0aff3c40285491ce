"""Run a training function with and without accumulation, compare, and say why where they differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from accumulation_harness.audit.allowed import with_allowed
from accumulation_harness.audit.compare.comparison import ShapeError, facts
from accumulation_harness.audit.compare.floors import COARSE_GATE, Floor, is_handed, moves, stands_in
from accumulation_harness.audit.compare.held import feels, keeps, rests
from accumulation_harness.audit.compare.run import Facts, steps_of
from accumulation_harness.audit.compare.step import StepFacts
from accumulation_harness.audit.compare.vacuity import not_rounding, nothing_compared
from accumulation_harness.audit.compare.windows import stitched
from accumulation_harness.audit.convention import cuts_the_same_windows, other_rows, rows_of, takes_the_whole_batch
from accumulation_harness.audit.evidence import Intervention, Run, Term, Vector
from accumulation_harness.audit.extra_runs import ExtraRuns, explained
from accumulation_harness.audit.family import Family, Progress, Runs
from accumulation_harness.audit.observe.handed import OBSERVER, Most
from accumulation_harness.audit.observe.pooling import disagreement
from accumulation_harness.audit.observe.runs import Functions, Local, Train, double
from accumulation_harness.audit.report import ArmResult, Problem, Report, Unseen
from accumulation_harness.audit.request import FEW_STEPS, MAX_STEPS, causes_of, checked
from accumulation_harness.audit.rules.findings import first_of_each
from accumulation_harness.audit.rules.location import located
from accumulation_harness.audit.rules.whole_run import unread
from accumulation_harness.audit.visibility import hidden
from accumulation_harness.compare.linear import distance, dot
from accumulation_harness.judge.cause import Cause

ROUNDED_BY_LOOP = 1e-6  # relative; some roundings to float32
MOST_TERMS = 8  # of a loss that are listed
REPEATED = 100.0  # roundings by which two runs with the same arguments may differ

UNCLEAR = (
    "as an arithmetic of 16 bits or TF32 may make them, which does not show in what was handed over: hand over the contributions "
    "of the micro-batches, and go on with the weights that `hand` returns, so that rounding is measured"
)


def audit(
    train: Train,
    *,
    batch_size: int,
    accumulation_steps: int | Sequence[int],
    reference: Train | None = None,
    processes: int = 1,
    max_steps: int | None = MAX_STEPS,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Compare `train(batch_size // N, N)` with `train(batch_size, 1)` for every N, and name the cause of each difference.

    For optimizer step t, with g the gradient that the optimizer receives at N = 1 and a the one at N, the audit measures ||a -
    g|| / ||g|| and compares it with the largest distance that rounding explains, measured on this very function. Every run
    starts from the same random state.

    Args:
        train: The training code, called as `train(micro_batch, num_micro_batches)`. It takes its samples in a fixed order and
            makes a few optimizer steps. It may have these keyword parameters: `dtype`, to be compared in float64 as well;
            `order_seed`, to shuffle the samples of a window; and `hand`, for what the hooks of torch do not see.
            `weights = hand(weights=weights)` is to be called once before training and after each optimizer step,
            `hand(gradient=tree)` before a step with the gradient that the optimizer receives, and `hand(contribution=tree)`
            for each micro-batch with what it adds to that gradient. The loop goes on with the weights that come back: in some
            runs they are a rounding away, so that rounding is measured. A tree is a nest of mappings, sequences and dataclasses
            of arrays: what NumPy reads or DLPack gives.
        batch_size: Samples of one optimizer step (on one rank).
        accumulation_steps: The number N of micro-batches to compare with the whole batch, or several.
        reference: Another function, of which `reference(batch_size, 1)` takes the place of `train(batch_size, 1)`. With it, N =
            1 of `train` is compared as well.
        processes: Number of ranks that run `train`, with `torch.distributed` initialised. The reference runs on one, with the
            samples of all ranks.
        max_steps: Optimizer steps after which a run is ended. With None, the first run shows how many: 200, or as few as 8, where
            they take long or an epoch has ended.
        allow: Names of causes that are meant, as `{"stochastic_layers"}` for a model with dropout. Their findings are reported,
            and the verdict is that of everything else, as far as it could be compared.
        progress: Called with a line for every run and what it shows.

    Returns:
        The report. What `train` raises does not escape: it is among `Report.problems`. torch has as many threads as before.

    Raises:
        ValueError: An argument cannot be run, such as an N that does not divide the batch.
    """
    arms = checked(train, reference, batch_size, accumulation_steps, processes=processes, max_steps=max_steps)
    permitted = causes_of(allow)
    if processes == 1:
        return judged(Local(train, reference), arms, batch_size, max_steps, permitted, progress)
    from accumulation_harness.audit.observe.ranks import Ranks

    with Ranks(train, reference, processes) as ranks:
        return judged(ranks, arms, batch_size, max_steps, permitted, progress)


def judged(
    runner: Functions,
    arms: Sequence[int],
    batch_size: int,
    max_steps: int | None,
    allowed: frozenset[Cause],
    progress: Progress | None,
) -> Report:
    """The report of one audit.

    Args:
        runner: Makes the runs.
        arms: The numbers of accumulation steps.
        batch_size: Rows of a whole batch.
        max_steps: Optimizer steps of a run, or None for as many as are quick.
        allowed: Causes that make no arm different.
        progress: Called with what runs, or None.

    Returns:
        Verdict, findings and what could not be seen.
    """
    most = Most(MAX_STEPS, few=FEW_STEPS) if max_steps is None else Most(max_steps)
    runs = Runs(runner, batch_size, runner.functions[True] is not None, most, progress or (lambda line: None))
    return with_allowed(Session(runs, arms).report(), allowed)


class Session:
    """One audit: which runs are made, and what is concluded from them."""

    def __init__(self, runs: Runs, arms: Sequence[int]) -> None:
        """`arms`: numbers of accumulation steps, each compared with the reference."""
        self.runs, self.arms = runs, arms
        self.problems: list[Problem] = []
        self.unseen: list[Unseen] = []  # what the runs that were made could not show
        self.notes: list[str] = []  # how the function is called
        self.repeatable = True  # causes are named only for a function that does the same twice
        self.results: list[ArmResult] = []

    def report(self) -> Report:
        """Every arm, as trained and, where the functions take a `dtype`, in float64."""
        families = [self._understood(self._family({}))]
        if families[0].reference.stopped:
            last = f"what comes after {self.runs.most.steps:.0f} optimizer steps: runs are ended there (max_steps)"
            self.unseen.append(Unseen("later_steps", last))
        if self.runs.accept_dtype() and not self.problems:
            families.append(self._family({"dtype": double()}))
        for family in families:
            if family.reference.error is None and family.reference.num_steps:
                self._check_comparable(family.reference)
                for n in self.arms:
                    self._arm(family, n)
        first = families[0]
        if self.repeatable and not self.problems:
            if not any(result.findings for result in self.results):
                self._look_beside_aliases(first)
            self._look_at_terms(first)
        return Report(
            batch_size=self.runs.batch_size,
            results=tuple(self.results),
            problems=tuple(dict.fromkeys(self.problems)),
            notes=tuple(self.notes),
            hidden=tuple(dict.fromkeys([*self.unseen, *hidden(first.reference, first.nulls, first.candidates, self.results)])),
        )

    def _look_beside_aliases(self, family: Family) -> None:
        """Where each of N micro-batches has N rows, division by either is the same: another N tells them apart."""
        size, arms = self.runs.batch_size, [n for n in self.arms if n > 1]
        if not arms or any(size != n * n for n in arms):
            return
        n, other = arms[0], next((k for k in range(2, size) if size % k == 0 and size != k * k), 0)
        run = self._candidate(family, other) if other else None
        if run is None or run.error is not None or not run.num_steps:
            what = (
                f"N={n} micro-batches have {n} rows each: a division by one of the two numbers instead of the other cannot show"
            )
            self.unseen.append(Unseen("equal_factors", what, "take another batch size"))
            return
        with suppress(ShapeError):
            compared = _compared(run, family)
            if all(step.agrees for step in steps_of(compared)):
                return
        family.candidates[other] = run
        self._arm(family, other)
        if found := [f.cause for result in self.results for f in result.findings]:
            what = (
                f"with {n} rows in each of {n} micro-batches nothing differs, and with {other} micro-batches the computation does"
            )
            self._problem(f"{what} ({', '.join(found)})", n)
        else:
            self.results = [result for result in self.results if result.accumulation_steps != other]

    def _look_at_terms(self, family: Family) -> None:
        """What each term of the loss weighs and gives at N=1; of one that gives no gradient, a fault does not show."""
        run = family.nulls[0]
        last = max((len(track.steps) for track in run.tracks), default=0) - 1
        seen = [(track, b.terms) for track in run.tracks for step in track.steps for b in step.backwards if b.terms]
        kinds = [(track.name, tuple(term.name for term in terms)) for track, terms in seen]
        for kind in dict.fromkeys(kinds):
            own = [one for one, its in zip(seen, kinds, strict=True) if its == kind]
            alike = [terms for _, terms in own]
            each = [its for track in run.tracks if (its := [terms for of, terms in own if of is track])]
            given = [
                np.concatenate([np.sum([terms[place].gradient for terms in one], axis=0) for one in each])
                for place in range(len(kind[1]))
            ]
            self.notes.append(_of_terms(alike[0], given, last))
            for place, name in enumerate(kind[1]):
                if not any(terms[place].gradient.any() for terms in alike) and not any(one.findings for one in self.results):
                    which = f"term {place + 1} of {len(given)} of the loss ({name})"
                    what = f"{which} gave no gradient at all at optimizer step {last}: a fault in it cannot show"
                    self.unseen.append(Unseen("silent_term", what))

    # -- how the function takes its arguments --------------------------------------------------------------------------

    def _understood(self, family: Family) -> Family:
        """The family, of runs that call the function as it wants to be called: as its first run with N micro-batches shows."""
        n = next((n for n in self.arms if n > 1), None)
        if n is None or self.problems or not family.reference.num_steps:
            return family
        run = family.candidates[n] = self._candidate(family, n)
        size, one = self.runs.batch_size // n, family.reference
        if takes_the_whole_batch(run, one) or (run.error is not None and not run.num_steps and size % n):
            self._take_whole(family, n)
        elif other_rows(run, one):
            return self._apart(family, n)
        return family

    def _candidate(self, family: Family, n: int) -> Run:
        return self.runs.candidate(n, family.options)

    def _take_whole(self, family: Family, n: int) -> None:
        """Give the function the whole batch, where it then makes the windows of N=1 of it."""
        before, self.runs = self.runs, replace(self.runs, total=True)
        run, size = self._candidate(family, n), self.runs.batch_size
        if run.error is not None or not cuts_the_same_windows(run, family.reference):
            self.runs = before
            return
        family.candidates[n] = run
        self.notes.append(
            f"batch_size is the whole batch here: called with ({size // n}, {n}), the function cut {size // n} samples into {n} "
            f"micro-batches; so it was called with ({size}, {n}), as {{total_batch}} says for a script"
        )

    def _apart(self, family: Family, n: int) -> Family:
        """With evaluations that leave no trace on random numbers, where it then trains on the same rows at every N."""
        before, self.runs = self.runs, replace(self.runs, apart=True)
        if rows_of(self.runs.baseline(family.options, Intervention(leads=True))) != rows_of(family.reference):
            apart = self._family(family.options)
            run = apart.candidates[n] = self._candidate(apart, n)
            if rows_of(run) == rows_of(apart.reference):
                self.notes.append(
                    "evaluation draws from the random numbers that training goes on with, and as many as its batches take: in "
                    "reality, N changes the samples after each evaluation; here, every evaluation put the generators back"
                )
                return apart
        self.runs = before
        return family

    # -- the reference --------------------------------------------------------------------------------------------------

    def _family(self, options: Mapping[str, Any]) -> Family:
        """The reference twice (is it deterministic?), and perturbed or permuted: the floor."""
        runs, reference = self.runs, self.runs.baseline(options, Intervention(leads=True))
        if self._unusable(reference, 1):
            return Family(options, reference)
        if runs.most.few is not None:  # the others take as many
            self.runs = runs = replace(runs, most=Most(reference.num_steps if reference.stopped else runs.most.steps))
        last = None if options or not reference.summed else max(len(track.steps) for track in reference.tracks) - 1
        again = runs.baseline(options, Intervention(terms=last))
        made = (again, runs.baseline(options, Intervention(perturb=1.0, arithmetic=reference.arithmetic)))
        nulls = [run for run in made if run.error is None]
        if not nulls:
            self.repeatable = False
            self._problem(f"the function raises when it is run again ({again.error}): its rounding cannot be measured", 1)
            return Family(options, reference)
        self._check_repeatable(reference, again)
        return Family(options, reference, [*nulls, *self._permuted(options, reference, nulls)])

    def _permuted(self, options: Mapping[str, Any], reference: Run, nulls: Sequence[Run]) -> list[Run]:
        """The reference with its samples in another order, where that is all that `order_seed` changes."""
        kept = []
        for run in self.runs.permuted(options):
            besides = not_rounding(run, reference, nulls, drift=True)
            if besides is None:
                kept.append(run)
            else:
                what = f"the run with `order_seed=1` cannot be used to measure rounding: {besides}"
                self.unseen.append(Unseen("precision", what))
        return kept

    def _problem(self, what: str, n: int | None = None) -> None:
        self.problems.append(Problem(what, n))

    def _unusable(self, run: Run, n: int) -> bool:
        """Whether the run raised, or took no step: that is a problem of N=`n`."""
        if run.error is not None and run.error.startswith(OBSERVER):
            self._problem(run.error, n)
        elif run.error is not None:
            self._problem(f"the training function raised {run.error} after {run.num_steps} optimizer steps", n)
        elif not run.num_steps:
            self._problem(_why_no_step(run), n)
        return run.error is not None or not run.num_steps

    def _check_repeatable(self, reference: Run, again: Run) -> None:
        """Kernels that are not deterministic differ by roundings; a function that is not, by more."""
        if again.error is not None:
            return
        try:
            same = facts(again, reference, Floor([], drift=True))
        except ShapeError as error:
            self.repeatable = False
            self._problem(f"the function is not deterministic: run twice, it makes {error}")
            return
        for item in same:
            allowed = REPEATED * reference.roundoff
            off = next((s for s in item.steps if s.consumed.distance > max(s.gate, allowed)), None)
            if off is not None or item.run.mine.steps != item.run.reference.steps:
                where = f"gradients {off.consumed.distance:.2g} apart at step {off.step}" if off else "another number of steps"
                self.repeatable = False
                self._problem(
                    f"the function is not deterministic: run twice with the same arguments, {where}; it must seed everything "
                    "(random.seed(0), numpy.random.default_rng(0), torch.manual_seed(0)), take samples in a fixed order and "
                    "build its model and optimizer anew"
                )
                return

    # -- arms ------------------------------------------------------------------------------------------------------------

    def _arm(self, family: Family, n: int) -> None:
        candidate = family.candidates[n] = family.candidates.get(n) or self._candidate(family, n)
        self._unusable(candidate, n)
        if not candidate.num_steps:
            return
        try:
            compared: Sequence[Facts] = _compared(candidate, family)
        except ShapeError as error:
            self._problem(f"the model is not the one of N=1: {error}; it must not depend on the arguments", n)
            return
        self._check_start(candidate, family.reference)
        if self.repeatable and self._learn_what_is_kept(family, compared):
            compared = _compared(candidate, family)
        found = explained(compared) if self.repeatable else []
        self.runs.progress(f"N={n}, {family.arithmetic}: {_first_answer(compared)}")
        if self.repeatable and any(not step.agrees or step.gate > COARSE_GATE for step in steps_of(compared)):
            at_one = [r for r in self.results if r.accumulation_steps == 1 and r.arithmetic == family.arithmetic]
            extra = ExtraRuns(self.runs, family, n, same_at_one=any(r.findings for r in at_one))
            compared, found = extra.diagnose(compared)
        if _rounded_by_the_loop(compared) and self._agrees_as_trained(family, n):
            worst = max(step.raw.distance for step in steps_of(compared))
            what = (
                f"N={n}: in {family.arithmetic} the gradients are {worst:.1g} apart, as numbers that the loop rounds to float32"
            )
            self.unseen.append(Unseen("precision", f"{what}: smaller differences cannot be seen"))
            found = []
        if (unclear := _of_unknown_arithmetic(compared)) is not None and all(f.nameless for f in found):
            apart = f"the gradients are {unclear.raw.distance:.2g} apart at optimizer step {unclear.step}"
            self._problem(f"{apart}, {UNCLEAR}", n)
            found = []
        split = disagreement(candidate, max((step.gate for step in steps_of(compared)), default=0.0))
        if split:  # what one rank's gradient looks like then says nothing of the window
            found = split + [f for f in found if not f.unreproduced]
        if candidate.error is not None:
            found = [f for f in found if f.cause is not Cause.window_misplaced]  # the run was cut short by the exception
        for what in [] if found else filter(None, (unread(item.run) for item in compared)):
            self._problem(what, n)
        empty = nothing_compared(candidate, family.reference, family.candidates.get(1, family.reference), compared) or ""
        if empty and not found:
            self._problem(empty, n)
        named, evidence = tuple(located(f, candidate) for f in first_of_each(found)), _evidence(candidate)
        if any(step.taken_inside for step in steps_of(compared)):
            self.notes.append(f"N={n}: gradients differ, and steps move the weights alike: they divide or add up what they take")
        self.results.append(ArmResult(n, family.arithmetic, tuple(compared), named, evidence, empty=empty))

    def _learn_what_is_kept(self, family: Family, compared: Sequence[Facts]) -> bool:
        """Of tensors that move otherwise, whether they go on from what they were: those written anew are no state."""
        paths = {one.path for item in compared for one in item.run.apart if one.may_be_kept} - family.kept.keys()
        if paths and not any(map(is_handed, family.reference.steps)):  # arrays of other libraries take no other values
            shaken = self.runs.baseline(family.options, Intervention(shake=frozenset(paths), follow=family.reference))
            family.enters |= feels(shaken, family.reference, given=True)
            family.kept |= {path: keeps(path, shaken, family.reference) for path in paths}
            copies = {one.path for item in compared for one in item.run.apart if one.is_copied}
            family.kept |= {path: True for path in paths & copies if rests(path, family.reference.held)}
            return True
        return False

    def _agrees_as_trained(self, family: Family, n: int) -> bool:
        """Whether this is a finer arithmetic than the arm was trained in, where nothing differed."""
        trained = [r for r in self.results if r.accumulation_steps == n and r.arithmetic != family.arithmetic]
        return bool(trained) and all(not r.findings and not r.empty for r in trained)

    def _check_start(self, candidate: Run, reference: Run) -> None:
        """Other weights from the start are no matter of accumulation: runs that follow the reference would hide them."""
        allowed = REPEATED * max(candidate.roundoff, reference.roundoff)
        for mine, theirs in zip(stitched(candidate), stitched(reference), strict=True):
            if mine.start is None or theirs.start is None:
                continue
            apart = distance(mine.start, theirs.start)
            if apart > allowed and self.repeatable:
                self._problem(
                    f"{mine.name} starts from other weights than N=1 ({apart:.2g} apart); the function must seed its model alike "
                    "at every N",
                    candidate.accumulation_steps,
                )

    def _check_comparable(self, reference: Run) -> None:
        """NaN equals NaN, and nothing equals nothing: what comes after is equal for no good reason."""
        for track in reference.tracks:
            broken = next((t for t, step in enumerate(track.steps) if not np.isfinite(step.after).all()), None)
            if broken is not None:
                where = f"the weights of {track.name} are not finite after optimizer step {broken}"
                self._problem(f"{where}; what follows cannot be judged", 1)
            given = any(step.total is not None and step.total.any() for step in track.steps)
            if given and not any(step.gradient.any() for step in track.steps):
                what = f"{track.name} steps without gradients, which were cleared after the backward: nothing can be compared"
                self._problem(what, 1)


def _compared(run: Run, family: Family) -> list[Facts]:
    """A run that goes its own way, beside the reference."""
    return facts(run, family.reference, family.floor(family.nulls, drift=True))


def _rounded_by_the_loop(compared: Sequence[Facts]) -> bool:
    """Whether gradients differ, and all by so little that numbers which the loop itself holds in float32 explain it."""
    off = [step for step in steps_of(compared) if not step.agrees]
    return bool(off) and all(max(s.raw.distance, s.consumed.distance, s.update.distance) <= ROUNDED_BY_LOOP for s in off)


def _of_unknown_arithmetic(compared: Sequence[Facts]) -> StepFacts | None:
    """The first step that differs, if by little, and if what was handed over does not show how it was rounded."""
    off = next((step for step in steps_of(compared) if not step.agrees), None)
    if off is None or not is_handed(off.theirs) or off.raw.distance > COARSE_GATE:
        return None
    return off if stands_in(off.theirs) or not moves(off.nulls, off.theirs) else None


def _first_answer(compared: Sequence[Facts]) -> str:
    """What the first run of an arm shows, before anything is explained."""
    steps = steps_of(compared)
    worst = max(steps, key=lambda step: step.raw.distance / step.gate if step.gate else 0.0, default=None)
    if worst is None:
        return "no optimizer step to compare"
    if all(step.agrees for step in steps):
        return f"gradients and updates of {len(steps)} optimizer steps agree"
    numbers = f"{worst.raw.distance:.2g} apart at optimizer step {worst.step}, where rounding explains {worst.gate:.2g}"
    return f"different ({numbers}); looking for the cause"


def _why_no_step(run: Run) -> str:
    if run.backwards:
        return (
            f"{run.backwards} backward passes were seen and no step of a torch.optim optimizer: the audit needs a "
            "function that steps optimizers of torch.optim in this process"
        )
    return (
        "no optimizer of torch.optim and no backward pass were seen: train in the calling process with torch.optim, or take a "
        "parameter `hand` and call `weights = hand(weights=weights)` before training and after each step of your own optimizer"
    )


def _evidence(run: Run) -> dict[str, Any]:
    tracks = run.tracks
    return {
        "steps": run.num_steps,
        "optimizers": [track.name for track in tracks],
        "backwards_per_step": [len(step.backwards) for step in tracks[0].steps] if tracks else [],
        "calls_of_first_window": list(tracks[0].steps[0].calls) if tracks and tracks[0].steps else [],
        "reported": run.reported,
        "callers": list(dict.fromkeys(run.callers)),
    }


def _of_terms(terms: Sequence[Term], given: Sequence[Vector], step: int) -> str:
    """What each term of a loss is, by its way in the graph, what it weighs, and its share of the gradient: g_i . g / ||g||^2."""
    whole = np.sum(given, axis=0)
    shares = [dot(part, whole) / max(dot(whole, whole), np.finfo(float).tiny) for part in given]
    said = [
        f"{place} ({term.path or term.name}{'' if np.isnan(term.weight) else f', weight {term.weight:.4g}'}) {share:.1%}"
        for place, (term, share) in enumerate(zip(terms, shares, strict=True), 1)
    ]
    listed = ", ".join(said[:MOST_TERMS]) + (f" and {len(said) - MOST_TERMS} more" if len(said) > MOST_TERMS else "")
    return f"at optimizer step {step} of N=1 the gradient is that of {len(said)} terms of the loss: {listed}"
