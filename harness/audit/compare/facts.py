"""What a candidate's run shows beside the reference's, in plain numbers: all that the rules of `findings` read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RowFacts:
    """The same rows in candidate and reference, at equal parameters."""

    outputs: float  # largest relative distance of the model's output for a row
    residual: float  # largest relative distance of a row's slope from a multiple of the reference's
    factors: tuple[tuple[float, ...], ...]  # these multiples, per micro-batch

    @property
    def spread(self) -> float:
        """Largest difference of two rows' factors within one micro-batch, relative to the largest factor."""
        size = max((abs(f) for part in self.factors for f in part), default=0.0)
        return max((max(part) - min(part) for part in self.factors), default=0.0) / size if size else 0.0


@dataclass(frozen=True, kw_only=True)
class OneTerm:
    """What one addend of the loss gave to the candidate's gradient, beside what it gave to the reference's."""

    distance: float  # relative to the whole reference gradient
    scale: float  # of the candidate's along the reference's
    weights: tuple[float, ...]  # of the reference's on those of the micro-batches; right: 1
    residual: float  # of the reference's outside their span, relative to the whole reference gradient
    condition: float
    off_rows: float = math.inf  # largest relative distance of a row's slope from a multiple of the reference's; infinite: unknown


@dataclass(frozen=True, kw_only=True)
class TermFacts:
    """The reference gradient as a sum of what each addend of the loss gave to the candidate's."""

    weights: tuple[float, ...]  # per addend; right: 1
    residual: float
    condition: float
    each: tuple[OneTerm, ...] = ()  # the addends one by one, where both losses have the same number of them


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One optimizer step of a candidate beside the reference's."""

    accumulation_steps: int
    ranks: int = 1
    track: str
    step: int
    roundoff: float = 0.0  # of the arithmetic in use
    gate: float  # largest relative distance of gradients that rounding explains
    distance: float  # of the gradients consumed
    scale: float
    cosine: float
    raw_distance: float  # of the gradients before clipping
    raw_scale: float
    raw_cosine: float
    clipped: bool  # clipping at the boundary changed the gradients (of either arm)
    backwards: int
    reference_backwards: int
    rows: str  # same, different, unknown
    fits: Mapping[str, float] = field(default_factory=dict)  # cause's prediction -> relative distance from what was seen
    weights: tuple[float, ...] = ()  # of the reference gradient on the micro-batch gradients
    condition: float = math.inf
    num_rows: int = 0  # of the window; 0 when unknown
    probed: bool = False  # whether rows and couplings have been looked at
    kept: bool = True  # whether the contributions of the window were kept
    rank_residual: float = math.inf  # of the reference gradient outside the span of what every rank's micro-batches gave
    rank_weights: tuple[tuple[float, ...], ...] = ()  # of the reference gradient on them, per micro-batch and rank; right: 1
    rank_condition: float = math.inf
    rescaled: tuple[float, ...] = ()  # norms after the gradients were scaled inside the window, and at the step
    lost: float = 0.0  # share of the reference's elements that are exactly 0 here, above what rounding does
    float16: bool = False
    partly: tuple[str, ...] = ()  # tensors that differ (too large, pointing alike) while others agree
    found_changed: bool = False  # the window began with gradients that no backward of this optimizer had left
    by_row: RowFacts | None = None  # only after a probe
    by_term: TermFacts | None = None  # only after a probe, where the loss is a sum
    held: bool = False  # the difference is gone when the parameters stay where they are
    same_at_one: bool = False  # the comparison is with an independent function, and N=1 differs from it as well
    cleared_inside: int = 0  # backwards before which gradients of the window, or of some tensors, had been cleared
    cleared_at_last: tuple[str, ...] = ()  # tensors whose gradients were cleared between the last backward and the step
    cleared_then_filled: bool = False  # cleared after the last backward, and the step has a gradient nevertheless
    loaded_inside: bool = False  # a checkpoint was loaded between the backwards of the window
    stale: bool = False
    active_clips_inside: int = 0
    clips_scaled: bool = False  # clipped with the loss scale still inside
    loss_scales: int = 1  # different ones in the window
    unscaled_inside: int = 0  # times a GradScaler unscaled gradients before the last backward of the window
    drawn_between: bool = False  # random numbers were drawn between all backwards of the window, outside the model
    broken_forwards: int = 0
    moves_inside: int = 0  # times the parameters moved between the backwards of the window
    reference_moves_inside: int = 0
    move_along_weights: float = math.nan  # cosine of that movement with the parameters
    low_precision: str | None = None  # format every element of the accumulated gradient fits in, unlike the reference's
    draws: bool = False
    outside_draws: bool = False
    dropout: bool = False
    batch_norm: bool = False
    mixed: bool = False  # in the reference, the model's output for one row depends on other rows; only after a probe
    buffers: tuple[str, ...] = ()  # of the model, that have moved otherwise than the reference's
    coupled: bool = False  # at N=1, a row's loss depends on the outputs of a row that is in another micro-batch here
    update_distance: float = 0.0
    update_gate: float = math.inf
    update_along_weights: float = math.nan  # residual of the difference of updates outside the direction of the parameters
    state_distance: float = 0.0
    state_gate: float = math.inf
    tensors: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)  # name -> distance, scale, cosine

    @property
    def gradients_agree(self) -> bool:
        """Before clipping as well: a fault that clipping hides is still one."""
        return self.distance <= self.gate and self.raw_distance <= self.gate

    @property
    def agrees(self) -> bool:
        return self.gradients_agree and self.update_distance <= self.update_gate and self.state_distance <= self.state_gate


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One optimizer's run of a candidate beside the reference's."""

    accumulation_steps: int
    track: str
    steps: int
    reference_steps: int
    idle_steps: int  # optimizer steps that moved nothing
    reference_idle_steps: int
    backwards: tuple[int, ...]  # per optimizer step
    reference_backwards: tuple[int, ...]
    pending: int  # backwards after the last step
    windows: tuple[str, ...]  # per aligned step: same, different, unknown
    repeated: tuple[int, ...]  # rows more often in the window than in the reference's run, per step
    never: int  # rows of the reference's run that the candidate never saw
    foreign: int  # rows of the candidate that the reference never saw
    lrs: tuple[tuple[float, ...], ...]
    reference_lrs: tuple[tuple[float, ...], ...]
    schedule_calls: tuple[int, ...]
    reference_schedule_calls: tuple[int, ...]
    lr_moves_inside: bool
    state_steps: tuple[float | None, ...]
    reference_state_steps: tuple[float | None, ...]
    horizon: float = 0.0  # steps for which the longest learning-rate schedule is laid out; 0 when unknown
    reference_horizon: float = 0.0
    shadow_distances: tuple[tuple[int, float, float], ...] = ()  # (step, distance, gate) of averaged copies of the weights
    shadow_updates: tuple[int, ...] = ()
    reference_shadow_updates: tuple[int, ...] = ()
    shadow_moves_inside: bool = False  # averaged copies moved between the backwards of a window
    reported: tuple[float, ...] | None = None
    reference_reported: tuple[float, ...] | None = None
    losses: tuple[float, ...] = ()  # differentiated, summed over the window
    reference_losses: tuple[float, ...] = ()
    broken_windows: tuple[int, ...] = ()  # steps whose window had a non-finite forward or gradient
    reference_broken_windows: tuple[int, ...] = ()
    resumed: tuple[tuple[int, int], ...] = ()  # (step, backwards lost) where a new optimizer took over
    skipped: tuple[int, ...] = ()  # steps that a GradScaler left out
    reference_skipped: tuple[int, ...] = ()
    norm_updates: tuple[int, ...] = ()  # of running statistics, so far, per step
    reference_norm_updates: tuple[int, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)  # steps, samples, tokens that the function returned
    reference_counts: Mapping[str, float] = field(default_factory=dict)
