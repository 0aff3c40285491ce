"""What the function itself hands over, of whatever library: it needs no torch, and is all that is seen where there is none."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import Self

from accumulation_harness.audit.evidence import (
    SHORT,
    WATCH,
    Backward,
    Intervention,
    Run,
    Step,
    Track,
    Vector,
    norms_by,
    of_few_digits,
    rounded_to,
)
from accumulation_harness.audit.observe.arrays import counts_in, leaves, like, losses_in, read, rebuilt
from accumulation_harness.audit.observe.other_layers import OtherLayers
from accumulation_harness.audit.observe.places import Places
from accumulation_harness.audit.observe.variables import Variables
from accumulation_harness.observe.patches import Patches

HANDED = "arrays handed over"
OBSERVER = "the audit's own observer"  # with which an error begins that is none of the function's
LONG = 2.0  # seconds of a run
LENT = 0.1  # relative; by which other weights are others
FEW_SHOWN = 4  # steps whose numbers are asked for the format that they were rounded to
FEW_AGAIN = 2  # windows of the next epoch that are looked at


class EnoughSteps(BaseException):
    """The run has taken as many optimizer steps as were asked for, and is ended by this."""


@dataclass(frozen=True)
class Most:
    """Optimizer steps after which a run is ended.

    With `few`, so many of them will do, where they take long, or where rows have come again by then: an epoch has ended.
    """

    steps: float = math.inf
    few: int | None = None

    def is_over(self, steps: int, seconds: float, again: float) -> bool:
        """Whether no step is taken after so many, in so many seconds, of which so many had rows of earlier ones."""
        return steps >= self.steps or (self.few is not None and steps >= self.few and (seconds > LONG or again >= FEW_AGAIN))


class Handed:
    """Makes a `Track` of trees of arrays that the function hands over."""

    def __init__(self, what: Intervention = WATCH) -> None:
        self.track = Track(name=HANDED, tensors=())
        self.arithmetic = 0.0  # unit roundoff that the numbers themselves show
        self.of_weights_alone = True
        self.what = what
        self._weights: Vector | None = None  # the last ones
        self._gradient: Vector | None = None  # of the step under way
        self._stood: Vector | None = None  # the loop's own ones, when they were last looked at
        self._gone: Vector | None = None  # how far they had gone by then
        self._contributions: list[Backward] = []
        self._sample: Places | None = None
        self._roundoffs: tuple[float, ...] = ()

    @property
    def ends_a_step(self) -> bool:
        """Whether weights that come now are those after a step; the first ones are those before training."""
        return self._weights is not None

    @property
    def follows(self) -> bool:
        """Whether the run is on another one's weights, and has begun."""
        return self.what.follow is not None and self.ends_a_step

    def stands(self, weights: Vector | None) -> None:
        """Before the next contribution, or the gradient that the step takes, the loop's own variables hold these weights [P]."""
        now = None if weights is None or self._sample is None else self._sample.pick(weights)
        before, self._stood, self._gone = self._stood, now, None
        if now is not None and before is not None and now.shape == before.shape and not np.array_equal(now, before):
            self._gone = now - before

    def take(self, weights: Any = None, gradient: Any = None, contribution: Any = None) -> Any:
        """Copy what is given, as `audit` explains.

        Args:
            weights: Named arrays after a step, or before the first.
            gradient: Named arrays of the gradient that the optimizer takes.
            contribution: Named arrays of what a micro-batch gave.

        Returns:
            The weights to go on with, which are these or a rounding away; None where none were given.

        Raises:
            ValueError: Nothing is given, or what has other names or sizes than before.
        """
        given = {"weights": weights, "gradient": gradient, "contribution": contribution}
        if all(tree is None for tree in given.values()):
            raise ValueError("hand: expected weights, gradient or contribution, got none of them")
        vectors = {what: self._vector(what, tree) for what, tree in given.items() if tree is not None}
        if (given_now := vectors.get("contribution")) is not None:
            finite, moved, self._gone = bool(np.isfinite(given_now).all()), self._gone, None
            self._contributions.append(Backward(start="manual", contribution=given_now, finite=finite, moved=moved))
        self._gradient = vectors.get("gradient", self._gradient)
        self.of_weights_alone &= vectors.keys() == {"weights"}
        if "weights" not in vectors:
            return None
        if self._weights is not None:
            self._end_step(self._weights, vectors["weights"])
        led = self._led()
        moved = weights if led is None and not self.what.perturb else self._moved(weights, led)
        self._weights = self._stood = vectors["weights"] if moved is weights else self._vector("weights", moved)
        return moved

    def _led(self) -> Vector | None:
        """The weights that the followed run had by now, where it kept all of them; or those before training."""
        if self.what.freeze_weights and self.track.steps:
            return None if self.track.steps[0].kept else self.track.steps[0].before
        followed, step = self.what.follow, self.what.led(len(self.track.steps))
        track = next((one for one in followed.tracks if one.name == HANDED), None) if followed is not None else None
        if track is None or step > len(track.steps) or track.steps[0].kept:
            return None
        if [size for _, size in track.tensors] != [size for _, size in self.track.tensors]:
            return None  # names may have been counted on
        return track.steps[step - 1].after if step else track.steps[0].before

    def _moved(self, weights: Any, led: Vector | None) -> Any:
        """By a rounding of each number, from where the followed run stood."""
        draws, at = np.random.default_rng(len(self.track.steps)), 0
        made = {}
        for path, leaf in leaves(weights).items():
            values, u = read(leaf)
            if led is not None:
                values = led[at : (at := at + values.size)]
            apart = LENT if self.what.leaves == len(self.track.steps) else self.what.perturb * max(u, self.what.arithmetic)
            made[path] = like(leaf, values * (1 + apart * draws.choice((-1.0, 1.0), size=values.size)))
        return rebuilt(weights, made)

    def _vector(self, what: str, tree: Any) -> Vector:
        arrays = {path: read(leaf) for path, leaf in leaves(tree).items()}
        tensors = tuple((name, values.size) for name, (values, _) in arrays.items())
        if not tensors:
            raise ValueError(f"{what}: expected named arrays, got none")
        if self._sample is None:
            self._sample = Places([size for _, size in tensors])
            self._roundoffs = tuple(u for _, u in arrays.values())
            self.track.tensors = tensors
        if tensors != self.track.tensors:
            raise ValueError(f"{what}: expected the same named arrays each time, {self.track.tensors[:8]}, got {tensors[:8]}")
        return self._sample.pick(np.concatenate([values for values, _ in arrays.values()]))

    def _end_step(self, before: Vector, after: Vector) -> None:
        """Where no gradient was handed over the update, with its sign turned, stands for it."""
        assert self._sample is not None
        backwards, self._contributions = self._contributions, []
        parts = [b.contribution for b in backwards if b.contribution is not None]
        if parts and self._gradient is None:
            raise ValueError("hand: expected the gradient that the optimizer takes, beside contributions and before the weights")
        total = np.sum(parts, axis=0) if parts else None
        shown = parts[0] if parts else self._gradient
        few = () if shown is None or len(self.track.steps) >= FEW_SHOWN else [of_few_digits(shown, p) for p in SHORT]
        found = [rounded_to(self._sample.counts, values) for values in few]
        self.arithmetic = max(self.arithmetic, *self._roundoffs, *found)
        gradient, self._gradient = before - after if self._gradient is None else self._gradient, None
        spreads = norms_by(self._sample.counts, np.sum(np.abs(parts), axis=0)) if parts else None
        self.track.steps.append(
            Step(
                tensors=self.track.tensors,
                kept=() if self._sample.whole else self._sample.counts,
                total=total,
                spreads=(0.0,) * len(self.track.tensors) if spreads is None else tuple(spreads.tolist()),
                roundoffs=self._roundoffs,
                gradient=gradient,
                before=before,
                after=after,
                moved=self._gone,
                backwards=tuple(backwards),
            )
        )
        self._gone = None


EVERY = Most()


class HandRecorder:
    """Context in which one run is watched by what it hands over alone; `run` holds the evidence afterwards."""

    def __init__(self, run: Run, intervention: Intervention = WATCH, most: Most = EVERY) -> None:
        """`EnoughSteps` is raised where a step begins after `most` of them."""
        self.run, self.most, self.handed = run, most, Handed(intervention)
        self.steps, self.began = 0, 0.0
        self.is_over = False
        self._others = OtherLayers(run, intervention.disable, lambda: self.handed.ends_a_step)
        self._patches, self._variables = Patches(), Variables()

    def __enter__(self) -> Self:
        self._generators = random.getstate(), np.random.get_state()
        self.take_out()
        return self

    def __exit__(self, *_: object) -> None:
        """Put the shared generators back."""
        of_python, of_numpy = self._generators
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        self.put_back()
        self.finish()

    def take_out(self) -> None:
        """What of libraries other than torch the intervention disables."""
        self._patches.replace(self._others.wraps())
        self._others.forget_compiled()

    def put_back(self) -> None:
        """What was taken out."""
        self._patches.restore()
        self._others.forget_compiled()

    def finish(self) -> None:
        """Add the track of what was handed over to the run's."""
        if self.handed.track.steps:
            if not self.run.held.states:
                self._variables.held.settle()
                self.run.held = self._variables.held
            self.run.tracks.append(self.handed.track)
            self.run.round_by(self.handed.arithmetic)

    def hand(self, weights: Any = None, gradient: Any = None, contribution: Any = None) -> Any:
        """Take trees of arrays: what hooks of torch do not see. Weights are returned, to go on with."""
        if weights is not None and self.handed.ends_a_step:
            self.count_step()
        elif weights is None and self.handed.follows:
            self.handed.stands(self._variables.weights())
        moved = self.handed.take(weights, gradient, contribution)
        if weights is not None:
            self._variables.look(moved)
        return moved

    def count_step(self) -> None:
        """End the run where a step goes beyond the most."""
        self.look_whether_over()
        if self.is_over:
            raise EnoughSteps
        self.steps += 1

    def look_whether_over(self) -> None:
        """By the number of steps, and the seconds since the first."""
        self.began = self.began or time.monotonic()
        self.is_over = self.most.is_over(self.steps, time.monotonic() - self.began, 0)

    def returned(self, result: Any) -> None:
        """Take what the function has returned."""
        self.run.reported, self.run.counts = losses_in(result), counts_in(result)
