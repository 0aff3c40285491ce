"""What in-batch negatives are worth: full batch, small batch, accumulation, GradCache and memory banks, trained side by side.

All see the same windows from the same weights; recall is over all held-out passages. Bytes are those of a step, counted
(`measure/memory.py`) with what a method keeps beside the graph; seconds are medians over windows, all methods in turn.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from accumulation_harness.experiments.contrastive.negatives import corpus_of, tower_ratio
from accumulation_harness.experiments.shared.convergence import Training, chosen_arms, train
from accumulation_harness.experiments.shared.measuring import (
    FULL,
    HELD_OUT_BATCH,
    Arm,
    Batch,
    Candidate,
    OnStep,
    Recipe,
    Row,
    Setting,
    compare,
    evaluated,
    flatten,
    full_batch,
    gradients,
    pytree,
    split_plan,
    with_faults,
)
from accumulation_harness.measure import memory
from accumulation_harness.measure.banks import count_forwards
from accumulation_harness.recipes import contrastive
from accumulation_harness.workloads.contrastive import ranks

SMALL = "small"  # an optimizer step for each micro-batch: no accumulation at all
LOOKS = (0.5, 0.75, 1.0)  # shares of the training after which the held-out pairs are ranked
CUTS = (1, 5, 20)  # of recall


@dataclass(eq=False)
class Method(Training):
    """A method in training; of a small batch `parts` are its steps in a window."""

    _: KW_ONLY
    probe_every: int
    parts: int = 1
    cosines: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    looks: list[Row] = field(default_factory=list)
    exact: Tensor | None = None  # the full batch's gradient of the present window, where it is probed

    def before(self, t: int, window: Batch) -> None:
        """Note the full batch's gradient at the method's own weights, where the window is probed."""
        is_probed = t % self.probe_every == 0 and self.name.name != SMALL
        self.exact = _exact(self.arm, window) if is_probed else None
        self.arm.memory["asked"] = is_probed

    def take(self, window: Batch) -> float:
        """A window: one step of the optimizer, of the small batch one for each micro-batch. Returns the mean loss."""
        own = torch.arange(len(window)).chunk(self.parts)
        parts = (window.rows(slice(int(rows[0]), int(rows[-1]) + 1)) for rows in own)  # views, no copy of the window
        return sum(super(Method, self).take(part) * len(part) for part in parts) / len(window)

    def probe(self) -> float:
        """The cosine to the full batch's gradient, where the window was probed."""
        if self.exact is None:
            return math.nan
        own = self.arm.memory.pop("consumed")
        self.cosines.append(compare(own, self.exact).cosine)
        self.ratios.append(tower_ratio(self.arm.model, own))
        return self.cosines[-1]


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per method and N: recall and reciprocal rank, bytes, seconds, forwards, and gradients beside the full batch's.

    Args:
        setting: The trial's task, initial weights and windows.
        on_step: Called with the rows of each step.

    Returns:
        Rows with the arm, `corpus`, `micro_batch`, recall and reciprocal rank, `seconds` (of a window), `*_bytes` (of a
        step), `forwards`, and `cosine` and `norm_ratio` of the last gradient.
    """
    methods = make_methods(setting)
    looks = {max(1, round(share * setting.config.steps)) for share in LOOKS}

    def look(t: int, method: Method) -> Row:
        if t + 1 in looks:
            method.looks.append(_ranked(method.arm))
        return {"cosine": method.probe()}

    train(setting, methods, on_step, look=look)
    first = next(setting.windows(1))
    return [_row(setting, method, method.arm.workload.batch(first)) for method in methods]


def make_methods(setting: Setting) -> list[Method]:
    """Make the arms of a trial.

    Args:
        setting: The trial.

    Returns:
        The full batch; at every N accumulation, the configured methods and the small batch; and the permuted full batch. Or
        one `trained_arm` of these.
    """
    config, full = setting.config, full_batch(setting.config)
    whole = [Candidate(FULL, full), *with_faults(config, {n: contrastive.named(n) for n in config.methods})]
    small = [Candidate(SMALL, dataclasses.replace(full, accumulation_steps=num)) for num in config.accumulation_steps]
    trained = chosen_arms(config, [one.name for one in (*whole, *small)])
    every = config.probe_every
    return [Method(one.name, setting.arm(watched(one.recipe)), probe_every=every) for one in whole if one.name in trained] + [
        Method(one.name, setting.arm(one.recipe, steps=num * config.steps), probe_every=every, parts=num)
        for one in small
        for num in [one.recipe.accumulation_steps]
        if one.name in trained
    ]


def watched(recipe: Recipe) -> Recipe:
    """The recipe, whose gradient is noted where the arm is asked to.

    Args:
        recipe: A right recipe.

    Returns:
        The recipe.
    """

    def note(arm: Arm) -> None:
        if arm.memory.pop("asked", False):
            arm.memory["consumed"] = flatten(gradients(arm.model.parameters()))

    return dataclasses.replace(recipe, at_boundary=(note, *recipe.at_boundary))


def _ranked(arm: Arm) -> Row:
    """Recall at 1, 5 and 20 and the mean reciprocal rank of the held-out queries among all held-out passages."""
    with evaluated(arm), torch.no_grad():
        parts = [arm.workload.forward(arm.model, batch) for batch in arm.workload.held_out_batches(HELD_OUT_BATCH)]
        place = ranks(pytree.joined(parts)).double()
    return {**{f"recall_{k}": float((place <= k).double().mean()) for k in CUTS}, "reciprocal_rank": float((1 / place).mean())}


def _exact(arm: Arm, window: Batch) -> Tensor:
    """[P] the full batch's gradient at the arm's own weights."""
    outputs = arm.workload.forward(arm.model, window)
    loss = arm.workload.losses(outputs, window).mean()
    found = torch.autograd.grad(loss, list(arm.model.parameters()), materialize_grads=True, allow_unused=True)
    return flatten(found)


def _row(setting: Setting, method: Method, window: Batch) -> Row:
    config, arm, num = setting.config, method.arm, method.name.accumulation_steps
    size = max(split_plan(config, num)(config.effective_batch))
    taken, held = _weighed(method, window.rows(slice(0, size)) if method.name.name == SMALL else window)
    forwards = count_forwards(arm.model, lambda: method.take(window))
    half = len(method.cosines) // 2
    *_, before, last = {}, *method.looks
    return {
        "corpus": corpus_of(setting),
        **method.name.columns,
        "micro_batch": size,
        **last,
        "gain_of_last_quarter": last["reciprocal_rank"] - before["reciprocal_rank"] if before else math.nan,
        "seconds": statistics.median(method.seconds),
        "forwards": forwards / len(window),
        "activation_bytes": taken.activations,
        "held_bytes": held,
        "total_bytes": taken.total + (held if taken.peak is None else 0),
        "cosine": statistics.fmean(method.cosines[half:]) if method.cosines else math.nan,
        "norm_ratio": statistics.median(method.ratios[half:]) if method.ratios else math.nan,
    }


def kept_beside(arm: Arm) -> Iterator[Tensor]:
    """What the methods of `recipes/contrastive.py` keep beside the graph: representations, a bank, an average of the towers.

    Args:
        arm: The arm that trains.

    Yields:
        Tensors.
    """
    yield from pytree.tensors([arm.memory.get(name, ()) for name in ("held", "bank")])
    if "average" in arm.memory:
        yield from arm.memory["average"].parameters()


def _weighed(method: Method, window: Batch) -> tuple[memory.Memory, int]:
    """The bytes of one more step, and of what the method keeps beside the graph, at its largest."""
    arm, most = method.arm, [0]

    def see(arm: Arm) -> None:
        most[0] = max(most[0], memory.num_bytes(kept_beside(arm)))

    recipe = arm.recipe
    arm.recipe = dataclasses.replace(recipe, after_backward=(see, *recipe.after_backward))
    taken = memory.of_step(arm, window)
    arm.recipe = recipe
    return taken, most[0]
