"""(h) The audit beside the function it audits: processor time and peak memory as ratios to one plain run, by parameters.

Every run has a process of its own. Time is that of the processor, after a tiny run has loaded what torch loads late; memory is
the peak above what the process holds once everything is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from accumulation_harness.audit import audit
from accumulation_harness.bench.cost import Cost, Spread, alternate, own_memory
from accumulation_harness.bench.measurement import Measurement

PART = "audit"
ROUNDS = 3
SIZES = (10**5, 10**6, 10**7, 5 * 10**7)
LARGE = 10**7  # parameters, from which on a single pair is run, which takes a minute or two
TIME, MEMORY = 12.0, 3.0
BATCH, STEPS, N = 32, 4, 4
LAYERS, HEADS, TOKENS, LENGTH = 4, 4, 256, 32


def measurements(rounds: int = ROUNDS) -> Iterator[Measurement]:
    """Time and peak memory of an audit of `N` micro-batches over those of one plain run, by the number of parameters."""
    for size in SIZES:
        sides = {side: partial(cost, side, size) for side in ("plain", "audit")}
        costs = alternate(sides, rounds if size < LARGE else 1)
        pairs = list(zip(costs["audit"], costs["plain"], strict=True))
        of = f"of an audit (N={N}, {STEPS} steps) over one plain run, {size:.0e} parameters"
        cpu = Spread.of([mine.cpu / plain.cpu for mine, plain in pairs])
        yield Measurement(part=PART, name=f"processor time {of}", unit="x", wall=cpu, cpu=cpu, target=TIME)
        peak = Spread.of([mine.peak / plain.peak for mine, plain in pairs])
        note = f"{costs['audit'][0].peak / 2**20:.0f} MiB over {costs['plain'][0].peak / 2**20:.0f} MiB"
        yield Measurement(part=PART, name=f"peak memory {of}", unit="x", wall=peak, target=MEMORY, note=note)


def cost(side: str, size: int) -> Cost:
    """Seconds and peak of one process."""
    command = [sys.executable, "-m", "accumulation_harness.bench.audit", side, str(size)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # NumPy's; torch's are set below: waiting threads take time too
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


class Trained:
    """A language model of about `size` parameters (blocks of attention and two layers), AdamW, clipping, `STEPS` steps."""

    def __init__(self, size: int) -> None:
        self.width = HEADS * max(1, round((size / (12 * LAYERS)) ** 0.5 / HEADS))

    def __call__(self, batch_size: int, accumulation_steps: int) -> None:
        """Train on a fixed sequence of rows, with equal micro-batches."""
        torch.manual_seed(0)
        model = Transformer(self.width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        rows = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            tokens = torch.randint(1, TOKENS, (batch_size * accumulation_steps, LENGTH + 1), generator=rows)
            optimizer.zero_grad()
            for part in tokens.split(batch_size):
                loss: Tensor = functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
                (loss / accumulation_steps).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


class Transformer(nn.Module):
    """Embeds, mixes and reads out tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        layers = (nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True) for _ in range(LAYERS))
        self.layers = nn.ModuleList(layers)
        self.read = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows, length, TOKENS] of [rows, length]."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.read(hidden)
        return logits


def run(side: str, size: int) -> None:
    """One plain run, or one audit, which must find the function equivalent."""
    train = Trained(size)
    if side == "plain":
        train(BATCH, 1)
        return
    report = audit(train, batch_size=BATCH, accumulation_steps=(N,))
    assert report.equivalent, report


def main(side: str, size: int) -> None:
    """Run it, and print what it cost."""
    torch.set_num_threads(1)
    held = own_memory("VmRSS")
    run("plain", 10**3)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    wall, cpu = time.perf_counter(), time.process_time()
    run(side, size)
    found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "peak": own_memory("VmHWM") - held}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
