"""What a loop keeps beside its optimizer's weights, and what it does with these after the last step: right and wrong."""

import copy
import random
from itertools import count

import torch

from tests.audit.loops import frame
from tests.audit.loops.frame import X, Y, ce, full_windows, loop, mean_over_window


def _by(at, inside, update):
    """Of the stages of `train`, the one after every micro-batch, or the one after every step."""
    return {"after_micro_batch" if inside else "after_step": update, "windows": full_windows}


def _shrunk_at_the_end(at, inside):
    counted = count(1)
    frame.train(at.size, at.n, at.model, optimizer=at.optimizer, **_by(at, inside, lambda: next(counted)))
    with torch.no_grad():
        for p in at.model.parameters():
            p.div_(1 + 0.01 * next(counted))


@loop()
def shrunk_at_the_end(at):
    """When training is over, weights are divided by a number that grows with the steps."""
    _shrunk_at_the_end(at, inside=False)


@loop("unexplained")
def shrunk_at_the_end_by_micro_batches(at):
    """It grows with the micro-batches."""
    _shrunk_at_the_end(at, inside=True)


def _probe_by_hand(at, divisor):
    """A linear probe of the features is trained beside the model, without an optimizer."""
    probe = torch.zeros(X.shape[1], len(Y.unique()), requires_grad=True)

    def loss(model, ids, window):
        (ce(X[ids] @ probe, Y[ids], reduction="sum") / (divisor or len(window))).backward()
        return mean_over_window(model, ids, window)

    @torch.no_grad()
    def move():
        probe.sub_(probe.grad, alpha=0.1)
        probe.grad = None

    return {"loss": loss, "after_step": move, "windows": full_windows}


@loop()
def probe_by_hand(at):
    """Its loss is divided by the window's rows."""
    return _probe_by_hand(at, 0)


@loop("unexplained")
def probe_by_hand_undivided(at):
    """It is divided by the micro-batch's rows."""
    return _probe_by_hand(at, at.size)


def _target(at, inside):
    """A target network is copied from the model at every fourth update, and used after the run."""
    target, counted = copy.deepcopy(at.model), count(1)

    def update():
        if next(counted) % 4 == 2:
            target.load_state_dict(at.model.state_dict())

    return _by(at, inside, update)


@loop()
def target_for_later(at):
    """Optimizer steps are counted."""
    return _target(at, inside=False)


@loop("ema_per_micro_batch")
def target_for_later_by_micro_batches(at):
    """Micro-batches are counted."""
    return _target(at, inside=True)


@loop("ema_per_micro_batch")
def target_in_the_loss_by_micro_batches(at):
    """Micro-batches are counted, and the target's outputs are in the loss."""
    target, counted = copy.deepcopy(at.model).requires_grad_(False), count(1)

    def loss(model, ids, window):
        if next(counted) % 3 == 0:
            target.load_state_dict(model.state_dict())
        return (model(X[ids]) - target(X[ids].flip(1))).square().sum() / len(window)

    return {"loss": loss}


def _squares(at, inside):
    """A running mean of squared gradients is kept for later (a penalty on a second task)."""
    kept = [torch.zeros_like(p) for p in at.model.parameters()]

    def update():
        for mean, p in zip(kept, at.model.parameters(), strict=True):
            mean.lerp_(p.grad.square(), 0.1)

    return {"after_backward" if inside else "before_step": update, "windows": full_windows}


@loop()
def squared_gradients(at):
    """Of the whole window."""
    return _squares(at, inside=False)


@loop("unexplained")
def squared_gradients_so_far(at):
    """Of what a window has after each backward."""
    return _squares(at, inside=True)


@loop()
def mean_of_inputs_for_later(at):
    """A running mean that a log may hold, or an evaluation may need, moves once per micro-batch: nobody can tell these apart."""
    mean = torch.zeros(X.shape[1])

    def loss(model, ids, window):
        mean.lerp_(X[ids].mean(0), 0.1)
        return mean_over_window(model, ids, window)

    return {"loss": loss, "windows": full_windows}


@loop()
def written_anew(at):
    """A copy of the gradients, and a mean of the rows, are looked at in every micro-batch and forgotten."""

    def loss(model, ids, window):
        at.mean = X[ids].mean(0)
        return mean_over_window(model, ids, window)

    def look():
        at.gradients = [p.grad.clone() for p in at.model.parameters()]

    return {"loss": loss, "after_backward": look, "windows": full_windows}


def _queue(at, inside, divisor=1):
    """Rows are compared with a queue of the outputs before them, too."""
    queue = torch.randn(40, len(Y.unique()), generator=torch.Generator().manual_seed(3))
    for window, parts in at.windows(full_windows):
        outputs = []
        for ids in parts:
            out = at.model(X[ids])
            loss = ce(out, Y[ids], reduction="sum") + torch.logsumexp(out @ queue.T, 1).sum()
            (loss * divisor / len(window)).backward()
            outputs.append(out.detach())
            if inside:
                queue = torch.cat([queue, outputs.pop()])[-40:]
        queue = torch.cat([queue, *outputs])[-40:]


@loop()
def queue_of_windows(at):
    """It moves once per window."""
    _queue(at, inside=False)


@loop("memory_bank")
def queue_of_micro_batches(at):
    """It moves once per micro-batch, and the next one uses it."""
    _queue(at, inside=True)


@loop("memory_bank", "loss_not_divided")
def queue_of_micro_batches_undivided(at):
    """The loss is not divided, either."""
    _queue(at, inside=True, divisor=at.n)


def _noisy(at, *, counts):
    """A number per micro-batch comes from a generator of the loop's own."""
    generator = random.Random(0)

    def loss(model, ids, window):
        return frame.share(model(X[ids]) * (1 + counts * generator.random()), ids, window)

    return {"loss": loss, "windows": full_windows}


@loop()
def drawn_for_a_log(at):
    """Nothing depends on it."""
    return _noisy(at, counts=0)


@loop("stochastic_layers")
def drawn_by_an_own_generator(at):
    """Outputs are scaled by it."""
    return _noisy(at, counts=1)


@loop("non_separable_loss")
def drawn_for_a_log_in_pairs(at):
    """Nothing depends on it, and every row is compared with the others of its micro-batch."""
    generator = random.Random(0)

    def loss(model, ids, window):
        generator.random()
        out = model(X[ids])
        return ce(out @ out.T, torch.arange(len(ids))) / at.n

    return {"loss": loss, "windows": full_windows}


RIGHT, WRONG = frame.tables(globals(), [mean_of_inputs_for_later])  # which is neither
