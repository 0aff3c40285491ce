"""Loops of less common kinds, right and wrong: closures, transforms, several optimizers, caches, resumed runs."""

from functools import partial

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from scoreboard import data
from tests.audit.loops import frame
from tests.audit.loops.frame import TOKENS, X, Y, ce, divided, full_windows, loop, mean_over_window, nothing, own_mean, sgd


def _lbfgs(**options):
    return lambda model: torch.optim.LBFGS(model.parameters(), **options)


@loop(optimizer=_lbfgs(lr=0.5, max_iter=4, line_search_fn="strong_wolfe"))
def line_search(at):
    """LBFGS evaluates the window several times per step, and clears the gradients each time."""
    frame.train_by_closure(at.size, at.n, at.model, at.optimizer)


@loop(optimizer=partial(sgd, lr=0.05, momentum=0.9))
def sharpness_aware(at):
    """The window is passed twice, the weights moved along the gradient in between."""
    for window, parts in at.windows():
        moves = []
        for second in (False, True):
            at.optimizer.zero_grad()
            for ids in parts:
                mean_over_window(at.model, ids, window).backward()
            gradients = [p.grad for p in at.model.parameters()]
            if not second:
                norm = torch.nn.utils.get_total_norm(gradients)
                moves = [0.05 * gradient / norm for gradient in gradients]
            with torch.no_grad():
                for p, move in zip(at.model.parameters(), moves, strict=True):
                    p.add_(move, alpha=-1.0 if second else 1.0)


def _sample_gradients(at, first):
    """Those of the parts of a window from `first` on."""

    def loss(parameters, row, label):
        return ce(functional_call(at.model, parameters, (row[None],)), label[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))
    for window, each in at.windows():
        frame.assign(at.model, map(torch.zeros_like, at.model.parameters()))
        for ids in each[first:]:
            parts = per_sample({name: p.detach() for name, p in at.model.named_parameters()}, X[ids], Y[ids])
            for name, p in at.model.named_parameters():
                p.grad += parts[name].sum(0) / len(window)


@loop()
def sample_gradients(at):
    """Gradients per sample come from `torch.func`, are summed and assigned: no backward is called."""
    _sample_gradients(at, 0)


@loop("micro_batches_lost")
def sample_gradients_of_the_last(at):
    """They are assigned and not summed."""
    _sample_gradients(at, -1)


def master_weights(batch_size, accumulation_steps):
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
                master.grad += p.grad.float()
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)


def _flat_copy(at, loss, windows, *, order=1, scale=1.0):
    """The optimizer holds all weights in one padded tensor (as ZeRO does), which gets its gradient when the window ends."""
    parameters = list(at.model.parameters())[::order]
    pad = torch.zeros(7)
    flat = torch.cat([*(p.detach().reshape(-1) for p in parameters), pad]).requires_grad_()

    def hand_over():
        flat.grad = torch.cat([*(p.grad.reshape(-1) / scale for p in parameters), pad])

    def copy_back():
        with torch.no_grad():
            for p, part in zip(parameters, flat.split([*(p.numel() for p in parameters), len(pad)]), strict=False):
                p.copy_(part.reshape(p.shape))
                p.grad = None

    stages = {"windows": windows, "before_step": hand_over, "after_step": copy_back, "clear": nothing}
    return {"loss": divided(loss, 1 / scale), "optimizer": torch.optim.SGD([flat], lr=0.1), **stages}


_FLAT = {"model": frame.words, "optimizer": nothing}


@loop(**_FLAT)
def flat_copy(at):
    """One flat tensor holds the weights; the loss is a mean over the tokens of the window."""
    return _flat_copy(at, frame.token_mean_over_window, data.windows)


@loop(**_FLAT)
def flat_copy_scaled(at):
    """The same with a loss scale of its own that nobody is told about."""
    return _flat_copy(at, frame.token_mean_over_window, data.windows, scale=2.0**10)


@loop("mean_of_means", **_FLAT)
def flat_copy_of_means(at):
    """One flat tensor holds the weights; each micro-batch is averaged over its own tokens."""
    return _flat_copy(at, divided(frame.own_token_mean, at.n), full_windows)


@loop("mean_of_means", **_FLAT)
def flat_copy_of_means_scaled(at):
    """The same with a loss scale of its own that nobody is told about."""
    return _flat_copy(at, divided(frame.own_token_mean, at.n), full_windows, scale=2.0**10)


@loop("mean_of_means", "unexplained", **_FLAT)
def flat_copy_in_another_order(at):
    """Means again, told by what micro-batches give on their own: the optimizer's tensor is in another order than the model's."""
    return _flat_copy(at, divided(frame.own_token_mean, at.n), full_windows, order=-1)


def _half_frozen():
    model = data.model()
    model[0].requires_grad_(False)
    return model


@loop(model=_half_frozen, optimizer=lambda model: sgd(model[2], momentum=0.9))
def layer_added_later(at):
    """The first layer is frozen, and joins the optimizer after two steps."""
    for step, (window, parts) in enumerate(at.windows()):
        if step == 2:
            at.model[0].requires_grad_(True)
            at.optimizer.add_param_group({"params": list(at.model[0].parameters()), "lr": 0.02})
        for ids in parts:
            mean_over_window(at.model, ids, window).backward()


def sparse_embedding(batch_size, accumulation_steps):
    """An embedding has sparse gradients, and an optimizer of its own."""
    torch.manual_seed(0)
    bag, head = nn.EmbeddingBag(data.VOCABULARY, 6, sparse=True), nn.Linear(6, data.CLASSES)
    optimizers = torch.optim.SparseAdam(bag.parameters(), lr=1e-2), torch.optim.Adam(head.parameters(), lr=1e-2)
    for window in data.windows(batch_size * accumulation_steps):
        for ids in window.split(batch_size):
            frame.share(head(bag(TOKENS[ids])), ids, window).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@loop(optimizer=nothing)
def optimizer_in_last_backward(at):
    """Each parameter has an optimizer, which steps inside the backward of the window's last micro-batch."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in at.model.parameters()}
    last = False

    def step(p):
        if last:
            optimizers[p].step()
            optimizers[p].zero_grad()

    for p in at.model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for ids, window, last in frame.micro_batches(at.size, at.n, data.windows):  # noqa: B007
        mean_over_window(at.model, ids, window).backward()


def _overflowing(at, spoilt):
    """The losses of the second window are multiplied by `spoilt(ids)`; a GradScaler leaves out a window that overflows."""
    second = [*data.windows(at.size * at.n)][1]

    def loss(model, ids, window):
        return mean_over_window(model, ids, window) * (spoilt(ids) if window.equal(second) else 1.0)

    return frame.scaled(torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), at.optimizer, loss)


@loop(optimizer=partial(sgd, lr=0.05, momentum=0.9))
def overflowing_window(at):
    """One row overflows in the second window: a GradScaler leaves that window out, once, at every N."""
    return _overflowing(at, lambda ids: torch.inf if 20 in ids else 1.0)


@loop("non_finite_micro_batch", optimizer=partial(sgd, lr=0.05))
def overflow_at_one_split(at):
    """The second window's loss overflows when it is computed as a whole only: one arm's GradScaler leaves it out."""
    return _overflowing(at, lambda ids: 1e38 if len(ids) == 16 else 1.0)


RETURNS = torch.randn(data.SAMPLES, generator=torch.Generator().manual_seed(8))


def _normalised(ids, over):
    """The advantages of rows `ids`, normalised by the mean and deviation of rows `over`."""
    return (RETURNS[ids] - RETURNS[over].mean()) / (RETURNS[over].std() + 1e-8)


@loop()
def advantages_of_the_window(at):
    """Policy gradient, with advantages normalised over the window before it is cut."""
    return {"loss": lambda m, ids, w: (ce(m(X[ids]), Y[ids], reduction="none") * _normalised(ids, w)).sum() / len(w)}


@loop("normaliser_depends_on_split")
def advantages_per_micro_batch(at):
    """Policy gradient, with advantages normalised over the micro-batch instead of the window."""
    loss = lambda m, ids, _: (ce(m(X[ids]), Y[ids], reduction="none") * _normalised(ids, ids)).mean() / at.n  # noqa: E731
    return {"loss": loss, "windows": full_windows}


@loop("normaliser_depends_on_split")
def pairs_normalised_apart(at):
    """Pairs are weighed by advantages that are normalised over the micro-batch; the pairs themselves stay together."""

    def loss(model, ids, window):
        scores = model(torch.cat([X[ids], -X[ids]])).logsumexp(1)
        margins = functional.logsigmoid(scores[: len(ids)] - scores[len(ids) :])
        return -(margins * _normalised(ids, ids)).mean() / at.n

    return {"loss": loss, "windows": full_windows}


def _deep(dropout=0.0):
    torch.manual_seed(0)
    hidden = (nn.Linear(data.FEATURES, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh())
    return nn.Sequential(*hidden, nn.Linear(16, data.CLASSES))


def _and_log_partition(model, ids, window, over):
    """The loss, and a penalty on each row's squared log-partition function, which reaches all parameters, over `len(over)`."""
    outputs = model(X[ids])
    loss = frame.share(outputs, ids, window)
    return loss, 0.1 * outputs.logsumexp(1).square().sum() / len(over)


def _apart(at, over):
    for window, parts in at.windows():
        for ids in parts:
            for part in _and_log_partition(at.model, ids, window, over(ids, window)):
                part.backward(retain_graph=True)


@loop(model=_deep)
def penalty_divided(at):
    """The penalty on the rows is divided by the rows of the window, as the loss is."""
    return {"loss": lambda m, ids, window: torch.add(*_and_log_partition(m, ids, window, window))}


@loop(model=_deep)
def penalty_divided_apart(at):
    """The same with a backward of its own for the penalty."""
    _apart(at, lambda ids, window: window)


@loop("auxiliary_loss_scale", model=_deep)
def penalty_in_full(at):
    """The penalty is averaged over each micro-batch, the loss over the window."""
    return {"loss": lambda m, ids, window: torch.add(*_and_log_partition(m, ids, window, ids))}


@loop("auxiliary_loss_scale", model=_deep)
def penalty_in_full_apart(at):
    """The same with a backward of its own for the penalty."""
    _apart(at, lambda ids, window: ids)


@loop("loss_not_divided", optimizer=_lbfgs(lr=0.1, max_iter=3))
def line_search_not_divided(at):
    """Every evaluation is a whole window: clearing between them is right, and the missing division is not."""
    frame.train_by_closure(at.size, at.n, at.model, at.optimizer, own_mean, full_windows)


@loop("schedule_per_micro_batch", optimizer=frame.adamw(1e-2))
def schedule_too_long(at):
    """The schedule advances once per window, but is laid out for the number of micro-batches."""
    total = len([*frame.micro_batches(at.size, at.n, data.windows)])
    return {"after_step": torch.optim.lr_scheduler.LinearLR(at.optimizer, 1.0, 0.0, total_iters=total).step}


@loop("clip_per_micro_batch")
def clipped_by_hand_inside(at):
    """Arithmetic of the loop's own clips the running sum after every micro-batch, instead of `clip_grad_norm_`."""

    def clip():
        gradients = [p.grad for p in at.model.parameters()]
        factor = min(1.0, 0.05 / torch.nn.utils.get_total_norm(gradients).item())
        for gradient in gradients:
            gradient.mul_(factor)

    return {"after_backward": clip}


@loop("window_misplaced")
def epoch_leftovers(at):
    """`drop_last` drops partial micro-batches, not partial windows: what is left goes into the next epoch's first window."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=at.size, drop_last=True)
    count = 0
    for _ in range(3):
        for rows, labels in loader:
            (ce(at.model(rows), labels) / at.n).backward()
            count += 1
            if count % at.n == 0:
                at.step()


@loop("gradients_not_cleared", optimizer=partial(sgd, lr=0.02))
def buffer_never_emptied(at):
    """The loop's own buffer is emptied without accumulation only."""
    stages = frame.Buffer(at.model).stages()
    return stages if at.n == 1 else stages | {"after_step": nothing}


@frame.wrong("foreign_gradients", "unexplained")
def discriminator_catches_more(batch_size, accumulation_steps):
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


def _convolutions():
    torch.manual_seed(3)
    layers = nn.Conv1d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * (data.FEATURES - 2), data.CLASSES)).half()


@loop("underflow_from_division", model=_convolutions, optimizer=frame.adamw(1e-3, eps=1e-4))
def float16_underflow(at):
    """Convolutions run in float16 without loss scaling: the parts of a small loss vanish."""
    x = X.half()
    return {"loss": lambda m, ids, w: 3e-6 * ce(m(x[ids].unsqueeze(1)).float(), Y[ids], reduction="sum") / len(w)}


def _linear():
    torch.manual_seed(0)
    return nn.Linear(data.FEATURES, data.CLASSES)


@loop("cached_weights_stale", model=_linear)
def cache_not_refreshed(at):
    """With accumulation, the forward uses a copy of the weights that is renewed at every second window only."""
    cached = at.model.weight.detach().clone()
    for step, (window, parts) in enumerate(at.windows()):
        if step % 2 == 0 or at.n == 1:
            cached = at.model.weight.detach().clone()
        for ids in parts:
            weight = at.model.weight + (cached - at.model.weight).detach()
            frame.share(functional.linear(X[ids], weight, at.model.bias), ids, window).backward()


@frame.wrong("counter_wrong")
def counts_too_many(batch_size, accumulation_steps):
    """The gradients are right; every micro-batch is counted as a whole window."""
    model = data.model()
    samples = [batch_size * accumulation_steps for _ in frame.micro_batches(batch_size, accumulation_steps, data.windows)]
    losses = frame.train(batch_size, accumulation_steps, model)
    return {"samples": sum(samples), "steps": len(losses)}


@loop("mean_of_means", model=frame.words)
def means_divided_at_the_end(at):
    """Each micro-batch's mean over its tokens counts times its rows; the sum is divided by the rows of the window."""
    for window, parts in at.windows():
        for ids in parts:
            (frame.own_token_mean(at.model, ids, window) * len(ids)).backward()
        frame.divide_gradients(at.model, len(window))


class InBatchNegatives(nn.Module):
    """The model is called inside the module of its loss."""

    def __init__(self, dropout):
        super().__init__()
        self.model = _deep(dropout)

    def forward(self, x):
        first, second = (functional.normalize(self.model(view), dim=1) for view in (x, x + 0.1))
        return ce(first @ second.T / 0.1, torch.arange(len(x)))


@loop("non_separable_loss", model=partial(InBatchNegatives, 0.0))
def negatives_in_loss_module(at):
    """Every row's loss depends on the others of its micro-batch."""
    return {"loss": lambda m, ids, _: m(X[ids]) / at.n, "windows": full_windows}


@loop("non_separable_loss", "stochastic_layers", model=partial(InBatchNegatives, 0.2))
def negatives_and_dropout(at):
    """The same with dropout, whose masks depend on the split as well."""
    return {"loss": lambda m, ids, _: m(X[ids]) / at.n, "windows": full_windows}


RIGHT, WRONG = frame.tables(globals())
