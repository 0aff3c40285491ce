"""Hand-written loops of less common kinds, right and wrong: closures, transforms, several optimizers, caches, resumed runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from experiments.trainers import data

ce = functional.cross_entropy


def _sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


# -- right ------------------------------------------------------------------------------------------------------------


def line_search(batch_size: int, accumulation_steps: int) -> None:
    """LBFGS evaluates the window several times per step, and clears the gradients each time."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
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


def sharpness_aware(batch_size: int, accumulation_steps: int) -> None:
    """Two passes over the window, the weights moved along the gradient in between."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for window in data.windows(batch_size * accumulation_steps):
        moves: list[Tensor] = []
        for second in (False, True):
            optimizer.zero_grad()
            for ids in window.split(batch_size):
                (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if not second:
                norm = torch.nn.utils.get_total_norm(gradients)
                moves = [0.05 * gradient / norm for gradient in gradients]
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.add_(move, alpha=-1.0 if second else 1.0)
        optimizer.step()


def sample_gradients(batch_size: int, accumulation_steps: int) -> None:
    """Gradients per sample with `torch.func`, summed and assigned: no backward is called."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)

    def loss(parameters: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return ce(functional_call(model, parameters, (row[None],)), label[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    for window in data.windows(batch_size * accumulation_steps):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for ids in window.split(batch_size):
            parts = per_sample({name: p.detach() for name, p in model.named_parameters()}, x[ids], y[ids])
            for name, p in model.named_parameters():
                assert p.grad is not None
                p.grad += parts[name].sum(0) / len(window)
        optimizer.step()


def master_weights(batch_size: int, accumulation_steps: int) -> None:
    """A bfloat16 model; the optimizer holds float32 copies, in which gradients accumulate."""
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


def _flat_copy(batch_size: int, accumulation_steps: int, *, by_means: bool, reordered: bool = False, scale: float = 1.0) -> None:
    """The optimizer holds all weights in one padded tensor (as ZeRO does), which gets its gradient when the window ends."""
    tokens = data.sentences()
    model = data.language_model()
    order = list(model.parameters())[:: -1 if reordered else 1]
    pad = torch.zeros(7)
    flat = torch.cat([*(p.detach().reshape(-1) for p in order), pad]).requires_grad_()
    optimizer = torch.optim.SGD([flat], lr=0.1)
    for window in data.windows(batch_size * accumulation_steps, keep=not by_means):
        for ids in window.split(batch_size):
            total = data.token_loss(model(tokens[ids]), tokens[ids])
            loss = total / (data.num_targets(tokens[ids]) * accumulation_steps if by_means else data.num_targets(tokens[window]))
            (loss * scale).backward()
        flat.grad = torch.cat([*(p.grad.reshape(-1) / scale for p in order if p.grad is not None), pad])
        optimizer.step()
        with torch.no_grad():
            for p, part in zip(order, flat.split([*(p.numel() for p in order), len(pad)]), strict=False):
                p.copy_(part.reshape(p.shape))
                p.grad = None


def flat_copy(batch_size: int, accumulation_steps: int) -> None:
    _flat_copy(batch_size, accumulation_steps, by_means=False)


def flat_copy_scaled(batch_size: int, accumulation_steps: int) -> None:
    """With a loss scale of its own that nobody is told about."""
    _flat_copy(batch_size, accumulation_steps, by_means=False, scale=2.0**10)


def layer_added_later(batch_size: int, accumulation_steps: int) -> None:
    """The first layer is frozen, and joins the optimizer after two steps."""
    x, y = data.images()
    model = data.model()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    for step, window in enumerate(data.windows(batch_size * accumulation_steps)):
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.02})
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sparse_embedding(batch_size: int, accumulation_steps: int) -> None:
    """Sparse gradients of an embedding, with an optimizer of their own."""
    tokens = data.sentences()
    _, y = data.images()
    torch.manual_seed(0)
    bag, head = nn.EmbeddingBag(data.VOCABULARY, 6, sparse=True), nn.Linear(6, data.CLASSES)
    optimizers = torch.optim.SparseAdam(bag.parameters(), lr=1e-2), torch.optim.Adam(head.parameters(), lr=1e-2)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(head(bag(tokens[ids])), y[ids], reduction="sum") / len(window)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def optimizer_in_last_backward(batch_size: int, accumulation_steps: int) -> None:
    """One optimizer per parameter, stepped inside the backward of the window's last micro-batch."""
    x, y = data.images()
    model = data.model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    last = False

    def step(p: Tensor) -> None:
        if last:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for window in data.windows(batch_size * accumulation_steps):
        parts = window.split(batch_size)
        for k, ids in enumerate(parts):
            last = k == len(parts) - 1
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()


def overflowing_window(batch_size: int, accumulation_steps: int) -> None:
    """One row overflows in the second window: a GradScaler leaves that window out, once, at every N."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, window in enumerate(data.windows(batch_size * accumulation_steps)):
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
            if step == 1 and 20 in ids:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def advantages_of_the_window(batch_size: int, accumulation_steps: int) -> None:
    """Policy gradient with advantages normalised over the window before it is cut."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    returns = torch.randn(data.SAMPLES, generator=torch.Generator().manual_seed(8))
    for window in data.windows(batch_size * accumulation_steps):
        advantages = (returns[window] - returns[window].mean()) / (returns[window].std() + 1e-8)
        for ids, part in zip(window.split(batch_size), advantages.split(batch_size), strict=True):
            ((ce(model(x[ids]), y[ids], reduction="none") * part).sum() / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _deep(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = (nn.Linear(data.FEATURES, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh())
    return nn.Sequential(*hidden, nn.Linear(16, data.CLASSES))


def _log_partition(batch_size: int, accumulation_steps: int, *, divided: bool, apart: bool = False) -> None:
    """A penalty on the squared log-partition function of each row, which reaches all parameters."""
    x, y = data.images()
    model = _deep()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            outputs = model(x[ids])
            loss = ce(outputs, y[ids], reduction="sum") / len(window)
            penalty = 0.1 * outputs.logsumexp(1).square().sum() / (len(window) if divided else len(ids))
            for part in (loss, penalty) if apart else (loss + penalty,):
                part.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def _resumed(batch_size: int, accumulation_steps: int, *, with_gradients: bool) -> None:
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    count = 0
    for window in data.windows(16, epochs=3, keep=False):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids]) / accumulation_steps).backward()
            count += 1
            if accumulation_steps > 1 and count == accumulation_steps + accumulation_steps // 2:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
                model = data.model()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                for parameter, gradient in zip(model.parameters(), saved[2], strict=True):
                    parameter.grad = gradient if with_gradients else None
        optimizer.step()
        optimizer.zero_grad()


def resumed_with_gradients(batch_size: int, accumulation_steps: int) -> None:
    """Saved and resumed in the middle of the second window, `.grad` with it."""
    _resumed(batch_size, accumulation_steps, with_gradients=True)


def penalty_divided(batch_size: int, accumulation_steps: int) -> None:
    _log_partition(batch_size, accumulation_steps, divided=True)


def penalty_divided_apart(batch_size: int, accumulation_steps: int) -> None:
    _log_partition(batch_size, accumulation_steps, divided=True, apart=True)


RIGHT: tuple[Callable[..., Any], ...] = (
    flat_copy,
    flat_copy_scaled,
    line_search,
    sharpness_aware,
    sample_gradients,
    master_weights,
    layer_added_later,
    sparse_embedding,
    optimizer_in_last_backward,
    overflowing_window,
    advantages_of_the_window,
    penalty_divided,
    penalty_divided_apart,
    resumed_with_gradients,
)

# -- wrong ------------------------------------------------------------------------------------------------------------


def line_search_not_divided(batch_size: int, accumulation_steps: int) -> None:
    """Every evaluation is a whole window: clearing between them is right, and the missing division is not."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for window in data.windows(16, keep=False):

        def closure(window: Tensor = window) -> float:
            optimizer.zero_grad()
            value = 0.0
            for ids in window.split(batch_size):
                loss = ce(model(x[ids]), y[ids])
                loss.backward()
                value += loss.item()
            return value

        optimizer.step(closure)


def schedule_too_long(batch_size: int, accumulation_steps: int) -> None:
    """Stepped once per window, but laid out for the number of micro-batches."""
    x, y = data.images()
    model = data.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    windows = [window.split(batch_size) for window in data.windows(batch_size * accumulation_steps)]
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=sum(map(len, windows)))
    for parts in windows:
        for ids in parts:
            (ce(model(x[ids]), y[ids], reduction="sum") / sum(map(len, parts))).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def clipped_by_hand_inside(batch_size: int, accumulation_steps: int) -> None:
    """Own arithmetic instead of `clip_grad_norm_`, after every micro-batch."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            factor = min(1.0, 0.05 / torch.nn.utils.get_total_norm(gradients).item())
            for gradient in gradients:
                gradient.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()


def epoch_leftovers(batch_size: int, accumulation_steps: int) -> None:
    """`drop_last` drops partial micro-batches, not partial windows: what is left goes into the next epoch's first window."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, drop_last=True)
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
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model, 0.02)
    buffer = [torch.zeros_like(p) for p in model.parameters()]
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            optimizer.zero_grad()
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            for kept, p in zip(buffer, model.parameters(), strict=True):
                assert p.grad is not None
                kept += p.grad
        for kept, p in zip(buffer, model.parameters(), strict=True):
            p.grad = kept.clone()
            if accumulation_steps == 1:
                kept.zero_()
        optimizer.step()


def one_layer_decayed(batch_size: int, accumulation_steps: int) -> None:
    """A penalty on one layer is added in full to every micro-batch."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
            (loss + 1e-2 * model[0].weight.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def router_loss(batch_size: int, accumulation_steps: int) -> None:
    """Experts behind a router, whose own loss (a mean over the micro-batch) is not divided."""
    x, y = data.images()
    torch.manual_seed(0)
    router, experts = nn.Linear(data.FEATURES, 3), nn.ModuleList([nn.Linear(data.FEATURES, data.CLASSES) for _ in range(3)])
    optimizer = torch.optim.SGD([*router.parameters(), *experts.parameters()], lr=0.1)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            scores = router(x[ids])
            mixed = torch.stack([expert(x[ids]) for expert in experts], dim=1)
            logits = (scores.softmax(1).unsqueeze(2) * mixed).sum(1)
            (ce(logits, y[ids]) / accumulation_steps + 0.1 * scores.logsumexp(1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def advantages_per_micro_batch(batch_size: int, accumulation_steps: int) -> None:
    """Policy gradient with advantages normalised over the micro-batch instead of the window."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    returns = torch.randn(data.SAMPLES, generator=torch.Generator().manual_seed(8))
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            advantages = (returns[ids] - returns[ids].mean()) / (returns[ids].std() + 1e-8)
            ((ce(model(x[ids]), y[ids], reduction="none") * advantages).mean() / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def discriminator_catches_more(batch_size: int, accumulation_steps: int) -> None:
    """The generator's backward leaves gradients in the discriminator while its window is open.

    With accumulation the generator also learns from the discriminator of before its step: a second difference, without a name.
    """
    x, _ = data.images()
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, data.FEATURES), nn.Sequential(nn.Linear(data.FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    make, judging = _sgd(maker, 0.05), _sgd(judge, 0.05)
    noise = torch.randn(data.SAMPLES, 4, generator=torch.Generator().manual_seed(5))
    softplus = functional.softplus
    for window in data.windows(batch_size * accumulation_steps):
        parts = window.split(batch_size)
        for k, ids in enumerate(parts):
            loss = softplus(-judge(x[ids])).sum() + softplus(judge(maker(noise[ids]).detach())).sum()
            (loss / len(window)).backward()
            if k == len(parts) - 1:
                judging.step()
                judging.zero_grad()
            (softplus(-judge(maker(noise[ids]))).sum() / len(window)).backward()
        make.step()
        make.zero_grad()
        judging.zero_grad()


def float16_underflow(batch_size: int, accumulation_steps: int) -> None:
    """Convolutions in float16 without loss scaling: the parts of a small loss vanish."""
    x, y = data.images(torch.float16)
    torch.manual_seed(3)
    layers = nn.Conv1d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * (data.FEATURES - 2), data.CLASSES)).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            logits = model(x[ids].unsqueeze(1)).float()
            (3e-6 * ce(logits, y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def cache_not_refreshed(batch_size: int, accumulation_steps: int) -> None:
    """With accumulation, the forward uses a copy of the weights that is renewed at every second window only."""
    x, y = data.images()
    torch.manual_seed(0)
    model = nn.Linear(data.FEATURES, data.CLASSES)
    optimizer = _sgd(model)
    cached = model.weight.detach().clone()
    for step, window in enumerate(data.windows(batch_size * accumulation_steps)):
        if step % 2 == 0 or accumulation_steps == 1:
            cached = model.weight.detach().clone()
        for ids in window.split(batch_size):
            weight = model.weight + (cached - model.weight).detach()
            (ce(functional.linear(x[ids], weight, model.bias), y[ids], reduction="sum") / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed_inside(batch_size: int, accumulation_steps: int) -> None:
    """Saved and resumed in the middle of the second window: the gradients so far are lost."""
    _resumed(batch_size, accumulation_steps, with_gradients=False)


def counts_too_many(batch_size: int, accumulation_steps: int) -> dict[str, Any]:
    """Right gradients; every micro-batch is counted as a whole window."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model)
    samples = steps = 0
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (ce(model(x[ids]), y[ids], reduction="sum") / len(window)).backward()
            samples += batch_size * accumulation_steps
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return {"samples": samples, "steps": steps}


def overflow_at_one_split(batch_size: int, accumulation_steps: int) -> None:
    """The second window's loss overflows when it is computed as a whole only: one arm's GradScaler leaves it out."""
    x, y = data.images()
    model = data.model()
    optimizer = _sgd(model, 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, window in enumerate(data.windows(batch_size * accumulation_steps)):
        for ids in window.split(batch_size):
            loss = ce(model(x[ids]), y[ids], reduction="sum") / len(window)
            if step == 1 and len(ids) == 16:
                loss = loss * 1e38
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def penalty_in_full(batch_size: int, accumulation_steps: int) -> None:
    """The penalty is averaged over each micro-batch, the loss over the window."""
    _log_partition(batch_size, accumulation_steps, divided=False)


def penalty_in_full_apart(batch_size: int, accumulation_steps: int) -> None:
    """The same with a backward of its own."""
    _log_partition(batch_size, accumulation_steps, divided=False, apart=True)


def means_divided_at_the_end(batch_size: int, accumulation_steps: int) -> None:
    """Mean over the tokens of each micro-batch, times its rows; the sum is divided by the rows of the window."""
    tokens = data.sentences()
    model = data.language_model()
    optimizer = _sgd(model)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            (data.token_loss(model(tokens[ids]), tokens[ids], "mean") * len(ids)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(window)
        optimizer.step()
        optimizer.zero_grad()


def flat_copy_of_means(batch_size: int, accumulation_steps: int) -> None:
    _flat_copy(batch_size, accumulation_steps, by_means=True)


def flat_copy_of_means_scaled(batch_size: int, accumulation_steps: int) -> None:
    _flat_copy(batch_size, accumulation_steps, by_means=True, scale=2.0**10)


def flat_copy_in_another_order(batch_size: int, accumulation_steps: int) -> None:
    """Means again; what the model's parameters got cannot be laid beside what the optimizer's tensor holds."""
    _flat_copy(batch_size, accumulation_steps, by_means=True, reordered=True)


class InBatchNegatives(nn.Module):
    """The model is called inside the module of its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        first, second = (functional.normalize(self.model(view), dim=1) for view in (x, x + 0.1))
        return ce(first @ second.T / 0.1, torch.arange(len(x)))


def _in_batch_negatives(batch_size: int, accumulation_steps: int, dropout: float) -> None:
    x, _ = data.images()
    loss = InBatchNegatives(_deep(dropout))
    optimizer = _sgd(loss)
    for window in data.windows(16, keep=False):
        for ids in window.split(batch_size):
            (loss(x[ids]) / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()


def negatives_in_loss_module(batch_size: int, accumulation_steps: int) -> None:
    _in_batch_negatives(batch_size, accumulation_steps, 0.0)


def negatives_and_dropout(batch_size: int, accumulation_steps: int) -> None:
    _in_batch_negatives(batch_size, accumulation_steps, 0.2)


WRONG: dict[Callable[..., Any], set[str]] = {
    flat_copy_of_means: {"mean_of_means"},
    flat_copy_of_means_scaled: {"mean_of_means"},
    flat_copy_in_another_order: {"unexplained"},
    line_search_not_divided: {"loss_not_divided"},
    schedule_too_long: {"schedule_per_micro_batch"},
    clipped_by_hand_inside: {"clip_per_micro_batch"},
    epoch_leftovers: {"window_misplaced"},
    buffer_never_emptied: {"gradients_not_cleared"},
    one_layer_decayed: {"auxiliary_loss_scale"},
    router_loss: {"auxiliary_loss_scale"},
    advantages_per_micro_batch: {"normaliser_depends_on_split"},
    discriminator_catches_more: {"foreign_gradients", "unexplained"},
    float16_underflow: {"underflow_from_division"},
    cache_not_refreshed: {"cached_weights_stale"},
    resumed_inside: {"resume_in_window"},
    counts_too_many: {"counter_wrong"},
    overflow_at_one_split: {"non_finite_micro_batch"},
    penalty_in_full: {"auxiliary_loss_scale"},
    penalty_in_full_apart: {"auxiliary_loss_scale"},
    means_divided_at_the_end: {"mean_of_means"},
    negatives_in_loss_module: {"non_separable_loss"},
    negatives_and_dropout: {"non_separable_loss", "stochastic_layers"},
}
