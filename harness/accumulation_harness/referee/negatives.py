"""Exact oracles of losses with in-batch negatives: one table of all scores of a window, and which of them each row may see.

Written from the formulas, in one forward of the whole window; nothing here runs a loss or a loop under test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from accumulation_harness.config import Contrast
from accumulation_harness.referee.gradients import flatten

Pairs = tuple[Tensor, Tensor]  # queries [n, E] and passages [n, E]
Objective = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def gradient_of(model: nn.Module, inputs: Tensor, objective: Objective) -> tuple[float, Tensor]:
    """Compute a contrastive objective and its gradient in one forward pass.

    Args:
        model: The model.
        inputs: [n, ...] all inputs of the window.
        objective: A function of queries, passages, log scale and bias.

    Returns:
        The value, and the gradient [P].
    """
    queries, passages, log_scale, bias = model(inputs)
    value = objective(queries, passages, log_scale, bias)
    found = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True, allow_unused=True)
    return float(value.detach()), flatten(found)


def within_blocks(sizes: Sequence[int], contrast: Contrast) -> Objective:
    """Return the mean loss if a pair is compared with the pairs of its own block only.

    Args:
        sizes: Rows of each block; `[n]` gives the loss of the large batch.
        contrast: The contrastive loss.

    Returns:
        A function of queries, passages, log scale and bias.
    """
    block = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(list(sizes)))
    sees = block.unsqueeze(1) == block.unsqueeze(0)

    def objective(queries: Tensor, passages: Tensor, log_scale: Tensor, bias: Tensor | None) -> Tensor:
        return _mean_loss(_table(queries, passages, log_scale, bias), sees, contrast)

    return objective


class Past:
    """What a memory bank of `size` pairs is meant to hold: representations of earlier windows, without gradient.

    The encoder of a window is the model at that time, or with `decay` d the moving average of its weights, phi = d phi + (1 -
    d) theta at each window, which begins with the weights of the first window.
    """

    def __init__(self, size: int, *, has_queries: bool = True, decay: float | None = None, since: int = 0) -> None:
        """Create an empty bank.

        Args:
            size: Number of pairs.
            has_queries: Whether past queries are rows of the table of scores as well.
            decay: d of the moving average; without it the model encodes.
            since: First window, from 0, at which the bank is used.
        """
        self.size, self.has_queries, self.decay, self.since = size, has_queries, decay, since
        self.windows = 0
        self.before: Pairs | None = None  # of earlier windows, oldest first; at most `size`
        self.own: Pairs | None = None  # of the window that was seen last
        self._average: nn.Module | None = None

    def see(self, model: nn.Module, inputs: Tensor) -> None:
        """Begin the window of these inputs, at the model's present weights."""
        if self.own is not None:
            earlier = self.own if self.before is None else [torch.cat(both) for both in zip(self.before, self.own, strict=True)]
            self.before = earlier[0][-self.size :], earlier[1][-self.size :]
        with torch.no_grad():
            queries, passages, *_ = self._encoder(model)(inputs)
        self.own = queries, passages
        self.windows += 1

    @property
    def seen(self) -> int:
        """How many of the last pairs a block sees beside itself."""
        return self.size if self.windows > self.since else 0

    def _encoder(self, model: nn.Module) -> nn.Module:
        if self.decay is None:
            return model
        if self._average is None:
            self._average = copy.deepcopy(model)
        for phi, theta in zip(self._average.parameters(), model.parameters(), strict=True):
            phi.copy_(self.decay * phi + (1 - self.decay) * theta)
        return self._average


def beside_bank(sizes: Sequence[int], contrast: Contrast, past: Past) -> Objective:
    """Return the objective of blocks whose rows are also compared with a memory bank.

    It is the mean over the blocks, weighted by their rows, of the mean loss of a block; a block sees itself and the `past.seen`
    pairs before it, which are constants.

    Args:
        sizes: Rows of each block.
        contrast: The contrastive loss.
        past: The bank, which has seen this window.

    Returns:
        A function of queries, passages, log scale and bias.
    """

    def objective(queries: Tensor, passages: Tensor, log_scale: Tensor, bias: Tensor | None) -> Tensor:
        assert past.own is not None
        old_q, old_p = past.own if past.before is None else map(torch.cat, zip(past.before, past.own, strict=True))
        total, start, before = torch.zeros_like(log_scale), 0, len(old_p) - len(passages)
        for length in sizes:
            own, seen = slice(start, start + length), slice(max(0, before + start - past.seen), before + start)
            rows = torch.cat([queries[own], old_q[seen]]) if past.has_queries else queries[own]
            columns = torch.cat([passages[own], old_p[seen]])
            table = _table(rows, columns, log_scale, bias)
            total = total + length / len(queries) * _mean_loss(table, torch.ones_like(table, dtype=torch.bool), contrast)
            start += length
        return total

    return objective


def _table(queries: Tensor, passages: Tensor, log_scale: Tensor, bias: Tensor | None) -> Tensor:
    """[n, m] scores."""
    table = torch.exp(log_scale) * torch.einsum("ne,me->nm", queries, passages)
    return table if bias is None else table + bias


def _mean_loss(table: Tensor, sees: Tensor, contrast: Contrast) -> Tensor:
    own, sees = torch.arange(len(table), device=table.device), sees.to(table.device)
    right = table[own, own]
    if contrast == Contrast.sigmoid:
        signs = torch.full_like(table, -1.0)
        signs[own, own] = 1.0
        return torch.where(sees, torch.log1p(torch.exp(-signs * table)), 0.0).sum() / len(table)
    masked = table.masked_fill(~sees, -torch.inf)
    forth = (masked.logsumexp(1) - right).mean()
    if contrast == Contrast.one_sided:
        return forth
    back = masked[:, : len(table)].logsumexp(0) - right
    return 0.5 * (forth + back.mean())
