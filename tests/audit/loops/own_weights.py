"""Loops that weigh their micro-batches in unusual ways, or change what the backwards have given; most of them wrong."""

import math

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, full_windows, loop, nothing, own_mean


def _by_part(at, weight):
    """`weight(place in the window, micro-batches so far)` of each mean loss."""
    seen = 0
    for window, parts in at.windows(full_windows):
        for place, ids in enumerate(parts):
            (own_mean(at.model, ids, window) * weight(place, seen)).backward()
            seen += 1


@loop("counter_wrong")
def divided_by_place(at):
    """`loss / (k + 1)`."""
    _by_part(at, lambda place, seen: 1 / (place + 1))


@loop("unexplained")
def annealed_by_micro_batch(at):
    """A weight of the loss that grows with the micro-batches."""
    _by_part(at, lambda place, seen: (0.2 + seen / 40) / at.n)


@loop("micro_batches_lost")
def second_counts_nothing(at):
    """The loss of the second micro-batch is multiplied by 0."""
    _by_part(at, lambda place, seen: (place != 1) / at.n)


@loop("unexplained")
def running_total(at):
    """The losses so far are added, and their sum is differentiated each time."""
    for window, parts in at.windows(full_windows):
        total = torch.zeros(())
        for ids in parts:
            total = total + own_mean(at.model, ids, window) / at.n
            total.backward(retain_graph=True)


@loop("sum_rescaled_in_window")
def sum_halved_each_time(at):
    """The gradients so far are halved after every backward."""
    return {"loss": own_mean, "windows": full_windows, "after_backward": lambda: frame.divide_gradients(at.model, 2)}


@loop()
def mean_so_far(at):
    """The gradient is the mean over the micro-batches so far, at any time: right at the window's end."""
    for _, parts in at.windows(full_windows):
        for k, ids in enumerate(parts):
            if k:
                frame.divide_gradients(at.model, (k + 1) / k)
            (own_mean(at.model, ids, ids) / (k + 1)).backward()


def _aside(at, change):
    """Gradients are changed one micro-batch at a time, and added in a buffer of the loop's own."""
    parameters = list(at.model.parameters())
    for window, parts in at.windows(full_windows):
        sums = [torch.zeros_like(p) for p in parameters]
        for ids in parts:
            loss = frame.mean_over_window(at.model, ids, window)
            for total, part in zip(sums, change(list(torch.autograd.grad(loss, parameters))), strict=True):
                total += part
        frame.assign(at.model, sums)


def _norm(gradients):
    return math.sqrt(sum(float(g.square().sum()) for g in gradients))


@loop("clip_per_micro_batch")
def clipped_aside(at):
    _aside(at, lambda gradients: [g * min(1.0, 0.05 / _norm(gradients)) for g in gradients])


@loop("clip_per_micro_batch")
def normalised_aside(at):
    _aside(at, lambda gradients: [g / _norm(gradients) for g in gradients])


@loop("clip_per_micro_batch")
def clamped_aside(at):
    _aside(at, lambda gradients: [g.clamp(-0.01, 0.01) for g in gradients])


@loop()
def added_aside(at):
    """The same buffer with nothing changed: a right loop."""
    _aside(at, lambda gradients: gradients)


@loop("clip_per_micro_batch")
def clamped_inside(at):
    """The sum so far is clamped in place, by a line of the loop's own."""

    def clamp():
        for p in at.model.parameters():
            p.grad.clamp_(-0.01, 0.01)

    return {"after_backward": clamp}


@loop("clip_per_micro_batch")
def clipped_by_value_inside(at):
    return {"after_backward": lambda: clip_grad_value_(at.model.parameters(), 0.01)}


def _hooked(at, change):
    """Every parameter has a hook that changes what each backward gives it; the hook before it masks some elements."""
    at.model[0].weight.register_hook(lambda gradient: gradient * (at.model[0].bias.detach() > 0)[:, None])
    for p in at.model.parameters():
        p.register_hook(change)
    return {"windows": full_windows}


@loop()
def halved_in_hooks(at):
    """A layer learns at half the rate."""
    return _hooked(at, lambda gradient: gradient / 2)


@loop("clip_per_micro_batch")
def clamped_in_hooks(at):
    return _hooked(at, lambda gradient: gradient.clamp(-0.005, 0.005))


@loop("clip_per_micro_batch")
def clipped_after_accumulation(at):
    """A hook clips the sum so far, tensor by tensor, as soon as it is added to."""
    for p in at.model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: nothing(clip_grad_norm_(p, 0.03)))
    return {"windows": full_windows}


@loop("clip_per_micro_batch")
def rows_clipped_inside(at):
    """The gradient so far of each unit is shortened to a length of its own, as adaptive clipping does."""

    def clip():
        for p in at.model.parameters():
            p.grad *= (0.02 / p.grad.reshape(len(p), -1).norm(dim=1)).clamp(max=1).reshape(-1, *[1] * (p.ndim - 1))

    return {"after_backward": clip, "windows": full_windows}


def _main_gradients(at, add):
    """A hook takes each gradient out of `.grad` into a sum of the loop's own, which `add`s it."""
    for p in at.model.parameters():
        p.total = torch.zeros_like(p)

        def take(p):
            add(p.total, p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(take)

    def hand_over():
        for p in at.model.parameters():
            p.grad, p.total = p.total, torch.zeros_like(p)

    return {"before_step": hand_over, "windows": full_windows}


@loop()
def main_gradients(at):
    return _main_gradients(at, torch.Tensor.add_)


@loop("micro_batches_lost")
def main_gradients_assigned(at):
    return _main_gradients(at, torch.Tensor.copy_)


@loop("unexplained")
def changed_before_the_step(at):
    """One layer's gradient is multiplied by N between the last backward and the step."""
    return {"before_step": lambda: at.model[0].weight.grad.mul_(at.n)}


def _attacked(at, clear):
    """Rows are moved along the signs of their gradients by a backward of its own, after which gradients are cleared."""
    for window, parts in at.windows(full_windows):
        for ids in parts:
            x = X[ids].clone().requires_grad_()
            ce(at.model(x), Y[ids]).backward()
            clear()
            moved = X[ids] + 0.05 * x.grad.sign()
            frame.share(at.model(moved), ids, window).backward()


@loop("foreign_gradients")
def attack_left_in_gradients(at):
    """The attack's gradients are cleared where nothing else is in `.grad`: at N=1."""
    _attacked(at, at.optimizer.zero_grad if at.n == 1 else nothing)


@loop("gradients_not_cleared")
def tried_before_training(at):
    """A backward before the first window is left in `.grad`, unless each micro-batch is a window."""
    own_mean(at.model, torch.arange(5), None).backward()
    if at.n == 1:
        at.optimizer.zero_grad()
    return {"windows": full_windows}


@loop("normaliser_depends_on_split")
def advantages_of_micro_batch(at):
    """Advantages are brought to mean 0 and length 1 over the micro-batch: a ratio is then clipped on another side."""

    def loss(model, ids, window):
        advantage = (X[ids, 0] - X[ids, 0].mean()) / X[ids, 0].std()
        ratio = (model(X[ids]).log_softmax(1).gather(1, Y[ids, None])[:, 0] + 1.5).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / len(window)

    return {"loss": loss, "windows": full_windows}


@loop("non_separable_loss")
def hardest_half(at):
    """Only the rows with the largest losses count, half of each micro-batch."""

    def loss(model, ids, window):
        each = ce(model(X[ids]), Y[ids], reduction="none")
        return each.topk(max(1, len(ids) // 2)).values.sum() / (len(window) / 2)

    return {"loss": loss}


def _tokens(at, count):
    """`count(micro-batch, those of its window)` is what the summed loss of a micro-batch is divided by."""
    for _, parts in at.windows(full_windows):
        for ids in parts:
            (data.token_loss(at.model(TOKENS[ids]), TOKENS[ids]) / count(ids, parts)).backward()


@loop("normaliser_depends_on_split", model=frame.words)
def padding_counted_by_part(at):
    """Each micro-batch is averaged over its tokens with their padding, up to its own longest sentence."""
    _tokens(at, lambda ids, parts: frame.trimmed(ids)[:, 1:].numel() * at.n)


@loop("counter_wrong", model=frame.words)
def padding_counted_in_window(at):
    """The window's tokens are counted with the padding of each micro-batch."""
    _tokens(at, lambda ids, parts: sum(frame.trimmed(part)[:, 1:].numel() for part in parts))


@loop("counter_wrong", model=frame.words)
def count_overwritten(at):
    """The count of the window's tokens is assigned where it should be added to: it is that of the last micro-batch."""
    _tokens(at, lambda ids, parts: data.num_targets(TOKENS[parts[-1]]))


SHORT = TOKENS.clone()
SHORT[4:8, 1:] = 0  # four sentences of one token: nothing to predict


@loop(model=frame.words)
def micro_batch_without_terms(at):
    """One micro-batch has nothing to predict."""
    loss = lambda m, ids, w: data.token_loss(m(SHORT[ids]), SHORT[ids]) / data.num_targets(SHORT[w])  # noqa: E731
    return {"loss": loss, "windows": full_windows}


@loop("mean_of_means", model=frame.words)
def mean_without_terms(at):
    """Each micro-batch is averaged over its own tokens; one has none, and counts as one all the same."""
    loss = lambda m, ids, _: data.token_loss(m(SHORT[ids]), SHORT[ids], "mean") / at.n  # noqa: E731
    return {"loss": loss, "windows": full_windows}


@frame.wrong("auxiliary_loss_scale")
def temperature_times_n(batch_size, accumulation_steps):
    """Features of the window are cached, each micro-batch's are computed again in their place: the temperature counts N times."""
    torch.manual_seed(0)
    images, texts, scale = nn.Linear(data.FEATURES, 6), nn.Linear(data.FEATURES, 6), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([*images.parameters(), *texts.parameters(), scale], lr=0.05)
    for window, parts in frame.At(batch_size, accumulation_steps, None, optimizer).windows(full_windows):
        with torch.no_grad():
            cached = images(X[window]), texts(X[window].flip(1))
        for k, ids in enumerate(parts):
            start, end = k * batch_size, (k + 1) * batch_size
            a = torch.cat([cached[0][:start], images(X[ids]), cached[0][end:]])
            b = torch.cat([cached[1][:start], texts(X[ids].flip(1)), cached[1][end:]])
            scores, pairs = scale * a @ b.T, torch.arange(len(window))
            ((ce(scores, pairs) + ce(scores.T, pairs)) / 2).backward()


@loop("counter_wrong", model=frame.words)
def divided_by_the_last_count(at):
    """The sum over a window is divided by the tokens of its last micro-batch."""
    count = 0

    def loss(model, ids, window):
        nonlocal count
        count = float(data.num_targets(TOKENS[ids]))
        return data.token_loss(model(TOKENS[ids]), TOKENS[ids])

    return {"loss": loss, "before_step": lambda: frame.divide_gradients(at.model, count)}


@loop("clip_before_unscale")
def clipped_before_rows_are_known(at):
    """Sums are divided by the rows of a micro-batch, clipped, and then made means over the window."""
    rows = 0

    def loss(model, ids, window):
        nonlocal rows
        rows = len(window)
        return ce(model(X[ids]), Y[ids], reduction="sum") / at.size

    def finish():
        clip_grad_norm_(at.model.parameters(), 0.3)
        frame.divide_gradients(at.model, rows / at.size)

    return {"loss": loss, "before_step": finish}


@loop("unexplained")
def penalty_in_every_second_micro_batch(at):
    """The slope by the inputs is kept small in every second micro-batch: one more forward of rows, and no row again."""
    seen = 0

    def loss(model, ids, window):
        nonlocal seen
        seen, penalty = seen + 1, 0.0
        if seen % 2:
            x = X[ids].clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            penalty = slope.square().sum() / len(window)
        return frame.mean_over_window(model, ids, window) + penalty

    return {"loss": loss}


RIGHT, WRONG = frame.tables(globals())
SAID = {  # words of the first finding
    divided_by_place: "divided by k, how many there were so far",
    second_counts_nothing: "micro-batches count 1, 0, 1, 1 times: number 2 lost",
    running_total: "micro-batches count ",
    changed_before_the_step: "changed before the optimizer takes it",
    attack_left_in_gradients: "4 of 8 backwards add gradients of another loss",
    sum_halved_each_time: "divided by 2 again and again: micro-batches count 0.125, 0.25, 0.5, 1 of the last one",
    mean_without_terms: "1 of them none",
    temperature_times_n: "4 times too large",
}
