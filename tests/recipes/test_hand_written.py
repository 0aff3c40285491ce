"""Loops as everyone writes them: the right ones are equivalent, the wrong ones are named from the evidence."""

import dataclasses
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from accumulation_harness.config import Precision
from accumulation_harness.measure.trial import Candidate, judge_loop, split_plan, standard_candidates
from accumulation_harness.recipes.hand_written import hand_written, sample_ids
from tests.slow import one_in
from tests.toy import Toy
from tests.trials import arms, trial

CONFIG = (
    "accumulation_steps=[4] effective_batch=32 steps=1 algebra_steps=2 workload.width=2 optimizer.name=momentum optimizer.lr=0.05"
)
# Many loops as arms of one trial: momentum, a moving average, clipping that is sometimes active, and a short window of 3.
MANY = trial(
    "accumulation_steps=[4] effective_batch=400 steps=1 algebra_steps=5 clip_norm=0.8 ema_decay=0.9 workload.model=mlp",
    "schedule.name=cosine optimizer.name=adam optimizer.lr=0.003",
)


def parts_of(window, micro_batch=100):
    return [window.rows(slice(k, k + micro_batch)) for k in range(0, len(window), micro_batch)]


def finish(arm):
    torch.nn.utils.clip_grad_norm_(arm.model.parameters(), arm.clip_norm)
    arm.optimizer.step()
    arm.ema.update_parameters(arm.model)
    arm.schedule.step()
    arm.optimizer.zero_grad()


def backward(arm, part, divisor):
    loss = F.cross_entropy(arm.model(part.inputs), part.targets, reduction="sum") / divisor
    loss.backward()
    return loss.detach()


def accumulate(arm, window, before=lambda k: None, after=lambda k: None):
    """A right window around which, and around whose micro-batches, a loop does something else."""
    total = torch.zeros((), dtype=torch.float64)
    for k, part in enumerate(parts_of(window)):
        before(k)
        total += backward(arm, part, len(window))
        after(k)
    return total


def finished(arm, window, **around):
    total = accumulate(arm, window, **around)
    finish(arm)
    return total


def whole_window(arm, window):
    """Accumulates nothing: a window is one forward and one backward."""
    loss = backward(arm, window, len(window))
    if arm.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(arm.model.parameters(), arm.clip_norm)
    arm.optimizer.step()
    arm.schedule.step()
    arm.optimizer.zero_grad(set_to_none=False)
    return loss


def test_a_loop_that_does_not_accumulate_is_not_judged():
    row = judge_loop(trial(CONFIG), whole_window)
    assert (row["verdict"], row["cause"]) == ("inconclusive", ""), row["reasons"]


def test_a_loop_that_scales_is_followed_in_float16():
    def scaled(arm, window):
        total = torch.zeros(())
        for part, normaliser in arm.micro_batches(window):
            with torch.autocast("cpu", dtype=torch.float16, enabled=arm.precision == Precision.float16):
                outputs = arm.model(part.inputs)
            loss = arm.workload.losses(outputs, part).sum() / normaliser
            arm.scaler.scale(loss).backward()
            total = total + loss.detach().double()
        arm.scaler.unscale_(arm.optimizer)
        if arm.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(arm.model.parameters(), arm.clip_norm)
        arm.scaler.step(arm.optimizer)
        arm.scaler.update()
        arm.schedule.step()
        arm.optimizer.zero_grad()
        return total

    row = judge_loop(trial(CONFIG, "precision=float16 split=ragged"), scaled)
    assert (row["verdict"], row["cause"]) == ("equivalent", ""), row["reasons"]


def test_rows_are_recognised_by_their_content():
    window = Toy().batch(torch.tensor([5, 3, 11, 7]))
    for rows, ids in ((window.inputs[[2, 0]], [11, 5]), (window.inputs[:2] + 1, [-1, -1])):
        assert sample_ids(rows, window.inputs, window.ids).tolist() == ids
    assert sample_ids(window.inputs[:2, :4], window.inputs, window.ids).tolist() == [5, 3], "trimmed"


def reports_in_float32(arm, window):
    return finished(arm, window).float()


def leaves_a_lost_window_out(arm, window):
    total = accumulate(arm, window)
    if torch.isfinite(total):
        finish(arm)
    arm.optimizer.zero_grad()
    return total


def zeros_for_lost_entries(arm, window):
    total = accumulate(arm, window)
    for p in arm.model.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    finish(arm)
    return total


def keeps_half(arm, window):
    for p, old in zip(arm.model.parameters(), arm.memory.get("kept", ()), strict=False):
        p.grad = 0.5 * old
    total = accumulate(arm, window)

    def keep(*_):
        arm.memory["kept"] = [p.grad.clone() for p in arm.model.parameters() if p.grad is not None]

    handle = arm.optimizer.register_step_pre_hook(keep)
    finish(arm)
    handle.remove()
    return total


def steps_after_the_first(arm, window):
    return accumulate(arm, window, after=lambda k: finish(arm) if k == 0 else None)


def steps_in_full_windows_alone(arm, window):
    """A short window's gradients wait for the next."""
    total = accumulate(arm, window)
    if len(window) == 400:
        finish(arm)
    return total


def averages_before_the_step(arm, window):
    total = accumulate(arm, window)
    arm.ema.update_parameters(arm.model)
    average, arm.ema = arm.ema, torch.optim.swa_utils.AveragedModel(arm.model)
    finish(arm)
    arm.ema = average
    return total


def ticks_first(arm, window):
    arm.optimizer.step()  # without gradients: nothing, and no warning that the schedule comes first
    total = accumulate(arm, window)
    arm.schedule.step()
    finish(arm)
    arm.schedule.last_epoch -= 1
    return total


def old_weights(arm, window):
    """All micro-batches but the first go through the weights of the second window, as long as there are others."""
    if arm.windows < 2:
        arm.memory["old"] = [p.detach().clone() for p in arm.model.parameters()]
    return with_weights(arm, window, arm.memory["old"])


def other_weights(arm, window):
    return with_weights(arm, window, [p.detach() * 1.001 for p in arm.model.parameters()])


def with_weights(arm, window, others):
    own = [p.detach().clone() for p in arm.model.parameters()]

    @torch.no_grad()
    def put(values):
        for p, value in zip(arm.model.parameters(), values, strict=True):
            p.copy_(value)

    total = accumulate(arm, window, before=lambda k: put(others) if k else None)
    put(own)
    finish(arm)
    return total


def noise_inside(arm, window):
    return reports_in_float32(arm, dataclasses.replace(window, inputs=window.inputs + 0.01))


def last_of_the_window_before(arm, window):
    parts = parts_of(window)
    before, arm.memory["last"] = arm.memory.get("last", parts[-1]), parts[-1]
    total = sum(backward(arm, part, len(window)) for part in [before, *parts[:-1]])
    finish(arm)
    return torch.as_tensor(total)


def looks_before_and_after(arm, window):
    """Forwards of the whole window that no backward goes through."""
    with torch.no_grad():
        arm.model(window.inputs)
    total = accumulate(arm, window)
    finish(arm)
    arm.model(window.inputs)
    return total


def undivided(arm, window):
    total = sum(backward(arm, part, len(part)) * (len(part) / len(window)) for part in parts_of(window))
    finish(arm)
    return torch.as_tensor(total)


def undivided_and_too_fast(arm, window):
    """Two faults."""
    total = undivided(arm, window)
    for _ in range(3):
        arm.schedule.step()
    return total


LOOPS = {
    reports_in_float32: "",
    looks_before_and_after: "",
    undivided: "loss_not_divided",
    undivided_and_too_fast: "loss_not_divided+schedule_per_micro_batch",
    leaves_a_lost_window_out: "",
    zeros_for_lost_entries: "non_finite_micro_batch",
    keeps_half: "gradients_not_cleared",
    steps_after_the_first: "window_misplaced",
    steps_in_full_windows_alone: "window_misplaced",
    averages_before_the_step: "unexplained",
    ticks_first: "unexplained",
    old_weights: "cached_weights_stale",
    other_weights: "unexplained",
    noise_inside: "unexplained",
    last_of_the_window_before: "window_misplaced",
}


@cache
def judged(part):
    """A third of the loops, as arms of one trial."""
    split = split_plan(MANY, 4)
    mine = [Candidate(loop.__name__, hand_written(loop, accumulation_steps=4, split=split)) for loop in [*LOOPS][part::3]]
    return {row["arm"]: row for row in arms(MANY, [*mine, *standard_candidates(MANY)])}


@pytest.mark.parametrize(
    ("place", "loop"),
    one_in(3, [*enumerate(LOOPS)]),
)
def test_loops_that_differ_in_one_place(place, loop):
    row, cause = judged(place % 3)[loop.__name__], LOOPS[loop]
    assert (row["verdict"], row["cause"]) == ("different" if cause else "equivalent", cause), row["reasons"]
