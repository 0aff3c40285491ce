"""A small training loop in stages, to be watched: right as it stands, wrong where a stage is exchanged."""

import torch
from torch import nn
from torch.nn import functional

from accumulation_harness.system.state import readable
from accumulation_harness.watch import watch

ROWS, FEATURES, CLASSES, N = 96, 10, 5, 4
# Losses: (model, x, y, rows of the window) -> what is differentiated


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, FEATURES, generator=generator, dtype=dtype), torch.randint(0, CLASSES, (ROWS,), generator=generator)


def network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), *(middle or (nn.Tanh(),)), nn.Linear(16, CLASSES))


def right(model, x, y, rows):
    return functional.cross_entropy(model(x), y, reduction="sum") / rows


def drawn(model):
    """A mean loss of four drawn rows."""
    return functional.cross_entropy(model(torch.randn(4, FEATURES)), torch.randint(0, CLASSES, (4,)))


def objective(model, batch):
    """The mean over a batch, as it is handed over to a watch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def summed(model, batch):
    """The sum over a batch, and the number of its terms."""
    return len(batch[1]) * objective(model, batch), len(batch[1])


def nothing(*_):
    pass


class Loop:
    """Windows of 4 micro-batches of unequal rows; every stage is a function of the loop."""

    def __init__(
        self,
        *,
        loss=right,
        model=None,
        optimizer=torch.optim.SGD,
        before_backward=nothing,
        after_backward=nothing,
        before_step=nothing,
        after_step=lambda loop: loop.optimizer.zero_grad(),
        sizes=(5, 3, 4, 4),
        scaler=None,
        windows=(),
    ):
        self.model = network() if model is None else model
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)
        self.loss, self.scaler = loss, scaler
        self.before_backward, self.after_backward = before_backward, after_backward
        self.before_step, self.after_step = before_step, after_step
        self.windows = windows or [sizes] * (ROWS // sum(sizes))
        self.k = self.window = 0

    def run(self, hand_over=nothing):
        x, y = data()
        start = 0
        for window, sizes in enumerate(self.windows):
            self.window = window
            for k, size in enumerate(sizes):
                self.k = k
                rows = slice(start, start + size)
                start += size
                hand_over((x[rows], y[rows]))
                self.before_backward(self)
                loss = self.loss(self.model, x[rows], y[rows], sum(sizes))
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                self.after_backward(self)
            self.before_step(self)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.after_step(self)

    def watched(self, **options):
        with watch(self.model, self.optimizer, **{"tell": None, **options}) as seen:
            self.run(seen.batch)
        return seen.report()

    @property
    def weights(self):
        """And buffers."""
        return [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers()) if readable(t)]


def is_same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def watched_and_alone(make, **options):
    """The report of a run, which ends with the weights that it has if nobody watches, and has drawn as many numbers."""
    ended = []
    for watches in (True, False):
        torch.manual_seed(3)
        loop = make()
        if watches:
            report = loop.watched(**options)
        else:
            loop.run()
        ended.append([*loop.weights, torch.rand(3)])
    assert is_same(*ended), str(report)
    return report
