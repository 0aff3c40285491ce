"""How a window becomes one optimizer step: the loop under test, which is the loop everyone writes.

A recipe is a value: how the window is cut, what the loss is divided by, and which stages run around each micro-batch and at the
window's boundary. The right recipe runs none around a micro-batch; a wrong one moves, drops or repeats a stage.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from accumulation_harness.config import (
    OPTIMIZERS,
    ConfigError,
    Execution,
    OptimizerConfig,
    OptimizerName,
    Precision,
    ScheduleConfig,
    ScheduleName,
    targets,
)
from accumulation_harness.recipes import precision
from accumulation_harness.recipes.micro_batch import SplitPlan
from accumulation_harness.referee.oracle import CLIP_EPSILON
from accumulation_harness.workloads import Batch, Workload

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Stage = Callable[["Arm"], None]
Normalise = Callable[[Sequence[Tensor], int], Sequence[Tensor]]


def window_total(terms: Sequence[Tensor], accumulation_steps: int) -> Sequence[Tensor]:
    """Divide every micro-batch's summed loss by the loss terms of the whole window: the correct normaliser.

    g = (1 / W) sum_k sum_{i in k} grad l_i, with W the terms of the window.

    Args:
        terms: Loss terms of each micro-batch, 0-dim.
        accumulation_steps: N, which it does not need.

    Returns:
        W for each micro-batch.
    """
    return [torch.stack(list(terms)).sum()] * len(terms)


def _total_loss(contributions: Sequence[Tensor]) -> Tensor:
    """The window's loss is the sum of what its micro-batches contributed."""
    return torch.stack(list(contributions)).sum()


def _prepared_whole(workload: Workload, window: Batch, chunks: Sequence[slice]) -> list[Batch]:
    """What a loss takes from all samples is taken from the window's, before it is cut."""
    whole = workload.prepared(window)
    return [whole.rows(chunk) for chunk in chunks]


def _own_share(own: Tensor, normaliser: Tensor) -> Tensor:
    """A penalty is added with the micro-batch's weight n_k / W, so that a window has it once."""
    return own.double() / normaliser


def forward(arm: Arm, micro_batch: Batch) -> Any:
    """The model's outputs, [n, ...] for n samples.

    Args:
        arm: The arm that trains.
        micro_batch: Its n samples.

    Returns:
        What the workload's `losses` take.
    """
    return arm.workload.forward(arm.model, micro_batch)


def unscale(arm: Arm) -> None:
    """Divide the gradients by the loss scale, in place; nothing where there is none.

    Args:
        arm: The arm that trains.
    """
    arm.scaler.unscale_(arm.optimizer)


def clip(arm: Arm) -> None:
    """Clip the window's gradient to L2 norm `arm.clip_norm`, where there is one, and note whether that changed it.

    Args:
        arm: The arm that trains.
    """
    if arm.clip_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(arm.model.parameters(), arm.clip_norm)
        arm.clipped.append(norm > arm.clip_norm)


def step(arm: Arm) -> None:
    """Take the optimizer step; the scaler skips it where a gradient is not finite.

    Args:
        arm: The arm that is trained.
    """
    arm.scaler.step(arm.optimizer)


def update_scale(arm: Arm) -> None:
    """Let the scaler grow or halve its loss scale.

    Args:
        arm: The arm that trains.
    """
    arm.scaler.update()


def update_ema(arm: Arm) -> None:
    """Move the exponential moving average of the weights, where the trial keeps one.

    Args:
        arm: The arm that trains.
    """
    if arm.ema is not None:
        arm.ema.update_parameters(arm.model)


def step_schedule(arm: Arm) -> None:
    """Move the learning-rate schedule by one optimizer step.

    Args:
        arm: The arm that trains.
    """
    arm.schedule.step()


def clear(arm: Arm) -> None:
    """Drop the gradients, so that the next window starts from none.

    Args:
        arm: The arm that is trained.
    """
    arm.optimizer.zero_grad(set_to_none=True)


BOUNDARY: tuple[Stage, ...] = (unscale, clip, step, update_scale, update_ema, step_schedule, clear)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a window becomes one optimizer step."""

    accumulation_steps: int
    split: SplitPlan
    arrange: Callable[[Batch, int], Batch] | None = None  # (window, optimizer step) -> the window in another order
    prepare: Callable[[Workload, Batch, Sequence[slice]], list[Batch]] = _prepared_whole
    forward: Callable[[Arm, Batch], Any] = forward
    normalise: Normalise = window_total
    auxiliary_share: Callable[[Tensor, Tensor], Tensor] = _own_share  # (own loss terms, normaliser) -> factor of the penalty
    report: Callable[[Sequence[Tensor]], Tensor] = _total_loss
    before_micro_batch: tuple[Stage, ...] = ()
    after_backward: tuple[Stage, ...] = ()
    at_boundary: tuple[Stage, ...] = BOUNDARY
    execution: Execution = Execution.eager  # of the model, in the precision under test
    widens: bool = False  # whether a loop narrows its numbers to float32 inside, and is widened in float64
    clip_epsilon: float = CLIP_EPSILON  # that a loop adds to the norm it clips by
    loop: Callable[[Arm, Batch], Tensor] | None = None  # one optimizer step, in place of the stages (`hand_written.py`)


@dataclass(kw_only=True, eq=False)
class Arm:
    """A model with its optimizer, trained by one recipe."""

    recipe: Recipe
    workload: Workload
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    precision: Precision
    device: torch.device
    clip_norm: float | None
    ema: AveragedModel | None = None
    windows: int = 0  # taken so far
    position: int = 0  # of the micro-batch within its window
    samples: int = 0  # counted so far, as a trainer's progress line would
    seen: list[Tensor] = field(default_factory=list)  # sample ids of the micro-batches of the last window
    strangers: int = 0  # rows that went through the last window's backwards beside its samples, and are none
    knows_rows: bool = True  # whether `seen` is what was seen: a transform of torch.func may hide it
    clipped: list[Tensor] = field(default_factory=list)  # whether clipping was active, one flag per call
    loss_resolution: float = 0.0  # relative, of a loss that is reported in a narrower format than the arm computes in
    memory: dict[str, Any] = field(default_factory=dict)  # what a stage keeps for later; the right recipe keeps nothing

    def micro_batches(self, window: Batch) -> Iterator[tuple[Batch, Tensor]]:
        """The window's micro-batches in order, each with the number its summed loss is divided by."""
        if self.recipe.arrange is not None:
            window = self.recipe.arrange(window, self.windows)
        edges = pairwise(accumulate(self.recipe.split(len(window)), initial=0))
        parts = self.recipe.prepare(self.workload, window, [slice(*edge) for edge in edges])
        terms = [self.workload.num_terms(part).sum() for part in parts]
        self.seen = [part.ids for part in parts]
        yield from zip(parts, self.recipe.normalise(terms, self.recipe.accumulation_steps), strict=True)


def run(stages: Iterable[Stage], arm: Arm) -> None:
    """Run the stages in order.

    Args:
        stages: Functions of the arm.
        arm: The arm that trains.
    """
    for stage in stages:
        stage(arm)


def end_window(arm: Arm, window: Batch) -> None:
    """Run the stages of the window's boundary, and count it.

    Args:
        arm: The arm that is trained; its windows and samples are counted up.
        window: The samples that it consumed.
    """
    run(arm.recipe.at_boundary, arm)
    arm.windows += 1
    arm.samples += len(window)


def take_step(arm: Arm, window: Batch) -> Tensor:
    """Train one window: N forwards and backwards, and one optimizer step.

    Args:
        arm: The arm that is trained, in place.
        window: All of its samples, B of them in a full window.

    Returns:
        The window's loss as the recipe reports it: 0-dim, float64, detached, on the device.
    """
    if arm.recipe.loop is not None:
        return arm.recipe.loop(arm, window)
    contributions = []
    for position, (micro_batch, normaliser) in enumerate(arm.micro_batches(window)):
        arm.position = position
        run(arm.recipe.before_micro_batch, arm)
        with precision.autocast(arm.precision, arm.device):
            outputs = arm.recipe.forward(arm, micro_batch)
            loss = arm.workload.losses(outputs, micro_batch).sum() / normaliser
            if arm.workload.penalty:
                own = arm.workload.num_terms(micro_batch).sum()
                penalty = arm.workload.auxiliary(dict(arm.model.named_parameters()))
                loss = loss + arm.recipe.auxiliary_share(own, normaliser).to(loss) * penalty
        arm.scaler.scale(loss).backward()  # gradients add up in .grad
        run(arm.recipe.after_backward, arm)
        contributions.append(loss.detach().double())
    end_window(arm, window)
    return arm.recipe.report(contributions)


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer, PyTorch's in its default implementation or the user's own, with the usual two groups.

    Weight matrices, and biases with the affine parameters of normalisations: trainers decay them differently; here both
    alike.

    Args:
        config: Name, learning rate, weight decay and what the optimizer has besides.
        parameters: The model's parameters.

    Returns:
        The optimizer; its groups are named `matrices` and `vectors`, an empty one is left out.
    """
    everything = list(parameters)
    named = {"matrices": [p for p in everything if p.dim() > 1], "vectors": [p for p in everything if p.dim() <= 1]}
    groups = [{"params": group, "name": name} for name, group in named.items() if group]
    if config.name == OptimizerName.custom:
        return _own_optimizer(config, groups)
    ours = OPTIMIZERS[config.name]
    made: torch.optim.Optimizer = getattr(torch.optim, ours.made_by)(
        groups, lr=config.lr, weight_decay=config.weight_decay, **ours.arguments(config)
    )
    return made


def _own_optimizer(config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """`target(groups, lr=..., weight_decay=... if it takes one, **args)`; ConfigError where that gives no optimizer."""
    field, target = "optimizer.target", config.target
    assert target is not None
    make = targets.load(field, target)
    arguments: dict[str, Any] = {"lr": config.lr, **config.args}
    with targets.expecting(field, target, "a class or function with a signature"):
        takes = inspect.signature(make).parameters
    if "weight_decay" in takes:
        arguments.setdefault("weight_decay", config.weight_decay)
    elif config.weight_decay:
        raise ConfigError("optimizer.weight_decay", config.weight_decay, f"0: {config.label} takes none")
    with targets.expecting(field, target, "an optimizer made of parameter groups, lr and optimizer.args"):
        made = make(groups, **arguments)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(field, target, f"a torch.optim.Optimizer, got {type(made).__name__}")
    if not hasattr(made, "_optimizer_step_pre_hooks"):
        raise ConfigError(field, target, "an optimizer that calls super().__init__(): hooks on its steps do not work otherwise")
    if any(each.default is each.empty and each.kind not in VARIADIC for each in inspect.signature(made.step).parameters.values()):
        raise ConfigError(
            field, target, "an optimizer whose step() takes the gradients that are there; this one asks for a closure"
        )
    set_mode(made, "train")
    return made


def set_mode(optimizer: torch.optim.Optimizer, mode: Literal["train", "eval"]) -> None:
    """Move the weights to where a schedule-free optimizer trains, or to where it is evaluated; others have no such modes.

    Args:
        optimizer: Any optimizer.
        mode: `train` or `eval`.
    """
    change = getattr(optimizer, mode, None)
    if callable(change):
        change()


@contextmanager
def evaluated(arm: Arm) -> Iterator[None]:
    """Evaluate inside: layers in evaluation mode, and the weights that a schedule-free optimizer evaluates with.

    Args:
        arm: The arm; afterwards it is as before, to the bit.

    Yields:
        Nothing.
    """
    kept = [(p, p.detach().clone()) for p in arm.model.parameters()] if hasattr(arm.optimizer, "eval") else []
    arm.model.eval()
    set_mode(arm.optimizer, "eval")
    try:
        yield
    finally:
        arm.model.train()
        set_mode(arm.optimizer, "train")
        with torch.no_grad():
            for p, value in kept:
                p.copy_(value)


def make_schedule(
    config: ScheduleConfig, optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Make the learning rate's schedule: linear warm-up, then constant or half a cosine to 0.

    With w warm-up steps of T the factor of optimizer step t is (t + 1) / (w + 1) for t < w; then 1, or (1 + cos(pi (t - w) /
    (T - w))) / 2.

    Args:
        config: Its name and w.
        optimizer: Whose learning rate it sets.
        total_steps: T, in optimizer steps.

    Returns:
        A schedule, to be stepped once a window.
    """

    def factor(t: int) -> float:
        if t < config.warmup_steps:
            return (t + 1) / (config.warmup_steps + 1)
        if config.name == ScheduleName.constant:
            return 1.0
        progress = (t - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
