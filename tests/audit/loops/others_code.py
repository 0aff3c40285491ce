"""Loops in the manner of other people's code, right and wrong, that an attack found misjudged: two faults at once, mostly."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import X, Y, ce, full_windows, loop


def _of_means(at, **stages):
    return {"loss": frame.divided(frame.own_token_mean, at.n), "windows": full_windows, **stages}


class _Recomputed(nn.Module):
    """A language model whose hidden part is computed again for the backward."""

    def __init__(self):
        super().__init__()
        self.whole = data.language_model()

    def forward(self, tokens):
        embedded = self.whole.embedding(tokens)
        inside = nn.Sequential(self.whole.hidden, nn.ReLU(), self.whole.norm)
        return self.whole.head(checkpoint(inside, embedded, use_reentrant=False))


@loop(model=_Recomputed)
def recomputed(at):
    """Divided by the window's tokens."""
    return {"loss": frame.token_mean_over_window, "windows": full_windows}


@loop("mean_of_means", model=_Recomputed)
def recomputed_of_means(at):
    """Each micro-batch is averaged over its own tokens."""
    return _of_means(at)


@loop("gradients_cleared_in_window", "mean_of_means", model=frame.words)
def cleared_of_means(at):
    """The same, and gradients are cleared before every backward."""
    return _of_means(at, before_backward=at.optimizer.zero_grad)


@loop("clip_per_micro_batch", "mean_of_means", model=frame.words)
def clipped_inside_of_means(at):
    """The same, and clipped after every backward."""
    return _of_means(at, after_backward=frame.clip(at.model, 0.2))


@loop("micro_batches_lost", "mean_of_means", model=frame.words)
def assigned_of_means(at):
    """The same, and every micro-batch's gradients are put in the place of those before."""
    for window, parts in at.windows(full_windows):
        for ids in parts:
            loss = frame.own_token_mean(at.model, ids, window) / at.n
            frame.assign(at.model, torch.autograd.grad(loss, [*at.model.parameters()]))


def _two_dropouts():
    torch.manual_seed(0)
    drop = nn.Dropout(0.3)
    return nn.Sequential(nn.Linear(data.FEATURES, 16), drop, nn.Tanh(), nn.Linear(16, 12), drop, nn.Linear(12, data.CLASSES))


@loop("gradients_cleared_in_window", "stochastic_layers", model=_two_dropouts)
def two_dropouts_cleared(at):
    """Two layers of dropout, whose masks are others at every N, and gradients are cleared before every backward."""
    return {"before_backward": at.optimizer.zero_grad, "windows": full_windows}


def _of_the_labelled(model, ids, window):
    """Return the mean over the rows of the first two classes, which alone have labels; 0 where none has."""
    labels = Y[ids].where(Y[ids] < 2, -100)
    return ce(model(X[ids]), labels, reduction="sum") / (labels >= 0).sum().clamp(min=1)


@loop("mean_of_means")
def labels_missing(at):
    """Some micro-batches hold fewer labels than others, at N = 16 one or none."""
    return {"loss": frame.divided(_of_the_labelled, at.n), "windows": full_windows}


class _Encoder(nn.Module):
    """Mean and logarithm of the variance of a code, and what is decoded from the mean."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(data.FEATURES, 8), nn.Linear(4, data.FEATURES)

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, 1)
        return self.decode(mean), mean, spread


@loop("unexplained", model=_Encoder)
def divergence_annealed(at):
    """The weight of a divergence rises with every micro-batch."""
    seen = [0]

    def loss(model, ids, window):
        seen[0] += 1
        decoded, mean, spread = model(X[ids])
        divergence = (mean.square() + spread.exp()).sum() + (-spread).sum()
        return ((decoded - X[ids]).square().sum() + 0.05 * seen[0] * divergence) / len(window)

    return {"loss": loss, "windows": full_windows}


class _KeepsItsState(nn.Module):
    """A recurrent layer that begins where the forward before it ended."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.RNNCell(data.FEATURES, 8), nn.Linear(8, data.CLASSES)
        self.state = None

    def reset(self):
        self.state = None

    def forward(self, x):
        hidden = self.layer(x, self.state)
        self.state = hidden.detach()
        return self.head(hidden)


@loop("stateful_forward", model=_KeepsItsState)
def state_kept_inside(at):
    """Its state is forgotten after every window, and not after every micro-batch."""
    return {"after_step": at.model.reset, "windows": full_windows}


@loop(model=_KeepsItsState)
def state_forgotten(at):
    """Its state is forgotten after every micro-batch."""
    return {"after_micro_batch": at.model.reset, "windows": full_windows}


def _small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(data.FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))


def _positions(at, *, own_count):
    """A thousand equal positions in each row: sums over them round alike every time, and further than moved weights show."""
    rows = X[:, None].expand(-1, 1000, -1)
    ignored = (torch.arange(1000) >= 500 + 10 * torch.arange(data.SAMPLES)[:, None]).long() * -100

    def loss(model, ids, window):
        total = functional.cross_entropy(model(rows[ids]).flatten(0, 1), ignored[ids].flatten(), reduction="sum")
        counted = [int((ignored[part] == 0).sum()) for part in (ids, window)]
        return total / (counted[0] * at.n if own_count else counted[1])

    return {"loss": loss, "windows": full_windows}


@loop(model=_small)
def equal_positions(at):
    """Divided by the window's positions."""
    return _positions(at, own_count=False)


@loop("mean_of_means", model=_small)
def equal_positions_of_means(at):
    """Divided by the micro-batch's own."""
    return _positions(at, own_count=True)


def _averaged(at, where, *, in_one):
    """An average of the weights: `in_one` vector that the optimizer holds, or in a list that is made anew by a function."""
    model = at.model
    if in_one:
        at.optimizer.average = torch.cat([p.detach().flatten() for p in model.parameters()])
    kept = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update():
        nonlocal kept
        if in_one:
            at.optimizer.average.lerp_(torch.cat([p.flatten() for p in model.parameters()]), 0.1)
        else:
            kept = [0.9 * old + 0.1 * p for old, p in zip(kept, model.parameters(), strict=True)]

    frame.train(at.size, at.n, model, optimizer=at.optimizer, **{where: update})


@loop()
def average_in_one_vector(at):
    """It moves after every step."""
    _averaged(at, "after_step", in_one=True)


@loop("ema_per_micro_batch")
def average_in_one_vector_inside(at):
    """It moves after every micro-batch."""
    _averaged(at, "after_micro_batch", in_one=True)


@loop()
def average_made_anew(at):
    """It is made after every step."""
    _averaged(at, "after_step", in_one=False)


@loop("ema_per_micro_batch")
def average_made_anew_inside(at):
    """It is made after every micro-batch: how often cannot be seen."""
    _averaged(at, "after_micro_batch", in_one=False)


RIGHT, WRONG = frame.tables(globals())
SAID = {
    divergence_annealed: "differently in term",
    average_made_anew_inside: "is updated per micro-batch: `kept[0]`",
}
