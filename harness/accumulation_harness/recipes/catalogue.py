"""The catalogue: every fault under its cause, where it changes the computation, and errors of a given size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from accumulation_harness.config import ConfigError, Data, LastWindow, Precision, Split, State, TrialConfig, state_of
from accumulation_harness.judge.cause import MEANINGS, Cause
from accumulation_harness.recipes import faults
from accumulation_harness.recipes.faults import Transform
from accumulation_harness.recipes.recipe import Arm, Recipe
from accumulation_harness.referee.gradients import flatten


@dataclass(frozen=True)
class Fault:
    """A wrong way to accumulate."""

    apply: Transform  # under the name of its cause
    changes: Callable[[TrialConfig], bool]  # whether it changes the computation of such a trial at all

    @property
    def cause(self) -> Cause:
        """What a diagnosis should call it."""
        return Cause(self.apply.__name__)

    @property
    def id(self) -> str:
        """Its number in the catalogue."""
        return MEANINGS[self.cause].fault

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return (self.apply.__doc__ or "").strip().splitlines()[0]


def always(config: TrialConfig) -> bool:
    """The condition of a fault that changes every trial.

    Args:
        config: The trial.

    Returns:
        True.
    """
    return True


def _several(config: TrialConfig) -> bool:
    return max(config.accumulation_steps) > 1


def _unequal_terms(config: TrialConfig) -> bool:
    """Some micro-batches of some window have different numbers of loss terms: text, weights, ragged splits, or a remainder."""
    weighted = config.workload.data in (Data.text, Data.class_weights, Data.ignored_labels)
    return weighted or config.split == Split.ragged or _short_windows(config)


def _short_windows(config: TrialConfig) -> bool:
    return config.data.last_window == LastWindow.keep and NUM_DIGITS % config.effective_batch > 0


def _scaled(config: TrialConfig) -> bool:
    return config.precision == Precision.float16


NUM_DIGITS = 1500  # training samples of the digits, on which the matrix runs

FAULTS = tuple(
    Fault(*both)
    for both in {
        faults.loss_not_divided: _several,
        faults.loss_divided_twice: _several,
        faults.mean_of_means: _unequal_terms,
        faults.short_window_divided_by_n: _short_windows,
        faults.window_misplaced: always,
        faults.gradients_cleared_in_window: _several,
        faults.gradients_not_cleared: always,
        faults.step_every_micro_batch: _several,
        faults.schedule_per_micro_batch: _several,
        faults.clip_per_micro_batch: always,  # L0 has active clipping in every trial
        faults.clip_before_unscale: _scaled,
        faults.scaler_updated_in_window: _scaled,
        faults.micro_batches_lost: _several,
        faults.low_precision_accumulator: always,
        faults.underflow_from_division: _scaled,
        faults.loss_report_differs: _several,
        faults.weight_decay_per_micro_batch: lambda config: config.optimizer.weight_decay > 0,
        faults.optimizer_state_per_micro_batch: lambda config: state_of(config.optimizer.name) != State.none,
        faults.ema_per_micro_batch: lambda config: config.ema_decay is not None,
        faults.auxiliary_loss_scale: lambda config: config.workload.penalty > 0 and _several(config),
        faults.cached_weights_stale: always,
        faults.non_finite_micro_batch: _several,
        faults.resume_in_window: _several,
        faults.counter_wrong: always,
        faults.samples_repeated: always,
        faults.foreign_gradients: always,
        faults.normaliser_depends_on_split: lambda config: config.workload.data == Data.policy and _several(config),
    }.items()
)

PLANTED = ("scale", "direction", "tensor")
LARGEST_ERROR = 1e4  # relative, that a planted one may have: gradients have to stay within the format


def planted(kind: str, size: float, precision: Precision) -> Transform:
    """Plant a relative error ||a' - a|| / ||a|| of a chosen size in the accumulated gradient.

    Args:
        kind: Where: in its `scale`, in a random `direction`, or in the first tensor alone.
        size: The relative error.
        precision: Arms of this precision have it, and no others: one in float64 would show it to L0 at once.

    Returns:
        The transform from the right recipe to the wrong one.
    """

    def plant(arm: Arm) -> None:
        if arm.precision != precision:
            return
        gradients = [p.grad for p in arm.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(flatten(gradients))
        if kind == "scale":
            errors = [g.clone() for g in gradients]
        elif kind == "direction":
            generator = torch.Generator().manual_seed(arm.windows)
            errors = [torch.randn(g.shape, generator=generator, dtype=torch.float64).to(g) for g in gradients]
        else:
            errors = [gradients[0].clone(), *(torch.zeros_like(g) for g in gradients[1:])]
        length = torch.linalg.vector_norm(flatten(errors))
        for g, error in zip(gradients, errors, strict=True):
            g.add_((error.double() * (size * norm / length)).to(g))

    def apply(recipe: Recipe) -> Recipe:
        return dataclasses.replace(recipe, at_boundary=(plant, *recipe.at_boundary))

    return apply


def named(name: str, precision: Precision) -> Transform:
    """Look up a fault.

    Args:
        name: A cause of the catalogue, or a planted error: `direction@1e-6`.
        precision: The precision of the trial. Its arms alone have a planted error: one in float64 would show it at once.

    Returns:
        The transform from the right recipe to the wrong one.

    Raises:
        ConfigError: There is no such fault, or a planted error is larger than `LARGEST_ERROR`.
    """
    kind, _, size = name.partition("@")
    if kind in PLANTED and _is_size(size):
        return planted(kind, float(size), precision)
    for fault in FAULTS:
        if fault.cause == name:
            return fault.apply
    known = ", ".join(["all", *(f"{kind}@SIZE" for kind in PLANTED), *(fault.cause for fault in FAULTS)])
    raise ConfigError("faults", name, f"one of {known}, with a SIZE up to {LARGEST_ERROR:g}")


def _is_size(text: str) -> bool:
    try:
        return 0 < float(text) <= LARGEST_ERROR
    except ValueError:
        return False


def names(config: TrialConfig) -> list[str]:
    """List the faults that a trial asks for.

    Args:
        config: The settings of the trial.

    Returns:
        Names of faults; `all` is replaced by the causes of the catalogue.
    """
    return [cause for name in config.faults for cause in ([fault.cause for fault in FAULTS] if name == "all" else [name])]


def expected(config: TrialConfig) -> dict[str, bool]:
    """Say which of a trial's faults must be found there.

    Args:
        config: The settings of the trial.

    Returns:
        Fault -> whether it changes the computation under these settings, so that missing it would be a miss.
    """
    by_cause: dict[str, Fault] = {fault.cause: fault for fault in FAULTS}
    return {name: name not in by_cause or by_cause[name].changes(config) for name in names(config)}
