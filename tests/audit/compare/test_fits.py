"""Each prediction is near zero for the fault it predicts, made up here from its formula, and far for the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from accumulation_harness.audit.compare import fits as module
from accumulation_harness.audit.compare.facts import Fits
from accumulation_harness.audit.compare.fits import by_rank, fits, lost, narrow_format, partly, rescaled, weighted_sum
from accumulation_harness.audit.evidence import Clip, Run, Step, Vector
from tests.audit.compare.made_runs import P, backward, run, step, vectors

GATE = 1e-6
N, K = 4, 3
PARTS = vectors(K)
G: Vector = np.sum(PARTS, axis=0)
WHOLE = step([G])
LEFT = vectors(1, seed=9)[0]


def seen(mine: Step, theirs: Step = WHOLE, before: Step | None = None, **changes: Any) -> tuple[Fits, Any]:
    candidate = run(n=N, **changes)
    found = fits(mine, theirs, before, mine.gradient, theirs.gradient, candidate, GATE)
    return found.fits, found.right


def rows(count: int) -> Step:
    """A window of so many rows, all in its first backward."""
    first, *others = (backward(part, rows=()) for part in PARTS)
    return step(PARTS, backwards=(replace(first, rows=tuple(f"row {i}" for i in range(count))), *others))


def clipped(limit: float) -> Step:
    norm = float(np.linalg.norm(G))
    clip = Clip(after=K, before=G, active=True, limit=limit, scale=1.0)
    return step(PARTS, G * min(1.0, limit / norm) / N, clips=(clip,))


def cleared(*places: int) -> Step:
    """The window whose gradients were cleared before these backwards."""
    backwards = tuple(backward(p, emptied=frozenset({0, 1}) if k in places else frozenset()) for k, p in enumerate(PARTS))
    return step(PARTS, np.sum(PARTS[max(places) :], axis=0), backwards=backwards)


def beside_another(own: Sequence[Vector], other: Vector) -> Step:
    reached = [frozenset({0})] * len(own) + [frozenset({0, 1})]
    backwards = tuple(backward(part, reached=group) for part, group in zip([*own, other], reached, strict=True))
    return step([*own, other], backwards=backwards)


CASES: dict[str, tuple[Step, set[str]]] = {  # a window -> the predictions that must fit, among those of a single cause
    "right": (step(PARTS), {"sum", "sums", "sums_line", "own_sum", "sum_line", "line"}),
    "N": (step([N * p for p in PARTS]), {"times_n", "sum_over_n", "line", "sum_line", "own_sum", "sums_line"}),
    "K": (step([K * p for p in PARTS]), {"times_k", "sum_over_k", "line", "sum_line", "own_sum", "sums_line"}),
    "1/N": (step([p / N for p in PARTS]), {"over_n", "sum_times_n", "line", "sum_line", "own_sum", "sums_line"}),
    "1/K": (step([p / K for p in PARTS]), {"over_k", "line", "sum_line", "own_sum", "sums_line"}),
    "K/N": (step([p * K / N for p in PARTS]), {"k_over_n", "line", "sum_line", "own_sum", "sums_line"}),
    "rows": (replace(rows(7), gradient=7 * G), {"times_rows", "line", "sum", "sums", "sums_line", "sum_line"}),
    "1/rows": (replace(rows(7), gradient=G / 7), {"over_rows", "line", "sum", "sums", "sums_line", "sum_line"}),
    "first": (step(PARTS, PARTS[0]), {"first", "sum", "sums", "sums_line"}),
    "last": (step(PARTS, PARTS[-1]), {"last", "sum", "sums", "sums_line"}),
    "cleared": (cleared(1), {"since_clear", "sum", "sums", "sums_line"}),
    "cleared twice": (cleared(1, 2), {"since_clear", "last", "sum", "sums", "sums_line"}),
    "clipped, then divided": (clipped(0.5), {"clipped_then_divided", "line", "sum", "sums", "sums_line", "sum_line"}),
    "weights": (step(PARTS, G + 0.3), {"along_weights", "along_signs", "sum", "sums", "sums_line"}),  # all weights are 1
    "another optimizer": (beside_another(PARTS, LEFT), {"without_foreign", "own_sum", "sum_line"}),
}


@pytest.mark.parametrize(("mine", "expected"), CASES.values(), ids=CASES)
def test_what_fits_is_what_was_made(mine: Step, expected: set[str]) -> None:
    found, _ = seen(mine)
    fitting = {f.name for f in fields(found) if getattr(found, f.name) <= 1e-12}
    assert fitting == expected


def test_ranks_are_predicted_on_several_ranks_only() -> None:
    for factor, name in ((2.0, "times_ranks"), (0.5, "over_ranks")):
        mine = step([factor * p for p in PARTS])
        assert getattr(seen(mine, ranks=2)[0], name) < 1e-12
        assert getattr(seen(mine)[0], name) == math.inf


def test_carried_gradients_must_be_more_than_rounding() -> None:
    size = module.LEFT_OVER * GATE * float(np.linalg.norm(G)) / float(np.linalg.norm(LEFT))
    for factor, known in ((0.9, False), (1.1, True), (1e4, True)):
        left = factor * size * LEFT
        found, _ = seen(step(PARTS, G + left), before=step([left]))
        assert (found.stale < 1e-9) == known and (known or found.stale == math.inf)


def test_gradients_of_some_tensors_may_be_left_over() -> None:
    weight_alone = np.where(np.arange(P) < 16, LEFT, 0.0)
    for left, known in ((weight_alone, True), (LEFT, True), (0.5 * weight_alone, False), (np.zeros(P), False)):
        found, _ = seen(step(PARTS, G + left), before=step([LEFT]))
        assert (found.stale < 1e-12) == known


@pytest.mark.parametrize(("mine", "theirs"), [(0.5, 1.0), (1.0, 0.25), (0.5, 0.25), (1.0, 1.0), (2.0, 1.0)])
def test_weights_before_sums_were_shortened(mine: float, theirs: float) -> None:
    """Each sum times a number before its step: weights are of what was stepped, and are known as they were added too."""
    terms = np.array([0.5, 1.5, 0.7])
    means = [part / w for part, w in zip(PARTS, terms, strict=True)]
    right = seen(step(means, mine * np.sum(means, axis=0)), step([G], theirs * G))[1]
    assert right.weights == pytest.approx(tuple(terms * theirs / mine), rel=1e-6)
    as_added = np.array(right.weights) * right.as_added
    assert as_added == pytest.approx(terms / max(mine, 1.0), rel=1e-6), "what lengthens is no clip"


def test_weights_are_those_of_the_reference_on_the_parts() -> None:
    wanted = (0.5, 1.5, 2.5)
    theirs = step([np.sum([w * p for w, p in zip(wanted, PARTS, strict=True)], axis=0)])
    _, made = seen(step(PARTS), theirs)
    solved = np.linalg.lstsq(np.stack(PARTS, axis=1), theirs.gradient, rcond=None)[0]
    np.testing.assert_allclose(made.weights, solved, rtol=1e-12)
    np.testing.assert_allclose(made.weights, wanted, rtol=1e-12)
    assert made.residual < 1e-12 and made.condition < 10
    _, made = seen(step(PARTS, G / N), theirs)  # divided after they were added: weights of what was stepped
    np.testing.assert_allclose(made.weights, N * np.array(wanted), rtol=1e-12)
    outside = weighted_sum(LEFT, PARTS).residual
    q, _ = np.linalg.qr(np.stack(PARTS, axis=1))
    assert outside == pytest.approx(np.linalg.norm(LEFT - q @ (q.T @ LEFT)) / np.linalg.norm(LEFT), rel=1e-12)


def test_too_many_parts_are_not_told_apart() -> None:
    parts = vectors(P // 2)
    assert seen(step(parts))[1].weights and not seen(step(vectors(P // 2 + 1)))[1].weights


def test_nothing_is_known_of_numbers_that_are_not_finite() -> None:
    assert seen(step(PARTS, np.full(P, np.nan))) == (Fits(), seen(step(PARTS, np.full(P, np.inf)))[1])
    assert seen(step(PARTS), step([np.zeros(P)]))[0] == Fits()


def test_a_step_that_takes_zeros_was_cleared_last() -> None:
    found, _ = seen(step(PARTS, np.zeros(P)))
    assert found.since_clear == 0.0 and found.sums == 0.0 and found.line == math.inf


def test_what_every_rank_gave_is_weighed() -> None:
    locals_ = [(PARTS[0], PARTS[1]), (PARTS[2], LEFT)]  # two micro-batches of two ranks
    weights = ((0.5, 1.5), (2.0, 3.0))
    flat = [part for pair in locals_ for part in pair]
    wanted = np.sum([w * p / 2 for w, p in zip(np.ravel(weights), flat, strict=True)], axis=0)
    mine = step([(a + b) / 2 for a, b in locals_])
    mine = replace(mine, backwards=tuple(replace(b, locals=pair) for b, pair in zip(mine.backwards, locals_, strict=True)))
    made = by_rank(mine, mine.gradient, wanted, GATE)
    np.testing.assert_allclose(made.weights, weights, rtol=1e-12)
    for off, known in ((0.5, True), (2.0, False)):  # what is not simply added cannot be weighed
        moved = mine.gradient + off * GATE * np.linalg.norm(mine.gradient) * _across(mine.gradient)
        assert bool(by_rank(mine, moved, wanted, GATE).weights) == known
    assert not by_rank(step(PARTS), G, wanted, GATE).weights


def _across(v: Vector) -> Vector:
    """A unit vector at right angles to `v`."""
    rest = LEFT - v * (LEFT @ v) / (v @ v)
    return np.asarray(rest / np.linalg.norm(rest))


@pytest.mark.parametrize(("size", "named"), [(0.9, ()), (1.1, ("bias",))])
def test_tensors_differ_beyond_the_gate(size: float, named: tuple[str, ...]) -> None:
    bias = slice(16, P)
    apart = size * GATE * np.linalg.norm(G) / np.linalg.norm(G[bias])
    mine = G.copy()
    mine[bias] *= 1 + apart
    assert partly(step([mine]), mine, G, GATE) == named
    mine[bias] = G[bias] * (1 - apart)  # smaller than it should be: nothing was added twice
    assert partly(step([mine]), mine, G, GATE) == ()


def test_a_tensor_that_differs_points_as_it_should() -> None:
    bias = slice(16, P)
    unit, across = G[bias] / np.linalg.norm(G[bias]), _across(np.where(np.arange(P) >= 16, G, 0.0))[bias]
    across = across - unit * (unit @ across)
    across /= np.linalg.norm(across)
    for cosine, named in ((0.51, ("bias",)), (0.49, ())):  # ALIKE
        mine = G.copy()
        mine[bias] = 2 * np.linalg.norm(G[bias]) * (cosine * unit + math.sqrt(1 - cosine**2) * across)
        assert partly(step([mine]), mine, G, GATE) == named


def test_narrow_formats_hold_all_elements() -> None:
    exact = np.full(P, 1 + 2.0**-8)  # needs 8 bits after the point: float16 has 10, bfloat16 has 7
    assert narrow_format(np.ones(P), exact) == "bfloat16"
    assert narrow_format(exact, np.full(P, 1 + 2.0**-11)) == "float16"
    assert narrow_format(exact, exact) is None and narrow_format(np.full(P, 1 + 2.0**-11), exact) is None


def test_lost_elements_are_counted_above_the_nulls() -> None:
    half = np.where(np.arange(P) < P // 2, 0.0, G)
    quarter = np.where(np.arange(P) < P // 4, 0.0, G)
    assert lost(step([half]), WHOLE, []) == 0.5 and lost(step([half]), WHOLE, [step([quarter])]) == 0.25
    assert lost(WHOLE, step([half]), []) == 0.0  # what the reference has lost as well is not counted


def test_norms_are_those_after_scaling_and_at_the_step() -> None:
    scaled = replace(step(PARTS), backwards=(backward(PARTS[0]), backward(PARTS[1], start="scaled", rescaled=0.1)))
    assert rescaled(scaled) == (0.1, pytest.approx(np.linalg.norm(G))) and rescaled(step(PARTS)) == ()


def test_accumulation_steps_come_from_the_candidate() -> None:
    assert fits(step([2 * G]), WHOLE, None, 2 * G, G, Run(batch_size=8, accumulation_steps=2), GATE).fits.times_n == 0.0


def test_parts_that_make_up_each_other_have_the_weights_nearest_to_one() -> None:
    """Two rows of the same tokens: what each of them counts cannot be told, and what both count can."""
    found = weighted_sum(0.5 * PARTS[0] + 2 * PARTS[1], [PARTS[0] / 2, PARTS[1], PARTS[0] / 2])
    assert found.weights == pytest.approx((0.5, 2.0, 0.5)) and found.residual < 1e-12 and found.condition < 10
    assert weighted_sum(PARTS[2], [PARTS[0], PARTS[1], PARTS[0]]).residual > 0.1
    both = PARTS[0] + PARTS[1]
    assert weighted_sum(2 * both, [PARTS[0], PARTS[1], both]).weights == pytest.approx((1.0, 1.0, 1.0))
