"""The price of a bug: a small language model is fine-tuned right and with each of four faults of the museum, ten seeds each.

`python scoreboard/prices.py` writes `prices.json`, which `make scoreboard` puts on the museum's page (minutes on one core).
"""

from __future__ import annotations

import argparse as code_of_python
import json
import math
import pydoc_data.topics as prose_of_python
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

N, ROWS, STEPS, LONGEST, SEEDS, RATE = 4, 16, 150, 64, 10, 3e-3
T_95 = 2.262  # Student's, 9 degrees of freedom
PAD = 0


class Model(nn.Module):
    """A causal transformer over bytes: two layers of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, 32), nn.Embedding(LONGEST, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 128)

    def forward(self, rows: Tensor) -> Tensor:
        length = rows.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden: Tensor = self.head(self.body(self.tokens(rows) + self.places.weight[:length], mask=mask, is_causal=True))
        return hidden


def lines(text: str) -> Tensor:
    """[rows, LONGEST] bytes of the lines of 6 characters and more, padded."""
    kept = [line.rstrip().encode("ascii", "ignore")[:LONGEST] for line in text.splitlines() if len(line.strip()) > 5]
    return torch.tensor([[*line, *[PAD] * (LONGEST - len(line))] for line in kept])


def summed(model: Model, rows: Tensor) -> Tensor:
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), ignore_index=PAD, reduction="sum")


def terms(rows: Tensor) -> int:
    return int((rows[:, 1:] != PAD).sum())


Weights = Callable[[list[int]], list[float]]  # tokens of each micro-batch -> by what its summed loss is multiplied


def right(tokens: list[int]) -> list[float]:
    return [1 / sum(tokens)] * N


def middle_lost(tokens: list[int]) -> list[float]:
    return [weight * kept for weight, kept in zip(right(tokens), (1, 0, 0, 1), strict=True)]


def mean_of_means(tokens: list[int]) -> list[float]:
    return [1 / count / N for count in tokens]


def means_added(tokens: list[int]) -> list[float]:
    return [1 / count for count in tokens]


FAULTS: dict[str, tuple[Weights, int]] = {  # what is told -> weights, and how often the schedule advances in a window
    "first and last micro-batch of 4 only (deepspeed-offload-middle-lost)": (middle_lost, 1),
    "mean of means (transformers-mean-of-means)": (mean_of_means, 1),
    "means added (transformers-heads-added)": (means_added, 1),
    "schedule per micro-batch (accelerate-schedule-per-micro-batch)": (right, N),
}


def windows(rows: Tensor, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield rows[torch.randint(len(rows), (ROWS,), generator=generator)]


def trained(start: dict[str, Tensor], rows: Tensor, seed: int, weights: Weights, pace: int = 1) -> Model:
    """After STEPS optimizer steps of AdamW, clipped at 1, with a rate that falls linearly to 0."""
    model = Model()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step, window in enumerate(windows(rows, seed)):
        optimizer.param_groups[0]["lr"] = RATE * max(0.0, 1 - pace * step / STEPS)
        parts = window.split(ROWS // N)
        for part, weight in zip(parts, weights([terms(part) for part in parts]), strict=True):
            (summed(model, part) * weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def loss(model: Model, rows: Tensor) -> float:
    return float(summed(model, rows)) / terms(rows)


def row(fault: str, correct: Sequence[float], broken: Sequence[float]) -> dict[str, Any]:
    """The paired difference over seeds, with its interval."""
    paid = [b - a for a, b in zip(correct, broken, strict=True)]
    price, half = statistics.mean(paid), T_95 * statistics.stdev(paid) / math.sqrt(len(paid))
    return {
        "fault": fault, "right": statistics.mean(correct), "broken": statistics.mean(broken), "price": price,
        "interval": [price - half, price + half], "worse": sum(one > 0 for one in paid), "seeds": len(paid),
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    prose = lines("\n".join(prose_of_python.topics.values()))
    code = lines(Path(code_of_python.__file__).read_text())
    order = torch.randperm(len(code), generator=torch.Generator().manual_seed(0))
    held_out, rows = code[order[:300]], code[order[300:]]
    results: dict[str, list[float]] = {name: [] for name in ("", *FAULTS)}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        start = trained(Model().state_dict(), prose, 1000 + seed, right).state_dict()
        for name, (weights, pace) in {"": (right, 1), **FAULTS}.items():
            results[name].append(loss(trained(start, rows, seed, weights, pace), held_out))
        print({name: round(values[-1], 4) for name, values in results.items()}, flush=True)
    what = (
        "A causal transformer of two layers over bytes learns prose (Python's own documentation), and is then fine-tuned on code "
        f"(lines of `argparse.py` of unequal lengths): {STEPS} steps of AdamW on {N} micro-batches of {ROWS // N} rows, clipped "
        f"at 1, a rate of {RATE} that falls to 0. Loss in nats per byte on {len(held_out)} held-out lines; the price is the loss "
        f"of the broken run minus that of the right run with the same seed, over {SEEDS} seeds (`scoreboard/prices.py`). It is "
        "one small model on one task at one rate, which was not tuned: it does not say what a fault costs elsewhere, and a fault "
        "that does better here may do worse there."
    )
    made = {"what": what, "rows": [row(name, results[""], results[name]) for name in FAULTS]}
    (Path(__file__).parent / "prices.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
