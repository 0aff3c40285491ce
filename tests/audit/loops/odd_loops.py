"""Loops that an attack on the audit tried: right ones that look wrong, and wrong ones that look right or like something else."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, full_windows, loop, mean_over_window, own_mean, sgd


@loop()
def clipped_times_n_then_divided(at):
    """The undivided sum is clipped to N times the limit, and divided by N: that is clipping the mean to the limit."""
    clip = frame.clip(at.model, 0.1 * at.n)
    return {"loss": own_mean, "windows": full_windows, "before_step": lambda: (clip(), frame.divide_gradients(at.model, at.n))}


@loop("unexplained")
def clipped_to_another_limit(at):
    """The limit is divided by N."""
    return {"before_step": frame.clip(at.model, 0.2 / at.n)}


def _averaged(at, ahead):
    for window, parts in at.windows(full_windows):
        means = []
        for place, ids in enumerate(parts):
            at.optimizer.zero_grad()
            own_mean(at.model, ids, window).backward()
            given = [p.grad.clone() for p in at.model.parameters()]
            means = [mean + (g - mean) / (place + ahead) for mean, g in zip(means, given, strict=True)] if place else given
        frame.assign(at.model, means)


@loop()
def running_mean(at):
    """A mean of the micro-batches so far is kept in a buffer."""
    _averaged(at, 1)


@loop("unexplained")
def running_mean_ahead(at):
    """The number of micro-batches so far is one too large."""
    _averaged(at, 2)


@loop()
def centred_every_time(at):
    """The sum so far is projected after every micro-batch: a projection is linear, and the second one changes nothing."""
    matrices = [p for p in at.model.parameters() if p.ndim > 1]
    return {"after_backward": lambda: [p.grad.sub_(p.grad.mean(1, keepdim=True)) for p in matrices]}


@loop()
def projected_after_the_step(at):
    """Weights are put back on the unit sphere after every optimizer step."""

    @torch.no_grad()
    def project():
        weight = at.model[0].weight
        weight.div_(weight.norm(dim=1, keepdim=True))

    return {"after_step": project}


@loop("unexplained")
def pulled_back_after_the_step(at):
    """With accumulation alone, weights go back a tenth of the step."""
    before = [p.detach().clone() for p in at.model.parameters()]

    def keep():
        for old, p in zip(before, at.model.parameters(), strict=True):
            old.copy_(p.detach())

    @torch.no_grad()
    def pull():
        for old, p in zip(before, at.model.parameters(), strict=True):
            p.lerp_(old, 0.1 * (at.n > 1))

    return {"before_step": keep, "after_step": pull}


@loop("non_separable_loss")
def root_of_the_own_mean(at):
    """The root of a mean of squares, by micro-batch: right weights add up to almost 1, and are no numbers of terms."""

    def loss(model, ids, window):
        return (model(X[ids]) - functional.one_hot(Y[ids], data.CLASSES)).square().mean().sqrt() / at.n

    return {"loss": loss, "windows": full_windows}


@loop("non_separable_loss")
def mixed_with_own_frequencies(at):
    """Targets are mixed with the frequencies of the classes in the micro-batch."""

    def loss(model, ids, window):
        classes = functional.one_hot(Y[ids], data.CLASSES).float()
        return ce(model(X[ids]), 0.9 * classes + 0.1 * classes.mean(0), reduction="sum") / len(window)

    return {"loss": loss}


@frame.wrong("stateful_forward")
def carried_state(batch_size, accumulation_steps):
    """A state goes on from one micro-batch of the window to the next."""
    torch.manual_seed(0)
    cell, head = nn.GRUCell(data.FEATURES, 16), nn.Linear(16, data.CLASSES)
    at = frame.At(batch_size, accumulation_steps, cell, sgd(nn.ModuleList([cell, head])))
    for window, parts in at.windows(full_windows):
        state = torch.zeros(1, 16)
        for ids in parts:
            hidden = cell(X[ids], state.expand(len(ids), 16))
            frame.share(head(hidden), ids, window).backward()
            state = hidden.mean(0, keepdim=True).detach()


def _added(at, change):
    for window, parts in at.windows(full_windows):
        total = [torch.zeros_like(p) for p in at.model.parameters()]
        for ids in parts:
            at.optimizer.zero_grad()
            mean_over_window(at.model, ids, window).backward()
            for changed, p in zip(total, at.model.parameters(), strict=True):
                changed += change(p.grad) / at.n
        frame.assign(at.model, total)


@loop("unexplained", optimizer=partial(sgd, lr=0.01))
def signs_added(at):
    """Each micro-batch gives the signs of its gradient."""
    _added(at, torch.sign)


@loop("clip_per_micro_batch")
def each_tensor_brought_to_one_norm(at):
    """Each micro-batch's gradient of a tensor is normalised by itself before it is added."""
    _added(at, lambda gradient: gradient / gradient.norm())


class Lookahead:
    """At every second call, weights go back to an average of them."""

    def __init__(self, model):
        self.model, self.calls, self.slow = model, 0, [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def pull(self):
        self.calls += 1
        for average, p in zip(self.slow, self.model.parameters(), strict=True) if self.calls % 2 == 0 else ():
            p.copy_(average.lerp_(p, 0.5))


@loop()
def pulled_to_slow_weights(at):
    """After each second step."""
    return {"after_step": Lookahead(at.model).pull}


@loop("ema_per_micro_batch")
def pulled_to_slow_weights_inside(at):
    """After each second micro-batch."""
    return {"after_backward": Lookahead(at.model).pull}


def _beside_shared(at, total):
    importance = torch.rand(data.SAMPLES, generator=torch.Generator().manual_seed(4)) + 0.1

    def loss(model, ids, window):
        rows = model(X[ids])
        scores = torch.cat([rows[:, :1], rows @ model(X[:10] + 1).T], 1)
        each = ce(scores, torch.zeros(len(ids), dtype=torch.long), reduction="none") * importance[ids]
        return each.sum() / total(importance, ids, window)

    return {"loss": loss, "windows": full_windows}


@loop()
def negatives_that_all_share(at):
    """Each row is told from ten rows that are the same for all, and counts by its importance."""
    return _beside_shared(at, lambda importance, ids, window: importance[window].sum())


@loop("mean_of_means")
def negatives_that_all_share_by_part(at):
    """Its importance is divided by that of its micro-batch."""
    return _beside_shared(at, lambda importance, ids, window: importance[ids].sum() * at.n)


@loop(model=lambda: nn.Sequential(nn.Embedding(data.VOCABULARY, 8, max_norm=0.5), nn.Linear(8, data.VOCABULARY)))
def rows_of_a_table_shortened_as_used(at):
    """A forward moves weights: rows of an embedding are brought to a norm when a micro-batch first uses them."""
    return {"loss": frame.token_mean_over_window}


@loop("step_every_micro_batch", optimizer=lambda model: (sgd(model[0]), sgd(model[2])))
def body_steps_every_time(at):
    """Of two optimizers, that of the first layer steps after every micro-batch."""
    for ids, window, last in frame.micro_batches(at.size, at.n, full_windows):
        mean_over_window(at.model, ids, window).backward()
        for optimizer in at.optimizer if last else at.optimizer[:1]:
            optimizer.step()
            optimizer.zero_grad()


@loop("normaliser_depends_on_split", model=frame.words)
def weighed_tokens(at):
    """Tokens are weighed by deviations of their number from the mean of the micro-batch."""

    def loss(model, ids, window):
        targets, used = TOKENS[ids, 1:], TOKENS[ids, 1:] != 0
        numbers = targets.float()
        apart = (numbers - numbers[used].mean()) / numbers[used].std()
        each = ce(model(TOKENS[ids])[:, :-1].transpose(1, 2), targets, reduction="none")
        return (each * apart * used).sum() / data.num_targets(TOKENS[window])

    return {"loss": loss}


@loop("counter_wrong")
def two_parts_at_one(at):
    """N=1 is the wrong one: it adds two halves."""
    for window, _ in at.windows(full_windows):
        for ids in window.chunk(max(2, at.n)):
            (own_mean(at.model, ids, window) / at.n).backward()


@loop("mean_of_means", model=frame.words)
def means_of_shortened_rows(at):
    """Rows are cut to the longest of their micro-batch, whose last token is a target alone: the model is given other rows."""

    def loss(model, ids, window):
        rows = frame.trimmed(ids)
        return ce(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], ignore_index=0) / at.n

    return {"loss": loss, "windows": full_windows}


@loop("weight_decay_per_micro_batch")
def decay_added_after_each_backward(at):
    """The run adds it to `.grad`, where the first layer has nothing else yet: the last one begins with zeros."""
    nn.init.zeros_(at.model[-1].weight)
    return {"after_backward": lambda: [p.grad.add_(p.detach(), alpha=0.01) for p in at.model.parameters()]}


@loop(optimizer=lambda model: (sgd(model[0]), sgd(model[2])))
def penalised_by_two_optimizers(at):
    """Two optimizers of one class and unequal sizes take the gradient of a loss of two terms."""
    for ids, window, last in frame.micro_batches(at.size, at.n, full_windows):
        outputs = at.model(X[ids])
        ((ce(outputs, Y[ids], reduction="sum") + outputs.square().sum()) / len(window)).backward()
        for optimizer in at.optimizer if last else ():
            optimizer.step()
            optimizer.zero_grad()


@loop("samples_repeated")
def first_counts_twice_in_the_bias(at):
    """A bias of 4 elements, too few to weigh 4 micro-batches in one window."""
    bias, kept = at.model[2].bias, []

    def add():
        bias.grad += kept[0] * (at.n > 1)
        kept.clear()

    return {"after_backward": lambda: kept.append(bias.grad.clone()), "before_step": add, "windows": full_windows}


RIGHT, WRONG = frame.tables(globals())


SAID = {
    first_counts_twice_in_the_bias: "micro-batches count 2, 1, 1, 1 times: number 1 counted 2 times; only 2.bias",
    clipped_to_another_limit: "clipped to 0.05 where N=1 clips to 0.2",
    running_mean_ahead: "micro-batches count 0.4, 0.2, 0.2, 0.2 times",
    mixed_with_own_frequencies: "depends on the rows beside it",
}
