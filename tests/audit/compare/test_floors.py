"""The gates: a distance just below a factor times what rounding alone did is accepted, one just above it is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from accumulation_harness.audit.compare.comparison import facts
from accumulation_harness.audit.compare.facts import StepFacts
from accumulation_harness.audit.compare.floors import Floor, beyond_rounding, faint, gates, noisy
from accumulation_harness.audit.evidence import Copy, Run, Step, Vector
from tests.audit.compare.made_runs import P, run, step, vectors

G, ACROSS = vectors(2, seed=3)
ACROSS = ACROSS - G * (ACROSS @ G) / (G @ G)
ACROSS *= np.linalg.norm(G) / np.linalg.norm(ACROSS)  # at right angles to G, and as long
ROUNDING = 1e-5
EVENLY = np.where(np.arange(P) % 2, G, -G)  # as long as G, and in every element as large


def off(by: float, **changes: Any) -> Step:
    """A step at relative distance `by` from that of G."""
    return step([G + by * ACROSS], **changes)


def one(candidate: Run, reference: Run, nulls: Sequence[Run]) -> StepFacts:
    (item,) = facts(candidate, reference, Floor(nulls, drift=False))
    return item.steps[0]


@pytest.mark.parametrize(("roundoff", "factor"), [(2.0**-24, 10.0), (0.99e-5, 10.0), (1.01e-5, 4.0), (2.0**-9, 4.0)])
@pytest.mark.parametrize(("share", "agrees"), [(0.99, True), (1.01, False)])
def test_a_gradient_agrees_up_to_a_factor_of_rounding(roundoff: float, factor: float, share: float, agrees: bool) -> None:
    reference = run(off(0.0), roundoff=roundoff)
    judged = one(run(off(share * factor * ROUNDING), n=4), reference, [run(off(ROUNDING)), run(off(ROUNDING / 3))])
    assert judged.gate == pytest.approx(factor * ROUNDING, rel=1e-9)
    assert judged.gradients_agree == agrees


@pytest.mark.parametrize(("share", "agrees"), [(0.99, True), (1.01, False)])
def test_an_update_and_a_state_agree_up_to_a_factor(share: float, agrees: bool) -> None:
    def moved(by: float, **state: Vector) -> Run:
        return run(off(0.0, after=np.ones(P) - 0.1 * (G + by * EVENLY), state=state))

    rounding = 1e-3
    judged = one(moved(share * 10 * rounding), moved(0.0), [moved(rounding)])
    assert judged.update.gate == pytest.approx(10 * rounding, rel=1e-6) and judged.gradients_agree
    assert (judged.update.distance <= judged.update.gate) == agrees == judged.agrees
    judged = one(moved(0.0, m=G + share * 10 * rounding * ACROSS), moved(0.0, m=G), [moved(0.0, m=G + rounding * ACROSS)])
    assert judged.update.state_gate == pytest.approx(10 * rounding, rel=1e-6)
    assert (judged.update.state_distance <= judged.update.state_gate) == agrees == judged.agrees


def test_an_update_is_known_no_better_than_one_part_in_a_thousand() -> None:
    for by, agrees in ((0.99e-3, True), (1.01e-3, False)):
        moved = off(0.0, after=np.ones(P) - 0.1 * (G + by * EVENLY))
        assert one(run(moved), run(off(0.0)), []).agrees == agrees


def test_the_sum_itself_rounds() -> None:
    """(K + 1) u ||sum |c_k||| / ||g|| of the accumulator, and a term per row: u of float32 at most."""
    u, parts = 2.0**-9, [2 * G, -G]
    mine, reference = step(parts), run(off(0.0), accumulator_roundoff=u)
    expected = (3 * u + 16 * 2.0**-24) * float(np.linalg.norm(3 * np.abs(G)) / np.linalg.norm(G))
    for share, agrees in ((0.99, True), (1.01, False)):
        shifted = replace(mine, gradient=G + share * expected * ACROSS)
        judged = one(run(shifted, n=4), reference, [])
        assert judged.gate == pytest.approx(expected, rel=1e-12) and judged.gradients_agree == agrees


def test_weights_that_were_handed_over_are_float32() -> None:
    def handed(weight: float, by: float = 0.0) -> Run:
        before = np.full(P, weight)
        return run(off(by, before=before, after=before - G, backwards=(), total=None))

    for weight, gate in ((1.0, 1e-3), (1e4, 10 * 2.0**-23 * 1e4 * math.sqrt(P) / np.linalg.norm(G))):
        assert one(handed(weight), handed(weight), []).gate == pytest.approx(gate, rel=1e-12)
        assert one(handed(weight, 0.99 * gate), handed(weight), []).gradients_agree
        assert not one(handed(weight, 1.01 * gate), handed(weight), []).gradients_agree


def test_buffers_and_averages_are_beyond_rounding() -> None:
    assert beyond_rounding([]) == beyond_rounding([0.5e-4]) == 1e-3 and beyond_rounding([1e-3, 1e-2]) == 0.1
    for share, named in ((0.99, ()), (1.01, ("mean",))):
        mine, null = (run(off(0.0, buffers={"mean": G + by * ACROSS})) for by in (share * 0.1, 0.01))
        assert one(mine, run(off(0.0, buffers={"mean": G})), [null]).layers.buffers == named
    for share, differs in ((0.99, False), (1.01, True)):
        start = np.ones(P)
        mine, theirs, null = (
            run(off(0.0, shadows=(Copy(0, start + G + by * ACROSS),), before=start)) for by in (share * 0.1, 0.0, 0.01)
        )
        (item,) = facts(mine, theirs, Floor([null], drift=False))
        ((first, distance, gate),) = item.run.shadow_distances
        assert (first, distance > gate) == (0, differs) and gate == pytest.approx(0.1)


def test_elements_near_the_rounding_of_the_largest_are_noise() -> None:
    u = 2.0**-24
    gradient = np.full(P, 1.0)
    gradient[:2] = 0.99e3 * u, 1.01e3 * u  # NOISE roundings of the largest
    reference = run(step([gradient]), roundoff=u)
    (mask,) = faint(reference.tracks[0].steps, reference)
    assert mask.tolist() == [True] + [False] * (P - 1)
    masks = faint([step([gradient]), step([np.ones(P)])], reference)
    assert masks[1].tolist() == masks[0].tolist()  # what a noisy element has moved by stays in the weights


def test_elements_about_whose_update_equal_runs_disagree_are_noise() -> None:
    theirs = step([np.ones(P)], before=np.zeros(P), after=np.ones(P))
    moved = np.ones(P)
    moved[:2] = 1.0099, 1.0101  # DISAGREE
    null = replace(theirs, after=moved)
    (mask,) = noisy([theirs], [[null]], run(theirs))
    assert mask.tolist() == [False, True] + [False] * (P - 2)


def test_gates_of_runs_that_drift_apart_only_grow() -> None:
    reference = run(off(0.0), off(0.0), off(0.0))
    steps, noise = reference.tracks[0].steps, [np.zeros(P, dtype=bool)] * 3

    def gradient_gates(seen: Sequence[float], *, drift: bool) -> list[float]:
        null = [off(by) for by in seen]
        return gates(steps, steps, [null], noise, (reference, reference), drift=drift).gradient

    assert gradient_gates((1e-5, 3e-5, 2e-5), drift=True) == pytest.approx([3e-4, 3e-4, 3e-4])
    assert gradient_gates((1e-5, 3e-5, 2e-5), drift=False) == pytest.approx([1e-4, 3e-4, 2e-4])
    assert gradient_gates((0.0, 3e-5, 2e-5), drift=False) == pytest.approx([3e-4, 3e-4, 2e-4])  # before any perturbation
