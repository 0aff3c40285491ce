"""Loops, right and wrong, with losses of several terms, and with averages that earlier runs left."""

import torch
from torch import nn
from torch.nn import functional

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, full_windows, loop


def _preferences(divisor):
    """Cross-entropy over tokens plus a log-odds term over pairs of rows (as in ORPO), whose rows always come together.

    The token term is the sum over the micro-batch divided by `divisor(ids, window)`.
    """
    rejected = TOKENS.roll(1, 0)

    def loss(model, ids, window):
        outputs = model(torch.cat([TOKENS[ids], rejected[ids]]))
        chosen = data.token_loss(outputs[: len(ids)], TOKENS[ids]) / divisor(ids, window)
        scores = outputs.logsumexp(2).mean(1)
        odds = -functional.logsigmoid(scores[: len(ids)] - scores[len(ids) :]).sum()
        return chosen + 0.5 * odds / len(window)

    return {"loss": loss}


@loop(model=frame.words)
def preferences_by_tokens(at):
    """The token term is divided by the tokens of the window."""
    return _preferences(lambda ids, window: data.num_targets(TOKENS[window]))


@loop("mean_of_means", model=frame.words)
def preferences_by_means(at):
    """The token term is a mean over the micro-batch; the pairs are counted rightly."""
    return _preferences(lambda ids, window: data.num_targets(TOKENS[ids]) * len(window) / len(ids))


@loop("mean_of_means", "auxiliary_loss_scale", model=frame.words)
def preferences_added(at):
    """The same, and the token term's means are added."""
    return _preferences(lambda ids, window: data.num_targets(TOKENS[ids]))


class Experts(nn.Module):
    """Experts behind a router: the mixture's outputs, and the router's scores."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(data.FEATURES, 3)
        self.experts = nn.ModuleList([nn.Linear(data.FEATURES, data.CLASSES) for _ in range(3)])

    def forward(self, x):
        scores = self.router(x)
        mixed = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (scores.softmax(1).unsqueeze(2) * mixed).sum(1), scores


def _routed(at, router_loss):
    def loss(model, ids, window):
        outputs, scores = model(X[ids])
        return ce(outputs, Y[ids]) / at.n + router_loss(scores)

    return {"loss": loss, "windows": full_windows}


@loop("auxiliary_loss_scale", model=Experts)
def router_loss(at):
    """The router's own loss, a mean over the micro-batch, is not divided."""
    return _routed(at, lambda scores: 0.1 * scores.logsumexp(1).square().mean())


def _balance(scores):
    """Half the share of rows that each expert gets, which has no gradient, times its mean probability, times 3."""
    load = functional.one_hot(scores.argmax(1), 3).float().mean(0)
    return 0.5 * 3 * (load * scores.softmax(1).mean(0)).sum()


@loop("non_separable_loss", model=Experts)
def load_balance_divided(at):
    """The load of an expert is counted over the micro-batch instead of the window."""
    return _routed(at, lambda scores: _balance(scores) / at.n)


@loop("non_separable_loss", "auxiliary_loss_scale", model=Experts)
def load_balance_in_full(at):
    """The same, and the load-balancing loss is not divided (a division by 1 is none)."""
    return _routed(at, lambda scores: _balance(scores) / 1)


class Weighed(nn.Module):
    """Two outputs, and how certain each is: log s, by which their losses are weighed."""

    def __init__(self):
        super().__init__()
        self.both, self.log = data.model(), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.both(x), self.log


@loop("auxiliary_loss_scale", model=Weighed)
def certainties_in_full(at):
    """sum_k exp(-s_k) L_k + s_k, whose second part, of two parameters alone, is added to every micro-batch's loss."""

    def loss(model, ids, window):
        outputs, log = model(X[ids])
        squared = functional.mse_loss(outputs.sum(1), X[ids].sum(1), reduction="sum")
        losses = ce(outputs, Y[ids], reduction="sum"), squared
        return sum((-log[k]).exp() * part for k, part in enumerate(losses)) / len(window) + log.sum()

    return {"loss": loss, "windows": full_windows}


def _towers():
    """Two encoders of one sample, each of which the loop calls by itself."""
    torch.manual_seed(0)
    return nn.ModuleList([nn.Sequential(nn.Linear(data.FEATURES, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)])


def _triplets(negatives):
    """Each row's distance to its other view is less by 1 than to one of `negatives(a, b, rows of the window)`."""

    def loss(model, ids, window):
        a, b = model[0](X[ids]), model[1](X[ids] + 0.5)
        return functional.relu(1 + (a - b).abs().sum(1) - (a - negatives(a, b, ids)).abs().sum(1)).sum() / len(window)

    return {"loss": loss, "windows": full_windows}


@loop(model=_towers)
def triplets_of_two_towers(at):
    """The negative is a view of the same row."""
    return _triplets(lambda a, b, ids: at.model[1](X[ids].flip(1)))


@loop("non_separable_loss", model=_towers)
def hardest_negative_of_micro_batch(at):
    """The negative is the nearest other row of the micro-batch: distances are not smooth, and choosing has no gradient."""
    return _triplets(lambda a, b, _: b[(torch.cdist(a, b) + 1e9 * torch.eye(len(a))).argmin(1)])


@loop("non_separable_loss", model=_towers)
def pairs_of_two_towers(at):
    """All pairs of the micro-batch are told apart, each alone (SigLIP)."""

    def loss(model, ids, window):
        a, b = model[0](X[ids]), model[1](X[ids] + 0.5)
        return functional.softplus((1 - 2 * torch.eye(len(a))) * (a @ b.T)).sum() / len(window)

    return {"loss": loss, "windows": full_windows}


@loop("batch_statistics")
def normalised_between_modules(at):
    """The loop calls the modules one by one, and brings what the first gives to mean 0 over the micro-batch."""

    def loss(model, ids, window):
        hidden = model[0](X[ids])
        return frame.share(model[1:](hidden - hidden.mean(0)), ids, window)

    return {"loss": loss, "windows": full_windows}


CHOSEN = X[:, 0] > 0


def _detector(at, class_loss, box_loss):
    """Classes of all rows, and four numbers of those that hold something."""

    def loss(model, ids, window):
        outputs, held = model(X[ids]), CHOSEN[ids]
        boxes = functional.l1_loss(outputs[held], X[ids][held][:, : outputs.shape[1]], reduction="sum")
        return class_loss(ce(outputs, Y[ids], reduction="sum"), ids, window) + 5 * box_loss(boxes, ids, window)

    return {"loss": loss, "windows": full_windows}


@loop("loss_not_divided", "mean_of_means")
def detector_by_micro_batch(at):
    """Both terms are averaged over the micro-batch's own, and added."""
    return _detector(at, lambda loss, ids, _: loss / len(ids), lambda loss, ids, _: loss / CHOSEN[ids].sum())


@loop("mean_of_means")
def boxes_by_clamped_count(at):
    """The second term is divided by the micro-batch's own number, which is no less than 1."""
    own = lambda loss, ids, _: loss / (CHOSEN[ids].sum().clamp(min=1) * at.n)  # noqa: E731
    return _detector(at, lambda loss, _, window: 0 * loss, own)


def _criticised(batch_size, accumulation_steps, divide, *, frozen, inside=False):
    """A critic with a gradient penalty, made second; unless `frozen`, the maker's backwards leave gradients in it.

    It may step `inside`, after every micro-batch.
    """
    maker, critic, noise = frame.adversaries()
    make, judge = frame.sgd(maker, 0.05), frame.sgd(critic, 0.05)
    for window in full_windows(batch_size * accumulation_steps):
        judge.zero_grad()
        for ids in window.split(batch_size):
            x = X[ids].requires_grad_()
            scores = critic(x)
            (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            penalty = slope.square().sum() / divide(ids, window)
            ((critic(maker(noise[ids]).detach()) - scores).sum() / len(window) + penalty).backward()
            if inside:
                judge.step()
                judge.zero_grad()
        judge.step()
        critic.requires_grad_(not frozen)
        for ids in window.split(batch_size):
            (-critic(maker(noise[ids])).sum() / len(window)).backward()
        critic.requires_grad_(True)
        make.step()
        make.zero_grad()


@frame.wrong("auxiliary_loss_scale")
def critic_penalty_in_full(batch_size, accumulation_steps):
    """The penalty is a mean over the micro-batch."""
    _criticised(batch_size, accumulation_steps, lambda ids, window: len(ids), frozen=True)


def critic_with_a_penalty(batch_size, accumulation_steps):
    """A right one, cleared before its own window."""
    _criticised(batch_size, accumulation_steps, lambda ids, window: len(window), frozen=False)


@frame.wrong("step_every_micro_batch")
def critic_steps_inside(batch_size, accumulation_steps):
    """The critic's optimizer steps after every micro-batch, and once more on nothing."""
    _criticised(batch_size, accumulation_steps, lambda ids, window: len(window), frozen=False, inside=True)


def _bare(batch_size, accumulation_steps, *, in_full=False, drawn=False):
    """Without any module: weights are drawn around their means, once a window or for every micro-batch, and penalised."""
    torch.manual_seed(0)
    mean, spread = (torch.full((4, data.FEATURES), value, requires_grad=True) for value in (0.1, -3.0))
    optimizer = torch.optim.SGD([mean, spread], lr=0.1)
    for window in full_windows(batch_size * accumulation_steps):
        for k, ids in enumerate(window.split(batch_size)):
            if drawn or not k:
                noise = torch.randn(mean.shape)
            penalty = 1e-2 * (mean.square().sum() - spread.sum())
            loss = ce(X[ids] @ (mean + spread.exp() * noise).T, Y[ids], reduction="sum") / len(window)
            (loss + penalty * (1 if in_full else len(ids) / len(window))).backward()
        optimizer.step()
        optimizer.zero_grad()


def bare_weights(batch_size, accumulation_steps):
    """Drawn once for a window, the penalty shared among its micro-batches."""
    _bare(batch_size, accumulation_steps)


@frame.wrong("auxiliary_loss_scale")
def bare_weights_penalty_in_full(batch_size, accumulation_steps):
    """Each micro-batch adds all of the penalty."""
    _bare(batch_size, accumulation_steps, in_full=True)


@frame.wrong("stochastic_layers")
def bare_weights_drawn_anew(batch_size, accumulation_steps):
    """Each micro-batch draws its own weights."""
    _bare(batch_size, accumulation_steps, drawn=True)


OLD_AVERAGES = []  # of earlier runs; they stay, as in a registry or in reference cycles


@loop()
def average_beside_old_ones(at):
    """The average moves after every step."""
    OLD_AVERAGES.append(frame.Average(at.model))
    return {"after_step": OLD_AVERAGES[-1].update}


@loop("ema_per_micro_batch")
def average_inside_beside_old_ones(at):
    """The average moves after every micro-batch."""
    OLD_AVERAGES.append(frame.Average(at.model))
    return {"after_micro_batch": OLD_AVERAGES[-1].update}


RIGHT, WRONG = frame.tables(globals())
