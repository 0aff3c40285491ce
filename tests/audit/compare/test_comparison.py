"""From made-up runs to the plain numbers that the rules read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from accumulation_harness.audit.compare.comparison import ShapeError, facts
from accumulation_harness.audit.compare.facts import Facts, StepFacts
from accumulation_harness.audit.compare.floors import Floor
from accumulation_harness.audit.compare.probes import SAME_SUM, rows, separated, terms
from accumulation_harness.audit.compare.resumed import RESTORED, stitched
from accumulation_harness.audit.compare.windows import compare_rows, distance, effective, judged, off_line
from accumulation_harness.audit.evidence import Call, Clip, Row, Run, Step, Track
from tests.audit.compare.made_runs import P, backward, run, step, vectors

PARTS = vectors(4, seed=5)
G = np.sum(PARTS, axis=0)


def compared(mine: Run, theirs: Run) -> Facts:
    (item,) = facts(mine, theirs, Floor([], drift=False))
    return item


def only(mine: Step, theirs: Step) -> StepFacts:
    return compared(run(mine, n=4), run(theirs)).steps[0]


def test_distance_scale_and_cosine_are_those_of_numpy() -> None:
    seen = only(step([2 * G + 0.1 * PARTS[0]]), step([G]))
    a = 2 * G + 0.1 * PARTS[0]
    size = np.linalg.norm(G)
    assert seen.raw.distance == pytest.approx(np.linalg.norm(a - G) / size, rel=1e-12)
    assert seen.raw.scale == pytest.approx(np.linalg.norm(a) / size, rel=1e-12)
    assert seen.raw.cosine == pytest.approx(a @ G / np.linalg.norm(a) / size, rel=1e-12)
    bias = slice(16, P)
    assert seen.tensors["bias"].distance == pytest.approx(np.linalg.norm((a - G)[bias]) / np.linalg.norm(G[bias]), rel=1e-12)


def test_distances_of_what_has_no_size() -> None:
    zeros, nan = np.zeros(P), np.full(P, np.nan)
    assert distance(zeros, zeros) == 0.0 and distance(G, zeros) == np.inf and distance(nan, nan) == 0.0
    assert distance(G, G[1:]) == np.inf and off_line(-G, G) == np.inf and off_line(zeros, G) == np.inf


def test_gradients_are_compared_before_they_were_clipped_at_the_boundary() -> None:
    def clipped(gradient: np.ndarray, **changes: Any) -> Step:
        given: dict[str, Any] = {"after": 1, "before": 8 * gradient, "active": True, "limit": 1.0, "scale": 8.0}
        return step([gradient], gradient / np.linalg.norm(gradient), clips=(Clip(**given | changes),))

    seen = only(clipped(2 * G), clipped(G))
    assert seen.consumed.distance < 1e-12 and seen.raw.distance == pytest.approx(1.0) and not seen.gradients_agree
    assert seen.scaling.clipped and seen.scaling.clips_inside == 0
    assert seen.scaling.clips_scaled and not only(clipped(G, limit=8.1), clipped(G)).scaling.clips_scaled
    assert not only(clipped(G, scale=1.0), clipped(G)).scaling.clips_scaled
    inside = only(clipped(G, after=0), clipped(G, after=0))
    assert inside.scaling.clips_inside == 1 and inside.gradients_agree


def test_what_a_scaler_left_out_of_both_arms_agrees() -> None:
    nan = step([np.full(P, np.nan)], skipped=True, after=np.ones(P))
    other = step([np.full(P, np.inf)], skipped=True, after=np.ones(P))
    assert only(nan, other).agrees and not only(nan, replace(other, skipped=False, after=np.zeros(P))).agrees


@pytest.mark.parametrize(
    ("calls", "loaded", "filled", "unscaled"),
    [
        (("backward", "backward", "step"), False, False, 0),
        (("load", "backward", "backward", "load", "step"), False, False, 0),
        (("backward", "load", "backward", "step"), True, False, 0),
        (("backward", "backward", "zero_grad", "step"), False, True, 0),
        (("backward", "unscale", "backward", "unscale", "step"), False, False, 1),
    ],
)
def test_the_order_of_calls_tells_what_happened_inside(
    calls: tuple[Call, ...], loaded: bool, filled: bool, unscaled: int
) -> None:
    seen = only(step(PARTS[:2], calls=calls), step([G]))
    assert (seen.accumulator.loaded_inside, seen.accumulator.cleared_then_filled) == (loaded, filled)
    assert seen.scaling.unscaled_inside == unscaled


def test_steps_that_moved_nothing_belong_to_the_next_window() -> None:
    idle = step(PARTS[:1], after=np.ones(P))
    track = Track(name="SGD", tensors=idle.tensors, steps=[idle, step(PARTS[1:])])
    (whole,) = effective(track)
    assert len(whole.backwards) == 4
    still = step([np.zeros(P)])
    assert effective(replace(track, steps=[still, replace(idle, lrs=(0.0,))])) == [still, replace(idle, lrs=(0.0,))]
    item = compared(run(idle, step(PARTS[1:]), n=4), run(step([G])))
    assert item.run.mine.idle_steps == 1 and item.run.mine.backwards == (4,) and item.run.reference.idle_steps == 0


def test_a_first_step_that_moves_nothing_at_n_of_1_either_has_a_window_of_its_own() -> None:
    idle = step(PARTS[:1], after=np.ones(P))
    item = compared(run(idle, step(PARTS), n=4), run(idle, step([G])))
    assert item.run.mine.idle_steps == 1 and item.run.mine.backwards == (len(PARTS),) and item.run.reference.backwards == (1,)


def test_the_last_evaluation_of_a_closure_is_judged() -> None:
    def twice(parts: list[np.ndarray]) -> Step:
        backwards = [backward(p, start="kept" if k % len(parts) else "cleared") for k, p in enumerate([*parts, *parts])]
        return step(parts, backwards=tuple([replace(backwards[0], start="empty"), *backwards[1:]]))

    mine, theirs = judged(twice(PARTS), twice([G]), 4, 1e-6)
    assert len(mine.backwards) == 4 and len(theirs.backwards) == 1 and mine.backwards[0].start == "empty"
    assert judged(step(PARTS), step([G]), 4, 1e-6)[0].backwards == step(PARTS).backwards


def test_rows_are_compared_as_multisets() -> None:
    def of(*names: str) -> Step:
        return step([G], backwards=(backward(G, rows=names),))

    assert compare_rows(of("a", "b"), of("b", "a")) == "same" and compare_rows(of("a", "a"), of("a")) == "different"
    assert compare_rows(of("a"), step([G])) == compare_rows(of(), of("a")) == "unknown"
    item = compared(run(of("a", "b"), of("a", "x"), n=4), run(of("a", "b"), of("c", "d")))
    assert (item.run.windows, item.run.repeated) == (("same", "different"), (0, 1))
    assert (item.run.never, item.run.foreign) == (2, 1)  # c and d; x


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (Run(batch_size=4, accumulation_steps=4), "0 optimizers instead of 1"),
        (run(replace(step([G]), tensors=(("weight", P),))), "holds"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(mine: Run, words: str) -> None:
    for track in mine.tracks:
        track.tensors = track.steps[0].tensors
    with pytest.raises(ShapeError, match=words):
        compared(mine, run(step([G])))


@pytest.mark.parametrize(("off", "lost"), [(0.99 * RESTORED, 0), (1.01 * RESTORED, 1)])
def test_a_run_that_found_its_gradients_again_lost_none(off: float, lost: int) -> None:
    first, *others = PARTS
    tensors = step([G]).tensors
    across = PARTS[3] / np.linalg.norm(PARTS[3]) * np.linalg.norm(first)
    began = Track(name="SGD", tensors=tensors, steps=[step([G])], pending=[backward(first)], first_backward=1, last_backward=2)
    found = step(others, np.sum(others, axis=0) + first + off * across)
    went_on = Track(name="SGD", tensors=tensors, steps=[found], first_backward=3, last_backward=5)
    (track,) = stitched(Run(batch_size=4, accumulation_steps=4, tracks=[began, went_on]))
    assert track.resumed == ((1, lost),) and len(track.steps) == 2
    assert len(track.steps[1].backwards) == (3 if lost else 4) and len(began.steps) == 1


# -- probes -----------------------------------------------------------------------------------------------------------------


def test_slopes_of_the_same_rows_are_multiples_of_each_other() -> None:
    output, slope = np.arange(1.0, 4.0), np.array([[1.0, -2.0, 3.0]])
    theirs = Run(batch_size=4, accumulation_steps=1, probed={"a": Row(0, output, slope), "b": Row(0, output, slope)})
    mine = replace(
        theirs, probed={"a": Row(0, 1.1 * output, 2 * slope), "b": Row(1, output, 3 * slope), "c": Row(1, output, slope)}
    )
    seen = rows(mine, theirs)
    assert seen is not None and seen.factors == ((2.0,), (3.0,)) and seen.outputs == pytest.approx(0.1)
    assert seen.residual == pytest.approx(0.0, abs=1e-15) and seen.spread == 0.0
    assert rows(replace(theirs, probed={}), theirs) is None


def test_slopes_that_are_no_multiples_by_row_are_looked_at_by_token() -> None:
    output, slope = np.arange(8.0), np.random.default_rng(0).normal(size=(2, 4))
    theirs = Run(batch_size=4, accumulation_steps=1, probed={"a": Row(0, output, slope)})
    by_token = replace(theirs, probed={"a": Row(0, output, slope * [[0.5], [3.0]])})
    seen = rows(by_token, theirs)
    assert seen is not None and seen.tokens and seen.factors == ((0.5, 3.0),) and not seen.chosen
    assert seen.residual == pytest.approx(0.0, abs=1e-15) and seen.what == "token"
    one_left_out = rows(replace(theirs, probed={"a": Row(0, output, slope * [[0.0], [3.0]])}), theirs)
    assert one_left_out is not None and one_left_out.tokens and one_left_out.chosen
    turned = rows(replace(theirs, probed={"a": Row(0, output, slope[:, ::-1])}), theirs)
    assert turned is not None and not turned.tokens and turned.residual > 0.1


def test_copies_that_are_coupled_are_separated_by_the_split() -> None:
    mine, theirs = run(step(PARTS), n=4), run(step([G]))
    assert separated(replace(mine, coupled_copies=3), replace(theirs, coupled_copies=15), 0)
    assert not separated(replace(mine, coupled_copies=1), replace(theirs, coupled_copies=1), 0)  # pairs


@pytest.mark.parametrize(("limit", "agree"), [(4.0, True), (1.0, False)])
def test_clipping_n_times_the_gradient_to_n_times_the_limit_is_clipping_it(limit: float, agree: bool) -> None:
    """The candidate adds four means, clips their sum, and divides by 4."""
    size = float(np.linalg.norm(G))
    before, clipped = 4 * G, limit * G / size
    mine = step(
        [4 * part for part in PARTS], clipped / 4, clips=(Clip(after=4, before=before, active=True, limit=limit, scale=1.0),)
    )
    theirs = step([G], G / size, clips=(Clip(after=1, before=G, active=True, limit=1.0, scale=1.0),))
    assert only(mine, theirs).gradients_agree == agree


def test_coupled_rows_are_separated_by_the_split() -> None:
    def window(*groups: tuple[str, ...]) -> Run:
        return run(step(PARTS[: len(groups)], backwards=tuple(backward(G, rows=group) for group in groups)), n=len(groups))

    reference = replace(window(("a", "b", "c")), coupled=frozenset({("a", "b")}))
    assert separated(window(("a", "c"), ("b",)), reference, 0) and not separated(window(("a", "b"), ("c",)), reference, 0)
    assert not separated(window(("a",), ("b",)), replace(reference, coupled=frozenset()), 0)


def test_terms_of_the_loss_are_weighed_where_they_add_up() -> None:
    first, second = PARTS[:2]
    mine = run(step([first, second]), n=2)
    theirs = run(step([first + second / 4]))
    mine.terms, theirs.terms = [[first, second]], [[first, second / 4]]
    mine.tracks[0].steps[0] = step([first + second])
    seen = terms(mine, theirs, 0)
    assert seen is not None and seen.parts.weights == pytest.approx((1.0, 0.25)) and seen.parts.residual < 1e-12
    assert [term.scale for term in seen.each] == pytest.approx([1.0, 4.0]) and seen.each[0].distance < 1e-12
    for off, known in ((0.9 * SAME_SUM, True), (1.1 * SAME_SUM, False)):
        mine.terms = [[first + off * (first + second), second]]
        assert (terms(mine, theirs, 0) is not None) == known
