"""Loops that are known to be judged wrongly today, one example of each kind; what would be right stands in the golden table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from accumulation_harness.audit import audit
from scoreboard import data
from tests.audit.loops.frame import X, Y, full_windows

ce = functional.cross_entropy


class Autoencoder(nn.Module):
    """A variational one, which draws its code in its forward: 12 numbers in a micro-batch of 4 rows, 48 in 16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(12, 6), nn.Linear(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        mu, logvar = self.encode(x).chunk(2, -1)
        out: Tensor = self.decode(mu + (logvar / 2).exp() * torch.randn_like(mu))
        return out


class Spectral(nn.Module):
    """A filter with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.head = nn.Parameter(torch.randn(7, dtype=torch.complex64)), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=12))
        return out


class Trained:
    """The loop that everyone writes, over tensors that have a parameter group each; what it exchanges is a method."""

    def __init__(self, batch_size: int, accumulation_steps: int) -> None:
        self.size, self.num, self.model = batch_size, accumulation_steps, self.make()
        self.optimizer = torch.optim.SGD([{"params": [p]} for p in self.model.parameters()], lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        for window in full_windows(batch_size * accumulation_steps):
            for ids in window.split(batch_size):
                self.loss(ids).backward()
                self.after_backward()
            self.before_step()
            self.optimizer.step()
            self.after_step()
            self.optimizer.zero_grad()

    def make(self) -> nn.Module:
        return data.model()

    def loss(self, ids: Tensor) -> Tensor:
        return ce(self.model(X[ids]), Y[ids]) / self.num

    def after_backward(self) -> None: ...
    def after_step(self) -> None: ...
    def before_step(self) -> None: ...


class ClippedByTotalNorm(Trained):
    """Not divided, and every step is clipped to the same length, as torchtitan clips."""

    def loss(self, ids: Tensor) -> Tensor:
        return ce(self.model(X[ids]), Y[ids])

    def before_step(self) -> None:
        own = list(self.model.parameters())
        clip_grads_with_norm_(own, 0.1, get_total_norm([p.grad for p in own if p.grad is not None]))


class ScheduleByMicroBatch(Trained):
    """It moves the rate after the end of this run alone."""

    def after_backward(self) -> None:
        self.schedule.step()


class AutoencoderUndivided(Trained):
    def make(self) -> nn.Module:
        return Autoencoder()

    def loss(self, ids: Tensor) -> Tensor:
        return (self.model(X[ids]) - X[ids]).square().mean()


class DividedByRows(Trained):
    """Where there are as many rows as micro-batches, that is the right number."""

    def loss(self, ids: Tensor) -> Tensor:
        return ce(self.model(X[ids]), Y[ids]) / (self.size if self.num > 1 else 1)


class RatesByLayer(Trained):
    """LARS by hand."""

    def before_step(self) -> None:
        for group in self.optimizer.param_groups:
            (p,) = group["params"]
            group["lr"] = float(0.05 * p.norm() / p.grad.norm())


class ComplexWeights(Trained):
    def make(self) -> nn.Module:
        return Spectral()


class Scaled(nn.Module):
    """Logits times a temperature of 1e-5 of the gradient, a prior that training alone moves, and an entropy for a log."""

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.net, self.scale, self.remembers = data.model(), nn.Parameter(torch.tensor(1.0)), remembers
        self.prior, self.entropy = torch.full((4,), 0.25), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x) * (1 + 1e-5 * self.scale)
        p = out.detach().softmax(-1).mean(0)
        self.entropy = -(p * p.log()).sum()
        if self.remembers:
            self.prior = 0.9 * self.prior + 0.1 * p
        return out


class Temperature(Trained):
    """The temperature alone is clamped after every backward."""

    def make(self) -> nn.Module:
        return Scaled(False)

    def after_backward(self) -> None:
        assert isinstance(self.model, Scaled) and self.model.scale.grad is not None
        self.model.scale.grad.clamp_(-1e-7, 1e-7)


class LoggedEntropy(Temperature):
    """The model keeps the entropy of its last forward, which nothing reads."""

    def after_backward(self) -> None: ...


class PriorByForward(LoggedEntropy):
    def make(self) -> nn.Module:
        return Scaled(True)


class AverageFromZero(Trained):
    """An average of the weights that begins at zeros moves after every micro-batch."""

    def make(self) -> nn.Module:
        model = super().make()
        self.kept = [torch.zeros_like(p) for p in model.parameters()]
        return model

    def after_backward(self) -> None:
        for kept, p in zip(self.kept, self.model.parameters(), strict=True):
            kept.lerp_(p.detach(), 0.1)


class AverageByStep(AverageFromZero):
    def after_step(self) -> None:
        super().after_backward()

    def after_backward(self) -> None: ...


class UnusedWeights(Trained):
    """Weights that no row uses shrink N times after each step."""

    def make(self) -> nn.Module:
        self.spare = nn.Parameter(torch.ones(4))
        return nn.ModuleDict({"net": super().make(), "spare": nn.ParameterList([self.spare])})

    def loss(self, ids: Tensor) -> Tensor:
        return ce(self.model["net"](X[ids]), Y[ids]) / self.num  # type: ignore[index]

    def after_step(self) -> None:
        with torch.no_grad():
            self.spare.mul_(0.99**self.num)


class DividedByOwnRows(Trained):
    """`/ len(ids)` in place of `/ N`."""

    def loss(self, ids: Tensor) -> Tensor:
        return ce(self.model(X[ids]), Y[ids]) / len(ids)


def audited(loop: type[Trained], **options: Any) -> Any:
    return audit(lambda batch_size, accumulation_steps: loop(batch_size, accumulation_steps), batch_size=16,
                 accumulation_steps=(4,), **options)  # fmt: skip


AUDITED: dict[str, Callable[[], Any]] = {
    "A1 clipped by total norm": lambda: audited(ClippedByTotalNorm),
    "A2 schedule by micro-batch": lambda: audited(ScheduleByMicroBatch),
    "A10 autoencoder undivided": lambda: audited(AutoencoderUndivided, allow=("stochastic_layers",)),
    "A11 divided by rows": lambda: audited(DividedByRows),
    "A12 rates by layer": lambda: audited(RatesByLayer),
    "A13 complex weights": lambda: audited(ComplexWeights),
    "A15 entropy for a log": lambda: audited(LoggedEntropy),
    "A18 divided by own rows": lambda: audited(DividedByOwnRows),
    "A3 average from zero": lambda: audited(AverageFromZero),
    "A3 average by step": lambda: audited(AverageByStep),
    "A4 prior by forward": lambda: audited(PriorByForward),
    "A5 temperature": lambda: audited(Temperature),
    "A6 unused weights": lambda: audited(UnusedWeights),
}
