"""Loops of less common kinds, right and wrong: closures, transforms, several optimizers, caches, resumed runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, divided, full_windows, mean_over_window, own_mean, sgd, train


def line_search(batch_size: int, accumulation_steps: int) -> None:
    """LBFGS evaluates the window several times per step, and clears the gradients each time."""
    model = data.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    frame.train_by_closure(batch_size, accumulation_steps, model, optimizer)


def sharpness_aware(batch_size: int, accumulation_steps: int) -> None:
    """The window is passed twice, the weights moved along the gradient in between."""
    model = data.model()
    optimizer = sgd(model, lr=0.05, momentum=0.9)
    for window in data.windows(batch_size * accumulation_steps):
        moves: list[Tensor] = []
        for second in (False, True):
            optimizer.zero_grad()
            for ids in window.split(batch_size):
                mean_over_window(model, ids, window).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if not second:
                norm = torch.nn.utils.get_total_norm(gradients)
                moves = [0.05 * gradient / norm for gradient in gradients]
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move, alpha=-1.0 if second else 1.0)
        optimizer.step()


def sample_gradients(batch_size: int, accumulation_steps: int) -> None:
    """Gradients per sample come from `torch.func`, are summed and assigned: no backward is called."""
    model = data.model()
    optimizer = sgd(model)

    def loss(parameters: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return ce(functional_call(model, parameters, (row[None],)), label[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    for window in data.windows(batch_size * accumulation_steps):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for ids in window.split(batch_size):
            parts = per_sample({name: p.detach() for name, p in model.named_parameters()}, X[ids], Y[ids])
            for name, p in model.named_parameters():
                assert p.grad is not None
                p.grad += parts[name].sum(0) / len(window)
        optimizer.step()


def master_weights(batch_size: int, accumulation_steps: int) -> None:
    """The model is in bfloat16; the optimizer holds float32 copies, in which gradients accumulate."""
    x, y = data.images(torch.bfloat16)
    model = data.model(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-2)
    for window in data.windows(batch_size * accumulation_steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for ids in window.split(batch_size):
            (ce(model(x[ids]).float(), y[ids], reduction="sum") / len(window)).backward()
            for p, master in zip(model.parameters(), masters, strict=True):
                assert p.grad is not None and master.grad is not None
                master.grad += p.grad.float()
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)


def _flat_copy(
    batch_size: int, accumulation_steps: int, loss: frame.Loss, windows: frame.Windows, *, order: int = 1, scale: float = 1.0
) -> None:
    """The optimizer holds all weights in one padded tensor (as ZeRO does), which gets its gradient when the window ends."""
    model = data.language_model()
    parameters = list(model.parameters())[::order]
    pad = torch.zeros(7)
    flat = torch.cat([*(p.detach().reshape(-1) for p in parameters), pad]).requires_grad_()

    def hand_over() -> None:
        flat.grad = torch.cat([*(p.grad.reshape(-1) / scale for p in parameters if p.grad is not None), pad])

    def copy_back() -> None:
        with torch.no_grad():
            for p, part in zip(parameters, flat.split([*(p.numel() for p in parameters), len(pad)]), strict=False):
                p.copy_(part.reshape(p.shape))
                p.grad = None

    stages: dict[str, Any] = {"windows": windows, "before_step": hand_over, "after_step": copy_back, "clear": frame.nothing}
    train(batch_size, accumulation_steps, model, divided(loss, 1 / scale), torch.optim.SGD([flat], lr=0.1), **stages)


def flat_copy(batch_size: int, accumulation_steps: int) -> None:
    """One flat tensor holds the weights; the loss is a mean over the tokens of the window."""
    _flat_copy(batch_size, accumulation_steps, frame.token_mean_over_window, data.windows)


def flat_copy_scaled(batch_size: int, accumulation_steps: int) -> None:
    """The same with a loss scale of its own that nobody is told about."""
    _flat_copy(batch_size, accumulation_steps, frame.token_mean_over_window, data.windows, scale=2.0**10)


def layer_added_later(batch_size: int, accumulation_steps: int) -> None:
    """The first layer is frozen, and joins the optimizer after two steps."""
    model = data.model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    for step, window in enumerate(data.windows(batch_size * accumulation_steps)):
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
        for ids in window.split(batch_size):
            mean_over_window(model, ids, window).backward()
        optimizer.step()
        optimizer.zero_grad()


def sparse_embedding(batch_size: int, accumulation_steps: int) -> None:
    """An embedding has sparse gradients, and an optimizer of its own."""
    torch.manual_seed(0)
    bag, head = nn.EmbeddingBag(data.VOCABULARY, 6, sparse=True), nn.Linear(6, data.CLASSES)
    optimizers = torch.optim.SparseAdam(bag.parameters(), lr=1e-2), torch.optim.Adam(head.parameters(), lr=1e-2)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(head(bag(TOKENS[ids])), Y[ids], reduction="sum") / len(window)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def optimizer_in_last_backward(batch_size: int, accumulation_steps: int) -> None:
    """Each parameter has an optimizer, which steps inside the backward of the window's last micro-batch."""
    model = data.model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    last = False

    def step(p: Tensor) -> None:
        if last:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for ids, window, last in frame.micro_batches(batch_size, accumulation_steps, data.windows):  # noqa: B007
        mean_over_window(model, ids, window).backward()


def _overflowing(batch_size: int, accumulation_steps: int, spoilt: Callable[[Tensor], float], **options: Any) -> None:
    """The losses of the second window are multiplied by `spoilt(ids)`; a GradScaler leaves out a window that overflows."""
    second = [*data.windows(batch_size * accumulation_steps)][1]

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        return mean_over_window(model, ids, window) * (spoilt(ids) if window.equal(second) else 1.0)

    model = data.model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    train(batch_size, accumulation_steps, model, **frame.scaled(scaler, sgd(model, lr=0.05, **options), loss))


def overflowing_window(batch_size: int, accumulation_steps: int) -> None:
    """One row overflows in the second window: a GradScaler leaves that window out, once, at every N."""
    _overflowing(batch_size, accumulation_steps, lambda ids: torch.inf if 20 in ids else 1.0, momentum=0.9)


RETURNS = torch.randn(data.SAMPLES, generator=torch.Generator().manual_seed(8))


def _normalised(ids: Tensor, over: Tensor) -> Tensor:
    """The advantages of rows `ids`, normalised by the mean and deviation of rows `over`."""
    return (RETURNS[ids] - RETURNS[over].mean()) / (RETURNS[over].std() + 1e-8)


def advantages_of_the_window(batch_size: int, accumulation_steps: int) -> None:
    """Policy gradient, with advantages normalised over the window before it is cut."""

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        return (ce(model(X[ids]), Y[ids], reduction="none") * _normalised(ids, window)).sum() / len(window)

    train(batch_size, accumulation_steps, data.model(), loss)


def _deep(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = (nn.Linear(data.FEATURES, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh())
    return nn.Sequential(*hidden, nn.Linear(16, data.CLASSES))


def _and_log_partition(model: nn.Module, ids: Tensor, window: Tensor, over: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and a penalty on each row's squared log-partition function, which reaches all parameters, over `len(over)`."""
    outputs = model(X[ids])
    loss = ce(outputs, Y[ids], reduction="sum") / len(window)
    return loss, 0.1 * outputs.logsumexp(1).square().sum() / len(over)


def penalty_divided(batch_size: int, accumulation_steps: int) -> None:
    """The penalty on the rows is divided by the rows of the window, as the loss is."""
    train(batch_size, accumulation_steps, _deep(), lambda m, ids, window: torch.add(*_and_log_partition(m, ids, window, window)))


def _apart(batch_size: int, accumulation_steps: int, over: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = _deep()
    optimizer = sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            for part in _and_log_partition(model, ids, window, over(ids, window)):
                part.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def penalty_divided_apart(batch_size: int, accumulation_steps: int) -> None:
    """The same with a backward of its own for the penalty."""
    _apart(batch_size, accumulation_steps, lambda ids, window: window)


def line_search_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """Every evaluation is a whole window: clearing between them is right, and the missing division is not."""
    model = data.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    frame.train_by_closure(batch_size, accumulation_steps, model, optimizer, own_mean, full_windows)


def schedule_too_long(batch_size: int, accumulation_steps: int) -> None:
    """The schedule advances once per window, but is laid out for the number of micro-batches."""
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = len([*frame.micro_batches(batch_size, accumulation_steps, data.windows)])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)
    train(batch_size, accumulation_steps, model, optimizer=optimizer, after_step=schedule.step)


def clipped_by_hand_inside(batch_size: int, accumulation_steps: int) -> None:
    """Arithmetic of the loop's own clips the running sum after every micro-batch, instead of `clip_grad_norm_`."""
    model = data.model()

    def clip() -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        factor = min(1.0, 0.05 / torch.nn.utils.get_total_norm(gradients).item())
        for gradient in gradients:
            gradient.mul_(factor)

    train(batch_size, accumulation_steps, model, after_backward=clip)


def epoch_leftovers(batch_size: int, accumulation_steps: int) -> None:
    """`drop_last` drops partial micro-batches, not partial windows: what is left goes into the next epoch's first window."""
    model = data.model()
    optimizer = sgd(model)
    loader = DataLoader(TensorDataset(X, Y), batch_size=batch_size, drop_last=True)
    count = 0
    for _ in range(3):
        for rows, labels in loader:
            (ce(model(rows), labels) / accumulation_steps).backward()
            count += 1
            if count % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


def buffer_never_emptied(batch_size: int, accumulation_steps: int) -> None:
    """The loop's own buffer is emptied without accumulation only."""
    model = data.model()
    buffer = frame.Buffer(model)
    empty = buffer.empty if accumulation_steps == 1 else frame.nothing
    train(batch_size, accumulation_steps, model, optimizer=sgd(model, 0.02), **{**buffer.stages(), "after_step": empty})


def one_layer_decayed(batch_size: int, accumulation_steps: int) -> None:
    """A penalty on one layer is added in full to every micro-batch."""
    model = data.model()
    train(batch_size, accumulation_steps, model, lambda *of: mean_over_window(*of) + 1e-2 * model[0].weight.square().sum())


def advantages_per_micro_batch(batch_size: int, accumulation_steps: int) -> None:
    """Policy gradient, with advantages normalised over the micro-batch instead of the window."""

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        return (ce(model(X[ids]), Y[ids], reduction="none") * _normalised(ids, ids)).mean() / accumulation_steps

    train(batch_size, accumulation_steps, data.model(), loss, windows=full_windows)


def pairs_normalised_apart(batch_size: int, accumulation_steps: int) -> None:
    """Pairs are weighed by advantages that are normalised over the micro-batch; the pairs themselves stay together."""

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        scores = model(torch.cat([X[ids], -X[ids]])).logsumexp(1)
        margins = functional.logsigmoid(scores[: len(ids)] - scores[len(ids) :])
        return -(margins * _normalised(ids, ids)).mean() / accumulation_steps

    train(batch_size, accumulation_steps, data.model(), loss, windows=full_windows)


def discriminator_catches_more(batch_size: int, accumulation_steps: int) -> None:
    """The generator's backward leaves gradients in the discriminator while its window is open.

    With accumulation the generator also learns from the discriminator of before its step: a second difference, without a name.
    """
    maker, judge, noise = frame.adversaries()
    make, judging = sgd(maker, 0.05), sgd(judge, 0.05)
    softplus = functional.softplus
    for ids, window, last in frame.micro_batches(batch_size, accumulation_steps, data.windows):
        loss = softplus(-judge(X[ids])).sum() + softplus(judge(maker(noise[ids]).detach())).sum()
        (loss / len(window)).backward()
        if last:
            judging.step()
            judging.zero_grad()
        (softplus(-judge(maker(noise[ids]))).sum() / len(window)).backward()
        if last:
            make.step()
            make.zero_grad()
            judging.zero_grad()


def float16_underflow(batch_size: int, accumulation_steps: int) -> None:
    """Convolutions run in float16 without loss scaling: the parts of a small loss vanish."""
    x, y = data.images(torch.float16)
    torch.manual_seed(3)
    layers = nn.Conv1d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * (data.FEATURES - 2), data.CLASSES)).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    def loss(model: nn.Module, ids: Tensor, window: Tensor) -> Tensor:
        return 3e-6 * ce(model(x[ids].unsqueeze(1)).float(), y[ids], reduction="sum") / len(window)

    train(batch_size, accumulation_steps, model, loss, optimizer)


def cache_not_refreshed(batch_size: int, accumulation_steps: int) -> None:
    """With accumulation, the forward uses a copy of the weights that is renewed at every second window only."""
    torch.manual_seed(0)
    model = nn.Linear(data.FEATURES, data.CLASSES)
    optimizer = sgd(model)
    cached = model.weight.detach().clone()
    for step, window in enumerate(data.windows(batch_size * accumulation_steps)):
        if step % 2 == 0 or accumulation_steps == 1:
            cached = model.weight.detach().clone()
        for ids in window.split(batch_size):
            weight = model.weight + (cached - model.weight).detach()
            (ce(functional.linear(X[ids], weight, model.bias), Y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def counts_too_many(batch_size: int, accumulation_steps: int) -> dict[str, Any]:
    """The gradients are right; every micro-batch is counted as a whole window."""
    model = data.model()
    optimizer = sgd(model)
    samples = steps = 0
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            mean_over_window(model, ids, window).backward()
            samples += batch_size * accumulation_steps
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return {"samples": samples, "steps": steps}


def overflow_at_one_split(batch_size: int, accumulation_steps: int) -> None:
    """The second window's loss overflows when it is computed as a whole only: one arm's GradScaler leaves it out."""
    _overflowing(batch_size, accumulation_steps, lambda ids: 1e38 if len(ids) == 16 else 1.0)


def penalty_in_full(batch_size: int, accumulation_steps: int) -> None:
    """The penalty is averaged over each micro-batch, the loss over the window."""
    train(batch_size, accumulation_steps, _deep(), lambda m, ids, window: torch.add(*_and_log_partition(m, ids, window, ids)))


def penalty_in_full_apart(batch_size: int, accumulation_steps: int) -> None:
    """The same with a backward of its own for the penalty."""
    _apart(batch_size, accumulation_steps, lambda ids, window: ids)


def means_divided_at_the_end(batch_size: int, accumulation_steps: int) -> None:
    """Each micro-batch's mean over its tokens counts times its rows; the sum is divided by the rows of the window."""
    model = data.language_model()
    optimizer = sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (data.token_loss(model(TOKENS[ids]), TOKENS[ids], "mean") * len(ids)).backward()
        frame.divide_gradients(model, len(window))
        optimizer.step()
        optimizer.zero_grad()


def flat_copy_of_means(batch_size: int, accumulation_steps: int) -> None:
    """One flat tensor holds the weights; each micro-batch is averaged over its own tokens."""
    _flat_copy(batch_size, accumulation_steps, divided(frame.own_token_mean, accumulation_steps), full_windows)


def flat_copy_of_means_scaled(batch_size: int, accumulation_steps: int) -> None:
    """The same with a loss scale of its own that nobody is told about."""
    _flat_copy(batch_size, accumulation_steps, divided(frame.own_token_mean, accumulation_steps), full_windows, scale=2.0**10)


def flat_copy_in_another_order(batch_size: int, accumulation_steps: int) -> None:
    """Means again; what the model's parameters got cannot be laid beside what the optimizer's tensor holds."""
    _flat_copy(batch_size, accumulation_steps, divided(frame.own_token_mean, accumulation_steps), full_windows, order=-1)


class InBatchNegatives(nn.Module):
    """The model is called inside the module of its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        first, second = (functional.normalize(self.model(view), dim=1) for view in (x, x + 0.1))
        return ce(first @ second.T / 0.1, torch.arange(len(x)))


def _in_batch_negatives(batch_size: int, accumulation_steps: int, dropout: float) -> None:
    module = InBatchNegatives(_deep(dropout))
    train(batch_size, accumulation_steps, module, lambda m, ids, _: m(X[ids]) / accumulation_steps, windows=full_windows)


def negatives_in_loss_module(batch_size: int, accumulation_steps: int) -> None:
    """Every row's loss depends on the others of its micro-batch."""
    _in_batch_negatives(batch_size, accumulation_steps, 0.0)


def negatives_and_dropout(batch_size: int, accumulation_steps: int) -> None:
    """The same with dropout, whose masks depend on the split as well."""
    _in_batch_negatives(batch_size, accumulation_steps, 0.2)


WRONG: dict[frame.Loop, set[str]] = {
    flat_copy_of_means: {"mean_of_means"},
    flat_copy_of_means_scaled: {"mean_of_means"},
    flat_copy_in_another_order: {"unexplained"},
    line_search_not_divided: {"loss_not_divided"},
    schedule_too_long: {"schedule_per_micro_batch"},
    clipped_by_hand_inside: {"clip_per_micro_batch"},
    epoch_leftovers: {"window_misplaced"},
    buffer_never_emptied: {"gradients_not_cleared"},
    one_layer_decayed: {"auxiliary_loss_scale"},
    advantages_per_micro_batch: {"normaliser_depends_on_split"},
    pairs_normalised_apart: {"normaliser_depends_on_split"},
    discriminator_catches_more: {"foreign_gradients", "unexplained"},
    float16_underflow: {"underflow_from_division"},
    cache_not_refreshed: {"cached_weights_stale"},
    counts_too_many: {"counter_wrong"},
    overflow_at_one_split: {"non_finite_micro_batch"},
    penalty_in_full: {"auxiliary_loss_scale"},
    penalty_in_full_apart: {"auxiliary_loss_scale"},
    means_divided_at_the_end: {"mean_of_means"},
    negatives_in_loss_module: {"non_separable_loss"},
    negatives_and_dropout: {"non_separable_loss", "stochastic_layers"},
}

RIGHT = frame.unlisted(globals(), WRONG)
