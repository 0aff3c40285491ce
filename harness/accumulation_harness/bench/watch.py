"""(i) A watched training step beside an unwatched one: in one process, windows in turn.

Both sides train the same language model; a window of either follows one of the other, so that both meet the same load. The first
windows, which are looked at closely, are measured apart from the later ones. The peak of memory is that of a fresh process over a
few windows, less what it takes before the first one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
from torch.nn import functional

from accumulation_harness.bench.audit import HEADS, LAYERS, Transformer
from accumulation_harness.bench.cost import Spread, own_memory
from accumulation_harness.bench.measurement import Measurement
from accumulation_harness.watch import watch

PART = "watch"
SIZES = (10**6, 10**7)
ROUNDS = 12
TARGET = 1.03
N, BATCH, LENGTH, TOKENS = 4, 8, 128, 256
PEAKS = 1  # fresh processes of either kind: bytes are nearly the same every time
# Every block is given back when it is freed: else the holes of glibc's heap are most of what the two sides differ by.
NO_HOLES = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
CLOSE = 5  # windows at the beginning, of which all are looked at closely


def measurements(rounds: int = ROUNDS) -> Iterator[Measurement]:
    """The ratio of a watched window to an unwatched one, by the number of parameters."""
    for size in SIZES:
        close, later = ratios(size, rounds)
        of = f"window (N={N}) over an unwatched one, {size:.0e} parameters"
        for what, found, target in (("a watched", later, TARGET), ("a watched and closely looked at", close, None)):
            wall, cpu = (Spread.of([pair[i] for pair in found]) for i in (0, 1))
            yield Measurement(part=PART, name=f"{what} {of}", unit="x", wall=wall, cpu=cpu, target=target)
    for size in SIZES:
        pairs = [(peak("watched", size), peak("plain", size)) for _ in range(PEAKS)]
        name = f"peak of memory of watched windows over unwatched ones, {size:.0e} parameters"
        note = f"{Spread.of([(watched - plain) / 2**20 for watched, plain in pairs]).median:.1f} MB more"
        yield Measurement(
            part=PART, name=name, unit="x", wall=Spread.of([watched / plain for watched, plain in pairs]), note=note
        )


def ratios(size: int, rounds: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(wall, processor time) ratios of the first windows, and of `rounds` later ones."""
    sides = [Side(size), Side(size)]
    seen = watch(sides[1].model, sides[1].optimizer, tell=None)
    pairs = []
    for k in range(CLOSE + rounds):
        spent = []
        for which in (0, 1) if k % 2 else (1, 0):
            side = sides[which]
            if which:
                seen.attach()
            started = time.perf_counter(), time.process_time()
            side.window()
            if which:
                seen.judge.finish()  # what it would do when the next window ends
            spent.append((which, time.perf_counter() - started[0], time.process_time() - started[1]))
            if which:
                seen.detach()
        plain, watched = (entry[1:] for entry in sorted(spent))
        pairs.append((watched[0] / plain[0], watched[1] / plain[1]))
    assert seen.report().verdict == "equivalent", str(seen.report())
    return pairs[1 : CLOSE - 1], pairs[CLOSE:]


class Side:
    """A model of about `size` parameters, AdamW, and the windows it trains on."""

    def __init__(self, size: int) -> None:
        torch.manual_seed(0)
        self.model = Transformer(HEADS * max(1, round((size / (12 * LAYERS)) ** 0.5 / HEADS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(0)

    def window(self) -> None:
        """One optimizer step of `N` micro-batches."""
        for _ in range(N):
            tokens = torch.randint(0, TOKENS, (BATCH, LENGTH + 1), generator=self.generator)
            logits = self.model(tokens[:, :-1])
            (functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / N).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def peak(kind: str, size: int) -> int:
    """Bytes by which a fresh process grows over `CLOSE` windows."""
    command = [sys.executable, "-m", "accumulation_harness.bench.watch", kind, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | NO_HOLES)
    return int(json.loads(done.stdout))


def main(kind: str, size: int) -> None:
    """Take the windows, `watched` or `plain`, and print the bytes by which the process grew."""
    torch.set_num_threads(1)
    side = Side(size)
    before = own_memory("VmHWM")
    seen = watch(side.model, side.optimizer, tell=None)
    if kind == "watched":
        seen.attach()
    for _ in range(CLOSE):
        side.window()
    seen.detach()
    print(own_memory("VmHWM") - before)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
