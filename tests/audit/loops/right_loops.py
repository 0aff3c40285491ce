"""Correct loops in the styles people use. The audit must find each of them equivalent."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, At, X, Y, ce, full_windows, mean_over_window, sgd, train


def sgd_mean_over_window(batch_size, accumulation_steps, dtype=torch.float32, order_seed=0):
    """The summed loss is divided by the rows of the window; the short window keeps its own number."""
    x, y = data.images(dtype)
    model = data.model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in data.windows(batch_size * accumulation_steps, order_seed=order_seed):
        optimizer.zero_grad()
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()


def sgd_divided_by_n(batch_size, accumulation_steps):
    """The textbook loop, `loss / N`, on data that divides evenly."""
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    batches = [ids for window in full_windows(batch_size * accumulation_steps) for ids in window.split(batch_size)]
    for i, ids in enumerate(batches):
        loss = ce(model(X[ids]), Y[ids]) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def adamw_clipped(batch_size, accumulation_steps):
    """Clipping, AdamW with decay, and its schedule act once per window; the losses returned are those of the windows."""
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses = []
    for window in data.windows(batch_size * accumulation_steps):
        total = 0.0
        for ids in window.split(batch_size):
            loss = mean_over_window(model, ids, window)
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(total)
    return losses


def adam_momentum_long(batch_size, accumulation_steps):
    """Adam for 30 steps: rounding has time to grow."""
    model = data.model(torch.float32, nn.ReLU())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(batch_size, accumulation_steps, model, optimizer=optimizer, windows=lambda size: data.windows(size, epochs=10))


def tokens_weighted(batch_size, accumulation_steps):
    """The loss is summed over tokens and divided by the tokens of the window; rows are padded per micro-batch."""
    model = data.language_model()

    def loss(model, ids, window):
        rows = frame.trimmed(ids)
        return data.token_loss(model(rows), rows) / data.num_targets(TOKENS[window])

    return {"losses": train(batch_size, accumulation_steps, model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3))}


def divided_at_the_end(batch_size, accumulation_steps):
    """Sums accumulate, and the gradients are divided by the rows of the window just before the step."""
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            ce(model(X[ids]), Y[ids], reduction="sum").backward()
        frame.divide_gradients(model, len(window))
        clip_grad_norm_(list(model.parameters()), max_norm=1.0)
        optimizer.step()
        model.zero_grad()


def own_buffer(batch_size, accumulation_steps):
    """`.grad` is cleared before every backward; a float32 buffer of the loop's own adds the gradients up."""
    model = data.model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    train(batch_size, accumulation_steps, model, optimizer=optimizer, **frame.Buffer(model).stages())


def autograd_grad(batch_size, accumulation_steps):
    """`torch.autograd.grad` differentiates, and the sums are assigned as gradients by hand."""
    model = data.model()
    parameters = list(model.parameters())
    for window, micro_batches in At(batch_size, accumulation_steps, model, sgd(model)).windows():
        total = [torch.zeros_like(p) for p in parameters]
        for ids in micro_batches:
            parts = torch.autograd.grad(mean_over_window(model, ids, window), parameters)
            total = [a + b for a, b in zip(total, parts, strict=True)]
        frame.assign(model, total)


def functional_model(batch_size, accumulation_steps):
    """There is no module at all: two tensors and a matrix product."""
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(data.FEATURES, data.CLASSES, generator=generator, requires_grad=True)
    b = torch.zeros(data.CLASSES, requires_grad=True)
    optimizer = torch.optim.Adagrad([w, b], lr=0.1)
    train(batch_size, accumulation_steps, lambda x: x @ w + b, optimizer=optimizer)


def with_closure(batch_size, accumulation_steps):
    """The backward runs inside the optimizer's step."""
    model = data.model()
    frame.train_by_closure(batch_size, accumulation_steps, model, sgd(model, momentum=0.9))


def grad_scaler(batch_size, accumulation_steps):
    """GradScaler is used as documented: unscale, clip, step and update once per window."""
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mean_over_window(model, ids, window)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def bfloat16_autocast(batch_size, accumulation_steps):
    """The forward runs in bfloat16, the loss in float32."""

    def model(tokens):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = language(tokens)
        return logits.float()

    language = data.language_model()
    train(batch_size, accumulation_steps, model, frame.token_mean_over_window, sgd(language))


def averaged_weights(batch_size, accumulation_steps):
    """Averages are updated once per optimizer step: one by `swa_utils`, one by hand in a dictionary."""
    model = data.model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update():
        average.update_parameters(model)
        for name, p in model.named_parameters():
            by_hand[name].lerp_(p.detach(), 0.1)

    train(batch_size, accumulation_steps, model, after_step=update)


def two_optimizers(batch_size, accumulation_steps):
    """Weights and biases have optimizers of their own."""
    model = data.model()
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.1)
    rest = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=1e-2)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            mean_over_window(model, ids, window).backward()
        for optimizer in (matrices, rest):
            optimizer.step()
            optimizer.zero_grad()


def generator_and_discriminator(batch_size, accumulation_steps):
    """Each of two models is cleared before its own turn: the generator's loss leaves gradients in the discriminator."""
    maker, judge, noise = frame.adversaries()
    make, judging = torch.optim.Adam(maker.parameters(), lr=1e-3), torch.optim.Adam(judge.parameters(), lr=1e-3)
    softplus = functional.softplus
    for window in data.windows(batch_size * accumulation_steps):
        judging.zero_grad()
        for ids in window.split(batch_size):
            loss = softplus(-judge(X[ids])).sum() + softplus(judge(maker(noise[ids]).detach())).sum()
            (loss / len(window)).backward()
        judging.step()
        make.zero_grad()
        for ids in window.split(batch_size):
            (softplus(-judge(maker(noise[ids]))).sum() / len(window)).backward()
        make.step()


def evaluated_in_between(batch_size, accumulation_steps):
    """A layer is frozen, the rate warms up from 0, and the model is evaluated and copied after every step."""
    model = data.model()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.NAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / 3))

    def evaluate():
        schedule.step()
        model.eval()
        with torch.no_grad():
            assert math.isfinite(ce(model(X), Y).item())
        copy.deepcopy(model.state_dict())
        model.train()

    train(batch_size, accumulation_steps, model, optimizer=optimizer, after_step=evaluate)


def attention(batch_size, accumulation_steps):
    """A transformer layer: key biases have no gradient but noise, which Adam turns into steps."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(data.SAMPLES, 5, 8, generator=generator)
    y = torch.randint(3, (data.SAMPLES,), generator=generator)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    head = nn.Linear(8, 3)

    def loss(model, ids, window):
        return ce(head(layer(x[ids]).mean(1)), y[ids], reduction="sum") / len(window)

    train(batch_size, accumulation_steps, None, loss, torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-3))


def frozen_batch_norm(batch_size, accumulation_steps):
    """BatchNorm is kept in evaluation mode: its statistics do not come from the micro-batch."""
    model = data.model(torch.float32, nn.BatchNorm1d(16))
    model[1].eval()
    train(batch_size, accumulation_steps, model)


class GhostBatchNorm(nn.BatchNorm1d):
    """BatchNorm over chunks of `chunk` rows, in order."""

    def __init__(self, features, chunk):
        super().__init__(features)
        self.chunk = chunk

    def forward(self, input):
        return torch.cat([super(GhostBatchNorm, self).forward(part) for part in input.split(self.chunk)])


def ghost_batch_norm(batch_size, accumulation_steps):
    """BatchNorm sees fixed chunks of 2 rows, whatever the batch."""
    if batch_size == 1:
        raise ValueError("a micro-batch holds at least one chunk of 2 rows")
    train(batch_size, accumulation_steps, data.model(torch.float32, GhostBatchNorm(16, 2)))


def group_norm(batch_size, accumulation_steps):
    """GroupNorm takes its statistics from each row alone."""
    train(batch_size, accumulation_steps, data.model(torch.float32, nn.GroupNorm(4, 16)))


def dropout_by_row(batch_size, accumulation_steps):
    """Masks belong to (step, row), not to the order in which rows are computed."""
    model = data.model()
    at = At(batch_size, accumulation_steps, model, sgd(model))
    for step, (window, parts) in enumerate(at.windows()):
        for ids in parts:
            hidden = torch.tanh(model[0](X[ids]))
            seeds = [torch.Generator().manual_seed(1000 * step + int(row)) for row in ids]
            keep = torch.stack([torch.rand(16, generator=seed) > 0.2 for seed in seeds])
            frame.share(model[2](hidden * keep / 0.8), ids, window).backward()


def penalty_once(batch_size, accumulation_steps):
    """A regulariser is added once per window, by a backward of its own."""
    model = data.model()

    def regularise():
        (1e-3 * torch.stack([p.square().sum() for p in model.parameters()]).sum()).backward()

    train(batch_size, accumulation_steps, model, before_step=regularise)


def broken_window_skipped(batch_size, accumulation_steps):
    """One row is NaN: the whole window is left out, whatever the split."""
    x = X.clone()
    x[5] = torch.nan
    model = data.model()
    optimizer = sgd(model)

    def step():
        if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
            optimizer.step()

    loss = lambda model, ids, window: frame.share(model(x[ids]), ids, window)  # noqa: E731
    train(batch_size, accumulation_steps, model, loss, optimizer, step=step)


def contrastive_cached(batch_size, accumulation_steps):
    """In-batch negatives over the whole window: representations first, then their gradients passed back in parts (GradCache)."""
    model = data.model()
    for window, micro_batches in At(batch_size, accumulation_steps, model, sgd(model)).windows(full_windows):
        with torch.no_grad():
            parts = [model(torch.cat([X[ids], X[ids] + 0.1])).view(2, len(ids), -1) for ids in micro_batches]
            cached = torch.cat(parts, dim=1)
        cached.requires_grad_()
        z = functional.normalize(cached, dim=2)
        (slope,) = torch.autograd.grad(ce(z[0] @ z[1].T / 0.1, torch.arange(len(window))), cached)
        for part, ids in zip(slope.split(batch_size, dim=1), micro_batches, strict=True):
            model(torch.cat([X[ids], X[ids] + 0.1])).backward(part.flatten(0, 1))


class Outer(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


def optimizer_wrapper(batch_size, accumulation_steps):
    """An optimizer is wrapped in another one, both of `torch.optim`."""
    model = data.model()
    train(batch_size, accumulation_steps, model, optimizer=Outer(sgd(model)))


RIGHT, _ = frame.tables(globals())
