"""Habits of released trainers, each in a few lines, right and wrong: what they do beside the loop must not mislead the audit."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, loop, sgd

_MOMENTUM = {"optimizer": partial(sgd, momentum=0.9)}


def _over(count):
    """The sum over the micro-batch's rows divided by a number that no window changes."""
    return lambda model, ids, window: ce(model(X[ids]), Y[ids], reduction="sum") / count


def _norms_first(at, *, kept_aside):
    """Rows are clipped one by one: a first backward for their norms, which is cleared, and a second one."""
    for window, parts in at.windows():
        buffer = frame.Buffer(at.model)
        for ids in parts:
            at.optimizer.zero_grad()  # what was added so far is in `buffer`
            outputs = at.model(X[ids])
            slopes = []
            outputs.register_hook(slopes.append)
            losses = ce(outputs, Y[ids], reduction="none")
            losses.sum().backward(retain_graph=True)
            at.optimizer.zero_grad()
            (losses * (0.5 / slopes[0].norm(dim=1)).clamp(max=1.0)).sum().backward()
            buffer.add()
        if kept_aside:
            buffer.hand_over()
        frame.divide_gradients(at.model, len(window))


@loop(**_MOMENTUM)
def norms_first(at):
    """The gradients of the micro-batches before are kept aside while `.grad` is cleared between the two backwards."""
    _norms_first(at, kept_aside=True)


@loop("gradients_cleared_in_window", **_MOMENTUM)
def norms_first_last_kept(at):
    """The clearing between the two backwards takes the micro-batches before with it."""
    _norms_first(at, kept_aside=False)


def _with_hooks_spent():
    """A model whose first layer holds its input until one backward has passed, and fails at a second one."""
    model = data.model()
    held = []

    def pop(gradient):
        held.pop()

    def hold(module, args, output):
        held.append(args[0])
        output.register_hook(pop)

    model[0].register_forward_hook(hold)
    return model


@loop(model=_with_hooks_spent, **_MOMENTUM)
def hooks_spent(at):
    """Hooks in the model are good for one backward: a second one through the same graph raises."""
    return {}


@loop("counter_wrong", model=_with_hooks_spent, **_MOMENTUM)
def hooks_spent_other_divisor(at):
    """The sum is divided by 16, and by 13 without accumulation: a factor that nothing in the window explains."""
    return {"loss": _over(13 if at.n == 1 else 16)}


def _dry():
    """A model after a forward of zeros, for shapes: before the optimizer is made, and of no window."""
    model = data.language_model()
    model.forward(torch.zeros(1, 4, dtype=torch.long))
    return model


@loop(model=_dry, **_MOMENTUM)
def dry_forward(at):
    """Divided by the window's tokens."""
    return {"loss": frame.token_mean_over_window}


@loop("mean_of_means", model=_dry, **_MOMENTUM)
def dry_forward_mean_of_means(at):
    """The same, with each micro-batch averaged over its own tokens."""
    return {"loss": lambda m, ids, window: frame.own_token_mean(m, ids, window) * len(ids) / len(window)}


def _padded(dropped):
    def loss(model, ids, window):
        part = frame.trimmed(ids)
        vectors = functional.embedding(part, model.embedding.weight) * (part != 0)[..., None]
        logits = model.head(model.norm(torch.relu(model.hidden(_Locked(dropped)(vectors)))))
        return data.token_loss(logits, part) / len(TOKENS)

    torch.manual_seed(3)
    return {"loss": loss}


class _Locked(nn.Module):
    """Dropout without `torch.nn.functional`: whole vectors, drawn by hand."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return x * torch.empty(*x.shape[:2], 1).bernoulli_(1 - self.p) / (1 - self.p) if self.p else x


@loop(model=frame.words, **_MOMENTUM)
def padded_vectors(at):
    """The model is given vectors that no module made, of rows padded to the longest of the micro-batch."""
    return _padded(0.0)


@loop("stochastic_layers", model=frame.words, **_MOMENTUM)
def padded_vectors_dropped(at):
    """The same, with dropout by hand."""
    return _padded(0.3)


class _Counting(torch.optim.SGD):
    """SGD that keeps a count beside the states of its parameters."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)

    def step(self, closure=None):
        self.state["count"] = self.state.get("count", 0) + 1
        return super().step(closure)


class _Eigen(torch.optim.Optimizer):
    """Signs of the gradient in the eigenvectors of its own covariance, which has many equal eigenvalues of 0."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            gradient = p.grad.reshape(p.shape[0], -1)
            basis = torch.linalg.eigh(gradient @ gradient.T).eigenvectors
            p -= self.param_groups[0]["lr"] * (basis @ (basis.T @ gradient).sign()).reshape(p.shape)


@loop(optimizer=_Counting)
def count_among_states(at):
    """The optimizer keeps a number among its states, which is no state of a parameter."""
    return {}


@loop("loss_not_divided", optimizer=_Counting)
def count_among_states_not_divided(at):
    """The same, with the sum divided by the rows of the micro-batch."""
    return {"loss": _over(at.size)}


@loop(optimizer=_Eigen)
def eigenvectors(at):
    """The update jumps under rounding, although the gradients agree."""
    return {}


@loop("loss_not_divided", optimizer=_Eigen)
def eigenvectors_not_divided(at):
    """The same, with the sum divided by the rows of the micro-batch."""
    return {"loss": _over(at.size)}


RIGHT, WRONG = frame.tables(globals())
