"""Loops written without a look at the audit, right and wrong, beside each other: those that it had judged or named wrongly."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.optim import swa_utils

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, full_windows, loop, mean_over_window, sgd


class _Hybrid(torch.optim.Optimizer):
    """Matrices take plain steps of its own; an inner AdamW steps the vectors."""

    def __init__(self, model):
        parameters = list(model.parameters())
        super().__init__(parameters, {"lr": 0.05})
        self.matrices = [p for p in parameters if p.ndim > 1]
        self.inner = torch.optim.AdamW([p for p in parameters if p.ndim == 1], lr=1e-2)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.matrices:
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
        self.inner.step()


def _with_penalty(times):
    def loss(model, ids, window):
        penalty = 0.1 * model[0].weight.square().sum() * len(ids) / len(window)
        return mean_over_window(model, ids, window) + penalty * times

    return {"loss": loss}


@loop(optimizer=_Hybrid)
def two_kinds_of_steps(at):
    """An optimizer steps the matrices, and one inside it the vectors; the matrices' penalty is shared out."""
    return _with_penalty(1)


@loop("auxiliary_loss_scale", optimizer=_Hybrid)
def two_kinds_of_steps_penalty(at):
    """Every micro-batch has the whole penalty on a matrix, which the inner optimizer does not hold."""
    return _with_penalty(at.n)


def _decayed(at, times):
    def shrink():
        with torch.no_grad():
            for p in at.model.parameters():
                p.mul_((1 - 1e-3) ** times)

    return {"before_step": shrink}


@loop(optimizer=frame.adam(1e-3))
def decayed_before_the_step(at):
    """Weights are decayed by hand between the last backward and the step of Adam, with room for rounding to grow."""
    return _decayed(at, 1)


@loop("weight_decay_per_micro_batch", optimizer=frame.adam(1e-3))
def decayed_before_the_step_n_times(at):
    """They are decayed there in one go, once for every micro-batch."""
    return _decayed(at, at.n)


def _penalty_first(model, ids, window, *, shared):
    penalty = sum(p.square().sum() for p in model.parameters() if p.ndim > 1)
    return 1e-2 * penalty * (len(ids) / len(window) if shared else 1.0) + mean_over_window(model, ids, window)


@loop()
def penalty_before_the_forward(at):
    """The graph of the penalty is there before any forward."""
    return {"loss": partial(_penalty_first, shared=True)}


@loop("auxiliary_loss_scale")
def penalty_before_the_forward_in_full(at):
    """Every micro-batch has the whole of it."""
    return {"loss": partial(_penalty_first, shared=False)}


def _one_backward(at, *, own_count):
    for window, parts in at.windows(full_windows):
        tokens = data.num_targets(TOKENS[window])
        counts = [data.num_targets(TOKENS[ids]) * at.n if own_count else tokens for ids in parts]
        losses = [data.token_loss(at.model(TOKENS[ids]), TOKENS[ids]) / n for ids, n in zip(parts, counts, strict=True)]
        torch.stack(losses).sum().backward()


@loop(model=frame.words)
def one_backward_for_all(at):
    """The losses of the micro-batches are added, and differentiated together."""
    _one_backward(at, own_count=False)


@loop("mean_of_means", model=frame.words)
def one_backward_of_means(at):
    """Each of them is a mean over the tokens of its micro-batch."""
    _one_backward(at, own_count=True)


def _cleared_by_hand(at, *, whole):
    def clear():
        at.model[0].zero_grad()
        if whole or at.n == 1:
            at.model[2].zero_grad()

    return {"clear": clear}


@loop(optimizer=partial(sgd, lr=0.05))
def cleared_layer_by_layer(at):
    """The layers' gradients are cleared one layer after the other."""
    return _cleared_by_hand(at, whole=True)


@loop("gradients_not_cleared", optimizer=partial(sgd, lr=0.05))
def one_layer_never_cleared(at):
    """With accumulation, only those of the first layer are."""
    return _cleared_by_hand(at, whole=False)


def _copy_in_use(at, *, renewed_at):
    """A copy of the first layer's weight is used outside of any module, and passes its gradient on."""
    first, copy = at.model[0], at.model[0].weight.detach().clone()
    for window, parts in at.windows():
        for place, ids in enumerate(parts):
            if place == renewed_at:
                copy = first.weight.detach().clone()
            weight = first.weight + (copy - first.weight).detach()
            hidden = functional.linear(X[ids], weight, first.bias)
            frame.share(at.model[2](torch.tanh(hidden)), ids, window).backward()


@loop(optimizer=partial(sgd, lr=0.3))
def copy_renewed(at):
    """The copy is renewed before the first micro-batch of a window."""
    _copy_in_use(at, renewed_at=0)


@loop("cached_weights_stale", optimizer=partial(sgd, lr=0.3))
def copy_renewed_too_late(at):
    """It is renewed before the last one."""
    _copy_in_use(at, renewed_at=at.n - 1)


class _Recurrent(nn.Module):
    """Two recurrent layers, with dropout between them in the same operation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(data.VOCABULARY, 8)
        self.layers = nn.GRU(8, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, data.VOCABULARY)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens))[0])


def _six_windows(size):
    return data.windows(size, epochs=3, keep=False)


@loop(model=lambda: _Recurrent().eval())
def recurrent_at_rest(at):
    """Dropout between recurrent layers is off."""
    return {"loss": frame.token_mean_over_window, "windows": _six_windows}


@loop("mean_of_means", "stochastic_layers", model=_Recurrent)
def recurrent_dropout_of_means(at):
    """It is on, and each micro-batch is averaged over its own tokens, in more windows than are kept."""
    return {"loss": frame.divided(frame.own_token_mean, at.n), "windows": _six_windows}


def _shortened(at, loss):
    """Gradients that are longer than 0.9 are shortened by hand before the step, as engines with a clip of their own do."""

    def shorten():
        grads = [p.grad for p in at.model.parameters()]
        norm = float(torch.stack([g.norm() for g in grads]).norm())
        for g in grads:
            g.mul_(min(1.0, 0.9 / norm))

    return {"loss": loss, "before_step": shorten}


@loop(model=frame.words)
def shortened_by_hand(at):
    """Divided by the window's tokens."""
    return _shortened(at, frame.token_mean_over_window)


@loop("mean_of_means", "short_window_divided_by_n", model=frame.words)
def shortened_by_hand_of_means(at):
    """Each micro-batch is averaged over its own tokens, which makes some gradients longer than the limit."""
    return _shortened(at, frame.divided(frame.own_token_mean, at.n))


class _Prepares(torch.optim.Optimizer):
    """Its first step moves nothing, and later ones feel every rounding, as those in a basis of eigenvectors do (SOAP)."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            if self.state[p]:
                p.sub_(self.param_groups[0]["lr"] * p.grad * (1 + (1e9 * p.grad).sin()))
            self.state[p]["is_ready"] = torch.ones(())


@loop(model=frame.words, optimizer=_Prepares)
def prepares_before_it_moves(at):
    """Divided by the window's tokens."""
    return {"loss": frame.token_mean_over_window}


@loop("mean_of_means", "short_window_divided_by_n", model=frame.words, optimizer=_Prepares)
def prepares_before_it_moves_of_means(at):
    """Each micro-batch is averaged over its own tokens."""
    return {"loss": frame.divided(frame.own_token_mean, at.n)}


def _norms_taken(at, *, cleared):
    """The norm of every micro-batch's gradient is taken for a log, before it is differentiated for good."""

    def loss(model, ids, window):
        share = mean_over_window(model, ids, window)
        torch.stack([g.norm() for g in torch.autograd.grad(share, list(model.parameters()), retain_graph=True)]).norm()
        if cleared:
            at.optimizer.zero_grad()
        return share

    return {"loss": loss}


@loop()
def norms_for_a_log(at):
    """Gradients are added up."""
    return _norms_taken(at, cleared=False)


@loop("gradients_cleared_in_window")
def norms_for_a_log_and_cleared(at):
    """They are cleared before every backward."""
    return _norms_taken(at, cleared=True)


def _copied_first(at):
    """An average of PyTorch's own, whose first update copies the weights."""
    averaged = swa_utils.AveragedModel(at.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    return partial(averaged.update_parameters, at.model)


@loop()
def average_that_begins_with_a_copy(at):
    """It is updated after every step."""
    return {"after_step": _copied_first(at)}


@loop("ema_per_micro_batch")
def average_that_begins_with_a_copy_inside(at):
    """It is updated after every micro-batch."""
    return {"after_micro_batch": _copied_first(at)}


def _warmed_up(at, steps):
    """A warm-up of two steps comes before a cosine of what is left."""
    schedules = torch.optim.lr_scheduler
    warm, rest = schedules.LinearLR(at.optimizer, 0.1, total_iters=2), schedules.CosineAnnealingLR(at.optimizer, steps - 2)
    return {"after_step": schedules.SequentialLR(at.optimizer, [warm, rest], [2]).step}


@loop()
def warm_up_before_a_cosine(at):
    """It is laid out for twelve optimizer steps."""
    return _warmed_up(at, 12)


@loop("schedule_per_micro_batch")
def warm_up_before_a_cosine_of_micro_batches(at):
    """It is laid out for as many micro-batches."""
    return _warmed_up(at, 12 * at.n)


class _Counting(nn.Sequential):
    """The outputs of a forward hang on how many came before it."""

    forwards = 0

    def forward(self, rows):
        self.forwards += 1
        return super().forward(rows) * (1 + 0.05 * (self.forwards // 3 % 4))


def _counting():
    torch.manual_seed(0)
    return _Counting(nn.Linear(data.FEATURES, data.CLASSES))


@loop("stateful_forward", "loss_not_divided", model=_counting)
def counted_forwards_undivided(at):
    """Besides, the losses are added up."""
    return {"loss": frame.own_mean}


RIGHT, WRONG = frame.tables(globals())
