"""The balance loss of a mixture of experts, taken per micro-batch, from buffered counts, and from the window's counts.

L = E sum_e f_e p_e over E experts: f_e is the share of samples whose likeliest expert is e, p_e its mean probability. It is a
product of two means, so that its mean over micro-batches is another loss: L_micro - L = E sum_e Cov_k(f_ke, p_ke)
(arXiv:2501.11873). All of it is float64; the experts are linear classifiers of the sample's values, one of which answers for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accumulation_harness.experiments.shared.measuring import Batch, OnStep, Row, Setting, relative_distance

NUM_EXPERTS, NUM_CLASSES = 8, 10
STRENGTH = 0.1  # coefficient of the balance loss beside the cross-entropy; at 1 the router learns nothing but balance
Counts = Callable[[Sequence[Tensor]], list[Tensor]]  # shares f_k [E] of every micro-batch, in order -> those that each is given


def own(shares: Sequence[Tensor]) -> list[Tensor]:
    """Each micro-batch's own: what a loop does that computes the loss of what it sees."""
    return list(shares)


def buffered(shares: Sequence[Tensor]) -> list[Tensor]:
    """The mean of those so far: one pass, and nearer to the window's with every micro-batch."""
    return [torch.stack(list(shares[: k + 1])).mean(0) for k in range(len(shares))]


def two_pass(shares: Sequence[Tensor]) -> list[Tensor]:
    """The window's, from a first pass over the router alone."""
    return [torch.stack(list(shares)).mean(0)] * len(shares)


WAYS: dict[str, Counts] = {"per_micro_batch": own, "buffered_counts": buffered, "two_passes": two_pass}


class Mixture(nn.Module):
    """Router [E, d] and experts [E, 10, d + 1], from the trial's seed; the router starts with scores of about unit size."""

    def __init__(self, setting: Setting, features: int) -> None:
        super().__init__()
        generator = setting.generator(20)
        self.router, self.experts = (
            nn.Parameter((torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(features)).to(setting.device))
            for shape in ((NUM_EXPERTS, features), (NUM_EXPERTS, NUM_CLASSES, features + 1))
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n, E] probabilities, and [E] shares of the samples by most likely expert, which carry no gradient."""
        probabilities = (x @ self.router.T).softmax(1)
        return probabilities, F.one_hot(probabilities.argmax(1), NUM_EXPERTS).double().mean(0)

    def loss(self, x: Tensor, labels: Tensor, probabilities: Tensor) -> Tensor:
        """Mean cross-entropy of the chosen experts, whose scores are weighted by their probability."""
        weight, chosen = probabilities.max(1)
        inputs = torch.cat([x, x.new_ones(len(x), 1)], 1)
        scores = weight[:, None] * torch.einsum("ncd,nd->nc", self.experts[chosen], inputs)
        return F.cross_entropy(scores, labels)


def balance(shares: Tensor, probabilities: Tensor) -> Tensor:
    """E sum_e f_e p_e: 1 where both are uniform."""
    return NUM_EXPERTS * (shares * probabilities.mean(0)).sum()


def measurements(setting: Setting, on_step: OnStep) -> list[Row]:
    """One row per way and N: loss and router's gradient of the first window against the window's own, and a training's end."""
    config, workload = setting.config, setting.exact
    features = flat(workload.batch(torch.arange(1))).shape[1]
    start = Mixture(setting, features)
    windows = list(setting.windows())
    first = workload.batch(windows[0])
    rows = []
    for num in (1, *config.accumulation_steps):
        for name, way in WAYS.items() if num > 1 else [("full", own)]:
            trained = copy.deepcopy(start)
            for ids in windows:
                take_step(trained, workload.batch(ids), num, way, config.optimizer.lr)
            rows.append({"arm": name, "accumulation_steps": num, "micro_batch": config.effective_batch // num,
                         **at_once(start, first, num, way), **ending(trained, workload.held_out)})  # fmt: skip
    return rows


def flat(batch: Batch) -> Tensor:
    """[n, d] values of the samples."""
    values: Tensor = batch.inputs.flatten(1).double()
    return values


def window_balance(mixture: Mixture, batch: Batch, num: int, way: Counts) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Mean over the micro-batches of the balance loss; each one's shares and mean probabilities [E]."""
    routed = [mixture.route(x) for x in flat(batch).chunk(num)]
    shares = [own_shares for _, own_shares in routed]
    given = way(shares)
    loss = torch.stack([balance(f, p) for f, (p, _) in zip(given, routed, strict=True)]).mean()
    return loss, shares, [p.mean(0) for p, _ in routed]


def at_once(start: Mixture, batch: Batch, num: int, way: Counts) -> Row:
    """Of one window: `loss`, `window_loss`, what they differ by (`covariance`), and the router gradient's relative error."""
    loss, shares, means = window_balance(start, batch, num, way)
    exact, _, _ = window_balance(start, batch, 1, own)
    (mine,), (whole,) = (torch.autograd.grad(one, [start.router]) for one in (loss, exact))
    f, p = torch.stack(shares), torch.stack(means).detach()
    covariance = NUM_EXPERTS * ((f - f.mean(0)) * (p - p.mean(0))).mean(0).sum()
    return {
        "loss": float(loss.detach()),
        "window_loss": float(exact.detach()),
        "covariance": float(covariance),
        "gradient_error": relative_distance(mine, whole),
    }


def take_step(mixture: Mixture, batch: Batch, num: int, way: Counts, lr: float) -> None:
    """One step of SGD on the mean cross-entropy of the window and its balance loss; the micro-batches are of one size."""
    x, labels = flat(batch), batch.targets
    loss = torch.stack(
        [mixture.loss(a, b, mixture.route(a)[0]) for a, b in zip(x.chunk(num), labels.chunk(num), strict=True)]
    ).mean()
    total = loss + STRENGTH * window_balance(mixture, batch, num, way)[0]
    weights = [*mixture.parameters()]
    gradients = torch.autograd.grad(total, weights)
    with torch.no_grad():
        for own_weights, gradient in zip(weights, gradients, strict=True):
            own_weights.copy_(own_weights - lr * gradient)


def ending(mixture: Mixture, held_out: Batch) -> Row:
    """Held-out cross-entropy; entropy in nats of the experts' load, and its mean within classes: low where experts specialise."""
    with torch.no_grad():
        x = flat(held_out)
        probabilities, load = mixture.route(x)
        within = [mixture.route(x[held_out.targets == label])[1] for label in range(NUM_CLASSES)]
        return {
            "held_out_loss": float(mixture.loss(x, held_out.targets, probabilities)),
            "load_entropy": entropy(load),
            "class_entropy": sum(map(entropy, within)) / NUM_CLASSES,
        }


def entropy(shares: Tensor) -> float:
    """-sum f ln f."""
    return float(torch.special.entr(shares).sum())
