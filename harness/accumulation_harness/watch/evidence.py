"""What is known of a window when its optimizer step has been taken: plain numbers on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from accumulation_harness.judge.cause import Cause
from accumulation_harness.observe.followed import Options
from accumulation_harness.watch.slopes import Bend, chosen

Sketch = npt.NDArray[np.float64]  # [T, WIDTH]


Rung = Literal[  # what has shown a fault
    "ledger",  # calls, and the weights of loss terms
    "sketch",  # the sum of the micro-batches' gradients
    "replay",
]
Call = Literal[  # what a loop calls between two backwards, as far as it matters
    "clip",
    "clip scaled",  # with the loss scale in the gradients
    "unscale",
    "update scale",
    "schedule",
    "average",
    "other step",  # of another optimizer that is watched
    "epoch",  # a data loader begins anew
]
CLIPS: frozenset[Call] = frozenset({"clip", "clip scaled"})
SCALES: frozenset[Call] = frozenset({"unscale", "update scale"})


class Remark(Enum):
    """What is said of windows besides findings: whether it is a doubt, of which one is enough for no `equivalent`; a sentence."""

    moved = True, "the weights at the step are not those of the first backward"
    moved_inside = True, "weights move inside the window, as with SAM by micro-batch or an optimizer in the backward"
    fed = True, "another model's losses pass through this one inside a window"
    buffers_moved = (
        True,
        "buffers or frozen weights of the model move with its micro-batches (running statistics): a large batch has fewer",
    )
    hooked = (
        True,
        "hooks of the run's own change gradients on their way: the whole gradient was not judged, nor a clip there",
    )
    as_often = (
        True,
        "a schedule is advanced, or the weights or an average of them moved, as often after a step as its window had "
        "micro-batches: right where it counts them",
    )
    given_up = True, "micro-batches were given up: their gradients were cleared before a step"
    left_out = False, "micro-batches were given up, for a reason that shows: their gradients were cleared before a step"
    changed_after_clip = True, "the gradient is changed between the clip and the step"
    forwards = True, "a window has more forwards than backwards: a micro-batch was left out"
    unequal = True, "loss terms have unequal weights over micro-batches, and no known normalisation explains them"
    thawed = True, "parameters are frozen or freed inside a window, where a large batch would do so before or after it"
    over_the_end = True, "a window continues past the end of the data loader, where a large batch would end (window_misplaced)"
    half = True, "gradients are kept in float16 without a loss scale: what underflows there is not seen (underflow_from_division)"
    same_gradient = True, "micro-batches of one window gave the same gradient, as the same rows do (samples_repeated)"
    step_not_finite = True, "the gradient at the step was not finite although every micro-batch's was"
    part_not_finite = True, "a micro-batch gave a gradient that is not finite (has it a loss term at all?)"
    changed = (
        True,
        "the gradient is changed between the last backward and the step, or summed elsewhere, in a way that is not known",
    )
    no_multiple = True, "the gradient at the step is no multiple of the sum over ranks"
    resumed = False, "the first window goes on with gradients of a run before it: it was not judged"
    no_gradient = False, "the loss gave no gradient"
    ranks_unseen = False, "not every rank's gradients were seen"
    logits_unseen = False, "the logits were not seen (a fused or compiled loss, or a model that returns none)"
    ragged = (
        False,
        "loss terms weigh unequally within a micro-batch (class or sample weights): their weights were not judged",
    )
    unknown_loss = (
        False,
        "not a known loss (one of PyTorch's loss functions, or a cross-entropy by hand): its weights may be seen where you say "
        "`rows_apart=True`, or how many terms it has with `seen.terms(number)`",
    )
    diagonal = (
        False,
        "row i has the class i in every micro-batch: in-batch negatives, which a larger batch has more of, cannot be judged",
    )
    unreached = False, "some tensors got nothing from some of a window's micro-batches: not used there, or cut off"
    own_terms = (
        False,
        "whether each term of the run's own loss hangs on its own row alone (no statistics of the micro-batch, no choice among "
        "its rows) cannot be seen: say so with `rows_apart=True`, or how many there are with `seen.terms(number)`",
    )
    another_term = False, "the loss has another term than those whose slope was recognised (a penalty, an auxiliary loss)"

    def __init__(self, is_doubt: bool, sentence: str) -> None:
        self.is_doubt, self.sentence = is_doubt, sentence


@dataclass(kw_only=True)
class MicroBatch:
    """One backward of a window."""

    contribution: Sketch  # of what was differentiated, without the loss scale
    hooks: Any = 1.0  # on parameters: what they were handed, and then by what the run's own multiply it all
    before: Sketch | None = None  # of `.grad` as the backward began; None: not looked at
    after: Sketch | None = None  # and as it ended
    empty: bool = False  # no gradient was there as it began
    scale: float = 1.0  # of the loss
    slopes: Any = None  # losses, as their forms and then as slopes; None: not looked at
    own: Any = ()  # forms of losses of the run's own
    said: bool = False  # the loop has said how many terms they have
    bends: Sequence[Bend] = ()  # by hooks of the run's own; their factors where no head accounts for them
    loss: float = float("nan")
    calls: tuple[Call, ...] = ()  # since the backward before, or since the step
    lrs: tuple[float, ...] = ()
    options: Options = field(default_factory=dict)  # the other numbers of the parameter groups
    weights: Any = None  # at the backward, if it is one of the first two, or they moved inside the window
    trained: int = 0  # parameters that are not frozen
    fed: bool = False  # the model's inputs were made of parameters: another model's loss may pass through
    returned: bool = False  # its gradients were returned, and not added to `.grad`
    placed: bool = False  # and were put there
    forwards: int = 0  # of the model, since the backward before
    others: bool = False  # terms were differentiated beside the loss functions that were called


@dataclass(kw_only=True)
class Window:
    """The micro-batches between two optimizer steps."""

    index: int
    track: int  # which optimizer
    micro_batches: list[MicroBatch] = field(default_factory=list)
    gradient: Sketch = field(default_factory=lambda: np.zeros(0))  # `.grad` before the last clip, or as the step began
    norm: float = float("nan")  # of the gradient
    whole: bool = True  # all tensors were looked at; of the others, sketches are zero
    at_step: Sketch | None = None  # as the step began; None: not looked at
    parameters: Sketch | None = None  # of the weights as the step began
    clipped: Sketch | None = None  # `.grad` after the last clip
    narrow: bool = False  # a gradient is kept in 16 bits
    half: bool = False  # in float16
    rounded: str = ""  # the 16-bit format that the gradient fits into although its own is wider
    calls: tuple[Call, ...] = ()  # between the last backward and the step
    skipped: bool = False  # by the loss scaler
    closure: bool = False
    moved: bool = False  # weights moved inside the window
    state_moved: bool = False
    resumed: bool = False  # the optimizer had a state when the watch began, and this is its first window
    alone: bool = True  # one process
    ranks: Ranks | None = None  # looked at in a sample of windows
    as_often: bool = False  # since the step before, a schedule or an average was called as often as it had micro-batches
    averaged: float | None = None  # the rate at which an average of the weights moves inside the window
    forwards: int = 0  # of the model, in training
    still: bool = False  # the step moved no weights
    buffers_moved: bool = False  # since the step before; or frozen weights inside the window
    hooked: bool = False  # hooks of the run's own have changed what micro-batches give
    seconds: float = float("nan")  # since the step before
    unused: tuple[float, ...] = ()  # values of losses that no backward has differentiated

    @property
    def first(self) -> Sketch | None:
        """Of the weights at the first backward."""
        found: Sketch | None = self.micro_batches[0].weights
        return found

    @property
    def looked_into(self) -> bool:
        """Whether `.grad` was seen at both ends of every backward."""
        return all(m.after is not None and (m.before is not None or m.empty) for m in self.micro_batches)

    def choose(self) -> None:
        """Which losses the micro-batches have; those of the run's own where those that were looked for are not all known."""
        scales = [m.scale for m in self.micro_batches]
        looked, own = (chosen([getattr(m, name) for m in self.micro_batches], scales) for name in ("slopes", "own"))
        known = all(slopes and all(slope.kind is not None for slope in slopes) for slopes in looked)
        for m, slopes in zip(self.micro_batches, own if all(own) and not known else looked, strict=True):
            m.slopes = slopes


@dataclass(frozen=True, kw_only=True)
class Group:
    """What the ranks that share some tensors showed of them in one window; rows of sketches are sums over tensors."""

    contributions: Sequence[Sketch]
    gradients: Sequence[Sketch]  # at the step, of each whole
    before: Sequence[Sketch]  # and as its first backward began


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What all ranks showed of one window."""

    groups: Sequence[Group]
    terms: Sequence[float]  # of the ranks with rows of their own


@dataclass(kw_only=True)
class Finding:
    """Something wrong: its cause, where it was seen first and how often."""

    cause: Cause
    message: str
    window: int
    rung: Rung
    evidence: dict[str, Any] = field(default_factory=dict)
    count: int = 1
