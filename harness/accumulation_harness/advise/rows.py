"""From what was measured to advice: which b, N, learning rate and beta2, at which price, and what is not known.

A target that takes S steps at very large batches takes S (1 + B_noise / B) of B samples (McCandlish et al. 2018, eq. 2.7 of
arXiv:1812.06162, with B_simple in the place of B_crit), and a step of N micro-batches takes N t(b) + u seconds. So the time to it
is proportional to (1 + B_noise / (N b)) (N t(b) + u).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from accumulation_harness.advise.measured import LARGEST, Measured, Size
from accumulation_harness.config import OptimizerConfig, State, TrialConfig, state_of

LEAST = 1.02  # times the least memory still counts as the least


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A way to train, with its price."""

    aim: str
    size: Size
    num: int  # N
    optimizer: OptimizerConfig
    step_seconds: float
    times: float  # seconds to a target over those of the large batch; NaN where the noise scale is not known
    samples: float  # the same of samples
    raced: int = 0  # trainings that it has won; 0: by the formula
    alike: tuple[str, ...] = ()  # others that cannot be told from it

    @property
    def batch(self) -> int:
        """B = N b."""
        return self.num * self.size.b


def advice(config: TrialConfig, seen: Measured) -> list[Advice]:
    """Choose three rows: the fastest to a target, the least memory, and as the large batch; none of them over the budget.

    Args:
        config: The settings of the training as it is.
        seen: What was measured.

    Returns:
        The rows.
    """
    size = config.effective_batch
    base = (splits(seen, size) or [(seen.sizes[0], max(1, size // seen.sizes[0].b))])[0]
    batches = {one.b * 2**k for one, k in product(seen.sizes, range(20))}
    possible = [batch for batch in batches if batch <= min(LARGEST * size, seen.population // 2)]
    every = [one for batch in possible for one in splits(seen, batch)] or [base]
    least = min(one.bytes for one in seen.sizes)
    small = [one for one in every if one[0].bytes <= LEAST * least]

    def cost(one: tuple[Size, int]) -> float:
        return _time_to_target(seen, *one)

    known = not math.isnan(noise(seen))
    chosen = {
        "fastest to a target": min(every, key=cost) if known else base,
        "least memory": min(small, key=cost) if known else (small[0][0], max(1, size // small[0][0].b)),
        f"as B = {size}": base,
    }
    return [
        Advice(
            aim=aim,
            size=one,
            num=num,
            optimizer=rescaled(config.optimizer, size, num * one.b, noise(seen)),
            step_seconds=seen.step_seconds(one, num),
            times=cost((one, num)) / cost(base),
            samples=(num * one.b + noise(seen)) / (size + noise(seen)),
        )
        for aim, (one, num) in chosen.items()
    ]


def splits(seen: Measured, batch: int) -> list[tuple[Size, int]]:
    """List all (b, N) of B = N b that were measured.

    Args:
        seen: What was measured.
        batch: B, samples.

    Returns:
        Size and N, the fastest first; where b is part of the computation the largest b alone.
    """
    found = [(one, batch // one.b) for one in seen.sizes if batch % one.b == 0]
    found.sort(key=lambda one: (one[1] if seen.couples else 0, one[1] * one[0].seconds))
    return found[:1] if seen.couples else found


def noise(seen: Measured) -> float:
    """Read the noise scale B_simple = tr(S) / ||G||^2, with S the covariance of a sample's gradient and G their mean.

    Args:
        seen: What was measured.

    Returns:
        The scale, in samples; NaN where its interval has no end or it is none of these samples'.
    """
    one = seen.noise
    return one.estimate if math.isfinite(one.high) and one.low > 0 and not seen.couples else math.nan


def _time_to_target(seen: Measured, size: Size, num: int) -> float:
    """Predict the time to a target, up to a factor: (1 + B_noise / B) times the seconds of a step.

    Args:
        seen: What was measured.
        size: b and its seconds.
        num: N.

    Returns:
        Seconds of as many steps as one step at very large batches is worth.
    """
    return (1 + noise(seen) / (num * size.b)) * seen.step_seconds(size, num)


def rescaled(optimizer: OptimizerConfig, former: int, batch: int, noise_scale: float) -> OptimizerConfig:
    """Rescale an optimizer for another batch.

    The rate by (1 + B_noise / B_former) / (1 + B_noise / B), its root under Adam, and beta2 to beta2^(B / B_former). In noise
    (B far below B_noise) these are the linear and the square-root rule; far above, the rate stays.

    Args:
        optimizer: The optimizer at the former batch.
        former: B_former, samples.
        batch: B, samples.
        noise_scale: B_noise, in samples; infinite gives the linear and the square-root rule.

    Returns:
        The optimizer with another rate and, under Adam, another beta2.
    """
    by = (1 + noise_scale / former) / (1 + noise_scale / batch) if math.isfinite(noise_scale) else batch / former
    is_adam = state_of(optimizer.name) == State.moments
    return dataclasses.replace(
        optimizer, lr=optimizer.lr * (math.sqrt(by) if is_adam else by), beta2=optimizer.beta2 ** (batch / former)
    )


def table(found: Sequence[Advice], seen: Measured) -> list[tuple[str, ...]]:
    """Lay out the advice.

    Args:
        found: The rows.
        seen: What was measured.

    Returns:
        Head and rows, as text.
    """
    head = ("", "b", "N", "B", "rate", "beta2", "memory", "seconds a step", "samples to a target", "seconds to a target")
    adam = [state_of(one.optimizer.name) == State.moments for one in found]
    rows = [
        (one.aim, str(one.size.b), str(one.num), str(one.batch), f"{one.optimizer.lr:.3g}",
         f"{one.optimizer.beta2:.4g}" if has_beta2 else "-", f"{one.size.bytes / 1e6:.3g} MB", f"{one.step_seconds:.3g}",
         _times(one.samples), _times(one.times))
        for one, has_beta2 in zip(found, adam, strict=True)
    ]  # fmt: skip
    return [head, *rows]


def _times(value: float) -> str:
    return "not known" if math.isnan(value) else f"x {value:.2f}"


def conclusions(config: TrialConfig, found: Sequence[Advice], seen: Measured) -> list[str]:
    """Say what follows from the advice, what it rests on, and what is not known.

    Args:
        config: The settings of the training as it is.
        found: The rows.
        seen: What was measured.

    Returns:
        A line each.
    """
    one, first, largest = seen.noise, seen.sizes[0], seen.sizes[-1]
    best = min(seen.sizes, key=lambda size: size.seconds / size.b)
    lines = [
        f"one sample takes {first.seconds / first.b:.2g} s at b = {first.b} and {best.seconds / best.b:.2g} s at b = {best.b}, "
        f"an update {seen.update_seconds:.2g} s (on {seen.device}, at b = {', '.join(str(size.b) for size in seen.sizes)})",
        f"the largest b, {largest.b}, takes {largest.bytes / 1e6:.3g} MB of {seen.budget / 1e6:.4g} MB; "
        f"{seen.state_bytes / 1e6:.3g} MB are the optimizer's state",
    ]
    fastest = found[0]
    if seen.couples:
        lines.append(f"another b is another training, since {' and '.join(seen.couples)}: the second row was not trained")
    elif math.isnan(noise(seen)):
        lines.append(
            f"cannot tell: the noise scale; {config.steps} steps give {one.estimate:.3g}, with an interval without an end"
        )
    else:
        thirds = ", ".join(f"{value:.3g}" for value in seen.thirds)
        lines.append(
            f"noise scale: {one.estimate:.3g} samples ({one.low:.3g} to {one.high:.3g}); in each third of the training {thirds}"
        )
    lines += [
        f"the first row won a race of {fastest.raced} short trainings to the loss of your settings after {config.steps} steps",
        *([f"perhaps as fast as the first row, by further seeds: {'; '.join(fastest.alike)}"] if fastest.alike else []),
        f"accumulate for speed: {'no' if fastest.num == 1 else f'yes, N = {fastest.num}'}",
        "cannot tell: what a longer training wants (mostly a larger batch and a lower rate), and whether it ends where yours "
        "does: accumulation-harness converge",
    ]
    return lines
