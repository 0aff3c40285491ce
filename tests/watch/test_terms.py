"""Losses of the run's own: the graph shows what their terms weigh, and the loop says that these hang on their own rows."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from accumulation_harness.watch import watch
from tests.slow import slow

N, ROWS, LONGEST, WORDS, WIDEST = 4, 6, 10, 7, 16


class Policy(nn.Module):
    """Scores of the words, and a value, at every position."""

    def __init__(self):
        super().__init__()
        self.words, self.scores, self.value = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.words(x).tanh()
        return self.scores(hidden), self.value(hidden).squeeze(-1)


class Rollout:
    """Rows of unequal lengths, with an advantage each."""

    def __init__(self, scores, value, words, mask, advantage):
        self.scores, self.value, self.words, self.mask, self.advantage = scores, value, words, mask, advantage[:, None]

    @property
    def logs(self):
        return self.scores.log_softmax(-1).gather(-1, self.words[..., None]).squeeze(-1)

    @property
    def clipped(self):
        """[rows, positions] of the policy gradient."""
        ratio = (self.logs - self.logs.detach() - 0.3 * torch.randn(self.mask.shape)).exp()
        return -torch.min(ratio * self.advantage, ratio.clamp(0.8, 1.2) * self.advantage)


def grpo(of, n, total):
    return ((of.clipped * of.mask).sum(-1) / of.mask.sum(-1)).mean() / n


def with_a_divergence(of, n, total):
    apart = -1 - of.logs
    return (((of.clipped + 0.04 * (apart.exp() - apart - 1)) * of.mask).sum(-1) / of.mask.sum(-1)).mean() / n


def of_own_tokens(of, n, total):
    return (of.clipped * of.mask).sum() / of.mask.sum() / n


def dapo(of, n, total):
    return (of.clipped * of.mask).sum() / total


def of_longest(of, n, total):
    return (of.clipped * of.mask).sum() / (len(of.mask) * WIDEST) / n


def ppo(of, n, total):
    probabilities = of.scores.softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    parts = of.clipped, 0.5 * (of.value - of.advantage).square(), -0.01 * entropy
    return sum((part * of.mask).sum() for part in parts) / total


def dpo(of, n, total):
    chosen, rejected = (of.logs * of.mask).sum(-1).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean() / n


def reinforce(of, n, total):
    return -(of.logs * of.advantage * of.mask).sum() / total


def masked(of, n, total):
    each = functional.cross_entropy(of.scores.flatten(0, 1), of.words.flatten(), reduction="none")
    return (each * of.mask.flatten()).sum() / total


class Fused(torch.autograd.Function):
    """What a kernel of somebody else's is to the graph."""

    @staticmethod
    def forward(ctx, scores, words, mask):
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            loss = (functional.cross_entropy(leaf.flatten(0, 1), words.flatten(), reduction="none") * mask.flatten()).sum()
            (ctx.gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach()

    @staticmethod
    def backward(ctx, received):
        return ctx.gradient * received, None, None


def fused(of, n, total):
    return Fused.apply(of.scores, of.words, of.mask) / total


def in_batch_negatives(of, n, total):
    hidden = of.scores.mean(1)
    scores = hidden @ hidden.T
    return (scores.logsumexp(-1) - scores.diag()).mean() / n


def of_tokens(mask):
    return mask.sum()


LOSSES = {  # loss -> what it is divided by in one micro-batch, the causes of the loss as it is
    grpo: (len, ()),
    with_a_divergence: (len, ()),
    of_own_tokens: (of_tokens, ("mean_of_means",)),
    dapo: (of_tokens, ()),
    of_longest: (lambda mask: len(mask) * WIDEST, ()),
    ppo: (of_tokens, ()),
    dpo: (lambda mask: len(mask) / 2, ()),
    reinforce: (of_tokens, ()),
    masked: (of_tokens, ()),
    fused: (of_tokens, ()),
}
UNCOUNTED = (of_longest,)  # its divisor may be any number: without a word of the loop, a wrong one is told and not named


def undivided(loss):
    return lambda of, n, total: loss(of, 1, total / n)


def divided_twice(loss):
    return lambda of, n, total: loss(of, n, total) / n


def watched(loss, divisor=None, *, summed=False, **options):
    """The report of four windows of a loss; `divisor` of a mask: what the loop says."""
    torch.manual_seed(0)
    model = Policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tell=None, **options) as seen:
        for _ in range(4):
            lengths = torch.randint(3, LONGEST + 1, (N, ROWS, 1))
            masks = (torch.arange(LONGEST) < lengths).float()
            for mask in masks:
                words = torch.randint(0, WORDS, (2, ROWS, LONGEST))
                rollout = Rollout(*model(words[0]), words[1], mask, torch.randn(ROWS))
                found = loss(rollout, N, masks.sum())
                if divisor is not None:
                    seen.terms(divisor(mask), summed=summed)
                found.backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen.report()


@pytest.mark.parametrize("said", (True, slow(False)))
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_of_the_runs_own_is_weighed(loss, said):
    divisor, causes = LOSSES[loss]
    options = {"divisor": divisor, "summed": loss is fused} if said else {"rows_apart": True}
    found = [watched(arm, **options) for arm in (loss, undivided(loss), divided_twice(loss))]
    assert (found[0].verdict, found[0].causes) == ("different" if causes else "equivalent", causes)
    for report, cause in zip(found[1:], ("loss_not_divided", "loss_divided_twice"), strict=True):
        if said or loss not in UNCOUNTED:
            assert report.causes == (cause, *causes)
        else:
            assert report.verdict == "inconclusive" and any(cause in reason for reason in report.reasons)


def test_rows_that_hang_on_each_other_are_not_certified_whatever_the_loop_says():
    assert watched(in_batch_negatives, len).verdict == watched(in_batch_negatives, rows_apart=True).verdict == "inconclusive"


def test_a_wrong_number_of_terms_is_not_certified():
    def of_places(of, n, total):
        return (of.clipped * of.mask).mean() * (1 + of.mask.sum() / 100) / n

    def of_some(of, n, total):
        return (of.clipped * of.mask).sum() / (total + 7)

    assert watched(dapo, lambda mask: mask.numel()).verdict != "equivalent"
    assert watched(of_places, rows_apart=True).verdict == watched(of_some, rows_apart=True).verdict == "inconclusive"


def test_without_a_word_of_the_loop_faults_are_named_and_nothing_is_certified():
    assert watched(dapo).verdict == "inconclusive" and watched(undivided(dapo)).causes == ("loss_not_divided",)


def test_a_loss_in_16_bits_is_right_to_its_rounding_and_wrong_beyond():
    def narrow(of, n, total):
        return (of.clipped.bfloat16() * of.mask).bfloat16().mean() / n

    def number(mask):
        return mask.numel()

    assert watched(narrow, number).verdict == "equivalent"
    assert watched(undivided(narrow), number).causes == ("loss_not_divided",)


ELEMENTS = (
    lambda z, t: (z - t).square(),
    lambda z, t: -functional.logsigmoid(z * t),
    lambda z, t: torch.min(z.exp() * t, z.exp().clamp(0.8, 1.2) * t),
    lambda z, t: functional.mse_loss(z, t, reduction="none"),
    lambda z, t: functional.binary_cross_entropy_with_logits(z, t.sigmoid(), reduction="none"),
)
REDUCTIONS = {  # (elements [rows, positions, features], mask [rows, positions], of the window) -> loss; its number of terms
    "mean": (lambda e, mask, total: e.mean() / N, lambda e, mask: e.numel()),
    "rows": (lambda e, mask, total: e.sum() / len(e) / N, lambda e, mask: len(e)),
    "tokens": (lambda e, mask, total: (e.mean(-1) * mask).sum() / total, lambda e, mask: mask.sum()),
    "elements": (
        lambda e, mask, total: (e * mask[..., None]).sum() / (total * e.shape[-1]),
        lambda e, mask: mask.sum() * e.shape[-1],
    ),
    "means of rows": (lambda e, mask, total: ((e.sum(-1) * mask).sum(-1) / mask.sum(-1)).mean() / N, lambda e, mask: len(e)),
}


def drawn(seed, *, said):
    """The report of a right run of one to three drawn losses; masks are full in every other window."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, positions, features = draw.choice((1, 3, 4)), draw.choice((3, 7)), draw.choice((1, 3, 6))
    model = nn.Linear(5, features)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = [
        (draw.choice(ELEMENTS), *REDUCTIONS[draw.choice([*REDUCTIONS])], draw.choice((1, 0.5, 0.25, -0.5, 0.1, 4.0)))
        for _ in range(1 if said else draw.randint(1, 3))
    ]
    with watch(model, optimizer, tell=None) as seen:
        for window in range(4):
            masks = (torch.rand(N, rows, positions) > 0.3 * (window % 2)).float()
            masks[..., 0] = 1
            for mask in masks:
                found, targets = model(torch.randn(rows, positions, 5)), torch.randn(rows, positions, features)
                for element, _, number, _ in losses[:1] if said else ():
                    seen.terms(number(element(found, targets), mask))
                sum(
                    factor * reduce(element(found, targets), mask, masks.sum()) for element, reduce, _, factor in losses
                ).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen.report()


@pytest.mark.parametrize("said", (False, True))
@pytest.mark.parametrize("first", (0, slow(20)))
def test_no_right_loss_is_called_wrong(first, said):
    reports = [drawn(seed, said=said) for seed in range(first, 20 if not first else 300)]
    assert [str(report) for report in reports if report.verdict == "different"] == []
    assert not any("the watch ended" in str(report) for report in reports)
    assert not said or sum(report.verdict == "equivalent" for report in reports) > len(reports) / 3
