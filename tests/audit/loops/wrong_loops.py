"""Loops with one fault each that real projects have shipped. The audit must name its cause."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, divided, full_windows, loop, mean_over_window, nothing, own_mean, train


@loop("loss_not_divided")
def not_divided(at):
    """The mean losses of the micro-batches are added."""
    return {"loss": own_mean, "windows": full_windows}


@frame.wrong("loss_not_divided")
def not_divided_adam_clipped(batch_size, accumulation_steps):
    """Adam and clipping that is always active hide the missing division, and the reported loss is right as well."""
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clip = frame.clip(model, 1e-3)
    losses = train(batch_size, accumulation_steps, model, own_mean, optimizer, windows=full_windows, before_step=clip)
    return [loss / accumulation_steps for loss in losses]


@loop("loss_divided_twice")
def divided_twice(at):
    """The loss is divided by the window's rows, and by N once more."""
    return {"loss": divided(mean_over_window, at.n)}


@loop("mean_of_means", model=frame.words, optimizer=frame.adamw(1e-3))
def mean_of_means(at):
    """Each micro-batch is averaged over its own tokens, whose numbers are unequal."""
    for _, parts in at.windows(full_windows):
        for ids in parts:
            loss = data.token_loss(at.model(TOKENS[ids]), TOKENS[ids], "mean")
            (loss / at.n).backward()


@loop("mean_of_means", "loss_not_divided", model=frame.words)
def mean_of_means_not_divided(at):
    """Each micro-batch is averaged over its own tokens, and the means are added."""
    return {"loss": frame.own_token_mean, "windows": full_windows}


@loop("short_window_divided_by_n")
def short_window(at):
    """The loss is divided by N although the last window of an epoch has fewer micro-batches."""
    return {"loss": divided(own_mean, at.n)}


@loop("short_window_divided_by_n", optimizer=frame.adamw(1e-2, weight_decay=0.1))
def short_window_adamw(at):
    """The windows after the short one start from another optimizer state: a consequence, not a cause."""
    return {"loss": divided(own_mean, at.n), "before_step": frame.clip(at.model, 1.0)}


@loop("window_misplaced")
def tail_dropped(at):
    """The last, incomplete window never steps, and its gradients are thrown away."""
    for epoch in range(data.EPOCHS):
        at.optimizer.zero_grad()
        for i, ids in enumerate(torch.arange(data.SAMPLES).roll(7 * epoch).split(at.size)):
            (ce(at.model(X[ids]), Y[ids]) / at.n).backward()
            if (i + 1) % at.n == 0:
                at.step()


@loop("window_misplaced")
def window_straddles(at):
    """The counter of micro-batches goes on over the end of the epoch."""
    count = 0
    for epoch in range(data.EPOCHS):
        for ids in torch.arange(data.SAMPLES).roll(7 * epoch).split(at.size):
            (ce(at.model(X[ids]), Y[ids]) / at.n).backward()
            count += 1
            if count % at.n == 0:
                at.step()


@loop("gradients_cleared_in_window")
def cleared_inside(at):
    """`zero_grad` runs before every backward."""
    return {"loss": divided(own_mean, at.n), "windows": full_windows, "before_backward": at.model.zero_grad}


@loop("gradients_not_cleared")
def never_cleared(at):
    """`zero_grad` is missing."""
    return {"clear": nothing}


@loop("gradients_not_cleared", optimizer=frame.adam(1e-3))
def cleared_only_without_accumulation(at):
    """`zero_grad` runs at N=1 only."""
    return {"clear": at.optimizer.zero_grad if at.n == 1 else nothing}


@loop("step_every_micro_batch")
def step_inside(at):
    """The optimizer steps after every micro-batch."""
    for window in data.windows(at.size * at.n):
        for ids in window.split(at.size):
            at.optimizer.zero_grad()
            mean_over_window(at.model, ids, window).backward()
            at.optimizer.step()


@loop("schedule_per_micro_batch")
def schedule_inside(at):
    """The schedule advances after every micro-batch."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(at.optimizer, 1000)
    return {"after_backward": schedule.step}


@loop("schedule_per_micro_batch", optimizer=frame.adamw(1e-2))
def one_cycle_inside(at):
    """OneCycleLR, advanced after every micro-batch, moves Adam's betas as well: another update, and yet one cause."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(at.optimizer, max_lr=0.1, total_steps=200)
    return {"after_micro_batch": schedule.step}


@loop("schedule_per_micro_batch")
def schedule_by_hand(at):
    """The rate is a function of the number of micro-batches seen, set just before the step."""
    seen = 0
    for window, parts in at.windows():
        for ids in parts:
            mean_over_window(at.model, ids, window).backward()
            seen += 1
        for group in at.optimizer.param_groups:
            group["lr"] = 0.1 * 0.99 ** (seen - 1)


@loop("clip_per_micro_batch")
def clip_inside(at):
    """The running sum is clipped after each backward."""
    return {"after_backward": frame.clip(at.model, 0.1)}


@loop("clip_before_unscale")
def clip_scaled(at):
    """Gradients are clipped before the loss scale is taken out."""
    stages = frame.scaled(torch.amp.GradScaler("cpu", init_scale=1024.0), at.optimizer)
    return stages | {"before_step": frame.clip(at.model, 1.0)}


def _clip_undivided(at, clipped):
    for _, parts in at.windows(full_windows):
        for ids in parts:
            ce(at.model(X[ids]), Y[ids]).backward()
        for module in clipped:
            clip_grad_norm_(module.parameters(), 0.1)
        frame.divide_gradients(at.model, at.n)


@loop("clip_before_unscale")
def clip_undivided(at):
    """The sum over the window is clipped, and divided by N afterwards."""
    _clip_undivided(at, [at.model])


@loop("clip_before_unscale")
def clip_undivided_by_layer(at):
    """Each layer is clipped by itself."""
    _clip_undivided(at, at.model)


@loop("micro_batches_lost")
def total_cut_off(at):
    """The losses of a window are added up, and the sum so far is detached each time."""
    for window, parts in at.windows():
        total = torch.zeros(())
        for ids in parts:
            total = total.detach() + mean_over_window(at.model, ids, window)
        total.backward()


@loop("scaler_updated_in_window")
def scale_changes_inside(at):
    """The loss scale is updated after every micro-batch, and grows inside the window."""
    scale = 1024.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for ids, window, last in frame.micro_batches(at.size, at.n, data.windows):
        scaler.scale(mean_over_window(at.model, ids, window)).backward()
        scale *= 2 if scale < 1e6 else 0.25
        if last:
            scaler.step(at.optimizer)
            at.optimizer.zero_grad()
        scaler.update(scale)


@loop("batch_statistics", model=lambda: data.model(torch.float32, nn.BatchNorm1d(16)))
def batch_norm(at):
    """BatchNorm takes its statistics from the micro-batch."""
    return {}


def _drawing(*layers):
    """A model with these layers, before the first draws of the training."""
    model = data.model(torch.float32, *layers)
    torch.manual_seed(11)
    return model


@loop("stochastic_layers", model=lambda: _drawing(nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.1)))
def dropout(at):
    """Another split draws other dropout masks."""
    return {}


class Noise(nn.Module):
    def forward(self, x):
        return x + 0.1 * torch.randn(x.shape[1], x.shape[0]).T  # feature by feature: the split changes which row gets which


@loop("stochastic_layers", model=lambda: _drawing(Noise()))
def noise_in_the_model(at):
    """A layer adds noise that it draws per micro-batch."""
    return {}


@loop("stochastic_layers")
def drawn_rows(at):
    """Noise is added to the rows before the model, drawn per micro-batch."""
    torch.manual_seed(4)
    noise = Noise().forward
    return {"loss": lambda m, ids, window: frame.share(m(noise(X[ids])), ids, window)}


@loop(
    *("batch_statistics", "stochastic_layers", "loss_not_divided"),
    model=lambda: _drawing(nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.1)),
)
def batch_norm_dropout_not_divided(at):
    """Three faults at once."""
    return {"loss": own_mean, "windows": full_windows}


@loop("weight_decay_per_micro_batch")
def decay_inside(at):
    """Decoupled weight decay, written by hand, runs after every micro-batch."""
    return {"after_backward": lambda: [p.data.mul_(1 - 1e-3) for p in at.model.parameters()]}


class MicroAdam(torch.optim.Optimizer):
    """Adam that is called after every micro-batch: its moments advance each time, the parameters move every N calls."""

    def __init__(self, parameters, lr, every):
        super().__init__(parameters, {"lr": lr})
        self.every, self.calls = every, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                first = state.setdefault("exp_avg", torch.zeros_like(p))
                second = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                first.lerp_(p.grad, 0.1)
                second.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                if self.calls % self.every == 0:
                    p.addcdiv_(first, second.sqrt().add_(1e-8), value=-group["lr"])


@loop("optimizer_state_per_micro_batch", optimizer=nothing)
def state_inside(at):
    """The optimizer's moments advance with every micro-batch."""
    adam = MicroAdam(at.model.parameters(), lr=1e-2, every=at.n)
    return {"optimizer": adam, "windows": full_windows, "after_backward": adam.step, "step": nothing}


@loop("optimizer_state_per_micro_batch", optimizer=frame.adam(1e-3))
def bias_correction_inside(at):
    """Adam's own step counter advances with the micro-batches."""
    for window, parts in at.windows():
        for i, ids in enumerate(parts):
            mean_over_window(at.model, ids, window).backward()
            for state in at.optimizer.state.values() if i else ():
                state["step"] += 1


@loop("ema_per_micro_batch")
def ema_inside(at):
    """The averaged weights move with every micro-batch."""
    return {"after_micro_batch": frame.Average(at.model).update}


@frame.wrong("loss_report_differs")
def report_wrong(batch_size, accumulation_steps):
    """The gradients are right; the reported loss is the last micro-batch's."""
    model, losses = data.model(), []
    for window, parts in frame.At(batch_size, accumulation_steps, model, frame.sgd(model)).windows():
        for ids in parts:
            loss = mean_over_window(model, ids, window)
            loss.backward()
        losses.append(loss.item())
    return losses


@loop("samples_repeated")
def repeated(at):
    """Every micro-batch of a window starts where the window starts."""
    windows = [window[: at.size].repeat(at.n) for window in full_windows(at.size * at.n)]
    return {"loss": divided(own_mean, at.n), "windows": lambda _: windows}


@loop("low_precision_accumulator")
def bfloat16_buffer(at):
    """With accumulation, gradients are summed in bfloat16."""
    return frame.Buffer(at.model, torch.bfloat16).stages() if at.n > 1 else {}


@loop("low_precision_accumulator")
def float16_buffer(at):
    """The buffer is as narrow at N=1: both arms round, and only sums of parts lose more."""
    return frame.Buffer(at.model, torch.float16).stages()


@loop("non_finite_micro_batch")
def non_finite(at):
    """A micro-batch with a NaN loss is left out, and the rest of its window goes on without it."""
    x = X.clone()
    x[5] = torch.nan
    for window in data.windows(at.size * at.n):
        reached = False
        for ids in window.split(at.size):
            loss = frame.share(at.model(x[ids]), ids, window)
            if loss.isfinite():
                loss.backward()
                reached = True
        if reached:
            at.optimizer.step()
        at.optimizer.zero_grad()


@loop("micro_batches_lost")
def first_only(at):
    """The accumulator keeps the first micro-batch."""
    for window, parts in at.windows():
        kept = []
        for ids in parts:
            at.optimizer.zero_grad()
            mean_over_window(at.model, ids, window).backward()
            kept = kept or [p.grad.clone() for p in at.model.parameters() if p.grad is not None]
        frame.assign(at.model, kept)


@loop("micro_batches_lost")
def middle_lost(at):
    """An engine keeps the first micro-batch of every three."""
    for window, parts in at.windows():
        gradients = [torch.autograd.grad(mean_over_window(at.model, ids, window), [*at.model.parameters()]) for ids in parts]
        frame.assign(at.model, [sum(each) for each in zip(*gradients[::3], strict=True)])


@loop("auxiliary_loss_scale")
def penalty(at):
    """The regulariser is added in full to every micro-batch."""
    return {"loss": lambda *of: mean_over_window(*of) + 1e-3 * sum(p.square().sum() for p in at.model.parameters())}


@loop("non_separable_loss")
def contrastive(at):
    """In-batch negatives: every row's loss depends on the others of its micro-batch."""

    def loss(model, ids, window):
        z = functional.normalize(model(torch.cat([X[ids], X[ids] + 0.1])), dim=1)
        similar = z[: len(ids)] @ z[len(ids) :].T / 0.1
        return ce(similar, torch.arange(len(ids))) / at.n

    return {"loss": loss, "windows": full_windows}


@loop("unexplained")
def wrong_labels(at):
    """Labels are taken from the start of the data: nothing that the audit has a name for."""
    return {"loss": lambda m, ids, w: ce(m(X[ids]), Y[: len(ids)], reduction="sum") / len(w)}


@loop("unexplained")
def dead_end(at):
    """With accumulation, every gradient is moved along its own sign, which no cause of the catalogue does."""

    def turn():
        for p in at.model.parameters():
            p.grad = p.grad + 0.01 * p.grad.sign()

    return {"before_step": turn if at.n > 1 else nothing}


RIGHT, WRONG = frame.tables(globals())
