import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from accumulation_harness.config import OptimizerConfig, Precision
from accumulation_harness.experiments.precision.accumulators import FORMATS, independent_roundings, summed_in
from accumulation_harness.recipes.recipe import take_step
from tests.studies.by_hand import measured, trial
from tests.toy import make_arm

CONFIG = trial("study=accumulators workload.model=mlp workload.width=2 effective_batch=24 accumulation_steps=[1,24] split=ragged")


def rounded(values, digits):
    """To `digits` binary digits, ties to even, exactly, by fractions; no exponent is too small."""

    def one(value):
        if value == 0:
            return 0.0
        unit = Fraction(2) ** (math.frexp(value)[1] - digits)
        return float(round(Fraction(value) / unit) * unit)

    return np.array([one(float(value)) for value in values])


@pytest.mark.parametrize(
    ("width", "digits", "precision"), [("bfloat16", 8, Precision.float32), ("float16", 11, Precision.float16)]
)
def test_the_sum_is_rounded_after_every_backward(width, digits, precision):
    """Against sums rounded by fractions; the loss scale of float16 is a power of two and changes no rounding."""
    split = lambda size: [3, 9, 12]  # noqa: E731
    plain, kept = (make_arm(split, precision=precision, optimizer=OptimizerConfig(lr=0.0)) for _ in range(2))
    kept.recipe = summed_in(kept.recipe, FORMATS[width], 4096.0)
    sums: dict[int, list[np.ndarray]] = {0: [], 1: []}
    for place, arm in enumerate((plain, kept)):

        def see(arm, place=place):
            scale = arm.scaler.get_scale() if arm.scaler.is_enabled() else 1.0
            grads = [p.grad.flatten() for p in arm.model.parameters() if p.grad is not None]
            sums[place].append((torch.cat(grads) / scale).double().numpy())

        arm.recipe = dataclasses.replace(arm.recipe, after_backward=(*arm.recipe.after_backward, see))
        take_step(arm, arm.workload.batch(torch.arange(24)))
    parts = np.diff(np.stack([np.zeros_like(sums[0][0]), *sums[0]]), axis=0)
    total = np.zeros_like(parts[0])
    for part, found in zip(parts, sums[1], strict=True):
        total = rounded(total + part, digits)
        # One float32 rounding of the parts may tip a tie: then one unit in the last place.
        np.testing.assert_allclose(found, total, rtol=2.0 ** (1 - digits), atol=0)
        assert np.mean(found == total) > 0.9
        np.testing.assert_array_equal(found, rounded(found, digits))
    assert not np.array_equal(sums[0][-1], sums[1][-1]), "the plain sum has more digits"


@pytest.mark.parametrize("width", ["bfloat16", "float16", "float32"])
def test_independent_roundings(width):
    """Random partial sums, each rounded once: the rms of the errors' sum is the formula's within 5 %."""
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(6, 50_000, generator=generator, dtype=torch.float64).cumsum(0)
    errors = (sums.to(FORMATS[width]).double() - sums).sum(0)
    measured = float(errors.norm() / sums[-1].norm())
    assert independent_roundings(sums, FORMATS[width]) == pytest.approx(measured, rel=0.05)
    assert independent_roundings(sums[-1:], FORMATS[width]) < 0.8 * measured, "one rounding is less than six"


def test_errors_by_accumulator():
    rows = measured(CONFIG)
    errors = {(row["accumulator"], row["accumulation_steps"]): row for row in rows if row["quantity"] == "error"}
    assert [row["stops_at"] for row in rows if row["quantity"] == "ones"] == [4096, 256, 2048]
    assert list(errors) == [(name, num) for name in FORMATS for num in (1, 24)]
    for num in (1, 24):
        wide, narrow, half = (errors[name, num]["arm_error"] for name in ("float32", "bfloat16", "float16"))
        assert wide < 1e-6 < 1e-5 < half < narrow < 0.05
        for name in ("bfloat16", "float16"):
            assert 0.5 < errors[name, num]["arm_error"] / errors[name, num]["predicted_error"] < 2
    assert errors["float32", 1]["ratio"] == 1 and errors["float32", 1]["micro_batch"] == 24
    assert errors["float32", 24]["micro_batch"] == 1
