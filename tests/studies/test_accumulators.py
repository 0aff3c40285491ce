import dataclasses

import pytest
import torch

from accumulation_harness.config import OptimizerConfig, Precision
from accumulation_harness.experiments.precision.accumulators import FORMATS, independent_roundings, summed_in
from accumulation_harness.recipes.recipe import take_step
from accumulation_harness.referee.gradients import flatten
from tests.toy import make_arm
from tests.trials import measured, trial

CONFIG = trial("study=accumulators workload.model=mlp workload.width=2 effective_batch=24 accumulation_steps=[1,24] split=ragged")


@pytest.mark.parametrize(("width", "precision"), [("bfloat16", Precision.float32), ("float16", Precision.float16)])
def test_the_sum_is_rounded_after_every_backward(width, precision):
    """Against rounded sums of the parts; the loss scale of float16 is a power of two and changes no rounding."""
    sums, sizes = {}, (3, 9, 12)
    for is_kept in (False, True):
        arm = make_arm(lambda size: [*sizes], precision=precision, optimizer=OptimizerConfig(lr=0.0))
        own = sums[is_kept] = [torch.zeros(18, dtype=torch.float64)]

        def see(arm, own=own):
            own.append(flatten(p.grad for p in arm.model.parameters()).double() / arm.scaler.get_scale())

        recipe = summed_in(arm.recipe, FORMATS[width], 4096.0) if is_kept else arm.recipe
        arm.recipe = dataclasses.replace(recipe, after_backward=(*recipe.after_backward, see))
        take_step(arm, arm.workload.batch(torch.arange(24)))
    total = sums[True][0]
    for before, after, found in zip(*[sums[False][k : k + 3] for k in (0, 1)], sums[True][1:], strict=True):
        total = (total + after - before).to(FORMATS[width]).double()
        # One float32 rounding of the parts may tip a tie: then one unit in the last place.
        torch.testing.assert_close(found, total, rtol=torch.finfo(FORMATS[width]).eps, atol=0)
        assert (found == total).double().mean() > 0.9 and torch.equal(found, found.to(FORMATS[width]).double())
    assert not torch.equal(sums[False][-1], sums[True][-1]), "the plain sum has more digits"


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
