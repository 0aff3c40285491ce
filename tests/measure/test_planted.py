"""Loops that go wrong where no probe looks are found there, beside what the model is; what looks like them stays right."""

import copy
import math
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

from accumulation_harness.config import ConfigError
from accumulation_harness.measure.trial import judge_loop
from accumulation_harness.recipes.recipe import end_window
from tests.own import optimizers, tasks
from tests.slow import one_in, slow
from tests.trials import trial

ADAM = "optimizer.name=adam optimizer.lr=1e-3"


def judged(take, settings="", task="Frozen"):
    """Windows of 10 of 40 samples, in five micro-batches: none is short."""
    own = f"workload.data=custom workload.target={tasks.__file__}:{task} norm=as_is effective_batch=10 accumulation_steps=[5]"
    return judge_loop(trial(own, "steps=12 optimizer.name=momentum optimizer.lr=0.05", settings), take)


def nothing(arm): ...


def micro_batches(window):
    return [window.rows(part) for part in torch.arange(len(window)).chunk(5)]


def plain(arm, rows):
    return arm.workload.losses(arm.model(rows.inputs[0]), rows).sum()


def accumulate(arm, window, loss=plain, parts=None, factor=lambda: 1.0, after=nothing):
    """The sum of the micro-batches' losses, whose gradients are `factor` times as large; `after` each backward."""
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts or micro_batches(window):
        one = loss(arm, rows) / len(window)
        (one * factor()).backward()
        total = total + one.detach()
        after(arm)
    return total


def loop(after=nothing, factor=lambda arm: 1.0, averages=lambda arm: 1):
    """The right loop; `after` each step, `factor` of each loss, `averages` that are taken in a window."""

    def take(arm, window):
        arm.optimizer.zero_grad()
        total = accumulate(arm, window, factor=lambda: factor(arm))
        arm.optimizer.step()
        for _ in range(averages(arm) if arm.ema is not None else 0):
            arm.ema.update_parameters(arm.model)
        arm.schedule.step()
        after(arm)
        return total

    return take


def inside(act):
    """The right loop, but for `act` before each micro-batch, with its number."""

    def take(arm, window):
        numbers = count()

        def loss(arm, rows):
            act(arm, next(numbers))
            return plain(arm, rows)

        return stepped(arm, None, accumulate(arm, window, loss))

    return take


def in_window(number, act):
    return lambda arm: act(arm) if arm.windows == number else None


def earlier(arm):
    """The state of the window before, as of a stale checkpoint."""
    if arm.windows == 4:
        arm.memory["kept"] = copy.deepcopy(arm.optimizer.state_dict())
    if arm.windows == 5:
        arm.optimizer.load_state_dict(arm.memory["kept"])


def one_scaled(arm):
    next(iter(arm.optimizer.state.values()))["momentum_buffer"].mul_(1.001)


def one_less(arm):
    for p in arm.optimizer.param_groups[-1]["params"]:
        if p.grad is not None:
            arm.optimizer.state[p]["step"] -= 1


def reloaded(arm):
    arm.optimizer.load_state_dict(copy.deepcopy(arm.optimizer.state_dict()))


def lost(window):
    return loop(in_window(window, lambda arm: arm.optimizer.state.clear()))


def regrouped(**settings):
    return loop(in_window(5, lambda arm: arm.optimizer.param_groups[0].update(**settings)))


ON_A_KINK = f"optimizer.name=custom optimizer.target={optimizers.__file__}:Limited optimizer.args.momentum=0.9 precision=float64"
STATE = {
    "momentum lost": (lost(5),),
    "moments lost": (lost(7), ADAM),
    "momentum of the window before": (loop(earlier),),
    "moments of the window before": (loop(earlier), ADAM),
    "one tensor scaled": (loop(in_window(5, one_scaled)),),
    "a counter of one group": (loop(in_window(5, one_less)), ADAM),
    "a decay that changes": (regrouped(weight_decay=0.1),),
    "an average that stands still": (loop(averages=lambda arm: arm.windows < 3 or arm.windows > 8), "ema_decay=0.9"),
    "an average that moves five times": (loop(averages=lambda arm: 5 if arm.windows == 6 else 1), "ema_decay=0.9"),
    "momentum lost beside BatchNorm": (lost(5), "", "Images"),
    "momentum lost late beside BatchNorm": (lost(16), "steps=24", "Images"),
    "statistics that another forward has moved": (
        loop(factor=lambda arm: float(arm.windows < 10 or bool(arm.model(torch.ones(2, 2, 5, 5).double()).isfinite().all()))),
        "precision=float64",
        "Images",
    ),
    "a rate that is changed once beside BatchNorm": (regrouped(lr=0.051), "", "Images"),
    "momentum lost beside dropout": (lost(5), "", "Drops"),
    "momentum lost at weights on a kink": (lost(5), ON_A_KINK, "Binary"),
    "the rate that a schedule begins with": (loop(in_window(11, lambda arm: arm.schedule.base_lrs.__setitem__(0, 0.07))),),
    "an epsilon of clipping that changes": (
        lambda arm, window: ended(arm, window, 1e-8 * (1 + arm.windows // 5)),
        "clip_norm=0.1",
    ),
    "a loss reported otherwise": (lambda arm, window: loop()(arm, window) * (4.0 if arm.windows in (4, 5) else 1.0),),
    "evaluation mode": (loop(lambda arm: arm.model.train(not 3 <= arm.windows <= 6)), "", "Drops"),
    "evaluation mode from the second micro-batch on": (inside(lambda arm, k: arm.model.train(k == 0)), "", "Drops"),
    "a seed of each micro-batch": (inside(lambda arm, k: torch.manual_seed(0)), "", "Drops"),
}


@pytest.mark.parametrize("name", one_in(8, STATE))
def test_state_that_changes_once_is_found(name):
    row = judged(*STATE[name])
    inherent = {"batch_statistics", "stochastic_layers"}
    assert row["verdict"] == "different" and {*row["cause"].split("+")} - inherent, row["reasons"]
    assert "amplifies rounding" not in row["reasons"]


@pytest.mark.parametrize(
    ("since", "until", "settings", "task"),
    [
        (14, 99, "steps=24", "Frozen"),
        slow(29, 99, f"steps=30 {ADAM}", "Frozen"),
        (5, 5, "", "Images"),
        slow(16, 99, "steps=24", "Images"),
        (5, 5, "", "Drops"),
    ],
)
def test_a_loss_that_is_not_divided_later_is_named_with_what_the_model_is(since, until, settings, task):
    row = judged(loop(factor=lambda arm: 5.0 if since <= arm.windows <= until else 1.0), settings, task)
    assert row["verdict"] == "different" and "loss_not_divided" in row["cause"].split("+"), row["reasons"]
    assert ("batch_statistics" in row["cause"]) == (task == "Images")


@pytest.mark.parametrize(("factor", "cause"), [(1.0, "stochastic_layers"), (5.0, "stochastic_layers+loss_not_divided")])
def test_a_run_is_right_but_for_its_draws_or_has_a_second_cause(factor, cause):
    """A forward for the log draws too, so that the micro-batches draw other numbers than the full batch's rows."""

    def loss(arm, rows):
        arm.model(rows.inputs[0])
        drops = any(isinstance(layer, nn.Dropout) and layer.p for layer in arm.model.modules())
        return plain(arm, rows) * (factor if drops else 1.0)

    row = judged(lambda arm, window: stepped(arm, None, accumulate(arm, window, loss)), task="Drops")
    assert (row["cause"], row["explained"]) == (cause, True), row["reasons"]


@pytest.mark.parametrize(("always", "cause"), [(True, ""), (False, "gradients_not_cleared")])
def test_a_window_that_is_not_finite_leaves_nothing_behind(always, cause):
    """A guard skips its step; where only a step clears, every later window is skipped too."""

    def take(arm, window):
        total = accumulate(arm, window)
        if is_finite := all(bool(p.grad.isfinite().all()) for p in arm.model.parameters() if p.grad is not None):
            arm.optimizer.step()
        arm.schedule.step()
        if is_finite or always:
            arm.optimizer.zero_grad()
        return total

    row = judged(take)
    assert (row["verdict"], row["cause"]) == ("different" if cause else "equivalent", cause), row["reasons"]


def test_a_loop_that_exchanges_its_optimizer_is_refused():
    def exchanges(arm):
        arm.optimizer = torch.optim.SGD(arm.model.parameters(), lr=0.05)

    with pytest.raises(ConfigError, match="puts another in its place"):
        judged(loop(exchanges))


def test_weights_in_the_format_under_test_alone_are_no_rounding():
    row = judged(loop(factor=lambda arm: 5.0 if arm.precision == "float32" else 1.0))
    assert (row["verdict"], row["cause"]) == ("different", "loss_not_divided")
    assert "in float32 alone: the accumulated gradient is 5.00000" in row["reasons"]


def test_gradients_that_are_wrong_later_in_the_format_under_test_alone_are_degraded():
    def take(arm, window):
        total = accumulate(arm, window)
        if arm.precision == "float32" and arm.windows > 6:
            next(p.grad for p in arm.model.parameters() if p.grad is not None).mul_(3.0)
        return stepped(arm, None, total)

    row = judged(take)
    assert row["verdict"] == "degraded" and "in float32 from window 7 on gradients are off by up to" in row["reasons"]


@pytest.mark.parametrize(
    ("act", "settings", "seen"),
    [
        (lambda arm: arm.optimizer.state.clear(), "precision=bfloat16", "momentum_buffer"),
        (lambda arm: arm.ema.update_parameters(arm.model), "ema_decay=0.9", "the moving average"),
    ],
)
def test_what_a_step_leaves_is_compared_in_the_format_under_test(act, settings, seen):
    row = judged(loop(lambda arm: None if arm.precision == "float64" else act(arm)), settings)
    assert row["verdict"] == "different" and " alone: " in row["reasons"] and seen in row["reasons"], row["reasons"]


@pytest.mark.parametrize(
    ("task", "precision"),
    [
        *(("Images", "float32"), ("Frozen", "bfloat16")),
        *(slow("Drops", "float32"), slow("Images", "bfloat16")),
    ],
)
def test_weights_in_the_format_under_test_alone_are_named_where_rounding_cannot_tell(task, precision):
    for since, expected in ((99, set()), (7, {"loss_not_divided"})):
        factor = partial(lambda arm, since: 5.0 if arm.precision == precision and arm.windows >= since else 1.0, since=since)
        row = judged(loop(factor=factor), f"precision={precision}", task)
        found = {*row["cause"].split("+")} - {"batch_statistics", "stochastic_layers", ""}
        assert found == expected and not (row["explained"] and expected), row["reasons"]
        assert (f"in {precision} alone" in row["reasons"]) == bool(expected)


def in_groups(groups, lr):
    """A parameter group for each tensor."""
    return torch.optim.SGD([{"params": [p]} for group in groups for p in group["params"]], lr)


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "equivalent"), (1.5, "degraded")])
def test_a_small_group_in_the_format_under_test_alone_is_judged_by_itself(factor, outcome):
    def take(arm, window):
        total = accumulate(arm, window)
        arm.model.scale.grad.mul_(factor if arm.precision == "float32" else 1.0)
        return stepped(arm, None, total)

    row = judged(take, f"optimizer.name=custom optimizer.target={__file__}:in_groups", "Temperature")
    assert row["verdict"] == outcome, row["reasons"]
    assert ("times the full batch's (5.0e-01)" in row["reasons"]) == (outcome == "degraded")


def cast(arm, window):
    """Scores in float32, as language models take their losses, and a sum of one's own in float32."""
    main = [torch.zeros_like(p, dtype=torch.float32) for p in arm.model.parameters()]

    def add(arm):
        for own, p in zip(main, arm.model.parameters(), strict=True):
            own += 0 if p.grad is None else p.grad.float()
            p.grad = None

    def loss(arm, rows):
        return arm.workload.losses(arm.model(rows.inputs[0]).float(), rows).sum()

    return stepped(arm, main, accumulate(arm, window, loss, after=add))


def rounded(arm, window):
    """Integer tensors divided by each other: torch gives float32."""
    whole = arm.workload.num_terms(window).sum()

    def loss(arm, rows):
        mine = arm.workload.num_terms(rows).sum()
        return plain(arm, rows) / mine * (mine / whole) * len(window)

    return stepped(arm, None, accumulate(arm, window, loss, [*micro_batches(window)[:3], window.rows(slice(6, None))]))


def differentiated(arm, window):
    """`p.grad` is assigned, and never cleared: zeros where there is none."""
    weights, total = [p for p in arm.model.parameters() if p.requires_grad], torch.zeros((), dtype=torch.float64)
    sums = [torch.zeros_like(p) for p in weights]
    for rows in micro_batches(window):
        loss = arm.workload.losses(arm.model(rows.inputs[0]), rows).sum() / len(window)
        for own, one in zip(sums, torch.autograd.grad(loss, weights, materialize_grads=True), strict=True):
            own += one
        total = total + loss.detach()
    for p, own in zip(weights, sums, strict=True):
        p.grad = own
    arm.optimizer.step()
    arm.schedule.step()
    return total


def guarded(arm, window):
    """Losses of one's own, the task's for a log alone; gradients that are not finite are cleared, and the step is called."""

    def loss(arm, rows):
        outputs = arm.model(rows.inputs[0])
        arm.workload.losses(outputs.detach(), rows)
        return nn.functional.cross_entropy(outputs, rows.inputs[1], reduction="sum")

    total = accumulate(arm, window, loss)
    if not total.isfinite():
        arm.optimizer.zero_grad()
    return stepped(arm, None, total)


def ended(arm, window, epsilon=1e-8):
    """Our own function ends the window, and counts it; clipping has an epsilon of its own."""
    total, own = accumulate(arm, window), [p.grad for p in arm.model.parameters() if p.grad is not None]
    if arm.clip_norm is not None and (norm := nn.utils.get_total_norm(own)) > arm.clip_norm:
        torch._foreach_mul_(own, arm.clip_norm / (norm + epsilon))
    arm.clip_norm, limit = None, arm.clip_norm
    end_window(arm, window)
    arm.clip_norm = limit
    return total


def scaled_by_hand(arm, window):
    scaler = arm.memory.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=1000.0))
    total = accumulate(arm, window, factor=scaler.get_scale)
    scaler.scale(total)  # which makes it
    scaler.step(arm.optimizer)
    scaler.update()
    arm.schedule.step()
    arm.optimizer.zero_grad()
    return total


def by_sample(arm, window):
    """Gradients of single rows by `torch.func`."""
    weights = {name: p.detach() for name, p in arm.model.named_parameters()}

    def of(weights, x, y):
        return nn.functional.cross_entropy(torch.func.functional_call(arm.model, weights, (x[None],)), y[None])

    total, sums = torch.zeros((), dtype=torch.float64), dict.fromkeys(weights, torch.zeros(()))
    for rows in micro_batches(window):
        found, losses = torch.func.vmap(torch.func.grad_and_value(of), (None, 0, 0))(weights, *rows.inputs)
        sums = {name: sums[name] + one.sum(0) / len(window) for name, one in found.items()}
        total = total + losses.sum() / len(window)
    return stepped(arm, [sums[name] for name in weights], total)


def stepped(arm, gradients, total):
    for p, own in zip(arm.model.parameters(), gradients or (), strict=gradients is not None):
        p.grad = own.to(p.dtype) if p.requires_grad else None
    arm.optimizer.step()
    arm.schedule.step()
    arm.optimizer.zero_grad()
    return total


@pytest.mark.parametrize(
    ("take", "settings"),
    one_in(
        2,
        [
            *((take, "") for take in (loop(), cast, rounded, differentiated, guarded, ended, by_sample)),
            (ended, "clip_norm=0.1"),
            (scaled_by_hand, "precision=float16"),
            *((loop(), "ema_decay=0.9"), (loop(in_window(5, reloaded)), ADAM)),
            (differentiated, f"{ADAM} optimizer.weight_decay=0.1 workload.target={tasks.__file__}:Spare"),
            (loop(), f"optimizer.name=custom optimizer.target={optimizers.__file__}:Clocked"),
        ],
    ),
)
def test_what_a_loop_may_do_otherwise_is_right(take, settings):
    row = judged(take, f"steps=8 {settings}")
    assert (row["verdict"], row["cause"]) == ("equivalent", ""), row["reasons"]


def by_halves(arm, window):
    """Half of the parameters at a time, each in backwards through all rows."""
    own = [p for p in arm.model.parameters() if p.requires_grad]
    for half in (own[:1], own[1:]):
        for rows in micro_batches(window):
            loss = plain(arm, rows) / len(window)
            loss.backward(inputs=half)
    return stepped(arm, None, plain(arm, window).detach() / len(window))


def later_on_old_weights(arm, window):
    """The last micro-batch of window 7 goes through the weights of the window before."""
    old = arm.memory.get("old", {})

    def loss(arm, rows):
        arm.memory["k"] = k = arm.memory.get("k", -1) + 1
        values = {name: p + (old[name] - p).detach() for name, p in arm.model.named_parameters() if k == 7 * 5 + 4}
        return arm.workload.losses(torch.func.functional_call(arm.model, values, (rows.inputs[0],)), rows).sum()

    total = accumulate(arm, window, loss)
    arm.memory["old"] = {name: p.detach().clone() for name, p in arm.model.named_parameters()}
    return stepped(arm, None, total)


def one_tensor_in_bfloat16(arm, window):
    p = next(arm.model.parameters())
    return stepped(arm, None, accumulate(arm, window, after=lambda arm: setattr(p, "grad", p.grad.bfloat16().to(p.dtype))))


def in_two_ways(arm, window, factor=1.0):
    """`Alike` by hand: two forwards, one of inputs that are no rows of the data, and losses of one's own."""

    def loss(arm, rows):
        images, labels = rows.inputs
        return nn.functional.cross_entropy(arm.model(images / 2) + arm.model(images), labels, reduction="sum")

    return stepped(arm, None, accumulate(arm, window, loss, factor=lambda: factor))


def by_time(arm, window, factor=1.0):
    """Losses of one's own: no row is recognised, since the time is their first dimension."""

    def loss(arm, rows):
        return nn.functional.cross_entropy(arm.model(rows.inputs[0]), rows.inputs[1], reduction="sum")

    return stepped(arm, None, accumulate(arm, window, loss, factor=lambda: factor))


def filled_up(arm, window, factor=1.0):
    """A closure, which differentiates a copy of the model; the last micro-batch is filled up with rows that weigh nothing."""
    model, total = copy.deepcopy(arm.model), torch.zeros((), dtype=torch.float64)

    def closure():
        for k in range(0, len(window), 4):
            places = torch.arange(k, k + 4)
            rows = window.rows(places.clamp(max=len(window) - 1))
            losses = arm.workload.losses(model(rows.inputs[0].transpose(0, 1)), rows)
            loss = (losses * (places < len(window))).sum() / len(window)
            (loss * factor).backward()
            total.add_(loss.detach())
        for p, own in zip(arm.model.parameters(), model.parameters(), strict=True):
            p.grad = own.grad

    arm.optimizer.step(closure)
    arm.schedule.step()
    return total


def repeated(arm, window, factor=1.0):
    """The first micro-batch in the last one's place, where every row has an equal one."""

    def loss(arm, rows):
        return arm.workload.losses(arm.workload.forward(arm.model, rows), rows).sum()

    parts = micro_batches(window)
    return stepped(arm, None, accumulate(arm, window, loss, [*parts[:-1], parts[0]], factor=lambda: factor))


def twice(arm, window):
    """The last micro-batch's backward is run again."""
    total = accumulate(arm, window)
    (plain(arm, micro_batches(window)[-1]) / len(window)).backward()
    return stepped(arm, None, total)


def without_terms(arm, window, factor=1.0, until=None):
    """Rows without a loss term are left out."""
    terms = arm.workload.num_terms(window)
    parts = [window.rows(part) for part in terms.nonzero().flatten()[:until].chunk(5)]
    share = len(window) / terms.sum()
    return stepped(arm, None, accumulate(arm, window, plain, parts, lambda: factor * share) * share)


def without_gradients(arm, window, until=None):
    """Rows whose loss is zero whatever the weights are left out."""
    kept = (window.inputs[1] != 0).nonzero().flatten()[:until]
    return stepped(arm, None, accumulate(arm, window, parts=[window.rows(part) for part in kept.chunk(5)]))


def stays(arm, window):
    """The gradients of a window that is not finite are there when the next one begins."""
    total = accumulate(arm, window)
    return stepped(arm, None, total) if total.isfinite() else total


def one_small_tensor(arm):
    arm.model.scale.grad.mul_(1.5)


def two_forwards(arm, window, factor=1.0):
    """Half of the loss by each of two forwards of a micro-batch."""
    total = sum(accumulate(arm, window, factor=lambda: factor / 2) for _ in range(2))
    return stepped(arm, None, total / 2)


def own_rates(arm, window):
    """The rate is written anew, one unit in the last place off."""
    for group in arm.optimizer.param_groups:
        group["lr"] = math.nextafter(group["lr"], 1.0)
    return stepped(arm, None, accumulate(arm, window))


def clip(arm):
    nn.utils.clip_grad_norm_(arm.model.parameters(), 0.01)


def shrink(arm):
    torch._foreach_mul_([p.detach() for p in arm.model.parameters()], 0.9999)


def halve(arm):
    for parameter in arm.model.parameters():
        parameter.grad.mul_(0.5)


def after_each(act, arm, window):
    return stepped(arm, None, accumulate(arm, window, after=act))


def after_all(act, arm, window):
    total = accumulate(arm, window)
    act(arm)
    return stepped(arm, None, total)


@pytest.mark.parametrize(
    ("take", "task", "cause"),
    one_in(
        3,
        [
            (loop(), "Temperature", ""),
            (loop(), "LearntWeights", ""),
            (loop(), "Signed", ""),
            (loop(factor=lambda arm: 5.0), "Signed", "loss_not_divided"),
            (loop(factor=lambda arm: math.nan if arm.windows == 7 else 1.0), "Temperature", "unexplained"),
            (twice, "Temperature", "samples_repeated"),
            (partial(after_all, one_small_tensor), "Temperature", "unexplained"),
            (partial(after_each, clip), "Temperature", "clip_per_micro_batch"),
            (partial(after_all, clip), "Temperature", "unexplained"),
            (partial(after_each, halve), "Temperature", "sum_rescaled_in_window"),
            (partial(after_all, halve), "Temperature", "unexplained"),
            (partial(after_each, shrink), "Temperature", "weight_decay_per_micro_batch"),
            (two_forwards, "Temperature", ""),
            (partial(two_forwards, factor=5.0), "Temperature", "loss_not_divided"),
            (own_rates, "Temperature", ""),
            (in_two_ways, "Alike", ""),
            (partial(in_two_ways, factor=5.0), "Alike", "loss_not_divided"),
            (by_halves, "Frozen", ""),
            (without_terms, "Unlabelled", ""),
            (partial(without_terms, factor=5.0), "Unlabelled", "loss_not_divided"),
            (partial(without_terms, until=-1), "Unlabelled", "window_misplaced"),
            (without_gradients, "Easy", ""),
            (partial(without_gradients, until=-1), "Easy", "window_misplaced"),
            (stays, "Temperature", "gradients_not_cleared"),
            (repeated, "Alike", "samples_repeated"),
            (partial(repeated, factor=5.0), "Alike", "samples_repeated+loss_not_divided"),
            (twice, "Drops", "samples_repeated"),
            (later_on_old_weights, "Images", "batch_statistics+cached_weights_stale"),
            (one_tensor_in_bfloat16, "Images", "batch_statistics+low_precision_accumulator"),
            (partial(by_time, factor=5.0), "TimeFirst", "loss_not_divided"),
            (filled_up, "Turned", ""),
            (partial(filled_up, factor=3.0), "Turned", "loss_not_divided"),
        ],
    ),
)
def test_rows_are_not_guessed_and_each_tensor_has_its_floor(take, task, cause):
    row = judged(take, "steps=9", task)
    assert (row["verdict"], row["cause"]) == ("different" if cause else "equivalent", cause), row["reasons"]


def but_the_last(arm):
    """0 for the last of five micro-batches, 1 for the others."""
    arm.memory["k"] = arm.memory.get("k", -1) + 1
    return float(arm.memory["k"] % 5 != 4)


@pytest.mark.parametrize(
    ("factor", "task", "cause"),
    [
        (lambda arm: 1.0, "Binary", ""),
        (lambda arm: 0.2, "Binary", "loss_divided_twice"),
        slow(lambda arm: 1.0, "BinaryRows", "batch_statistics"),
        slow(but_the_last, "BinaryRows", "batch_statistics+micro_batches_lost"),
    ],
)
def test_weights_that_stand_on_a_kink_excuse_nothing(factor, task, cause):
    """Moved by the least, they leave it, and the gradient jumps: by that alone float64 would resolve no gradient of theirs."""
    row = judged(loop(factor=factor), ON_A_KINK, task)
    assert row["cause"] == cause, row["reasons"]


def test_a_rate_whose_cosine_is_written_otherwise_is_the_same():
    """At its end 1 + cos x cancels, and 2 cos^2(x / 2) does not: rounding is relative to the whole rate."""
    own = loop(lambda arm: arm.optimizer.param_groups[0].update(lr=0.05 * math.cos(math.pi * (arm.windows + 1) / 24) ** 2))
    row = judged(own, "schedule.name=cosine")
    assert row["verdict"] == "equivalent", row["reasons"]


def test_another_number_of_loss_terms_is_a_count_and_other_weights_are_told_with_their_digits():
    counted = judged(loop(factor=lambda arm: 10 / 11))
    assert (counted["cause"], counted["explained"]) == ("counter_wrong", True), counted["reasons"]

    def first_is_heavier(arm):
        arm.memory["k"] = arm.memory.get("k", -1) + 1
        return 1.001 if arm.memory["k"] % 5 == 0 else 1.0

    weighted = judged(loop(factor=first_is_heavier))
    assert weighted["cause"] == "unexplained" and "enter with 1.001, 1, 1, 1, 1 of" in weighted["reasons"]
