"""What the probes of L0 saw of one arm: filled window by window where it is seen, and merged over windows and runs."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from accumulation_harness.judge.cause import Causes, joined
from accumulation_harness.judge.gates import ALGEBRA_GATE, TRAJECTORY_GATE

Errors = Mapping[Causes, float]  # of one window: causes -> relative error of the best variant of their oracle; (): no cause
NEARER = 10.0  # times, that a cause has to bring the gradient nearer than no cause at all


@dataclass(frozen=True)
class Comparison:
    """A gradient a compared with a reference g; NaN, which never passes, where g is zero or not finite."""

    distance: float = math.nan  # ||a - g|| / ||g||
    scale: float = math.nan  # ||a|| / ||g||
    cosine: float = math.nan  # <a, g> / (||a|| ||g||)


@dataclass(frozen=True)
class Decomposition:
    """A least-squares decomposition a = sum_k weights[k] / N * parts[k] + rest; NaN where a vector is not finite."""

    weights: tuple[float, ...] = ()  # times N: all 1 when equal micro-batches are averaged
    residual: float = math.nan  # ||rest|| / ||a||
    condition: float = math.nan  # of the matrix of parts scaled to unit columns; the weights mean nothing when it is huge


@dataclass(frozen=True)
class Attribution(Decomposition, Comparison):
    """A gradient that an optimizer received beside the reference's, and in micro-batch gradients: 1 is a right weight."""


@dataclass(frozen=True, kw_only=True)
class WrongWindow:
    """A probed window in which the optimizer received another gradient than the reference."""

    step: int
    whole: Attribution
    groups: Mapping[str, Attribution] = field(default_factory=dict)  # by the optimizer's parameter groups
    tensors: Mapping[str, float] = field(default_factory=dict)  # the distance of each

    @property
    def distance(self) -> float:
        """||a - g|| / ||g|| of the whole gradient."""
        return self.whole.distance


@dataclass(frozen=True)
class Movement:
    """A change of the weights between two moments."""

    length: float = 0.0  # relative to what the user of it says
    along_weights: float = 0.0  # its cosine with the weights

    @property
    def magnitude(self) -> float:
        """The length; NaN counts as the largest."""
        return math.inf if math.isnan(self.length) else self.length


@dataclass(frozen=True, kw_only=True)
class Samples:
    """How the samples of a window's backward passes differ from the samples of the window."""

    repeated: int = 0  # used more than once
    missing: int = 0  # of the window, not used
    foreign: int = 0  # of other windows
    unknown: int = 0  # rows that are no training samples

    def largest(self, other: Samples) -> Samples:
        """The larger of each count."""
        return Samples(**{name: max(count, getattr(other, name)) for name, count in vars(self).items()})


def worst(*errors: float) -> float:
    """Return the largest error, where NaN counts as just above every gate.

    A failed measurement must not pass, nor hide a difference beside it.

    Args:
        *errors: The errors.

    Returns:
        The largest; NaN if one is NaN and none is above TRAJECTORY_GATE, and if there is none.
    """
    return max(errors, key=lambda error: TRAJECTORY_GATE if math.isnan(error) else error, default=math.nan)


def _furthest(a: WrongWindow | None, b: WrongWindow | None) -> WrongWindow | None:
    return a if b is None or (a is not None and b.distance <= a.distance) else b


def _worst_by_name(a: Mapping[Any, float], b: Mapping[Any, float]) -> dict[Any, float]:
    return {name: worst(a.get(name, 0.0), b.get(name, 0.0)) for name in a | b}  # type: ignore[operator]


def _by(rule: Callable[[Any, Any], Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """The metadata of a field of `Signature` of which two sightings are merged by `rule`."""
    return {"rule": rule}


COUNTED = _by(operator.add)
MOST, SMALLEST, WORST, WORST_BY_NAME = _by(max), _by(min), _by(worst), _by(_worst_by_name)
ANY, ALL, LONGEST = _by(operator.or_), _by(operator.and_), _by(lambda a, b: max(a, b, key=lambda movement: movement.magnitude))


OF_STEPS = "update", "state_errors", "advanced_error", "average_error"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Everything the diagnosis looks at, of one probed window or merged over many; the defaults say that nothing was seen."""

    probes: int = field(default=0, metadata=COUNTED)  # windows
    gradient_error: float = field(default=0.0, metadata=WORST)  # ||a - g|| / ||g||; NaN where nothing was consumed
    resolution: float = field(default=0.0, metadata=MOST)  # the coarsest to which a gradient could be compared; 0: the gate's
    unequal_terms: bool = field(default=False, metadata=ANY)  # micro-batches of a window had different numbers of loss terms
    wrong_windows: tuple[Errors, ...] = field(default=(), metadata=COUNTED)  # those whose gradient was wrong
    # Causes -> those that they leave wrong, the most of a run
    wrong_in_a_run: Mapping[Causes, int] = field(default_factory=dict, metadata=WORST_BY_NAME)
    other_samples: tuple[Errors, ...] = field(default=(), metadata=COUNTED)  # windows judged on the other samples the arm saw
    worst_window: WrongWindow | None = field(default=None, metadata=_by(_furthest))
    replayed: bool = field(default=False, metadata=ANY)  # whether the draws of the arm's forwards were made again
    drawn: Causes = field(default=(), metadata=_by(max))  # of the run with the model's draws
    drawn_error: float = field(default=0.0, metadata=WORST)  # of a gradient with the model's draws, if nothing explains it
    follows: Causes = field(default=(), metadata=_by(max))  # whose oracle's trajectory it is, and not the full batch's
    strayed_at: float = field(default=math.inf, metadata=SMALLEST)  # window from which it is not that oracle's, by no rounding
    moved: Movement = field(default=Movement(), metadata=LONGEST)  # of the weights inside a window, relative to them
    steps_in_window: tuple[int, int] = field(default=(1, 1), metadata=MOST)  # optimizer steps of a window, and its micro-batches
    steps_before_last_forward: int = field(default=0, metadata=MOST)  # optimizer steps of a window before its last forward
    skipped_windows: int = field(default=0, metadata=COUNTED)  # in which the full batch stepped and the arm did not
    decays_fit: bool = field(default=True, metadata=ALL)  # movements along the weights are those of a decay per micro-batch
    wrong_steps: int = field(default=0, metadata=COUNTED)  # windows whose step, or what it leaves, is not a twin's
    update: Movement = field(default=Movement(), metadata=LONGEST)  # error of a step beside a twin's, relative to the update
    state_errors: Mapping[str, float] = field(default_factory=dict, metadata=WORST_BY_NAME)  # the same of the optimizer's state
    uncopied: bool = field(default=False, metadata=ANY)  # a twin of the full batch's optimizer takes another step than that does
    advanced_error: float = field(default=0.0, metadata=WORST)  # of a wrong state beside one advanced for every micro-batch
    average_error: float = field(default=0.0, metadata=WORST)  # of a wrong moving average beside one moved for every micro-batch
    loss_error: float = field(default=0.0, metadata=WORST)  # relative, of the reported loss where the gradient is exact
    statistics_error: float = field(default=0.0, metadata=WORST)  # of running statistics beside the micro-batches' in turn
    samples: Samples = field(default=Samples(), metadata=_by(Samples.largest))
    survivors_error: float = field(default=math.inf, metadata=SMALLEST)  # against the finite micro-batches' gradient

    @property
    def wrong(self) -> int:
        """The number of windows whose gradient was wrong."""
        return len(self.wrong_windows)

    @property
    def is_lost(self) -> bool:
        """Whether a gradient was not finite where, at the same weights, the referee's is."""
        return self.worst_window is not None and math.isinf(self.worst_window.distance)

    @property
    def is_exact(self) -> bool:
        """Whether every probed window was the full batch's in all that a probe compares: gradient, step, state, loss, samples."""
        errors = (
            self.gradient_error,
            self.loss_error,
            self.statistics_error,
            self.moved.length,
            self.update.length,
            *self.state_errors.values(),
        )
        whole = self.steps_in_window[0] == 1 and not self.skipped_windows and self.samples == Samples()
        return whole and all(error <= ALGEBRA_GATE for error in errors)

    @property
    def explanations(self) -> dict[Causes, float]:
        """Causes -> the largest error of their oracle over the wrong windows."""
        return explanations(self.wrong_windows)

    @property
    def sufficient_alone(self) -> frozenset[Causes]:
        """The causes that reproduce at least one of the wrong windows."""
        return frozenset(causes for errors in self.wrong_windows for causes, error in errors.items() if error <= ALGEBRA_GATE)

    @classmethod
    def of_run(cls, seen: Sequence[Signature]) -> Signature:
        """What the probes of a run saw together."""
        wrong = [errors for one in seen for errors in one.wrong_windows]
        before = {causes[:-1] for errors in wrong for causes in errors}
        left = {causes: sum(not errors.get(causes, math.inf) <= ALGEBRA_GATE for errors in wrong) for causes in before}
        steps = sum(not one.step_error <= ALGEBRA_GATE for one in seen)
        return dataclasses.replace(reduce(cls.merged, seen, cls()), wrong_in_a_run=left, wrong_steps=steps)

    def merged(self, other: Signature) -> Signature:
        """What was seen here and there, field by field."""
        rules = {f.name: f.metadata["rule"] for f in dataclasses.fields(self)}
        return Signature(**{name: rule(getattr(self, name), getattr(other, name)) for name, rule in rules.items()})

    @property
    def step_error(self) -> float:
        """The largest of a step beside a twin's: of the update, or of what the optimizer carries."""
        return worst(self.update.length, *self.state_errors.values())

    def above(self, gate: float, of_steps: float) -> Signature:
        """What was seen, with errors up to the gate as zeros: they count as none. A NaN stays one.

        Args:
            gate: The largest error that is none.
            of_steps: The same of what a step makes of its gradient.

        Returns:
            The signature of what is above.
        """

        def snapped(seen: Any, gate: float) -> Any:
            if isinstance(seen, Movement):
                return seen if seen.magnitude > gate else Movement()
            if isinstance(seen, Mapping):
                return {name: snapped(error, gate) for name, error in seen.items()}
            return 0.0 if seen <= gate else seen

        is_wrong = not self.gradient_error <= gate
        errors = [f.name for f in dataclasses.fields(self) if f.metadata in (SMALLEST, WORST, WORST_BY_NAME, LONGEST)]
        return dataclasses.replace(
            self,
            **{name: snapped(getattr(self, name), of_steps if name in OF_STEPS else gate) for name in errors},
            wrong_windows=tuple(snapped(errors, gate) for errors in self.wrong_windows) if is_wrong else (),
            worst_window=self.worst_window if is_wrong else None,
            other_samples=tuple(snapped(errors, gate) for errors in self.other_samples),
        )

    def stored(self) -> dict[str, Any]:
        """As in the store: plain JSON types, and what the wrong windows say together in place of each of them."""
        row = dataclasses.asdict(self) | {
            "wrong": self.wrong,
            "explanations": {joined(causes): error for causes, error in self.explanations.items()},
            "sufficient_alone": sorted(joined(causes) for causes in self.sufficient_alone),
        }
        return {name: value for name, value in row.items() if name not in ("wrong_windows", "wrong_in_a_run", "other_samples")}


def explanations(windows: Sequence[Errors]) -> dict[Causes, float]:
    """Find the sets of causes that say something of every window.

    A second cause beside the model's own (BatchNorm) may be at rest in a window (a short-window fault in a full one), where
    the first alone explains it; or the model's own is, in a window of one micro-batch.

    Args:
        windows: For each window: causes -> relative error of the gradient that they predict.

    Returns:
        Causes -> the largest error over the windows.
    """

    def error(window: Errors, causes: Causes) -> float:
        return min(window.get(some, math.inf) for some in (causes, causes[:-1], causes[-1:]))

    every: Iterable[Causes] = sorted(set().union(*windows))
    largest = {causes: max(error(window, causes) for window in windows) for causes in every}
    return {causes: value for causes, value in largest.items() if math.isfinite(value)}


def clearly_nearer(errors: Errors, distance: float) -> dict[Causes, float]:
    """Return the causes that explain a wrong window clearly better than the right gradient does.

    Just above the gate the right gradient itself is near, and so is every cause that hardly changes it. A cause therefore has
    to reduce the distance at least NEARER times, and that of the causes which it stands beside as well.

    Args:
        errors: By cause, the relative distance of the gradient from a simulation of that cause.
        distance: The relative distance from the right gradient.

    Returns:
        The causes whose errors are at most 1 / NEARER of `distance`, and of the error without the last of them.
    """
    return {
        causes: error for causes, error in errors.items() if error <= min(distance, errors.get(causes[:-1], math.inf)) / NEARER
    }
