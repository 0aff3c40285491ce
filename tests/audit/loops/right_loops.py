"""Correct hand-written loops in the styles people use. The audit must find each of them equivalent."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from experiments.trainers import data

ce = functional.cross_entropy


def sgd_mean_over_window(
    batch_size: int, accumulation_steps: int, dtype: torch.dtype = torch.float32, order_seed: int = 0
) -> None:
    """Summed loss divided by the rows of the window; the short window keeps its own number."""
    x, y = data.images(dtype)
    model = data.model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps, order_seed=order_seed):
        optimizer.zero_grad()
        for ids in data.micro_batches(window, batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()


def sgd_divided_by_n(batch_size: int, accumulation_steps: int) -> None:
    """The textbook loop on data that divides evenly: `loss / N`."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    batches = [ids for window in data.windows(16, keep=False) for ids in window.split(batch_size)]
    for i, ids in enumerate(batches):
        loss = ce(model(x[ids]), y[ids]) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def adamw_clipped(batch_size: int, accumulation_steps: int) -> list[float]:
    """AdamW with decay, active clipping once per window, and a schedule once per window; returns its losses."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses = []
    for window in data.windows(batch_size * accumulation_steps):
        total = 0.0
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(total)
    return losses


def adam_momentum_long(batch_size: int, accumulation_steps: int) -> None:
    """Adam for 30 steps: rounding has time to grow."""
    x, y = data.images()
    model = data.model(torch.float32, nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for window in data.windows(batch_size * accumulation_steps, epochs=10):
        optimizer.zero_grad()
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()


def tokens_weighted(batch_size: int, accumulation_steps: int) -> dict[str, Any]:
    """Language model on unequal lengths: summed over tokens, divided by the tokens of the window; padded per micro-batch."""
    tokens = data.sentences()
    model = data.language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for window in data.windows(batch_size * accumulation_steps):
        total = data.num_targets(tokens[window])
        value = 0.0
        for ids in window.split(batch_size):
            rows = tokens[ids]
            rows = rows[:, : int((rows != 0).sum(1).max())]
            loss = data.token_loss(model(rows), rows) / total
            loss.backward()
            value += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value)
    return {"losses": losses}


def divided_at_the_end(batch_size: int, accumulation_steps: int) -> None:
    """Sums accumulate, and the gradients are divided by the count just before the step."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            ce(model(x[ids]), y[ids], reduction="sum").backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(len(window))
        clip_grad_norm_(list(model.parameters()), max_norm=1.0)
        optimizer.step()
        model.zero_grad()


def own_buffer(batch_size: int, accumulation_steps: int) -> None:
    """Gradients are cleared after every micro-batch and kept in a buffer of the loop's own."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for window in data.windows(batch_size * accumulation_steps):
        buffer = [torch.zeros_like(p) for p in model.parameters()]
        for ids in window.split(batch_size):
            optimizer.zero_grad()
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            for kept, p in zip(buffer, model.parameters(), strict=True):
                assert p.grad is not None
                kept += p.grad
        for kept, p in zip(buffer, model.parameters(), strict=True):
            p.grad = kept
        optimizer.step()
        optimizer.zero_grad()


def autograd_grad(batch_size: int, accumulation_steps: int) -> None:
    """`torch.autograd.grad` and gradients assigned by hand."""
    x, y = data.images()
    model = data.model()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        total = [torch.zeros_like(p) for p in parameters]
        for ids in window.split(batch_size):
            parts = torch.autograd.grad(ce(model(x[ids]), y[ids], reduction="sum") / len(window), parameters)
            total = [a + b for a, b in zip(total, parts, strict=True)]
        for p, gradient in zip(parameters, total, strict=True):
            p.grad = gradient
        optimizer.step()


def functional_model(batch_size: int, accumulation_steps: int) -> None:
    """No module at all: two tensors and matrix products."""
    x, y = data.images()
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(data.FEATURES, data.CLASSES, generator=generator, requires_grad=True)
    b = torch.zeros(data.CLASSES, requires_grad=True)
    optimizer = torch.optim.Adagrad([w, b], lr=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        optimizer.zero_grad()
        for ids in window.split(batch_size):
            (ce(x[ids] @ w + b, y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()


def with_closure(batch_size: int, accumulation_steps: int) -> None:
    """The backward runs inside the optimizer's step."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for window in data.windows(batch_size * accumulation_steps):

        def closure(window: Tensor = window) -> float:
            optimizer.zero_grad()
            value = 0.0
            for ids in window.split(batch_size):
                loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
                loss.backward()
                value += loss.item()
            return value

        optimizer.step(closure)


def grad_scaler(batch_size: int, accumulation_steps: int) -> None:
    """GradScaler used as documented: unscale, clip, step and update once per window."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def bfloat16_autocast(batch_size: int, accumulation_steps: int) -> None:
    tokens = data.sentences()
    model = data.language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        total = data.num_targets(tokens[window])
        for ids in window.split(batch_size):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(tokens[ids])
            (data.token_loss(logits.float(), tokens[ids]) / total).backward()
        optimizer.step()
        optimizer.zero_grad()


def averaged_weights(batch_size: int, accumulation_steps: int) -> None:
    """An EMA updated once per optimizer step, with `swa_utils`, and one by hand in a dictionary."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand = {name: p.detach().clone() for name, p in model.named_parameters()}
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        for name, p in model.named_parameters():
            by_hand[name].lerp_(p.detach(), 0.1)


def two_optimizers(batch_size: int, accumulation_steps: int) -> None:
    """Weights and biases have optimizers of their own."""
    x, y = data.images()
    model = data.model()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=1e-2)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        for optimizer in (matrices, rest):
            optimizer.step()
            optimizer.zero_grad()


def generator_and_discriminator(batch_size: int, accumulation_steps: int) -> None:
    """Two models, each cleared before its own turn: the generator's loss leaves gradients in the discriminator."""
    x, _ = data.images()
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, data.FEATURES), nn.Sequential(nn.Linear(data.FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    make, judging = torch.optim.Adam(maker.parameters(), lr=1e-3), torch.optim.Adam(judge.parameters(), lr=1e-3)
    noise = torch.randn(data.SAMPLES, 4, generator=torch.Generator().manual_seed(5))
    softplus = functional.softplus
    for window in data.windows(batch_size * accumulation_steps):
        judging.zero_grad()
        for ids in window.split(batch_size):
            loss = softplus(-judge(x[ids])).sum() + softplus(judge(maker(noise[ids]).detach())).sum()
            (loss / len(window)).backward()
        judging.step()
        make.zero_grad()
        for ids in window.split(batch_size):
            (softplus(-judge(maker(noise[ids]))).sum() / len(window)).backward()
        make.step()


def evaluated_in_between(batch_size: int, accumulation_steps: int) -> None:
    """Evaluation, a warm-up from 0, frozen layers, and a cached optimizer state in between."""
    x, y = data.images()
    model = data.model()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.NAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 3))
    for window in data.windows(batch_size * accumulation_steps):
        model.train()
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            assert math.isfinite(ce(model(x), y).item())
        copy.deepcopy(model.state_dict())


def attention(batch_size: int, accumulation_steps: int) -> None:
    """A transformer layer: key biases have no gradient but noise, which Adam turns into steps."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(data.SAMPLES, 5, 8, generator=generator)
    y = torch.randint(3, (data.SAMPLES,), generator=generator)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    head = nn.Linear(8, 3)
    parameters = [*layer.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(head(layer(x[ids]).mean(1)), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen_batch_norm(batch_size: int, accumulation_steps: int) -> None:
    x, y = data.images()
    model = data.model(torch.float32, nn.BatchNorm1d(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        model.train()
        model[1].eval()
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def ghost_batch_norm(batch_size: int, accumulation_steps: int) -> None:
    """BatchNorm over fixed chunks of 2 rows, whatever the batch."""
    x, y = data.images()
    model = data.model(torch.float32, GhostBatchNorm(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches: Iterable[Tensor] = data.windows(batch_size * accumulation_steps)
    if batch_size == 1:
        raise ValueError("a micro-batch holds at least one chunk of 2 rows")
    for window in batches:
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


class GhostBatchNorm(nn.BatchNorm1d):
    """Normalises chunks of `chunk` rows, in order."""

    def __init__(self, features: int, chunk: int) -> None:
        super().__init__(features)
        self.chunk = chunk

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(GhostBatchNorm, self).forward(part) for part in input.split(self.chunk)])


def group_norm(batch_size: int, accumulation_steps: int) -> None:
    """Statistics of each row alone, in place of the batch's."""
    x, y = data.images()
    model = data.model(torch.float32, nn.GroupNorm(4, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def dropout_by_row(batch_size: int, accumulation_steps: int) -> None:
    """Masks belong to (step, row), not to the order in which rows are computed."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, window in enumerate(data.windows(batch_size * accumulation_steps)):
        for ids in window.split(batch_size):
            hidden = torch.tanh(model[0](x[ids]))
            seeds = [torch.Generator().manual_seed(1000 * step + int(row)) for row in ids]
            keep = torch.stack([torch.rand(16, generator=seed) > 0.2 for seed in seeds])
            (ce(model[2](hidden * keep / 0.8), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def penalty_once(batch_size: int, accumulation_steps: int) -> None:
    """A regulariser is added once per window: its backward is one more."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        (1e-3 * torch.stack([p.square().sum() for p in model.parameters()]).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def broken_window_skipped(batch_size: int, accumulation_steps: int) -> None:
    """One row is NaN: the whole window is left out, whatever the split."""
    x, y = data.images()
    x[5] = torch.nan
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        if all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()


def contrastive_cached(batch_size: int, accumulation_steps: int) -> None:
    """In-batch negatives over the whole window: representations first, then their gradients passed back in parts (GradCache)."""
    x, _ = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps, keep=False):
        with torch.no_grad():
            parts = [model(torch.cat([x[ids], x[ids] + 0.1])).view(2, len(ids), -1) for ids in window.split(batch_size)]
            cached = torch.cat(parts, dim=1)
        cached.requires_grad_()
        z = functional.normalize(cached, dim=2)
        (slope,) = torch.autograd.grad(ce(z[0] @ z[1].T / 0.1, torch.arange(len(window))), cached)
        for part, ids in zip(slope.split(batch_size, dim=1), window.split(batch_size), strict=True):
            model(torch.cat([x[ids], x[ids] + 0.1])).backward(part.flatten(0, 1))
        optimizer.step()
        optimizer.zero_grad()


def optimizer_wrapper(batch_size: int, accumulation_steps: int) -> None:
    """An optimizer around another one, both of `torch.optim`."""
    x, y = data.images()
    model = data.model()
    optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Outer(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


RIGHT: tuple[Callable[..., Any], ...] = (
    sgd_mean_over_window,
    sgd_divided_by_n,
    adamw_clipped,
    adam_momentum_long,
    tokens_weighted,
    divided_at_the_end,
    own_buffer,
    autograd_grad,
    functional_model,
    with_closure,
    grad_scaler,
    bfloat16_autocast,
    averaged_weights,
    two_optimizers,
    generator_and_discriminator,
    evaluated_in_between,
    attention,
    frozen_batch_norm,
    ghost_batch_norm,
    optimizer_wrapper,
    group_norm,
    dropout_by_row,
    penalty_once,
    broken_window_skipped,
    contrastive_cached,
)
