"""Faults: each a function from a right recipe to a wrong one. The engine knows none of them.

The threads named are where real projects shipped the fault.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from accumulation_harness.recipes.recipe import (
    BOUNDARY,
    Arm,
    Recipe,
    Stage,
    clear,
    clip,
    step,
    step_schedule,
    unscale,
    update_ema,
    update_scale,
)
from accumulation_harness.workloads import Batch, Forward, Workload

Transform = Callable[[Recipe], Recipe]
SHRINK = 2.0**27


def _in_place_of(part: str) -> Callable[[Callable[..., Any]], Transform]:
    """The fault that has the function decorated as that part of a recipe; of stages, as the only one there."""

    def made(wrong: Callable[..., Any]) -> Transform:
        @functools.wraps(wrong)
        def apply(recipe: Recipe) -> Recipe:
            is_stage = part in ("before_micro_batch", "after_backward")
            changed: dict[str, Any] = {part: (wrong,) if is_stage else wrong}
            return dataclasses.replace(recipe, **changed)

        return apply

    return made


def _boundary_without(*dropped: Stage) -> tuple[Stage, ...]:
    """The right stages at the window's boundary but for some."""
    return tuple(stage for stage in BOUNDARY if stage not in dropped)


@_in_place_of("normalise")
def loss_not_divided(terms: Sequence[Tensor], num: int) -> Sequence[Tensor]:
    """Plant the fault that adds the micro-batches' mean losses without 1/N (nanoGPT#168, XLM#217).

    g = sum_k (1 / n_k) sum_{i in k} grad l_i, N times the gradient where micro-batches are equal.

    Args:
        terms: Loss terms of each micro-batch, 0-dim.
        num: N, which it ignores.

    Returns:
        The divisor of each micro-batch's summed loss.
    """
    return terms


def loss_divided_twice(recipe: Recipe) -> Recipe:
    """Divided by N in the trainer and again in the library below it (accelerate#3533, transformers#40052).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """

    def too_often(terms: Sequence[Tensor], num: int) -> Sequence[Tensor]:
        return [total * num for total in recipe.normalise(terms, num)]

    return dataclasses.replace(recipe, normalise=too_often)


@_in_place_of("normalise")
def mean_of_means(terms: Sequence[Tensor], num: int) -> Sequence[Tensor]:
    """Means over micro-batches averaged although their numbers of loss terms differ (transformers#34191, torchtune#1842).

    Args:
        terms: Loss terms of each micro-batch.
        num: Loss terms of the window.

    Returns:
        What each micro-batch's sum is divided by, in place of `num`.
    """
    return [n * len(terms) for n in terms]


def short_window_divided_by_n(recipe: Recipe) -> Recipe:
    """Sums divided by the terms of a full window, also where the epoch's last window is short (transformers#39659).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """

    def as_if_full(terms: Sequence[Tensor], num: int) -> Sequence[Tensor]:
        return [total.double() * num / len(terms) for total in recipe.normalise(terms, num)]  # an integer would become float32

    def own_terms_times_n(terms: Sequence[Tensor], num: int) -> Sequence[Tensor]:
        return as_if_full(terms, num) if len(terms) < num else recipe.normalise(terms, num)

    return dataclasses.replace(recipe, normalise=own_terms_times_n)


@_in_place_of("arrange")
def window_misplaced(window: Batch, _step: int) -> Batch:
    """The last samples of a window never reach the step (burn#5695, Swin-Transformer#185).

    Args:
        window: The samples of the window.
        _step: Not used.

    Returns:
        The window without its last eighth.
    """
    return window.rows(slice(0, max(1, len(window) - len(window) // 8 - 1)))


def gradients_cleared_in_window(recipe: Recipe) -> Recipe:
    """`zero_grad` before every micro-batch: only the last one counts (accelerate#1299, opacus#93).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """
    return dataclasses.replace(recipe, before_micro_batch=(clear,))


def gradients_not_cleared(recipe: Recipe) -> Recipe:
    """No `zero_grad` at the boundary: stale gradients stay in the sum (tez#38, pytorch#47175).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """
    return dataclasses.replace(recipe, at_boundary=_boundary_without(clear))


def step_every_micro_batch(recipe: Recipe) -> Recipe:
    """Plant the fault that steps the optimizer after every backward (Lightning#21808).

    Args:
        recipe: A right recipe.

    Returns:
        The wrong one: N steps a window, each with the gradient of one micro-batch; the schedule still moves once a window.
    """
    return dataclasses.replace(
        recipe, after_backward=(unscale, clip, step, update_scale, clear), at_boundary=(update_ema, step_schedule)
    )


def schedule_per_micro_batch(recipe: Recipe) -> Recipe:
    """The learning-rate schedule ticks N times per optimizer step (accelerate#963, diffusers#2632).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """
    return dataclasses.replace(recipe, after_backward=(step_schedule,), at_boundary=_boundary_without(step_schedule))


def clip_per_micro_batch(recipe: Recipe) -> Recipe:
    """The running sum is clipped after every backward (transformers#986, accelerate#641).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """
    return dataclasses.replace(recipe, after_backward=(clip,))


def clip_before_unscale(recipe: Recipe) -> Recipe:
    """Clipping sees the scaled gradients (TorchSSL#59, transformers#40799).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """
    return dataclasses.replace(recipe, at_boundary=(clip, unscale, *_boundary_without(clip, unscale)))


def scaler_updated_in_window(recipe: Recipe) -> Recipe:
    """The loss scale grows after the window's first backward (pytorch#36601, accelerate#2866).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """

    def grow_once(arm: Arm) -> None:
        if arm.scaler.is_enabled() and arm.position == 0:
            arm.scaler.update(new_scale=2 * arm.scaler.get_scale())

    def back(arm: Arm) -> None:
        if arm.scaler.is_enabled():
            arm.scaler.update(new_scale=arm.scaler.get_scale() / 2)

    wrong = tuple(back if stage is update_scale else stage for stage in BOUNDARY)
    return dataclasses.replace(recipe, after_backward=(grow_once,), at_boundary=wrong)


@_in_place_of("after_backward")
def micro_batches_lost(arm: Arm) -> None:
    """A fused buffer keeps the first micro-batch's gradient (DeepSpeed#6550, open-instruct#1498).

    Args:
        arm: The arm that trains.
    """
    kept = arm.memory.setdefault("kept", {})
    for p in arm.model.parameters():
        if p.grad is not None and arm.position == 0:
            kept[p] = p.grad.clone()
        elif p.grad is not None:
            p.grad.copy_(kept[p])


@_in_place_of("after_backward")
def low_precision_accumulator(arm: Arm) -> None:
    """The sum is kept in bfloat16 (DeepSpeed#2768, mxnet#17703).

    Args:
        arm: The arm that trains.
    """
    for p in arm.model.parameters():
        if p.grad is not None:
            p.grad = p.grad.bfloat16().to(p.dtype)


def underflow_from_division(recipe: Recipe) -> Recipe:
    """Plant the fault of a loss made small before the backward and gradients multiplied back (GradientAccumulator#35).

    Float16 underflows between the two. The factor undoes the loss scale and stands for the N and the layers of a larger
    model.

    Args:
        recipe: A right recipe.

    Returns:
        The wrong one.
    """

    def small(terms: Sequence[Tensor], num: int) -> Sequence[Tensor]:
        return [total * SHRINK for total in recipe.normalise(terms, num)]

    def multiply_back(arm: Arm) -> None:
        for p in arm.model.parameters():
            if p.grad is not None:
                p.grad.mul_(SHRINK)

    def report(contributions: Sequence[Tensor]) -> Tensor:
        return recipe.report(contributions) * SHRINK

    return dataclasses.replace(recipe, normalise=small, report=report, at_boundary=(multiply_back, *recipe.at_boundary))


@_in_place_of("report")
def loss_report_differs(contributions: Sequence[Tensor]) -> Tensor:
    """The last micro-batch's loss is reported as the window's (transformers#35207, allennlp#4706).

    Args:
        contributions: [] for each of N micro-batches, what it adds to the window's loss.

    Returns:
        [] the loss that is reported, N times the last contribution.
    """
    return contributions[-1] * len(contributions)


@_in_place_of("after_backward")
def weight_decay_per_micro_batch(arm: Arm) -> None:
    """Decoupled weight decay acts after every backward (keras#19990).

    Args:
        arm: The arm that trains.
    """
    group = arm.optimizer.param_groups[0]
    if arm.position > 0:  # the optimizer's own decay is the first
        with torch.no_grad():
            for p in arm.model.parameters():
                p.mul_(1 - group["lr"] * group["weight_decay"])


@_in_place_of("after_backward")
def optimizer_state_per_micro_batch(arm: Arm) -> None:
    """Plant the fault that advances momentum, second moment and bias correction with every backward (DeepSpeed#8443).

    Args:
        arm: The arm, whose optimizer's state is decayed once for each micro-batch but the first.
    """
    group = arm.optimizer.param_groups[0]
    beta1, beta2 = group.get("betas", (group.get("momentum", 0.0), 1.0))[:2]
    decays = {"momentum_buffer": beta1, "exp_avg": beta1, "exp_avg_sq": beta2}
    for state in arm.optimizer.state.values() if arm.position > 0 else ():
        for name, decay in decays.items():
            if state.get(name) is not None:
                state[name].mul_(decay)
        if "step" in state:
            state["step"] += 1


def ema_per_micro_batch(recipe: Recipe) -> Recipe:
    """The moving average of the weights moves with every backward (F5-TTS#631, Lightning#11688).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """
    return dataclasses.replace(recipe, after_backward=(update_ema,))


@_in_place_of("auxiliary_share")
def auxiliary_loss_scale(own: Tensor, normaliser: Tensor) -> Tensor:
    """The penalty is added undivided at every micro-batch (Megatron-LM#5798, torchtitan#3000).

    Args:
        own: [n] loss terms of each sample.
        normaliser: [] what their summed losses are divided by.

    Returns:
        [n] weight of each sample's penalty: 1.
    """
    return torch.ones_like(own)


@_in_place_of("forward")
def cached_weights_stale(arm: Arm, micro_batch: Batch) -> Any:
    """The forward uses a copy of the weights that is renewed in every other window only (TransformerEngine#1047).

    Args:
        arm: The arm that trains.
        micro_batch: Its samples.

    Returns:
        The outputs of the old weights.
    """
    if arm.position == 0 and arm.windows % 2 == 0:
        arm.memory["weights"] = {name: p.detach().clone() for name, p in arm.model.named_parameters()}
    cached = arm.memory["weights"]
    # the cached value, with the gradient going to the parameter itself
    values = {f"model.{name}": p + (cached[name] - p).detach() for name, p in arm.model.named_parameters()}
    return functional_call(Forward(arm.workload, arm.model), values, (micro_batch,))


@_in_place_of("prepare")
def normaliser_depends_on_split(workload: Workload, window: Batch, chunks: Sequence[slice]) -> list[Batch]:
    """Advantages are normalised within each micro-batch (verl#907).

    Args:
        workload: The task.
        window: The samples of the window.
        chunks: Rows of each micro-batch.

    Returns:
        The micro-batches, prepared one by one.
    """
    return [workload.prepared(window.rows(chunk)) for chunk in chunks]


def non_finite_micro_batch(recipe: Recipe) -> Recipe:
    """A micro-batch whose gradient is not finite is left out, and the others are weighted up by number (espnet#3283).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """

    def keep(arm: Arm) -> None:
        arm.memory["sum"] = [None if p.grad is None else p.grad.clone() for p in arm.model.parameters()]
        if arm.position == 0:
            arm.memory["lost"] = 0

    def put_back(arm: Arm) -> None:
        if not all(bool(torch.isfinite(p.grad).all()) for p in arm.model.parameters() if p.grad is not None):
            arm.memory["lost"] += 1
            for p, kept in zip(arm.model.parameters(), arm.memory["sum"], strict=True):
                if p.grad is not None:  # zeros, not none: where all are left out, a scaler still wants a gradient
                    p.grad = torch.zeros_like(p.grad) if kept is None else kept

    def weight_up(arm: Arm) -> None:
        taken, lost = len(arm.seen), arm.memory["lost"]
        for p in arm.model.parameters() if 0 < lost < taken else ():
            if p.grad is not None:
                p.grad.mul_(taken / (taken - lost))

    return dataclasses.replace(
        recipe, before_micro_batch=(keep,), after_backward=(put_back,), at_boundary=(weight_up, *recipe.at_boundary)
    )


@_in_place_of("before_micro_batch")
def resume_in_window(arm: Arm) -> None:
    """A checkpoint inside a window forgets the gradients so far (transformers#22143).

    Args:
        arm: The arm that trains.
    """
    if arm.windows == 1 and arm.position == 1:
        clear(arm)


@_in_place_of("after_backward")
def counter_wrong(arm: Arm) -> None:
    """Samples are counted once more for every micro-batch (nanochat#177).

    Args:
        arm: The arm that trains.
    """
    arm.samples += len(arm.seen[arm.position])


@_in_place_of("arrange")
def samples_repeated(window: Batch, _step: int) -> Batch:
    """A sample is used twice in a window and another never (stylegan2#9, gpt-neox#308).

    Args:
        window: The samples of the window.
        _step: Not used.

    Returns:
        As many samples, the first twice and the last never.
    """
    return window.rows(torch.cat([torch.arange(len(window) - 1), torch.zeros(1, dtype=torch.long)]))


def foreign_gradients(recipe: Recipe) -> Recipe:
    """Another loss has left its gradients behind before the window begins (Lightning#8284).

    Args:
        recipe: A right recipe.

    Returns:
        The recipe with this fault.
    """

    def leave_something(arm: Arm) -> None:
        for p in arm.model.parameters():
            p.grad = torch.full_like(p, 1e-3)

    return dataclasses.replace(recipe, at_boundary=(*BOUNDARY, leave_something))
