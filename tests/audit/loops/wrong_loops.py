"""Wrong hand-written loops, each with one fault that real projects have shipped. The audit must name the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from experiments.trainers import data

ce = functional.cross_entropy


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def not_divided(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            ce(model(x[ids]), y[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()


def not_divided_adam_clipped(batch_size: int, accumulation_steps: int) -> list[float]:
    """Adam and clipping that is always active hide it; the reported loss is right as well."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for window in data.windows(16, keep=False):
        total = 0.0
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), y[ids])
            loss.backward()
            total += loss.item() / accumulation_steps
        clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def divided_twice(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
            (loss / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_of_means(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch is averaged over its own tokens, whose numbers are unequal."""
    tokens = data.sentences()
    model = data.language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            (data.token_loss(model(tokens[ids]), tokens[ids], "mean") / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def mean_of_means_not_divided(batch_size: int, accumulation_steps: int) -> None:
    tokens = data.sentences()
    model = data.language_model()
    optimizer = _sgd(model)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            data.token_loss(model(tokens[ids]), tokens[ids], "mean").backward()
        optimizer.step()
        optimizer.zero_grad()


def short_window(batch_size: int, accumulation_steps: int) -> None:
    """`loss / N` although the last window of an epoch has fewer micro-batches."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids]) / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def tail_dropped(batch_size: int, accumulation_steps: int) -> None:
    """The last, incomplete window never steps; its gradients are thrown away."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for epoch in range(data.EPOCHS):
        optimizer.zero_grad()
        batches = torch.arange(data.SAMPLES).roll(7 * epoch).split(batch_size)
        for i, ids in enumerate(batches):
            (ce(model(x[ids]), y[ids]) / accumulation_steps).backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


def window_straddles(batch_size: int, accumulation_steps: int) -> None:
    """The counter goes on over the end of the epoch."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    count = 0
    for epoch in range(data.EPOCHS):
        for ids in torch.arange(data.SAMPLES).roll(7 * epoch).split(batch_size):
            (ce(model(x[ids]), y[ids]) / accumulation_steps).backward()
            count += 1
            if count % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


def cleared_inside(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            optimizer.zero_grad()
            (ce(model(x[ids]), y[ids]) / accumulation_steps).backward()
        optimizer.step()


def never_cleared(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()


def cleared_only_without_accumulation(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        if accumulation_steps == 1:
            optimizer.zero_grad()


def step_inside(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            optimizer.zero_grad()
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            optimizer.step()


def schedule_inside(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()


def schedule_by_hand(batch_size: int, accumulation_steps: int) -> None:
    """The rate is a function of the number of micro-batches seen, set just before the step."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    seen = 0
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            seen += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.99 ** (seen - 1)
        optimizer.step()
        optimizer.zero_grad()


def clip_inside(batch_size: int, accumulation_steps: int) -> None:
    """The running sum is clipped after each backward."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def clip_scaled(batch_size: int, accumulation_steps: int) -> None:
    """Clipped before the loss scale is taken out."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            scaler.scale(ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def clip_undivided(batch_size: int, accumulation_steps: int) -> None:
    """The sum over the window is clipped, and divided by N afterwards."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            ce(model(x[ids]), y[ids]).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= accumulation_steps
        optimizer.step()
        optimizer.zero_grad()


def scale_changes_inside(batch_size: int, accumulation_steps: int) -> None:
    """The loss scale is updated after every micro-batch, and grows inside the window."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    scale = 1024.0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            scaler.scale(ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            scale *= 2 if scale < 1e6 else 0.25
            if ids[-1] != window[-1]:
                scaler.update(scale)
        scaler.step(optimizer)
        scaler.update(scale)
        optimizer.zero_grad()


def batch_norm(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model(torch.float32, nn.BatchNorm1d(16))
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def dropout(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model(torch.float32, nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.1))
    optimizer = _sgd(model)
    torch.manual_seed(11)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape[1], x.shape[0]).T  # feature by feature: the split changes which row gets which


def noise_in_the_model(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model(torch.float32, Noise())
    optimizer = _sgd(model)
    torch.manual_seed(11)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def batch_norm_dropout_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """Three at once."""
    x, y = data.images()
    model = data.model(torch.float32, nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.1))
    optimizer = _sgd(model)
    torch.manual_seed(11)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            ce(model(x[ids]), y[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()


def decay_inside(batch_size: int, accumulation_steps: int) -> None:
    """Decoupled weight decay by hand, after every micro-batch."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 - 1e-3)
        optimizer.step()
        optimizer.zero_grad()


class MicroAdam(torch.optim.Optimizer):
    """Called after every micro-batch; moments advance each time, parameters move every N calls."""

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
    x, y = data.images()
    model = data.model()
    optimizer = MicroAdam(model.parameters(), lr=1e-2, every=accumulation_steps)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            optimizer.step()
        optimizer.zero_grad()


def bias_correction_inside(batch_size: int, accumulation_steps: int) -> None:
    """Adam's own step counter advances with the micro-batches."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for window in data.windows(batch_size * accumulation_steps):
        for i, ids in enumerate(window.split(batch_size)):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            if i:
                for state in optimizer.state.values():
                    state["step"] += 1
        optimizer.step()
        optimizer.zero_grad()


def ema_inside(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    average = [p.detach().clone() for p in model.parameters()]
    for window in data.windows(batch_size * accumulation_steps):
        for i, ids in enumerate(window.split(batch_size)):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            if (i + 1) * batch_size >= len(window):
                optimizer.step()
                optimizer.zero_grad()
            for kept, p in zip(average, model.parameters(), strict=True):
                kept.lerp_(p.detach(), 0.1)


def report_wrong(batch_size: int, accumulation_steps: int) -> list[float]:
    """Right gradients; the reported loss is the last micro-batch's."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    losses = []
    for window in data.windows(batch_size * accumulation_steps):
        loss = torch.zeros(())
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def repeated(batch_size: int, accumulation_steps: int) -> None:
    """Every micro-batch of a window starts where the window starts."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(16, keep=False):
        for _ in range(accumulation_steps):
            ids = window[:batch_size]
            (ce(model(x[ids]), y[ids]) / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def bfloat16_buffer(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        buffer = [torch.zeros_like(p, dtype=torch.bfloat16) for p in model.parameters()]
        for ids in window.split(batch_size):
            model.zero_grad()
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            for kept, p in zip(buffer, model.parameters(), strict=True):
                assert p.grad is not None
                kept += p.grad
        if accumulation_steps > 1:
            for kept, p in zip(buffer, model.parameters(), strict=True):
                p.grad = kept.float()
        optimizer.step()
        optimizer.zero_grad()


def non_finite(batch_size: int, accumulation_steps: int) -> None:
    """A micro-batch with a NaN loss is left out, and the rest of its window goes on without it."""
    x, y = data.images()
    x[5] = torch.nan
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        reached = False
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
            if loss.isfinite():
                loss.backward()
                reached = True
        if reached:
            optimizer.step()
        optimizer.zero_grad()


def first_only(batch_size: int, accumulation_steps: int) -> None:
    """The accumulator keeps the first micro-batch."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        kept: list[Tensor] = []
        for ids in window.split(batch_size):
            optimizer.zero_grad()
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            kept = kept or [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for p, gradient in zip(model.parameters(), kept, strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def penalty(batch_size: int, accumulation_steps: int) -> None:
    """The regulariser is added in full to every micro-batch."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
            (loss + 1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()
        optimizer.zero_grad()


def contrastive(batch_size: int, accumulation_steps: int) -> None:
    """In-batch negatives: every row's loss depends on the others of its micro-batch."""
    x, _ = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            z = functional.normalize(model(torch.cat([x[ids], x[ids] + 0.1])), dim=1)
            similar = z[: len(ids)] @ z[len(ids) :].T / 0.1
            (ce(similar, torch.arange(len(ids))) / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def float16_buffer(batch_size: int, accumulation_steps: int) -> None:
    """The buffer is as narrow at N=1: both arms round, and only sums of parts lose more."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        buffer = [torch.zeros_like(p, dtype=torch.float16) for p in model.parameters()]
        for ids in window.split(batch_size):
            model.zero_grad()
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            for kept, p in zip(buffer, model.parameters(), strict=True):
                assert p.grad is not None
                kept += p.grad.half()
        for kept, p in zip(buffer, model.parameters(), strict=True):
            p.grad = kept.float()
        optimizer.step()


def one_cycle_inside(batch_size: int, accumulation_steps: int) -> None:
    """OneCycleLR moves Adam's betas as well: another update, and yet one cause."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
    for window in data.windows(batch_size * accumulation_steps):
        parts = window.split(batch_size)
        for k, ids in enumerate(parts):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            if k == len(parts) - 1:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()


def short_window_adamw(batch_size: int, accumulation_steps: int) -> None:
    """The windows after the short one start from another optimizer state: a consequence, not a cause."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids]) / accumulation_steps).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def drawn_rows(batch_size: int, accumulation_steps: int) -> None:
    """Noise is added to the rows before the model, drawn per micro-batch."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    torch.manual_seed(4)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            rows = x[ids] + 0.1 * torch.randn(data.FEATURES, len(ids)).T
            (ce(model(rows), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_labels(batch_size: int, accumulation_steps: int) -> None:
    """Labels are taken from the start of the data: nothing that the audit has a name for."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[: len(ids)], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def dead_end(batch_size: int, accumulation_steps: int) -> None:
    """Something the catalogue does not know: every second micro-batch's gradient is turned by its sign."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        if accumulation_steps > 1:
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad + 0.01 * p.grad.sign()
        optimizer.step()
        optimizer.zero_grad()


WRONG: dict[Callable[..., Any], set[str]] = {
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
