"""Runs that are easily taken for others: each beside one that differs from it by what it is to be told by."""

from itertools import islice

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from accumulation_harness.watch import watch
from tests.watch.loops import CLASSES, FEATURES, N, network, objective

ROWS, WINDOWS = 6, 6
# Loss: (model, micro-batches of the window, which of them) -> a loss, or several
# Body: (model, window, its micro-batches, what watches)
ce, mse = "cross_entropy", "mse_loss"


class Heads(nn.Module):
    """Two losses over one trunk."""

    def __init__(self, first=1, second=CLASSES):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, first), nn.Linear(8, second)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.first(hidden), self.second(hidden)


def rows(number=ROWS):
    return torch.randn(number, FEATURES)


def classes(*shape):
    return torch.randint(0, CLASSES, shape or (ROWS,))


def run(body, model=None, sizes=(N,) * WINDOWS, **options):
    """The report of windows of so many micro-batches."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    with watch(model, optimizer, tell=None, **options) as seen:
        for window, num in enumerate(sizes):
            body(model, window, num, seen)
            optimizer.step()
            optimizer.zero_grad()
    return seen.report()


def each(loss):
    """A backward for every loss of every micro-batch."""

    def body(model, _window, num, _seen):
        for k in range(num):
            found = loss(model, num, k)
            for one in found if isinstance(found, tuple) else (found,):
                one.backward(retain_graph=isinstance(found, tuple))

    return body


def of(name, model, number=ROWS):
    """A mean of one of PyTorch's loss functions."""
    z = model(rows(number))
    if name in (ce, "multi_margin_loss"):
        targets = classes(number)
    elif name == "kl_div":
        return functional.kl_div(z.log_softmax(-1), torch.rand(number, CLASSES).softmax(-1), reduction="batchmean")
    else:
        targets = torch.randn(number, CLASSES)
    more = (torch.ones(number, CLASSES),) if name == "gaussian_nll_loss" else ()
    return getattr(functional, name)(z, targets, *more)


means = each(lambda model, num, k: of(ce, model) / num)  # as they should be


# -- several losses, several backwards --------------------------------------------------------------------------------


def two_tasks(model, num, k):
    """A backward for each, and nothing is accumulated."""
    one, other = model(rows())
    return functional.cross_entropy(one, torch.randint(0, 3, (ROWS,))), functional.cross_entropy(other, classes())


def adversarial():
    """A generator's backwards leave gradients in the discriminator, which are cleared before its own."""
    torch.manual_seed(0)
    generator = nn.Linear(4, FEATURES)
    optimizer, bce = torch.optim.Adam(generator.parameters()), functional.binary_cross_entropy_with_logits

    def body(model, window, num, seen):
        for _ in range(num if window else 0):
            (bce(model(generator(torch.randn(8, 4))), torch.ones(8, 1)) / num).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        for _ in range(num):
            x = torch.cat([generator(torch.randn(8, 4)).detach(), rows(8)])
            (bce(model(x), torch.arange(16)[:, None].ge(8).float()) / num).backward()

    return body


def real_and_fake(model, num, k):
    return mean_squared(model(rows()), 1.0), mean_squared(model(rows()), 0.0)


def mean_squared(z, to):
    return functional.mse_loss(z, torch.full_like(z, to))


def in_one_sum(first, second):
    def loss(model, num, k):
        value, z = model(rows())
        found = 0.5 * functional.mse_loss(value, torch.randn(ROWS, 1)) / first(num)
        return found + functional.cross_entropy(z, classes()) / second(num)

    return each(loss)


def many_times(divisor):
    """A loss with a coefficient that is N by chance."""

    def loss(model, num, k):
        value, z = model(rows())
        found = functional.cross_entropy(z, classes()) + N * functional.mse_loss(value, torch.randn(ROWS, 1))
        return found / divisor

    return loss


def boxes(times):
    """Coordinates of some rows, in number N, are added up and divided by these rows of the window, as detectors do."""

    def body(model, window, num, seen):
        found = torch.rand(num, 12) > 0.4
        for own in found:
            z = model(rows(len(own)))[own]
            loss = functional.smooth_l1_loss(z, torch.randn(len(z), z.shape[1]), reduction="sum")
            (times * loss / found.sum()).backward()

    return body


def looked_at(model, window, num, seen):
    """Gradients of each loss are taken for a log; those of some other rows once in a window, with a graph of their own."""
    own = list(model.parameters())
    torch.autograd.grad(of(ce, model), own, create_graph=True)
    for _ in range(num):
        loss = of(ce, model) / num
        torch.autograd.grad(loss, own, retain_graph=True)
        loss.backward()


def divided_at_the_end(by):
    def body(model, window, num, seen):
        for _ in range(num):
            of(ce, model).backward()
        for p in model.parameters():
            p.grad /= by * num if by else N

    return body


def divided_before_the_step(by=1, *, inside=False):
    """By a hook of the run's own, which it registers once it is watched; or as the step begins to gather gradients."""

    def divide(optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            p.grad /= N

    def body(model, window, num, seen):
        (optimizer,) = seen.optimizers
        if window == 0 and inside:
            gather = optimizer._init_group
            optimizer._init_group = lambda *lists: [divide(optimizer), gather(*lists)][1]
        elif window == 0:
            optimizer.register_step_pre_hook(divide)
        for _ in range(num):
            (of(ce, model) / by).backward()

    return body


def through_hooks(of_gradients):
    """Every parameter has a hook of the run's own, which is there since the second window."""

    def body(model, window, num, seen):
        for p in model.parameters() if window == 1 else ():
            p.register_hook(of_gradients)
        means(model, window, num, seen)

    return body


def hooked(tensor, of_gradients, by=1.0):
    """A hook on what is between the losses and the parameters: the hidden layer, its outputs, or the loss itself."""

    def loss(model, num, k):
        hidden = model[0](rows()).tanh()
        z = model[2](hidden)[:, None]
        found = functional.cross_entropy(z.flatten(0, 1), classes()) / (num if by > 1 else 1)
        {"hidden": hidden, "outputs": z, "loss": found}[tensor].register_hook(of_gradients)
        return found

    return each(loss)


def cut_off(but):
    """The trunk is cut off from the losses of some micro-batches."""

    def loss(model, num, k):
        hidden = model[0](rows()).tanh()
        return functional.cross_entropy(model[2](hidden if but(num, k) else hidden.detach()), classes()) / num

    return each(loss)


def every_step(made, moved, times):
    """What follows the steps, made in the first window, is moved so many times before each of the others."""
    kept = []

    def body(model, window, num, seen):
        kept[:] = kept if window else [made(model, seen.optimizers[0])]
        for _ in range(times if window else 0):
            moved(kept[0], model)
        means(model, window, num, seen)

    return body


def advanced(times):
    return every_step(lambda model, optimizer: lr_scheduler.StepLR(optimizer, 2), lambda one, model: one.step(), times)


def averaged(times):
    return every_step(lambda model, optimizer: AveragedModel(model), lambda one, model: one.update_parameters(model), times)


def warm_and_anneal(steps):
    def made(model, optimizer):
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, steps - 2)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    return every_step(made, lambda one, model: one.step(), 1)


def remembered(inside):
    """New tensors are put into the optimizer's state, at each step or after each backward."""

    def body(model, window, num, seen):
        (optimizer,) = seen.optimizers
        for k in range(num):
            (of(ce, model) / num).backward()
            for p in model.parameters() if inside or k == num - 1 else ():
                optimizer.state[p]["seen"] = optimizer.state[p].get("seen", 0) * 0.9 + p.grad.square()

    return body


def thawed(cleared):
    """A layer joins the optimizer later; its gradients are cleared, or never."""

    def body(model, window, num, seen):
        (optimizer,) = seen.optimizers
        if not window:
            model[0].requires_grad_(False)
            del optimizer.param_groups[0]["params"][:2]
        if window == 3:
            optimizer.add_param_group({"params": list(model[0].requires_grad_(True).parameters())})
        for p in model[0].parameters() if kept else ():
            p.grad = kept.pop(0)
        means(model, window, num, seen)
        if window > 2 and not cleared:  # the run clears all of it
            kept[:] = [p.grad for p in model[0].parameters()]

    kept = []
    return body


def between(change):
    """The means of micro-batches, and what is done to the model before each of them: (model, which of them)."""

    def body(model, _window, num, _seen):
        for k in range(num):
            change(model, k)
            (of(ce, model) / num).backward()

    return body


@torch.no_grad()
def ascended(model, k):
    """As in SAM, each micro-batch by itself; back again before the step."""
    model[2].bias += (0, 1e-3, 1e-3, -2e-3)[k]


def divided_by(count):
    """Sums over tokens of which some are padding, whose gradients are divided at the end."""

    def body(model, window, num, seen):
        labels = [classes(2, 8).masked_fill(torch.rand(2, 8) < 0.1 * (1 + window), -100) for _ in range(num)]
        for y in labels:
            z = model(torch.randn(2, 8, FEATURES))
            functional.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum").backward()
        number = sum(count(y) for y in labels)
        for p in model.parameters():
            p.grad /= number

    return body


def shortened(length):
    """Clipped by hand."""

    def body(model, window, num, seen):
        means(model, window, num, seen)
        grads = [p.grad for p in model.parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.mul_((length / norm).clamp(max=1))

    return body


def before_the_step(change):
    """Clipped, and then changed."""

    def body(model, window, num, seen):
        means(model, window, num, seen)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        change(model)

    return body


def decayed_after_the_step(times):
    """So many times, before the next window begins."""

    def body(model, window, num, seen):
        with torch.no_grad():
            for p in (*model.parameters(),) * times if window else ():
                p.mul_(0.999)
        means(model, window, num, seen)

    return body


def put_back(model, window, num, seen):
    """What the window has so far is kept aside while others are differentiated; a metric of no rows is not a number."""
    for k in range(num):
        (of(ce, model) / num).backward()
        if k == 1:
            kept = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            of(ce, model).backward()
            for p, gradient in zip(model.parameters(), kept, strict=True):
                p.grad = gradient
    of(ce, model, 0)


def many_times_a_sum(times):
    """A sum that is divided by the rows of the window, and multiplied by a coefficient or by N."""
    return each(lambda m, n, k: times * functional.cross_entropy(m(rows()), classes(), reduction="sum") / (n * ROWS))


def after_a_dry_run(model, window, num, seen):
    if not window:
        of(ce, model).backward()
        model.zero_grad()
    means(model, window, num, seen)


def balanced(coefficient):
    """A term of the outputs that no function of PyTorch's computes is added in full to each micro-batch."""

    def loss(model, num, k):
        z = model(rows())
        found = functional.cross_entropy(z, classes()) / num
        return found + coefficient * z.softmax(-1).mean(0).square().sum()

    return each(loss)


def undivided_later(model, window, num, seen):
    for _ in range(num):
        (of(ce, model) / (num if window < 3 else 1)).backward()


# -- one backward, or fewer than forwards -----------------------------------------------------------------------------


def in_one_backward(mean):
    return lambda model, window, num, seen: mean(torch.stack([of(ce, model) for _ in range(num)])).backward()


def over_the_ends(number):
    """The windows go on over the ends of a loader of so many rows."""

    def batches():
        loader = DataLoader(TensorDataset(rows(number), classes(number)), batch_size=4)
        while True:
            yield from loader

    def body(model, window, num, seen):
        for x, y in islice(endless, num):
            (functional.cross_entropy(model(x), y) / num).backward()

    endless = batches()
    return body


def last_alone(model, window, num, seen):
    """The backward is inside the condition that the step is in."""
    [of(ce, model) / num for _ in range(num)][-1].backward()


def not_finite_left_out(model, window, num, seen):
    for k in range(num):
        x = rows()
        x[0, 0] = torch.nan if window % 3 == 2 and k == 1 else 0.0
        loss = functional.cross_entropy(model(x), classes()) / num
        if torch.isfinite(loss):
            loss.backward()


def measured(model, num, k):
    """A metric is computed and not differentiated."""
    z = model(rows())
    functional.mse_loss(z, torch.zeros_like(z))
    return functional.cross_entropy(z, classes()) / num


def in_chunks(divisor):
    """A cross-entropy in chunks of two rows; `divisor` of the rows of the micro-batch, of the window, and N."""

    def body(model, _window, _num, _seen):
        sizes = 8, 6, 10, 4
        for size in sizes:
            z, y = model(rows(size)), classes(size)
            pairs = zip(z.split(2), y.split(2), strict=True)
            total = torch.stack([functional.cross_entropy(a, b, reduction="sum") for a, b in pairs]).sum()
            (total / divisor(size, sum(sizes), len(sizes))).backward()

    return body


def labels_before_their_shift(model, window, num, seen):
    lengths = [7 + window % 2, 5, 9, 6]
    tokens = [classes(2, length) for length in lengths]
    for y in tokens:
        z = model(torch.randn(*y.shape, FEATURES))[:, :-1].reshape(-1, CLASSES)
        total = functional.cross_entropy(z, y[:, 1:].reshape(-1), reduction="sum")
        (total / sum(one.numel() for one in tokens)).backward()


# -- replays and sums -------------------------------------------------------------------------------------------------


def of_sequences(model, batch):
    """A mean over sequences of their means over tokens."""
    x, y = batch
    kept = y >= 0
    losses = functional.cross_entropy(model(x).flatten(0, 1), y.clamp(min=0).flatten(), reduction="none").view_as(y) * kept
    return (losses.sum(1) / kept.sum(1)).mean()


def one_sequence_each(model, window, num, seen):
    for length in (3, 5, 7, 4):
        y = classes(1, 8)
        y[:, length:] = -100
        x, y = seen.batch((torch.randn(1, 8, FEATURES), y))
        (functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / num).backward()


def handed_over(model, window, num, seen):
    for _ in range(num):
        x, y = seen.batch((rows(), classes()))
        (functional.cross_entropy(model(x), y) / num).backward()


def summed_aside(times, sizes, divided=True):
    """Gradients are added up in a buffer of the loop's own, each so many times."""

    def body(model, window, num, seen):
        parameters = list(model.parameters())
        totals = [torch.zeros_like(p) for p in parameters]
        for k, size in enumerate(sizes):
            (of(ce, model, size) / (num if divided else 1)).backward()
            for total, p in zip(totals, parameters, strict=True):
                total += p.grad * times(k, size)
                p.grad = None
        for p, total in zip(parameters, totals, strict=True):
            p.grad = total

    return body


def keeping(*times):
    return summed_aside(lambda k, size: times[k], (30,) * len(times))


def _runs():
    def case(name, body, *arguments, **options):
        return name, lambda: run(body, *arguments, **options)

    for num in (2, 4):
        windows = {"sizes": (num,) * WINDOWS}
        for c in (0.5, 0.25, 3.0):
            yield case(f"{c:g} times a mean, N = {num}", each(lambda m, n, k, c=c: c * of(mse, m) / n), **windows)
            yield case(f"{c:g} times a mean, N = {num}, undivided", each(lambda m, n, k, c=c: c * of(mse, m)), **windows)
            yield case(f"{c:g} times a mean, N = {num}, twice", each(lambda m, n, k, c=c: c * of(mse, m) / n / n), **windows)
        varying = {"sizes": (num, num, num + 1, num, num, 1)}
        yield case(f"windows of unequal N = {num}", means, **varying)
        yield case(f"windows of unequal N = {num}, undivided", each(lambda m, n, k: of(ce, m)), **varying)
        yield case(f"windows of unequal N = {num}, divided by N", each(lambda m, n, k, num=num: of(ce, m) / num), **varying)
    yield case("undivided from the fourth window on", undivided_later)
    yield case("two tasks, a backward each", each(two_tasks), Heads(3), (1,) * WINDOWS)
    yield case(
        "a discriminator beside its generator", adversarial(), nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    )
    yield case("real and fake rows, squared", each(real_and_fake), None, (1,) * WINDOWS)
    yield case("value and classes in one sum", in_one_sum(float, float), Heads())
    yield case("value and classes in one sum, value undivided", in_one_sum(lambda n: 1.0, float), Heads())
    yield case("value and classes in one sum, classes undivided", in_one_sum(float, lambda n: 1.0), Heads())
    for n in (3, CLASSES):
        yield case(f"coordinates of boxes, N = {n}", boxes(2.0), sizes=(n,) * WINDOWS)
    for n in (1, N):
        yield case("a head that counts N times" + ("" if n > 1 else ", undivided"), each(many_times(n)), Heads())
    yield case("gradients for a log", looked_at)
    yield case("hooks that log", through_hooks(lambda g: g.norm() and None))
    yield case("hooks that clamp", through_hooks(lambda g: g.clamp(-1e-3, 1e-3)))
    halves, clamps, logs = (lambda g: g / N), (lambda g: g.clamp(-1e-3, 1e-3)), (lambda g: g.norm() and None)
    for place in ("outputs", "loss"):
        yield case(f"a hook on the {place} divides", hooked(place, halves))
        yield case(f"a hook on the {place} divides once more", hooked(place, halves, N))
    yield case("a hook on the hidden layer logs", hooked("hidden", logs, N))
    yield case("a hook on the hidden layer clamps", hooked("hidden", clamps, N))
    yield case("the trunk is cut off but for the last", cut_off(lambda num, k: k == num - 1))
    yield case("the trunk is cut off by chance", cut_off(lambda num, k: torch.rand(()) < 0.5))
    for times in (1, N):
        after = "" if times == 1 else ", N times"
        yield case(f"a schedule after each step{after}", advanced(times))
        yield case(f"an average after each step{after}", averaged(times))
        yield case(f"a schedule in two parts{after}", warm_and_anneal(times * WINDOWS))
        yield case(f"a sum that counts {times} times", many_times_a_sum(times))
    yield case("new tensors of the state", remembered(inside=False))
    yield case("new tensors of the state, inside", remembered(inside=True))
    yield case("a layer that joins", thawed(True))
    yield case("a layer that joins and is never cleared", thawed(False))
    yield case("nothing between", between(lambda model, k: None))
    yield case("one tensor is clamped between", between(lambda model, k: k and model[2].bias.grad.clamp_(-1e-7, 1e-7)))
    yield case("a layer that is freed between", between(lambda model, k: model[0].requires_grad_(k > 1)))
    yield case("weights moved to and fro between", between(ascended))
    for divided in (True, False):
        loss = each(lambda m, n, k, by=divided: of(ce, m) / (N if by else n))
        yield case(f"a boundary from 0{', divided by N' * divided}", loss, sizes=(1, *(N,) * WINDOWS))
    yield case("tokens at the end", divided_by(lambda y: (y >= 0).sum()))
    yield case("tokens at the end, padding counted", divided_by(lambda y: y.numel()))
    yield case("clipped by hand", shortened(0.05))
    yield case("one layer divided after the clip", before_the_step(lambda model: model[0].weight.grad.div_(N)))
    yield case("decayed N times after the step", decayed_after_the_step(N))
    yield case("gradients put back, and a metric of no rows", put_back)
    yield case("decayed once, unseen by counters", before_the_step(lambda model: [p.data.mul_(0.99) for p in model.parameters()]))
    yield case("after a dry run", after_a_dry_run)
    yield case("divided at the end", divided_at_the_end(1))
    yield case("divided at the end, by half", divided_at_the_end(0.5))
    yield case("divided at the end, by N in short windows", divided_at_the_end(0), sizes=(N, N, N - 1, N, N, N - 1))
    yield case("divided before the step", divided_before_the_step())
    yield case("divided before the step, and the loss", divided_before_the_step(N))
    yield case("divided inside the step", divided_before_the_step(inside=True))
    yield case("divided inside the step, and the loss", divided_before_the_step(N, inside=True))
    for coefficient in (1e-2, 1e-5):
        yield case(f"a balance of {coefficient:g}", balanced(coefficient))
    told = {"accumulation_steps": N}
    yield case("losses added up", in_one_backward(lambda losses: losses.sum() / N), **told)
    yield case("losses added up, undivided", in_one_backward(lambda losses: losses.sum()), **told)
    yield case("the mean of a stack", in_one_backward(lambda losses: losses.mean()), **told)
    for number in (24, 32):
        yield case(f"a loader of {number} rows", over_the_ends(number))
    yield case("the last backward alone", last_alone)
    yield case("what is not finite is left out", not_finite_left_out)
    yield case("a metric that is not differentiated", each(measured))
    yield case("chunks", in_chunks(lambda own, window, num: window))
    yield case("chunks, mean of means", in_chunks(lambda own, window, num: own * num))
    yield case("labels before their shift", labels_before_their_shift)
    for name in ("l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss", "multi_margin_loss"):
        yield case(name, each(lambda m, n, k, name=name: of(name, m) / n))
        yield case(f"{name}, undivided", each(lambda m, n, k, name=name: of(name, m)))
    yield case("one sequence each", one_sequence_each)
    yield case("one sequence each, its mean as the loss", one_sequence_each, loss=of_sequences)
    yield case(
        "another loss than the run's",
        handed_over,
        loss=lambda m, batch: functional.cross_entropy(m(batch[0]), (batch[1] + 1) % CLASSES),
    )
    yield case("the run's loss", handed_over, loss=objective)
    yield case("a buffer of its own", keeping(1, 1, 1, 1))
    yield case("the second and third are lost", keeping(1, 0, 0, 1))
    yield case("the last is lost", keeping(1, 1, 1, 0))
    yield case("the last counts twice", keeping(1, 1, 1, 2))
    yield case("means weighted by rows", summed_aside(lambda k, size: size / 90, (30, 24, 20, 16), divided=False))
    yield case("means weighted alike", summed_aside(lambda k, size: 1.0, (30, 24, 20, 16)))


RUNS = dict(_runs())
