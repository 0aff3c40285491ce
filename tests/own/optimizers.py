"""Optimizers as a user would write them."""

import random
import time

import torch


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv:2302.06675."""

    def __init__(self, params, lr, beta=0.99, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((0.9 * momentum + 0.1 * p.grad).sign(), alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - group["beta"])


class Stuck(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("no such luck")


def plain(params, lr):
    """A function, which takes no weight decay."""
    return torch.optim.SGD(params, lr=lr)


def not_one(params, lr):
    return 3


def raises(params, lr):
    raise RuntimeError("no such luck")


def partial(params, lr):
    """A function that forgets all parameters but the first."""
    return torch.optim.SGD(next(iter(params))["params"][:1], lr=lr)


class Dice(torch.optim.SGD):
    """Random numbers that are not torch's."""

    factor = staticmethod(random.random)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(self.factor())


class Idle(Dice):
    factor = staticmethod(lambda: 1.0)


class Wild(Dice):
    factor = staticmethod(lambda: float("inf"))


class Narrow(torch.optim.Adam):
    def step(self, closure=None):
        if any(p.dtype == torch.float64 for group in self.param_groups for p in group["params"]):
            raise RuntimeError("float32 alone")
        super().step()


class Centred(torch.optim.SGD):
    """Writes on its gradients."""

    def step(self, *args, **options):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
        super().step(*args, **options)


class Limited(torch.optim.SGD):
    """Matrices stay in [-1, 1], and many of their entries at these limits."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            if p.dim() == 2:
                p.clamp_(-1, 1)


class Bare(torch.optim.Optimizer):
    """It does not call its base class."""

    def __init__(self, groups, lr):
        self.param_groups = groups


def closing(groups, lr):
    """It asks for a closure."""
    return torch.optim.LBFGS(next(iter(groups))["params"], lr=lr)


class Clocked(torch.optim.SGD):
    """It times its steps, and keeps a mapping by the identities of its parameters."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9)
        self._seconds, self._matrices = 0.0, {}

    def step(self, closure=None):
        began = time.perf_counter()
        self._matrices |= {id(p): p.dim() > 1 for group in self.param_groups for p in group["params"]}
        super().step(closure)
        self._seconds += time.perf_counter() - began
