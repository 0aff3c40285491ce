"""L0, the algebra in float64: the same gradients, the same state, the same trajectory; and what is wrong if not.

A few windows are probed, and of all the weights are compared; before each probe, and at the end, all that an arm carries. Where
something of that parts although every probe was right, the run is repeated with a probe of every window from the last one on
before which all was alike: each is then compared at the arm's own weights, and the step it takes with that of a twin optimizer.

A training may amplify rounding (Adam where the second moment is nearly zero, a large learning rate), so that right arms part as
well. That is said only where the controls part too, at about the same window and as far, or where the exact gradient itself jumps
between the arm's weights and the full batch's, which rounding alone tells apart.

What a model computes within its micro-batches (BatchNorm's statistics) or leaves to the next forward makes another trajectory
than the full batch's, and no second fault is hidden by it: each split has an *oracle* beside it, trained on the whole window in
one backward with all that computed within its micro-batches, and an arm is compared with that one as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from accumulation_harness.config import LastWindow, Precision
from accumulation_harness.judge.cause import PRIORITY, Causes
from accumulation_harness.judge.counters import Differences, same
from accumulation_harness.judge.gates import (
    ALGEBRA_GATE,
    CLEAR_LEAST,
    COARSE_LEAST,
    COMPARABLE,
    CONFIRMED,
    RESOLUTION,
    RESOLVED,
    SMALL,
    STORED,
    TRAJECTORY_GATE,
    coarse_gate,
)
from accumulation_harness.judge.signature import Movement, Samples, Signature, worst
from accumulation_harness.judge.verdict import Algebra
from accumulation_harness.measure.lock_step import REFERENCE, ArmChanges, LockStep, Setting, StepRecord, Watch, carried_by
from accumulation_harness.measure.probe import (
    FEW_ULPS,
    REMEMBERED,
    REMEMBERED_BYTES,
    NotRemembered,
    Probe,
    inside_causes,
    moved_by_rounding,
)
from accumulation_harness.recipes.recipe import Arm, Recipe, end_window
from accumulation_harness.referee.gradients import distances_to, relative_distance
from accumulation_harness.referee.oracle import CLIP_EPSILON, WHOLE, Inside, Referee, losses_inside, no_clipping, snapshot
from accumulation_harness.results.measurements import Measurement
from accumulation_harness.system import state
from accumulation_harness.system.state import Difference, Snapshot
from accumulation_harness.workloads import Batch

RAN_AWAY = 1e38  # ||theta_full - theta_0|| beyond which nothing is compared: float32 ends there, float64's squares at 1e154
ACTIVE = 0.5  # the clipping test's threshold, as a fraction of the first gradient's norm: active by construction
FIRST = 10  # windows: the first steps, and every optimizer with its state at work
DEPENDS_ON = (
    "workload", "data", "norm", "optimizer", "schedule", "clip_norm", "ema_decay", "device", "effective_batch",
    "accumulation_steps", "split", "algebra_steps", "probe_every", "seed",
)  # fmt: skip
CONTROLS = 4  # full batches from weights moved by rounding, trained where an arm parts and the shuffled one does not as far
NARROWED = 1e-4  # relative, what a gradient may change by where float32 inside a loop is widened
MOVED = 9  # stream of the trial's seed
MOST_WARMUP = 50  # steps of a warm-up that are taken, with two beyond it


@dataclass(frozen=True)
class AlgebraResult:
    """L0 and L2 of one arm, and what its probes saw."""

    algebra: Algebra
    signature: Signature
    counters: Differences
    narrow: Signature = field(default_factory=Signature)  # in the format under test, where L1 cannot tell
    foreign: Collection[int] = ()  # windows of other samples, each of which was looked at


@dataclass
class Run:
    """One arm over all windows: what its probes saw, and what only the whole run shows."""

    seen: list[Signature] = field(default_factory=list)  # by probed window
    distances: list[float] = field(default_factory=list)  # of the parameters by window, relative to the reference's movement
    beside: list[float] = field(default_factory=list)  # the same to the oracle's, where it has one
    carried: dict[int, Mapping[str, Difference]] = field(default_factory=dict)  # window -> what else differs before it
    loss_parted_at: float = math.inf  # first window, begun alike, whose reported loss is another
    of_model: Mapping[str, Difference] = field(default_factory=dict)  # what the model carries otherwise, beside weights
    parted_at: int | None = None  # first window whose distance is amplified rounding: each one from it on was probed, and right
    jumps: dict[int, float] = field(default_factory=dict)  # window, right, begun alike and ended apart -> of the exact gradient
    strayed_at: float = math.inf  # window from which it is not its oracle's, by no rounding, although each one since is right
    clipped_share: float = 0.0  # of the windows
    steps: int = 0  # windows that were taken, the one in which the run ended included
    counters: Differences = field(default_factory=dict)  # that are not the reference's
    widens: bool = False  # as its recipe's
    foreign: Collection[int] = ()  # windows of other samples
    idle: list[tuple[bool, ...]] = field(default_factory=list)  # by window and parameter, whether its step found no gradient

    @property
    def signature(self) -> Signature:
        """What all probes saw."""
        return Signature.of_run(self.seen)

    @property
    def trajectory_error(self) -> float:
        """The largest distance of the parameters while it can tell anything."""
        return _largest(self.distances[: self.parted_at])

    def unexplained(self, inherent: Causes) -> float:
        """The gradients' error, but for what `inherent` explains exactly."""
        seen = self.signature
        return min(seen.gradient_error, seen.explanations.get(inherent, math.inf) if seen.wrong else math.inf)

    def is_right(self, inherent: Causes) -> bool:
        """Whether all that was probed is as it should be, but for what `inherent` explains exactly."""
        seen = self.signature
        return (
            not (seen.wrong and self.unexplained(inherent) > ALGEBRA_GATE)
            and (dataclasses.replace(seen, gradient_error=0.0) if seen.wrong else seen).is_exact
        )

    @property
    def nearer(self) -> list[float]:
        """The distances to the full batch, or to the oracle, whichever it follows for longer."""
        return max((self.distances, self.beside), key=lambda own: _parted(own) if own else -1)

    @property
    def alike_until(self) -> int | None:
        """The last window before which all that is carried was alike, where something has parted since."""
        apart = [t for t, paths in self.carried.items() if paths]
        first = min([_parted(self.nearer), self.loss_parted_at, *self.foreign, *apart])
        if first == len(self.nearer) and not apart:
            return None
        return max((t for t in self.carried if t < first), default=0)

    @property
    def apart(self) -> float:
        """How far the weights are by now from the full batch's, or from the oracle's where these are nearer."""
        return min((own[-1] for own in (self.distances, self.beside) if own), default=0.0)

    @property
    def weights_stay(self) -> bool:
        """Whether the weights are those of the full batch, or of the oracle, to the end."""
        return _parted(self.nearer) == len(self.nearer)

    @property
    def is_on_a_kink(self) -> bool:
        """Whether it parts where the exact gradient itself jumps between weights that rounding tells apart.

        A ReLU at zero, say, which flips in this arm and in no control.
        """
        t = _parted(self.distances)
        return t in self.jumps and self.distances[t] <= COMPARABLE * self.jumps[t]

    @property
    def follows_oracle(self) -> bool:
        """Whether it parts from the full batch, and from its oracle not, or as the controls do."""
        return self.nearer is self.beside and (self.parted_at is not None or _parted(self.beside) == len(self.beside))


def _largest(errors: Sequence[float]) -> float:
    """The largest; NaN where one is."""
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)


def _parted(distances: Sequence[float]) -> int:
    """The first window after which the weights are further apart than the gate, or the number of windows."""
    return next((t for t, distance in enumerate(distances) if not distance <= TRAJECTORY_GATE), len(distances))


def windows_of(setting: Setting, *, at_least: int = 0) -> list[Tensor]:
    """Choose the windows of L0: the first `algebra_steps` of the trial where that is set.

    Else those that hold what L0 tests: the first FIRST, more where a warm-up ends later, then an epoch's short last window,
    at which loops go wrong, and the window after it. A schedule runs over their number.

    Args:
        setting: The trial.
        at_least: So many windows: code that is not ours may go wrong at any.

    Returns:
        Sample ids, [n] int64 for each window.
    """
    config = setting.config
    if config.algebra_steps is not None:
        return list(setting.windows(max(config.algebra_steps, at_least)))
    num = max(FIRST, min(config.schedule.warmup_steps, MOST_WARMUP) + 2, at_least)
    full, remainder = divmod(setting.exact.num_samples, config.effective_batch)
    end = {full, full + 1} if remainder and config.data.last_window == LastWindow.keep else set()
    chosen = {*range(num), *end}
    return [ids for t, ids in enumerate(setting.windows(max(chosen) + 1)) if t in chosen]


def settled(setting: Setting, recipe: Recipe) -> Recipe:
    """Choose the recipe that float64 runs: a loop of the user's that narrows its numbers to float32 inside is widened.

    It is where that changes a gradient, and only by rounding. In a trial of float64 such a narrowing is the loop's fault. With
    what epsilon it clips is read from its own gradients.

    Args:
        setting: The trial.
        recipe: The arm's.

    Returns:
        The recipe, or a copy that widens, or clips with another epsilon.
    """
    if recipe.loop is None or setting.not_float64:
        return recipe

    clip_norm = setting.config.clip_norm

    def consumed(one: Recipe, *limits: float | None) -> Iterator[Tensor | None]:
        for limit in limits:
            arm = setting.arm(one, dropout=False, precision=Precision.float64, clip_norm=limit)
            lock = LockStep({REFERENCE: arm}, setting.config.seed)
            for ids in _few(windows_of(setting)):
                lock.step(ids)
                yield lock.watches[REFERENCE].gradient

    if setting.config.precision != Precision.float64:
        limits = {clip_norm, no_clipping(clip_norm)}  # clipping hides a factor
        wide, plain = dataclasses.replace(recipe, widens=True), [*consumed(recipe, *limits)]
        with suppress(Exception):  # code that asks for a format does not run in another one
            pairs = [*zip(plain, consumed(wide, *limits), strict=True)]
            gaps = [relative_distance(a, b) for a, b in pairs if a is not None and b is not None]
            recipe = wide if any(ALGEBRA_GATE < gap <= NARROWED for gap in gaps) and max(gaps) <= NARROWED else recipe
    if clip_norm is None:
        return recipe
    return dataclasses.replace(recipe, clip_epsilon=_clip_epsilon(lambda limit: next(consumed(recipe, limit))))


def _clip_epsilon(consumed: Callable[[float], Tensor | None]) -> float:
    """Read what a loop adds to its gradient's norm when it clips: from its first gradient whole, and clipped to half of that.

    `consumed`: what its optimizer receives, by the limit.

    Returns:
        Epsilon in g * limit / (||g|| + epsilon); PyTorch's where it clips otherwise than so.
    """
    if (whole := consumed(math.inf)) is None or (half := consumed(float(torch.linalg.vector_norm(whole)) / 2)) is None:
        return CLIP_EPSILON
    norm, length = (float(torch.linalg.vector_norm(one)) for one in (whole, half))
    epsilon = norm * (norm / 2 / length - 1) if length else math.inf
    rounding = RESOLVED * FEW_ULPS * norm
    is_known = abs(epsilon) <= SMALL * norm and relative_distance(half * (norm / length), whole) <= ALGEBRA_GATE
    return max(0.0, epsilon) if is_known and abs(epsilon - CLIP_EPSILON) > rounding else CLIP_EPSILON


def measurement(
    setting: Setting,
    recipes: Mapping[str, Recipe],
    windows: Sequence[Tensor],
    floor_arm: str,
    *,
    ours: bool,
) -> Measurement[dict[str, AlgebraResult]]:
    """Wrap `measure`, so that trials of our right arms share it.

    Args:
        setting: The trial.
        recipes: Label -> recipe of each arm.
        windows: Sample ids, [n] int64 for each window.
        floor_arm: The label of the permuted full batch.
        ours: Whether all arms are our right ones, which do the same in float64 whatever the precision under test. Any other
            arm may look for that precision's loss scaler, which they then all have.

    Returns:
        The measurement, with the settings that it depends on.
    """
    # In float64 alone L0 is run as the precision under test.
    settings = DEPENDS_ON + (("execution",) if setting.config.precision == Precision.float64 else ())
    make = partial(measure, setting, recipes, windows, floor_arm, scaler=not ours)
    return Measurement("algebra", dict[str, AlgebraResult], partial(setting.identity, settings, windows), make)


def measure(
    setting: Setting,
    recipes: Mapping[str, Recipe],
    windows: Sequence[Tensor],
    floor_arm: str,
    *,
    scaler: bool = True,
) -> dict[str, AlgebraResult]:
    """Measure L0, in float64, of every arm but the reference.

    The whole trajectory runs as configured, and without draws where the model draws. A few more windows (the first two, a
    short one and the one after it) have clipping the other way round, certainly active unless it has been active already,
    then off.

    Args:
        setting: The trial.
        recipes: Label -> recipe of each arm.
        windows: Sample ids, [n] int64 for each window.
        floor_arm: The label of the permuted full batch.
        scaler: Whether arms have the loss scaler of the precision under test.

    Returns:
        Label -> relative errors of gradients, state and weights, the signature of a fault, and counters that differ.
    """
    config = setting.config
    if setting.not_float64:
        few = _few(windows, first=4)
        return _in_format(setting, recipes, few, floor_arm, Precision.float32, range(len(few)))
    take = partial(_run, setting, scaler=scaler)
    runs = _followed(take, setting, recipes, windows, floor_arm)
    drawn = _followed(partial(take, dropout=True), setting, recipes, windows, None) if setting.draws else {}
    has_clipped = runs[REFERENCE].clipped_share > 0
    # A loop written by hand need not know of a clipping that its trial does not ask for.
    unasked = config.clip_norm is None and any(recipe.loop is not None for recipe in recipes.values())
    off = has_clipped or unasked
    other_clip = no_clipping(config.clip_norm) if off else ACTIVE * _first_norm(setting, windows[0])
    plain = take(recipes, _few(windows), clip_norm=other_clip)
    found = {
        label: _result(
            setting,
            run,
            plain[label],
            drawn.get(label),
            plain[floor_arm],
            _counters(run, runs[floor_arm], config.optimizer.lr),
            windows[: run.steps],
        )
        for label, run in runs.items()
        if label != REFERENCE
    }
    inherent, controls = _oracle(setting)[0], (REFERENCE, floor_arm)
    right = {label for label, run in runs.items() if recipes[label].loop is not None and run.is_right(inherent)}
    own = {label: recipe for label, recipe in recipes.items() if label in (*controls, *right)}
    if len(own) == 2 or config.precision == Precision.float64:
        return found
    narrow = _in_format(setting, own, windows, floor_arm, config.precision, range(2 * CONFIRMED))
    return {
        label: dataclasses.replace(one, narrow=narrow[label].signature) if label in narrow else one
        for label, one in found.items()
    }


def _in_format(
    setting: Setting,
    recipes: Mapping[str, Recipe],
    windows: Sequence[Tensor],
    floor_arm: str,
    precision: Precision,
    also: Collection[int] = (),
) -> dict[str, AlgebraResult]:
    """L0 in another format than float64: beside the shuffled full batch, for what differs clearly.

    The windows `also` are probed beside the usual ones, all without dropout. Right code and the referee part by rounding here,
    and a ReLU may flip. So an error below the gate (`judge.gates.coarse_gate`) counts as none, one above it as a difference only
    where a cause reproduces it, or in every window. What is left unseen is not judged: no arm is equivalent.

    Returns:
        Label -> result; none of them says that an arm is equivalent.
    """
    clip_norm = setting.config.clip_norm
    runs = _run(setting, recipes, windows, precision=precision, clip_norm=clip_norm, also=also, scaler=True)
    floor = _largest([error for one in runs[floor_arm].seen for error in (one.gradient_error, one.resolution)])
    found = {}
    for label, run in runs.items():
        # A twin's step is the same arithmetic, without any rounding; where there can be no twin, nothing is left of its errors.
        signature = Signature.of_run([one.above(coarse_gate(floor, precision), COARSE_LEAST) for one in run.seen])
        algebra = Algebra(
            gradient_error=run.signature.gradient_error,
            state_error=math.nan,
            trajectory_error=math.nan,
            loss_error=run.signature.loss_error,
            steps=len(run.seen),
            floor=floor,
            clipping_active=run.clipped_share > 0,
            clipped_share=run.clipped_share,
            short_windows=0,
            unequal_terms=signature.unequal_terms,
            not_float64=setting.not_float64,
        )
        found[label] = AlgebraResult(algebra, signature, {})
    del found[REFERENCE]
    return found


def _few(windows: Sequence[Tensor], first: int = 2) -> list[Tensor]:
    """The `first` windows, and where there is one the first short window and its successor."""
    short = next((t for t, ids in enumerate(windows) if len(ids) < len(windows[0])), len(windows))
    return [windows[t] for t in sorted({*range(first), short, short + 1}) if t < len(windows)]


def _first_norm(setting: Setting, ids: Tensor) -> float:
    referee = setting.referee(dropout=False)
    return float(torch.linalg.vector_norm(referee.gradient(snapshot(referee.model), setting.exact.batch(ids))))


def _result(
    setting: Setting,
    run: Run,
    plain: Run,
    drawn: Run | None,
    floor: Run,
    counters: Differences,
    windows: Sequence[Tensor],
) -> AlgebraResult:
    """The runs of an arm, taken together: the configured one without draws, the plain one, and the one with draws.

    `floor`: the permuted full batch's plain run.

    Returns:
        The largest errors over the runs, one signature, and the counters that differ.
    """
    follows = _oracle(setting)[0] if run.follows_oracle else ()
    signature = dataclasses.replace(run.signature.merged(plain.signature), follows=follows, strayed_at=run.strayed_at)
    drawn_error, trajectory_error, parted_at = 0.0, run.trajectory_error, run.parted_at
    if drawn is not None:
        fitting = [{c for c, e in one.explanations.items() if e <= ALGEBRA_GATE} for one in (signature, drawn.signature)]
        # Of wrong code that uses other rows, or some twice, the draws say nothing.
        is_told = fitting[0] & fitting[1] or (drawn.signature.samples != Samples() and not signature.is_exact)
        drawn_error = 0.0 if is_told else drawn.signature.gradient_error
        causes, replayed = min(fitting[1], key=lambda own: (len(own), PRIORITY[own[-1]]), default=()), drawn.signature.replayed
        signature = dataclasses.replace(signature, drawn_error=drawn_error, drawn=causes, replayed=replayed)
        counters = {**drawn.counters, **counters}
        if drawn.signature.gradient_error <= ALGEBRA_GATE:  # the same draws: all else has to be the same as well
            signature = signature.merged(drawn.signature)
            trajectory_error, parted_at = worst(trajectory_error, drawn.trajectory_error), parted_at or drawn.parted_at
    algebra = Algebra(
        gradient_error=worst(signature.gradient_error, drawn_error),
        state_error=worst(0.0, *signature.state_errors.values()),
        trajectory_error=trajectory_error,
        parted_at=parted_at,
        steps=len(run.distances),
        probes=len(run.seen),
        loss_error=signature.loss_error,
        floor=worst(floor.unexplained(_oracle(setting)[0]), floor.signature.resolution),
        clipping_active=run.clipped_share > 0 or plain.clipped_share > 0,
        clipped_share=run.clipped_share,
        short_windows=sum(len(ids) < setting.config.effective_batch for ids in windows),
        unequal_terms=run.signature.unequal_terms,
        draws=setting.draws,
        widened=setting.exact.widens or run.widens,
        narrow_steps=bool(setting.narrow_steps),
        carried=tuple(map(str, run.of_model.values())),
    )
    return AlgebraResult(algebra, signature, counters, foreign=run.foreign)


def _counters(run: Run, control: Run, rate: float) -> Differences:
    """The counters that differ; where none does, whole numbers in what is carried at the end, of each name the first.

    While the weights are alike, whatever else is carried as well that parts further than the control's does.

    Returns:
        Counter, or the path of what is carried -> the arm's and the full batch's; of a tensor how far it is off, and 0.
    """
    if run.counters:
        return run.counters
    found: dict[str, tuple[str, tuple[float, float]]] = {}
    for step, differences in reversed(run.carried.items()):
        usual, ends = control.carried.get(step, {}), step == len(run.distances)
        for path, one in differences.items():
            own, other = map(_number, (one.own, one.other))
            name, pair, is_number = f"relative difference of {path}", (one.error, 0.0), False
            if own is not None and other is not None:
                name, pair, is_number = path, (own, other), True
            if one.own is None or one.other is None or (is_number and same(*pair, rate)):
                continue
            is_count = ends and is_number and all(map(float.is_integer, pair))
            apart = COMPARABLE * max(TRAJECTORY_GATE, usual[path].error if path in usual else 0.0)
            if is_count or (run.weights_stay and not one.error <= apart):
                found.setdefault(path.rpartition(".")[2], (name, pair))
    return dict(found.values())


def _number(value: state.Value | None) -> float | None:
    """As a float; None for what is no single real number."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _followed(
    take: Callable[..., dict[str, Run]],
    setting: Setting,
    recipes: Mapping[str, Recipe],
    windows: Sequence[Tensor],
    floor_arm: str | None,
) -> dict[str, Run]:
    """The run of all arms; those that parted although every probe was right are repeated, with a probe of each window since.

    Such an arm is right all the same where each window is, and the controls part as it does: `floor_arm`, where there is one, and
    full batches from weights moved by rounding.

    Returns:
        Label -> run; `parted_at` is set where rounding was amplified.
    """
    clip_norm, inherent = setting.config.clip_norm, _oracle(setting)[0]
    runs = take(recipes, windows, clip_norm=clip_norm, oracles=True)
    for label, run in runs.items():
        epsilon = recipes[label].clip_epsilon
        if (epsilon != CLIP_EPSILON or run.idle != runs[REFERENCE].idle) and run.is_right(inherent):
            pair = {REFERENCE: _by_conventions(recipes[REFERENCE], run, epsilon), label: recipes[label]}
            runs[label] = take(pair, windows[: len(run.idle)], clip_norm=clip_norm, oracles=True)[label]
    since = {}
    for label, run in runs.items():
        has_parted = label != floor_arm or _parted(run.distances) < len(run.distances)
        if label != REFERENCE and has_parted and run.is_right(inherent) and run.alike_until is not None:
            since[label] = run.alike_until
    if not since:
        return runs
    again = {label: recipe for label, recipe in recipes.items() if label in since or label == REFERENCE}
    followed = take(again, windows, clip_norm=clip_norm, also=range(min(since.values()), len(windows)))
    shuffled = [] if floor_arm is None else [runs[floor_arm].nearer]

    @cache
    def moved(recipe: Recipe) -> list[list[float]]:
        """How far runs of it part that start from weights moved by rounding."""
        more = {REFERENCE: recipe, **{f"moved {k}": recipe for k in range(CONTROLS)}}
        controls = take(more, windows, clip_norm=clip_norm, probes=False, moved=True)
        return [one.distances for one in controls.values()]

    of, made = _oracles(setting, recipes, {})
    for label in since:
        run, own = runs[label], followed[label]
        run.seen = own.seen
        if run.weights_stay or not (own.is_right(inherent) and all(map(math.isfinite, own.distances))):
            continue
        others = [] if label == floor_arm else shuffled
        is_amplified = own.is_on_a_kink or _is_amplified(run.nearer, others)
        if is_amplified or _is_amplified(run.nearer, [*others, *moved(recipes[REFERENCE])]):
            run.parted_at = _parted(run.nearer)
        elif label in of and not _is_amplified(run.beside, moved(made[of[label]])):
            run.strayed_at = _parted(run.beside)
    return runs


def _by_conventions(recipe: Recipe, run: Run, epsilon: float) -> Recipe:
    """The recipe, but as in an arm's run parameters without a gradient have none or zeros, and clipping has its `epsilon`."""

    def follow(arm: Arm) -> None:
        own = [p.grad for p in arm.model.parameters() if p.grad is not None]
        if arm.clip_norm is not None:
            arm.clipped.append((norm := torch.nn.utils.get_total_norm(own)) > arm.clip_norm)
            torch._foreach_mul_(own, torch.clamp(arm.clip_norm / (norm + epsilon), max=1.0))
        for p, is_idle in zip(arm.model.parameters(), run.idle[arm.windows], strict=False):
            if p.requires_grad and (p.grad is None or not bool(p.grad.any())):
                p.grad = None if is_idle else torch.zeros_like(p)

    return dataclasses.replace(recipe, at_boundary=(recipe.at_boundary[0], follow, *recipe.at_boundary[2:]))


def _is_amplified(own: Sequence[float], controls: Sequence[Sequence[float]]) -> bool:
    """Whether the controls part at about the same window and by a comparable distance, wherever an arm does."""
    for t, distance in enumerate(own):
        reached = max((d for control in controls for d in control[: t + 2] if math.isfinite(d)), default=0.0)
        if not distance <= max(TRAJECTORY_GATE, COMPARABLE * reached):
            return False
    return True


def _oracle(setting: Setting) -> tuple[Causes, Inside]:
    """What is computed within micro-batches, all of it, and the causes that it has; nothing where the loop alone decides."""
    return next(reversed(inside_causes(setting).items()), ((), WHOLE))


def _oracles(
    setting: Setting, recipes: Mapping[str, Recipe], arms: Mapping[str, Arm]
) -> tuple[dict[str, str], dict[str, Recipe]]:
    """By label of an arm its oracle's label, and the oracles' recipes: one for each split, and each loop written by hand.

    `arms`: filled later; the oracle of a loop takes the window as the loop did just before.

    Returns:
        Label of an arm -> label of its oracle, and label of an oracle -> its recipe.
    """
    inside = _oracle(setting)[1]
    of, made = dict[str, str](), dict[str, Recipe]()
    for label, recipe in recipes.items():
        # The next forward meets what the last rows left, or a row what those before it took.
        reorders = recipe.arrange is not None and (setting.exact.is_stateful or setting.exact.orders_rows)
        if inside == WHOLE or not (recipe.accumulation_steps > 1 or reorders):
            continue
        is_own = recipe.loop is not None or reorders
        of[label] = f"oracle of {label if is_own else recipe.split}"

        def cut(window: Batch, label: str = label, recipe: Recipe = recipe, is_own: bool = is_own) -> tuple[Batch, Sequence[int]]:
            seen = arms[label].seen if label in arms else []
            if is_own and seen:
                required = setting.exact.required(window, rows := torch.cat(seen))
                if required.holds(rows):
                    return required.in_order(rows), [len(part) for part in seen]
            return window, recipe.split(len(window))

        made.setdefault(of[label], dataclasses.replace(recipes[REFERENCE], loop=partial(_take_whole, inside, cut)))
    return of, made


def _take_whole(inside: Inside, cut: Callable[[Batch], tuple[Batch, Sequence[int]]], arm: Arm, window: Batch) -> Tensor:
    """A step of an oracle: the whole window in one backward, with all that `inside` says computed within its micro-batches."""
    window, sizes = cut(window)
    arm.seen = [window.ids]
    losses = losses_inside(arm.workload, arm.model, window, sizes, inside)
    loss = losses.sum() / arm.workload.num_terms(window).sum()
    if arm.workload.penalty:
        loss = loss + arm.workload.auxiliary(dict(arm.model.named_parameters()))
    arm.scaler.scale(loss).backward()
    end_window(arm, window)
    return loss.detach().double()


def _apart(own: Snapshot, other: Snapshot, parameters: Collection[str]) -> dict[str, Difference]:
    """By path what differs beside the parameters, which are compared in every window.

    A gradient that is zero in exact arithmetic leaves rounding of the others' size: a tensor is compared down to `SMALL` of the
    largest with the same last name.

    Returns:
        Path -> difference.
    """
    found = {}
    sizes = defaultdict[str, float](float)
    for path, one in state.differing(own, other, TRAJECTORY_GATE).items():
        if path in parameters:
            continue
        value, name = one.other, path.rpartition(".")[2]
        if isinstance(value, Tensor) and value.is_floating_point() and math.isfinite(one.error):
            if name not in sizes:
                same = [v for p, v in other.values.items() if isinstance(v, Tensor) and p.rpartition(".")[2] == name]
                sizes[name] = max(float(torch.linalg.vector_norm(v.double())) for v in same)
            if one.error * float(torch.linalg.vector_norm(value.double())) <= TRAJECTORY_GATE * SMALL * sizes[name]:
                continue
        found[path] = one
    return found


def _run(setting: Setting, recipes: Mapping[str, Recipe], windows: Sequence[Tensor], **how: Any) -> dict[str, Run]:
    """`_taken`; where what a large arm did takes earlier windows to name, again with that arm alone, which remembers them."""
    is_small = REMEMBERED[0] * 8 * setting.num_parameters <= REMEMBERED_BYTES
    runs, unnamed = _taken(setting, recipes, windows, remembers=is_small, **how)
    for label in unnamed:
        alone = {own: recipes[own] for own in dict.fromkeys((REFERENCE, label))}
        runs[label] = _taken(setting, alone, windows, remembers=True, **how)[0][label]
    return runs


def _taken(
    setting: Setting,
    recipes: Mapping[str, Recipe],
    windows: Sequence[Tensor],
    *,
    remembers: bool,
    clip_norm: float | None,
    precision: Precision = Precision.float64,
    dropout: bool = False,
    probes: bool = True,
    also: Collection[int] = (),
    oracles: bool = False,
    moved: bool = False,
    scaler: bool,
) -> tuple[dict[str, Run], list[str]]:
    """Train all arms over `windows` in `precision` and collect what they show, and which of them are not named.

    The run ends before the window in which the full batch leaves the range of float32. `dropout`: with the draws of the model,
    where it draws; `also`: windows that are probed beside the usual ones; `oracles`: these are trained as well, and what arms
    carry is compared; `moved`: all arms but the reference start from weights moved by rounding.

    Returns:
        Label -> what the arm shows; and the labels of those in which no cause was named.
    """
    config = setting.config
    runs = {label: Run(widens=recipe.widens) for label, recipe in recipes.items()}
    arms: dict[str, Arm] = {}
    of, made = _oracles(setting, recipes, arms) if oracles else ({}, {})
    changes: ArmChanges = {"precision": precision, "steps": len(windows), "clip_norm": clip_norm}
    arms |= setting.arms({**recipes, **made}, dropout=dropout, scaler=scaler, **changes)
    rounding, referee = RESOLUTION.get(precision, FEW_ULPS), setting.referee(dropout=dropout)
    if moved:
        _move(setting, arms, STORED if setting.narrow_steps else rounding, referee, windows[0])
        runs = {label: run for label, run in runs.items() if label in arms}
    draws = dropout and setting.draws
    lock = LockStep(arms, config.seed, band=made, offload=setting.offload, draws=draws)
    probe = Probe(setting, lock, referee, remembers=remembers, by=rounding, draws=draws)
    looks = Looks(lock, probe, runs)
    for t, ids in enumerate(windows):
        # The first two steps, every `probe_every` steps, and every short window: a divisible data set would hide its faults.
        usual = t == 1 or t % config.probe_every == 0 or len(ids) < config.effective_batch
        watched = probes and (usual or t in also)
        if probes:
            probe.remember()
        if watched:
            _compare_carried(lock, runs, of, t if oracles else 0)
        around = partial(looks.around, ids, t) if watched else None
        records = lock.step(ids, gradients="kept" if watched or remembers else "compared", around=around)
        if not _is_in_range(lock.movement, lock.watches[REFERENCE]):
            break
        _note_window(lock, runs, of, records, t)
    _compare_carried(lock, runs, of, lock.steps if oracles else 0)
    for label, run in runs.items():
        run.clipped_share, run.steps, run.counters = lock.clipped_share(label), lock.steps, lock.differing_counters(label)
        run.foreign = lock.foreign_windows[label]
    return runs, looks.unnamed


def _note_window(
    lock: LockStep, runs: Mapping[str, Run], of: Mapping[str, str], records: Mapping[str, StepRecord], t: int
) -> None:
    """Note what window `t` shows of each arm, whether it was probed or not."""
    for label, run in runs.items():
        begun, distance, taken = run.apart, records[label].parameter_distance, lock.watches[label].taken
        run.idle.append(taken.idle if taken else ())
        run.distances.append(math.nan if _is_gone(distance, lock.movement) else distance)
        if label in of:
            gone = records[of[label]].parameter_distance  # an oracle that explodes moves by more than the reference
            run.beside.append(lock.apart(label, of[label]) / (gone if 1 < gone < math.inf else 1))
        if begun <= TRAJECTORY_GATE and _reports_another(label, of, records, lock.arms[label].loss_resolution):
            run.loss_parted_at = min(run.loss_parted_at, t)


@dataclass
class Looks:
    """What a probe sees of the arms in a window: of each before the next one is at work."""

    lock: LockStep
    probe: Probe
    runs: Mapping[str, Run]
    unnamed: list[str] = field(default_factory=list)  # arms that take earlier windows to name
    movement: float = 0.0  # of the full batch, as soon as its step is taken

    @contextmanager
    def around(self, ids: Tensor, t: int, label: str) -> Iterator[None]:
        """Around the arm's step in window `t`: what is kept of it for the probe is gone afterwards."""
        if label not in self.runs or label in self.unnamed:
            yield
            return
        self.probe.before(label)
        yield
        lock, run = self.lock, self.runs[label]
        watch, reference = lock.watches[label], lock.watches[REFERENCE]
        beside = lock.began if label == REFERENCE else reference.parameters
        distance = float(distances_to(watch.parameters, [beside]))
        self.movement = distance if label == REFERENCE else self.movement
        is_gone = _is_gone(distance, self.movement)
        begins = is_gone and not (run.distances and math.isnan(run.distances[-1])) and watch.is_lost
        if _is_in_range(self.movement, reference) and (begins or not is_gone):
            try:
                run.seen.append(self._by_an_instrument(label, self.probe.after(label, ids, t)))
            except NotRemembered:
                self.unnamed.append(label)
            else:
                begun = run.distances[-1] if run.distances else 0.0
                parts = begun <= ALGEBRA_GATE and distance > TRAJECTORY_GATE * self.movement
                if label != REFERENCE and parts and run.seen[-1].is_exact:
                    run.jumps[t] = self.probe.jump(label, ids, t)
        self.probe.forget(label)
        lock.offload.release()

    def _by_an_instrument(self, label: str, found: Signature) -> Signature:
        """Without errors, beside a twin, as large as those of the full batch's own step in this window: no copy takes that."""
        before = self.runs[REFERENCE].seen
        if label == REFERENCE or not before:
            return found
        usual, states = before[-1], found.state_errors
        known = {name for name, error in states.items() if error <= RESOLVED * usual.state_errors.get(name, 0.0)}
        errors = {name: 0.0 if name in known else error for name, error in states.items()}
        off = ALGEBRA_GATE < found.update.magnitude <= RESOLVED * usual.update.magnitude
        uncopied = off or any(states[name] > ALGEBRA_GATE for name in known)
        return dataclasses.replace(found, update=Movement() if off else found.update, state_errors=errors, uncopied=uncopied)


def _reports_another(label: str, of: Mapping[str, str], records: Mapping[str, StepRecord], resolution: float) -> bool:
    """Whether an arm's loss is neither the reference's nor its oracle's."""
    own, *others = (records[one].loss for one in (label, REFERENCE, *([of[label]] if label in of else ())))
    tolerance = max(TRAJECTORY_GATE, resolution)
    near = (math.isclose(own, other, rel_tol=tolerance, abs_tol=TRAJECTORY_GATE) for other in others)
    return math.isfinite(own) and not any(near)


def _is_gone(distance: float, movement: float) -> bool:
    """Whether an arm is out of range, where the full batch is not."""
    return movement > 0 and not math.isfinite(distance)


def _is_in_range(movement: float, reference: Watch) -> bool:
    """Whether the full batch is, in which alone anything is compared."""
    return movement <= RAN_AWAY and math.isfinite(reference.loss.item())


def _move(setting: Setting, arms: dict[str, Arm], by: float, referee: Referee, ids: Tensor) -> None:
    """Move all weights of the arms beside the reference by the rounding of a step.

    An arm is taken out of `arms` where the exact gradient jumps: its weights stood on a kink (clipped to a limit), as a
    loop's rounding leaves them.
    """

    def exact(model: nn.Module) -> Tensor:
        with setting.randomness():
            return referee.gradient(snapshot(model), setting.exact.batch(ids))

    unmoved = exact(arms[REFERENCE].model)
    for k, label in enumerate([*arms][1:], start=1):
        generator = setting.generator(MOVED, k)
        with torch.no_grad():
            for parameter in arms[label].model.parameters():
                parameter.copy_(moved_by_rounding(parameter, generator, by))
        if relative_distance(exact(arms[label].model), unmoved) > CLEAR_LEAST:
            del arms[label]


def _compare_carried(lock: LockStep, runs: Mapping[str, Run], of: Mapping[str, str], step: int) -> None:
    """Note what the arms carry otherwise than the reference, or the oracle where it is that one's weights they have."""
    if step == 0:
        return
    held = {label: carried_by(lock.arms[label]) for label in {*runs, *of.values()}}
    parameters = {f"model.{name}" for name, _ in lock.arms[REFERENCE].model.named_parameters()}
    for label, run in runs.items():
        if label != REFERENCE:
            beside = of[label] if run.nearer is run.beside else REFERENCE
            apart = _apart(held[label], held[beside], parameters)
            run.of_model = {path: one for path, one in apart.items() if path.startswith("model.")}
            run.carried[step] = {path: one for path, one in apart.items() if path not in run.of_model}
