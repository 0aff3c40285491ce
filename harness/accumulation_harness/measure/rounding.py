"""L1, the rounding in the target precision: is the accumulated gradient less accurate than the full batch's?

All gradients are taken at the initial weights and judged by their distance to the float64 referee, never by
their distance to each other: in 16-bit formats permuting a full batch moves almost nothing while correct accumulation does.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from accumulation_harness.config import Precision, TrialConfig
from accumulation_harness.judge.gates import CONFIRMED, LEAST, OUTLIER, ROUNDING_GATE
from accumulation_harness.judge.sequential import EARLY_LOOKS, ratio_limits, spent
from accumulation_harness.judge.signature import Comparison, Decomposition
from accumulation_harness.judge.verdict import Part, Rounding, rounding_failures
from accumulation_harness.measure.lock_step import REFERENCE, LockStep, Setting
from accumulation_harness.measure.probe import inside_causes
from accumulation_harness.recipes.recipe import Recipe
from accumulation_harness.referee.gradients import by_group, compare, decompose_rows, relative_distance
from accumulation_harness.referee.oracle import WHOLE, no_clipping, restore, snapshot
from accumulation_harness.results.measurements import Measurement

PERMUTATION_STREAM = 1  # of the trial's seed
WHOLE_MODEL = ""  # beside the names of parameter groups
DEPENDS_ON = (
    "workload", "norm", "precision", "device", "execution", "effective_batch", "accumulation_steps", "split",
    "permutations", "seed",
)  # fmt: skip


def measure(
    setting: Setting, recipes: Mapping[str, Recipe], ids: Tensor, *, early: Mapping[int, float] = EARLY_LOOKS
) -> dict[str, Rounding]:
    """Measure check L1, the rounding of every arm but the reference, on one window.

    An error is ||g - g_64|| / ||g_64||, where g is the gradient that the arm's optimizer receives, of the mean over the
    window's loss terms. Dropout and clipping are off. Permutations of the rows are made until all arms are decided.

    Args:
        setting: The setting of the trial.
        recipes: The recipes, by label.
        ids: [n] int64, the samples of the window.
        early: By number of permutations, the error probability that a limit may spend at each early look.

    Returns:
        The rounding of each arm, by label; NaN if the task does not compute in float64.
    """
    config = setting.config
    if setting.not_float64:  # there is nothing to measure it by
        return {label: Rounding() for label in recipes if label != REFERENCE}
    orders = Orders(setting, recipes, ids)
    orders.step(ids, orders.as_they_are)
    generator = setting.generator(PERMUTATION_STREAM)
    for done in range(1, config.permutations + 1):
        orders.step(ids[torch.randperm(len(ids), generator=generator)], orders.permuted)
        alpha = spent(done, config.permutations, early)
        if alpha is None:
            continue
        found = {label: orders.rounding(label, done, alpha) for label in recipes if label != REFERENCE}
        if all(_is_decided(own, config) for own in found.values()):
            break
    return found


class Orders:
    """The gradients that arms consume of one window at the initial weights, in one order of its rows after the other."""

    def __init__(self, setting: Setting, recipes: Mapping[str, Recipe], ids: Tensor) -> None:
        self.setting, self.recipes, self.window = setting, recipes, setting.exact.batch(ids)
        self.referee = setting.referee(dropout=False)
        self.state = setting.offload.put_all(snapshot(self.referee.model))
        self.exact = setting.offload.put(self.referee.gradient(self.state, self.window))
        setting.offload.release()
        arms = setting.arms(recipes, dropout=False, steps=1, clip_norm=no_clipping(setting.config.clip_norm))
        self.lock = LockStep(arms, setting.config.seed, offload=setting.offload, looks=False)
        # Beside what its micro-batches compute exactly: under BatchNorm a small one has other dead units than the window.
        self.inside = [WHOLE, *inside_causes(setting).values()][-1]
        self.natural = dict.fromkeys(recipes, Comparison())
        self.apart, self.zeros = dict.fromkeys(recipes, Decomposition()), dict.fromkeys(recipes, math.nan)
        self.places = {WHOLE_MODEL: [slice(None)], **by_group(arms[REFERENCE].model, arms[REFERENCE].optimizer)}
        self.errors: dict[str, dict[str, list[float]]] = {label: {name: [] for name in self.places} for label in recipes}
        self.factors: dict[str, list[float]] = {label: [] for label in recipes}

    def step(self, ids: Tensor, look: Callable[[str, Tensor], None]) -> None:
        """Take the window at the initial weights, and look at what each optimizer consumes before the next arm is at work."""

        @contextmanager
        def around(label: str) -> Iterator[None]:
            yield
            watch = self.lock.watches[label]
            if watch.gradient is not None:
                look(label, watch.gradient)
            watch.gradient = None
            restore(self.lock.arms[label].model, self.state)  # not every optimizer knows a rate of zero
            self.setting.offload.release()

        self.lock.step(ids, gradients="alone", around=around)

    def as_they_are(self, label: str, gradient: Tensor) -> None:
        """What the rows as they are say of an arm."""
        sizes = self.recipes[label].split(len(self.window))
        # Without such parts the window's gradient is every arm's.
        is_whole = self.inside == WHOLE
        own = self.exact if is_whole else self.referee.within(self.state, self.window, sizes, self.inside)[1]
        self.natural[label], self.zeros[label] = compare(gradient, self.exact), _zero_share(gradient, own)
        rows = self.referee.parts_by_rows(self.state, self.window, sizes)
        self.apart[label] = decompose_rows((gradient[place], parts) for place, parts in rows)

    def permuted(self, label: str, gradient: Tensor) -> None:
        """The error of each parameter group in another order, and the factor on the exact gradient."""
        self.factors[label].append(float(gradient @ self.exact / (self.exact @ self.exact)))
        for name, of_place in self.errors[label].items():
            of_place.append(max(relative_distance(gradient, self.exact, places=self.places[name]), LEAST))

    def rounding(self, label: str, done: int, alpha: float) -> Rounding:
        """What `done` permutations say of an arm; a limit of the interval errs with probability `alpha` at this look."""
        precision = self.setting.config.precision

        def part(own: list[float], full: list[float]) -> Part:
            found = Part(
                full_error=statistics.median(full) if full else math.nan, arm_error=statistics.median(own) if own else math.nan
            )
            if not (own and full) or precision == Precision.float64:
                return found
            low, high = ratio_limits(own, full, alpha)
            return dataclasses.replace(found, ratio=found.arm_error / found.full_error, low=low, high=high)

        errors, full_errors, factors = self.errors[label], self.errors[REFERENCE], self.factors[REFERENCE]
        parts = {name: part(own, full_errors[name]) for name, own in errors.items()}
        whole, natural = parts.pop(WHOLE_MODEL), self.natural[label]
        return Rounding(
            **vars(whole),
            groups=parts,
            permutations=done,
            scale=natural.scale,
            cosine=natural.cosine,
            full_factor=statistics.median(factors) if factors else math.nan,
            factor_range=sum(max(of) - min(of) for of in (factors, self.factors[label]) if of),
            **vars(self.apart[label]),
            skipped=2 * done - len(errors[WHOLE_MODEL]) - len(full_errors[WHOLE_MODEL]),
            dimensions=len(self.exact),
            zeros=self.zeros[label],
            full_zeros=self.zeros[REFERENCE],
        )


def _is_decided(own: Rounding, config: TrialConfig) -> bool:
    """Whether more permutations cannot change what the gates say of an arm, but with the probability that was spent."""
    if config.precision == Precision.float64:
        return True  # nothing is gated
    return own.high <= ROUNDING_GATE or own.low > ROUNDING_GATE


def measurement(setting: Setting, recipes: Mapping[str, Recipe], ids: Tensor) -> Measurement[dict[str, Rounding]]:
    """`measure`, as trials of our right arms share it: no optimizer changes the first gradient.

    Args:
        setting: The trial's task, initial weights and windows.
        recipes: Name of an arm -> its recipe.
        ids: [n] numbers of the window's samples.

    Returns:
        What identifies it, and how it is made.
    """
    settings = DEPENDS_ON + (("loss_scale",) if setting.config.precision == Precision.float16 else ())
    depends_on = partial(setting.identity, settings, [ids], arms=[*recipes])
    return Measurement("rounding", dict[str, Rounding], depends_on, partial(measure, setting, recipes, ids))


def confirmed(
    found: Mapping[str, Rounding],
    judged: Collection[str],
    precision: Precision,
    others: Sequence[Callable[[Collection[str]], Mapping[str, Rounding]]],
) -> dict[str, Rounding]:
    """Confirm in other windows, one after the other, what rejects an arm in the first.

    A ReLU that flips by rounding multiplies the error of one window, in the right arm or in the full batch, whatever the
    order of the rows; in another window it is another sample's, or none. Rounding that is the loop's own is found in every
    window. A window in which it is the full batch that flips acquits nobody.

    Args:
        found: Label -> rounding in the first window.
        judged: Labels of the arms that are judged.
        precision: The precision under test.
        others: Each measures the arms of the labels that it is given in a window of its own.

    Returns:
        Label -> the rounding that decides, and in how many windows it was measured.
    """
    present, tried = dict(found), dict.fromkeys(judged, 1)
    for measured in others:
        rejected = {label for label in judged if tried[label] < CONFIRMED and rounding_failures(precision, present[label])}
        for label, own in (measured(rejected) if rejected else {}).items():
            if own.full_error <= OUTLIER * present[label].full_error:
                tried[label] += 1
                present[label] = dataclasses.replace(own, windows=tried[label])
    return present


def _zero_share(gradient: Tensor, exact: Tensor) -> float:
    """Of the entries of `exact` ([P]) that are not zero, the share that is zero in `gradient`."""
    if not bool(exact.count_nonzero()):
        return math.nan
    return float(((gradient == 0) & (exact != 0)).sum() / (exact != 0).sum())
