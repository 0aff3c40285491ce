"""Between which values each number of a configuration means something, by the dotted name of its field.

Whoever checks a setting and whoever draws settings at random reads this one table.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT16_MAX = 65504.0
MOST_SAMPLES = 60_000  # of a data set that can be read: MNIST's
MOST_STEPS = 100_000
MOST_WINDOW_SAMPLES = 10**8  # int64 ids of all windows of a trial, which are kept: 0.8 GB
MOST_ARMS = 64  # numbers of accumulation steps of one trial


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """From `low` to `high`, each included unless it says otherwise, and the reason."""

    low: float
    high: float
    why: str
    is_integer: bool = False
    excludes_low: bool = False
    excludes_high: bool = False

    def hold(self, value: float) -> bool:
        """Whether `value` lies between; NaN does not."""
        above = self.low < value if self.excludes_low else self.low <= value
        below = value < self.high if self.excludes_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        low, high = (self.low, self.high) if self.is_integer else (f"{self.low:g}", f"{self.high:g}")
        between = f"{'above' if self.excludes_low else 'from'} {low} {'to below' if self.excludes_high else 'to'} {high}"
        return f"{'an integer' if self.is_integer else 'a number'} {between} ({self.why})"


def integers(low: int, high: int, why: str) -> Bounds:
    """From `low` to `high`, both included."""
    return Bounds(low=low, high=high, why=why, is_integer=True)


def numbers(low: float, high: float, why: str) -> Bounds:
    """From `low` to `high`, both included."""
    return Bounds(low=low, high=high, why=why)


DECAY = Bounds(low=0.0, high=1.0, excludes_high=True, why="the share that a moving average keeps at each step")

BOUNDS = {
    # Of the model: memory and time grow with the square of the width.
    "workload.width": integers(1, 512, "memory grows with its square; the usual ResNet-18 has 8"),
    "workload.depth": integers(1, 64, "every block is kept for each arm"),
    "workload.dropout": Bounds(low=0.0, high=1.0, excludes_high=True, why="a probability, at 1 nothing is left to train"),
    "workload.hard_negatives": integers(0, 1, "a pair has one neighbour in its module"),
    # A step is lr times a gradient, decay times a weight: what a gradient of 1 gives has to stay within the formats under test.
    "workload.penalty": numbers(0.0, FLOAT16_MAX, "a coefficient of the loss, which has to stay within float16"),
    "optimizer.lr": numbers(1e-16, FLOAT16_MAX, "below it no float64 weight moves, above it a step leaves float16"),
    "optimizer.momentum": DECAY,
    "optimizer.beta1": DECAY,
    "optimizer.beta2": DECAY,
    "optimizer.eps": numbers(2e-38, FLOAT16_MAX, "below it float32 has a zero, by which Adam divides"),
    "optimizer.weight_decay": numbers(0.0, FLOAT16_MAX, "a factor of the weights, which have to stay within float16"),
    "clip_norm": numbers(1e-12, 1e12, "Adam squares the clipped gradient, which float32 has to represent"),
    "ema_decay": Bounds(
        low=0.0, high=1.0, excludes_low=True, excludes_high=True, why="the share of the average that stays, or null for none"
    ),
    "loss_scale": numbers(1e-8, 1e10, "gradients times it have to come within float16, a halving for each step skipped"),
    # Of the sizes: what is done with each.
    "effective_batch": integers(1, MOST_SAMPLES, "no data set has more training samples"),
    "accumulation_steps": integers(1, MOST_SAMPLES, "a micro-batch has a sample or more"),
    "steps": integers(1, MOST_STEPS, "every arm takes each, and leaves a row of it"),
    "algebra_steps": integers(1, MOST_STEPS, "every arm takes each, in float64; or null"),
    "schedule.warmup_steps": integers(0, MOST_STEPS, "a trial has no more steps"),
    "probe_every": integers(1, 10**9, "optimizer steps; above `steps`, the first alone is probed"),
    "referee_every": integers(1, 10**9, "optimizer steps; above `steps`, the first alone is refereed"),
    # The lower end is what the last limits of L1 need (docs/equivalence.md).
    "permutations": integers(30, 10_000, "each is a gradient of every arm"),
    "nulls": integers(1, 100, "each is a model with its optimizer, trained beside the others"),
    "seed": integers(0, 2**63 - 1, "what a generator takes"),
    "workers": integers(0, 1024, "processes; 0 is one per core"),
}
