"""Losses of pairs whose negatives are the other pairs of the batch, over the representations of queries and of passages."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accumulation_harness.config import Contrast
from accumulation_harness.workloads import wide


class Representations(NamedTuple):
    """What two towers give for n pairs; the passage of query i is passage i.

    There may be more passages than queries (a memory bank): they are negatives of every query.
    """

    queries: Tensor  # [n, E], unit rows
    passages: Tensor  # [m, E], unit rows
    log_scale: Tensor  # 0-dim: scores are exp(log_scale) times cosines, the inverse of a learned temperature
    bias: Tensor | None = None  # 0-dim, added to the scores of the sigmoid loss


def _scores(of: Representations) -> Tensor:
    """[n, m] score of every query with every passage; float32 or wider."""
    similar = of.log_scale.exp() * wide(of.queries) @ wide(of.passages).T
    return similar if of.bias is None else similar + of.bias


def losses(of: Representations, contrast: Contrast) -> Tensor:
    """Compute the loss of each query; a window's loss is their mean.

    InfoNCE (arXiv:1807.03748): l_i = -log softmax_j(s_ij)[i]; `symmetric` is the mean of this and of the same over queries,
    as in CLIP (arXiv:2103.00020). `sigmoid` (SigLIP, arXiv:2303.15343): l_i = -sum_j log sigmoid(±s_ij), + at j = i.

    Args:
        of: Representations of n queries and m passages.
        contrast: Which of the losses.

    Returns:
        [n] losses, float32 or wider.
    """
    own, table = torch.arange(len(of.queries), device=of.queries.device), _scores(of)
    if contrast == Contrast.sigmoid:
        signs = -torch.ones_like(table)
        signs[own, own] = 1.0
        return -F.logsigmoid(signs * table).sum(1)
    forth = F.cross_entropy(table, own, reduction="none")
    if contrast == Contrast.one_sided:
        return forth
    return 0.5 * (forth + F.cross_entropy(table[:, : len(own)].T, own, reduction="none"))


def ranks(of: Representations) -> Tensor:
    """Rank each query's own passage among those of all pairs.

    Args:
        of: Representations of n queries, [n, E], and m passages, [m, E].

    Returns:
        [n] int64 ranks from 1; among equal scores the own passage is the last.
    """
    table = of.queries @ of.passages.T
    own = table.diagonal()
    return (table >= own.unsqueeze(1)).sum(1)
