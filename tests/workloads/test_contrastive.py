"""Losses with in-batch negatives, against numpy and the formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accumulation_harness.config import Contrast
from accumulation_harness.workloads.contrastive import Representations, losses, ranks


def made(queries: int = 5, passages: int = 5, texts: int = 1, bias: float | None = None) -> Representations:
    generator = torch.Generator().manual_seed(0)

    def unit(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)

    shift = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    return Representations(unit(queries, 7), unit(passages, texts, 7), torch.tensor(1.5, dtype=torch.float64), shift)


def by_hand(of: Representations, contrast: Contrast) -> list[float]:
    """Loops over queries and passages, in numpy."""
    q, p, scale = of.queries.numpy(), of.passages.numpy(), np.exp(float(of.log_scale))
    bias = 0.0 if of.bias is None else float(of.bias)
    columns = np.concatenate([p[:, k] for k in range(p.shape[1])])
    found = []
    for i in range(len(q)):
        s = np.array([scale * q[i] @ column + bias for column in columns])
        t = np.array([scale * other @ p[i, 0] + bias for other in q])
        if contrast == Contrast.sigmoid:
            found.append(sum(np.log1p(np.exp(-value if j == i else value)) for j, value in enumerate(s)))
        else:
            forth, back = np.log(np.exp(s).sum()) - s[i], np.log(np.exp(t).sum()) - s[i]
            found.append(forth if contrast == Contrast.one_sided else (forth + back) / 2)
    return found


@pytest.mark.parametrize("contrast", Contrast)
@pytest.mark.parametrize("shape", [{}, {"texts": 2}, {"passages": 9}, {"bias": -2.0}], ids=["pairs", "hard", "bank", "bias"])
def test_losses_are_the_formulas(contrast: Contrast, shape: dict[str, int]) -> None:
    of = made(**shape)  # type: ignore[arg-type]
    assert losses(of, contrast).numpy() == pytest.approx(by_hand(of, contrast), rel=1e-13)
    fewer = of._replace(queries=of.queries[:3], passages=of.passages[:3])
    assert not torch.allclose(losses(fewer, contrast), losses(of, contrast)[:3]), "they hang on each other"


def test_ranks_count_passages_that_are_as_near() -> None:
    of = made()
    table = (of.queries @ of.passages[:, 0].T).numpy()
    assert ranks(of).tolist() == [1 + int((row > row[i]).sum()) for i, row in enumerate(table)]
    same = of._replace(passages=of.passages[:1].expand(5, -1, -1))
    assert ranks(same).tolist() == [5] * 5, "a model that cannot tell passages apart is not the best of all"
