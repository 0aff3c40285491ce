"""Loops with one fault each that real projects have shipped. The audit must name its cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, divided, full_windows, mean_over_window, nothing, own_mean, train


def not_divided(batch_size: int, accumulation_steps: int) -> None:
    """The mean losses of the micro-batches are added."""
    train(batch_size, accumulation_steps, data.model(), own_mean, windows=full_windows)


def not_divided_adam_clipped(batch_size: int, accumulation_steps: int) -> list[float]:
    """Adam and clipping that is always active hide the missing division, and the reported loss is right as well."""
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clip = frame.clip(model, 1e-3)
    losses = train(batch_size, accumulation_steps, model, own_mean, optimizer, windows=full_windows, before_step=clip)
    return [loss / accumulation_steps for loss in losses]


def divided_twice(batch_size: int, accumulation_steps: int) -> None:
    """The loss is divided by the window's rows, and by N once more."""
    train(batch_size, accumulation_steps, data.model(), divided(mean_over_window, accumulation_steps))


def mean_of_means(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch is averaged over its own tokens, whose numbers are unequal."""
    model = data.language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for window in full_windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            loss = data.token_loss(model(TOKENS[ids]), TOKENS[ids], "mean")
            (loss / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_of_means_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch is averaged over its own tokens, and the means are added."""
    train(batch_size, accumulation_steps, data.language_model(), frame.own_token_mean, windows=full_windows)


def short_window(batch_size: int, accumulation_steps: int) -> None:
    """The loss is divided by N although the last window of an epoch has fewer micro-batches."""
    train(batch_size, accumulation_steps, data.model(), divided(own_mean, accumulation_steps))


def short_window_adamw(batch_size: int, accumulation_steps: int) -> None:
    """The windows after the short one start from another optimizer state: a consequence, not a cause."""
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loss = divided(own_mean, accumulation_steps)
    train(batch_size, accumulation_steps, model, loss, optimizer, before_step=frame.clip(model, 1.0))


def tail_dropped(batch_size: int, accumulation_steps: int) -> None:
    """The last, incomplete window never steps, and its gradients are thrown away."""
    model = data.model()
    optimizer = frame.sgd(model)
    for epoch in range(data.EPOCHS):
        optimizer.zero_grad()
        batches = torch.arange(data.SAMPLES).roll(7 * epoch).split(batch_size)
        for i, ids in enumerate(batches):
            (ce(model(X[ids]), Y[ids]) / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


def window_straddles(batch_size: int, accumulation_steps: int) -> None:
    """The counter of micro-batches goes on over the end of the epoch."""
    model = data.model()
    optimizer = frame.sgd(model)
    count = 0
    for epoch in range(data.EPOCHS):
        for ids in torch.arange(data.SAMPLES).roll(7 * epoch).split(batch_size):
            (ce(model(X[ids]), Y[ids]) / accumulation_steps).backward()
            count += 1
            if count % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


def cleared_inside(batch_size: int, accumulation_steps: int) -> None:
    """`zero_grad` runs before every backward."""
    model = data.model()
    loss = divided(own_mean, accumulation_steps)
    train(batch_size, accumulation_steps, model, loss, windows=full_windows, before_backward=model.zero_grad)


def never_cleared(batch_size: int, accumulation_steps: int) -> None:
    """`zero_grad` is missing."""
    train(batch_size, accumulation_steps, data.model(), clear=nothing)


def cleared_only_without_accumulation(batch_size: int, accumulation_steps: int) -> None:
    """`zero_grad` runs at N=1 only."""
    model = data.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clear = optimizer.zero_grad if accumulation_steps == 1 else nothing
    train(batch_size, accumulation_steps, model, optimizer=optimizer, clear=clear)


def step_inside(batch_size: int, accumulation_steps: int) -> None:
    """The optimizer steps after every micro-batch."""
    model = data.model()
    optimizer = frame.sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            optimizer.zero_grad()
            mean_over_window(model, ids, window).backward()
            optimizer.step()


def schedule_inside(batch_size: int, accumulation_steps: int) -> None:
    """The schedule advances after every micro-batch."""
    model = data.model()
    optimizer = frame.sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    train(batch_size, accumulation_steps, model, optimizer=optimizer, after_backward=schedule.step)


def one_cycle_inside(batch_size: int, accumulation_steps: int) -> None:
    """OneCycleLR, advanced after every micro-batch, moves Adam's betas as well: another update, and yet one cause."""
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
    train(batch_size, accumulation_steps, model, optimizer=optimizer, after_micro_batch=schedule.step)


def schedule_by_hand(batch_size: int, accumulation_steps: int) -> None:
    """The rate is a function of the number of micro-batches seen, set just before the step."""
    model = data.model()
    optimizer = frame.sgd(model)
    seen = 0
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            mean_over_window(model, ids, window).backward()
            seen += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.99 ** (seen - 1)
        optimizer.step()
        optimizer.zero_grad()


def clip_inside(batch_size: int, accumulation_steps: int) -> None:
    """The running sum is clipped after each backward."""
    model = data.model()
    train(batch_size, accumulation_steps, model, after_backward=frame.clip(model, 0.1))


def clip_scaled(batch_size: int, accumulation_steps: int) -> None:
    """Gradients are clipped before the loss scale is taken out."""
    model = data.model()
    stages = frame.scaled(torch.amp.GradScaler("cpu", init_scale=1024.0), frame.sgd(model))
    train(batch_size, accumulation_steps, model, **stages, before_step=frame.clip(model, 1.0))


def clip_undivided(batch_size: int, accumulation_steps: int) -> None:
    """The sum over the window is clipped, and divided by N afterwards."""
    model = data.model()
    optimizer = frame.sgd(model)
    for window in full_windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            ce(model(X[ids]), Y[ids]).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        frame.divide_gradients(model, accumulation_steps)
        optimizer.step()
        optimizer.zero_grad()


def scale_changes_inside(batch_size: int, accumulation_steps: int) -> None:
    """The loss scale is updated after every micro-batch, and grows inside the window."""
    model = data.model()
    optimizer = frame.sgd(model)
    scale = 1024.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for ids, window, last in frame.micro_batches(batch_size, accumulation_steps, data.windows):
        scaler.scale(mean_over_window(model, ids, window)).backward()
        scale *= 2 if scale < 1e6 else 0.25
        if last:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update(scale)


def batch_norm(batch_size: int, accumulation_steps: int) -> None:
    """BatchNorm takes its statistics from the micro-batch."""
    train(batch_size, accumulation_steps, data.model(torch.float32, nn.BatchNorm1d(16)))


def dropout(batch_size: int, accumulation_steps: int) -> None:
    """Another split draws other dropout masks."""
    model = data.model(torch.float32, nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.1))
    torch.manual_seed(11)
    train(batch_size, accumulation_steps, model)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape[1], x.shape[0]).T  # feature by feature: the split changes which row gets which


def noise_in_the_model(batch_size: int, accumulation_steps: int) -> None:
    """A layer adds noise that it draws per micro-batch."""
    model = data.model(torch.float32, Noise())
    torch.manual_seed(11)
    train(batch_size, accumulation_steps, model)


def drawn_rows(batch_size: int, accumulation_steps: int) -> None:
    """Noise is added to the rows before the model, drawn per micro-batch."""
    model = data.model()
    torch.manual_seed(4)
    noise = Noise().forward
    train(
        batch_size, accumulation_steps, model, lambda m, ids, window: ce(m(noise(X[ids])), Y[ids], reduction="sum") / len(window)
    )


def batch_norm_dropout_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """Three faults at once."""
    model = data.model(torch.float32, nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.1))
    torch.manual_seed(11)
    train(batch_size, accumulation_steps, model, own_mean, windows=full_windows)


def decay_inside(batch_size: int, accumulation_steps: int) -> None:
    """Decoupled weight decay, written by hand, runs after every micro-batch."""
    model = data.model()
    train(batch_size, accumulation_steps, model, after_backward=lambda: [p.data.mul_(1 - 1e-3) for p in model.parameters()])


class MicroAdam(torch.optim.Optimizer):
    """Adam that is called after every micro-batch: its moments advance each time, the parameters move every N calls."""

    def __init__(self, parameters: Any, lr: float, every: int) -> None:
        super().__init__(parameters, {"lr": lr})
        self.every, self.calls = every, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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


def state_inside(batch_size: int, accumulation_steps: int) -> None:
    """The optimizer's moments advance with every micro-batch."""
    model = data.model()
    adam = MicroAdam(model.parameters(), lr=1e-2, every=accumulation_steps)
    train(batch_size, accumulation_steps, model, optimizer=adam, windows=full_windows, after_backward=adam.step, step=nothing)


def bias_correction_inside(batch_size: int, accumulation_steps: int) -> None:
    """Adam's own step counter advances with the micro-batches."""
    model = data.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for window in data.windows(batch_size * accumulation_steps):
        for i, ids in enumerate(window.split(batch_size)):
            mean_over_window(model, ids, window).backward()
            if i:
                for state in optimizer.state.values():
                    state["step"] += 1
        optimizer.step()
        optimizer.zero_grad()


def ema_inside(batch_size: int, accumulation_steps: int) -> None:
    """The averaged weights move with every micro-batch."""
    model = data.model()
    train(batch_size, accumulation_steps, model, after_micro_batch=frame.Average(model).update)


def report_wrong(batch_size: int, accumulation_steps: int) -> list[float]:
    """The gradients are right; the reported loss is the last micro-batch's."""
    model = data.model()
    optimizer = frame.sgd(model)
    losses = []
    for window in data.windows(batch_size * accumulation_steps):
        loss = torch.zeros(())
        for ids in window.split(batch_size):
            loss = mean_over_window(model, ids, window)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def repeated(batch_size: int, accumulation_steps: int) -> None:
    """Every micro-batch of a window starts where the window starts."""
    first = [window[:batch_size] for window in full_windows(batch_size * accumulation_steps)]
    windows = [ids.repeat(accumulation_steps) for ids in first]
    train(batch_size, accumulation_steps, data.model(), divided(own_mean, accumulation_steps), windows=lambda _: windows)


def bfloat16_buffer(batch_size: int, accumulation_steps: int) -> None:
    """With accumulation, gradients are summed in bfloat16."""
    model = data.model()
    stages = frame.Buffer(model, torch.bfloat16).stages() if accumulation_steps > 1 else {}
    train(batch_size, accumulation_steps, model, **stages)


def float16_buffer(batch_size: int, accumulation_steps: int) -> None:
    """The buffer is as narrow at N=1: both arms round, and only sums of parts lose more."""
    model = data.model()
    train(batch_size, accumulation_steps, model, **frame.Buffer(model, torch.float16).stages())


def non_finite(batch_size: int, accumulation_steps: int) -> None:
    """A micro-batch with a NaN loss is left out, and the rest of its window goes on without it."""
    x = X.clone()
    x[5] = torch.nan
    model = data.model()
    optimizer = frame.sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        reached = False
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), Y[ids], reduction="sum") / len(window)
            if loss.isfinite():
                loss.backward()
                reached = True
        if reached:
            optimizer.step()
        optimizer.zero_grad()


def first_only(batch_size: int, accumulation_steps: int) -> None:
    """The accumulator keeps the first micro-batch."""
    model = data.model()
    optimizer = frame.sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        kept: list[Tensor] = []
        for ids in window.split(batch_size):
            optimizer.zero_grad()
            mean_over_window(model, ids, window).backward()
            kept = kept or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for p, gradient in zip(model.parameters(), kept, strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def penalty(batch_size: int, accumulation_steps: int) -> None:
    """The regulariser is added in full to every micro-batch."""

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        return mean_over_window(model, ids, window) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    train(batch_size, accumulation_steps, data.model(), loss)


def contrastive(batch_size: int, accumulation_steps: int) -> None:
    """In-batch negatives: every row's loss depends on the others of its micro-batch."""

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        z = functional.normalize(model(torch.cat([X[ids], X[ids] + 0.1])), dim=1)
        similar = z[: len(ids)] @ z[len(ids) :].T / 0.1
        return ce(similar, torch.arange(len(ids))) / accumulation_steps

    train(batch_size, accumulation_steps, data.model(), loss, windows=full_windows)


def wrong_labels(batch_size: int, accumulation_steps: int) -> None:
    """Labels are taken from the start of the data: nothing that the audit has a name for."""
    train(batch_size, accumulation_steps, data.model(), lambda m, ids, w: ce(m(X[ids]), Y[: len(ids)], reduction="sum") / len(w))


def dead_end(batch_size: int, accumulation_steps: int) -> None:
    """With accumulation, every gradient is moved along its own sign, which no cause of the catalogue does."""
    model = data.model()

    def turn() -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad = p.grad + 0.01 * p.grad.sign()

    train(batch_size, accumulation_steps, model, before_step=turn if accumulation_steps > 1 else nothing)


WRONG: dict[frame.Loop, set[str]] = {
    not_divided: {"loss_not_divided"},
    not_divided_adam_clipped: {"loss_not_divided"},
    divided_twice: {"loss_divided_twice"},
    mean_of_means: {"mean_of_means"},
    mean_of_means_not_divided: {"mean_of_means", "loss_not_divided"},
    short_window: {"short_window_divided_by_n"},
    tail_dropped: {"window_misplaced"},
    window_straddles: {"window_misplaced"},
    cleared_inside: {"gradients_cleared_in_window"},
    never_cleared: {"gradients_not_cleared"},
    cleared_only_without_accumulation: {"gradients_not_cleared"},
    step_inside: {"step_every_micro_batch"},
    schedule_inside: {"schedule_per_micro_batch"},
    schedule_by_hand: {"schedule_per_micro_batch"},
    clip_inside: {"clip_per_micro_batch"},
    clip_scaled: {"clip_before_unscale"},
    clip_undivided: {"clip_before_unscale"},
    scale_changes_inside: {"scaler_updated_in_window"},
    batch_norm: {"batch_statistics"},
    dropout: {"stochastic_layers"},
    noise_in_the_model: {"stochastic_layers"},
    batch_norm_dropout_not_divided: {"batch_statistics", "stochastic_layers", "loss_not_divided"},
    decay_inside: {"weight_decay_per_micro_batch"},
    state_inside: {"optimizer_state_per_micro_batch"},
    bias_correction_inside: {"optimizer_state_per_micro_batch"},
    ema_inside: {"ema_per_micro_batch"},
    report_wrong: {"loss_report_differs"},
    repeated: {"samples_repeated"},
    bfloat16_buffer: {"low_precision_accumulator"},
    non_finite: {"non_finite_micro_batch"},
    first_only: {"accumulator_overwritten"},
    penalty: {"auxiliary_loss_scale"},
    contrastive: {"non_separable_loss"},
    dead_end: {"unexplained"},
    float16_buffer: {"low_precision_accumulator"},
    one_cycle_inside: {"schedule_per_micro_batch"},
    short_window_adamw: {"short_window_divided_by_n"},
    drawn_rows: {"stochastic_layers"},
    wrong_labels: {"unexplained"},
}
