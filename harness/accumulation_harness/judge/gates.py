"""The gates of L0 and L1: how large an error may be before it counts, and why. Each stands here and nowhere else."""

from __future__ import annotations

ALGEBRA_GATE = 1e-12  # L0, relative, gradients and optimizer state in float64: correct code is near 1e-15, faults above 1e-3
RESOLVED = 10.0  # L0, above ALGEBRA_GATE: in units of what the referee's own gradient resolves at the same weights
COARSE_LEAST = 1e-4  # L0 in the format under test: what is a difference there at least
# L0, of a model that resolves less than ALGEBRA_GATE: what is a difference all the same; the largest is where faults begin.
CLEAR_FACTOR, CLEAR_LEAST, CLEAR_MOST = 1e4, 1e-6, 1e-3
TRAJECTORY_GATE = 1e-9  # L0, relative, parameters over the float64 trajectory
COMPARABLE = 1e3  # L0, how much further than the controls a trajectory may part by rounding, and L3 by more than it
SMALL = 1e-3  # L0, of the largest tensor of a kind: what is smaller is compared relative to this, as rounding is the largest's
# L1, windows that have to reject an arm: a false alarm in one of 1,000 is one in 10^9 of three.
CONFIRMED = 3
OUTLIER = 10.0  # L1: a window in which the full batch's error is so many times that of another window decides nothing
# L0 in the format under test, and along the training: of a gradient's error, times the largest of the full batch's. In 16 bits
# that is rounding of every product, which no order of the rows changes much.
CLEARLY = {"float32": 100.0, "bfloat16": 5.0, "float16": 5.0}
ROUNDING_GATE = 2.0  # L1, upper end of the interval of the error ratio
SCALE_FACTOR = 10.0  # L1, of the factor alpha on the exact gradient, in units of its range over permutations
# L1, float32: a gradient is stored to 2^-24 of its size, and adding micro-batches rounds it again: the ranks of smaller errors
# tell the order of the sum, not a fault. The smallest planted error that L1 must find is 1e-6.
STORED = 2.0**-23
LEAST = 2.0**-53  # L1: an error is measured in float64, and one below this counts as this
RESOLUTION = {"float32": STORED, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # the distance of numbers, relative, by format
SUMMED = 0.15  # of STORED, per square root of N: what adding N gradients in float32 rounds, a random walk of halves


def clear_gate(floor: float) -> float:
    """Find the float64 error above which an arm differs for certain: max(CLEAR_LEAST, CLEAR_FACTOR * floor).

    Args:
        floor: By how much the shuffled full batch differs.

    Returns:
        The gate. Above CLEAR_MOST a difference is certain only where a cause reproduces it.
    """
    return max(CLEAR_LEAST, CLEAR_FACTOR * floor)


def coarse_gate(floor: float, precision: str = "float32") -> float:
    """Return how far a gradient may differ in the format under test.

    Args:
        floor: Relative distance of the shuffled large batch's gradient, a control.
        precision: The format.

    Returns:
        max(COARSE_LEAST, CLEARLY * floor); infinite if `floor` is NaN.
    """
    return max(COARSE_LEAST, CLEARLY[precision] * floor) if floor == floor else float("inf")
