"""How often a watch is right: `python -m accumulation_harness.watch.calibration --loops 250 --seeds 3 --out watch.csv`.

Right loops are drawn at random (model, loss, sizes of micro-batches, optimizer, precision, clipping, short windows, with a replay
or without), and faults are planted into the same loops. Every loop has 4 windows. Printed: false alarms, and by fault what was
seen and named. The file has the counts by fault, precision, size and replay; it is written anew after every seed.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from accumulation_harness.judge.cause import Cause
from accumulation_harness.results.record import write_atomically
from accumulation_harness.source import commit
from accumulation_harness.watch.report import Report
from accumulation_harness.watch.session import watch

WINDOWS, FEATURES, CLASSES = 4, 12, 7
WIDTHS = (64, 256, 1024)  # 5 thousand, 71 thousand and 1.1 million parameters
LARGE = 5000  # 25 million
RIGHT = "none"  # the fault of a right loop
RUNGS = ("ledger", "sketch", "replay")
VERDICTS = ("equivalent", "different", "inconclusive")
GROUP = ("fault", "precision", "parameters", "replayed")
COUNTS = ("loops", "windows", *VERDICTS, "named", *RUNGS)
COLUMNS = (*GROUP, *COUNTS, "commit", "torch")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The settings of one loop."""

    seed: int
    width: int
    sizes: tuple[int, ...]  # rows of each micro-batch
    loss: str
    precision: str
    optimizer: str
    clipped: bool
    short: bool
    replayed: bool

    @property
    def parameters(self) -> int:
        """Of the model: three linear layers with biases."""
        return (FEATURES + 1) * self.width + (self.width + 1) * self.width + (self.width + 1) * CLASSES


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault: what it does to a loop, and in which loops it does anything."""

    cause: Cause
    in_loop: Callable[[Drawn], bool] = lambda drawn: True


FAULTS = (
    Fault(cause=Cause.loss_not_divided),
    Fault(cause=Cause.loss_divided_twice),
    Fault(cause=Cause.mean_of_means, in_loop=lambda drawn: max(drawn.sizes) > min(drawn.sizes)),
    Fault(cause=Cause.gradients_cleared_in_window),
    Fault(cause=Cause.gradients_not_cleared),
    Fault(cause=Cause.clip_per_micro_batch),
    Fault(cause=Cause.sum_rescaled_in_window),
    Fault(cause=Cause.weight_decay_per_micro_batch),
    Fault(cause=Cause.schedule_per_micro_batch),
    Fault(cause=Cause.clip_before_unscale, in_loop=lambda drawn: drawn.precision == "float16"),
    Fault(cause=Cause.short_window_divided_by_n, in_loop=lambda drawn: drawn.short),
    Fault(cause=Cause.foreign_gradients),
    Fault(cause=Cause.low_precision_accumulator),
    Fault(cause=Cause.ema_per_micro_batch),
)


def drawn(seed: int, widths: Sequence[int]) -> Drawn:
    """Settings at random."""
    draw = random.Random(seed)
    n = draw.randint(2, 6)
    equal = draw.random() < 0.4
    first = draw.randint(3, 9)
    return Drawn(
        seed=seed,
        width=draw.choice(widths),
        sizes=tuple(first if equal else draw.randint(2, 9) for _ in range(n)),
        loss=draw.choice(("cross_entropy", "by_hand", "smoothed", "ignored", "binary", "squared")),
        precision=draw.choice(("float32", "bfloat16", "float16")),
        optimizer=draw.choice(("SGD", "AdamW", "Adam", "RMSprop")),
        clipped=draw.random() < 0.5,
        short=n > 2 and draw.random() < 0.3,
        replayed=draw.random() < 0.5,
    )


def watched(setting: Drawn, fault: Cause | None) -> Report:
    """The report of one watched loop."""
    torch.manual_seed(setting.seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, setting.width), nn.Tanh(), nn.Linear(setting.width, setting.width), nn.GELU(),
        nn.Linear(setting.width, CLASSES),
    )  # fmt: skip
    optimizer: torch.optim.Optimizer = getattr(torch.optim, setting.optimizer)(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=setting.precision == "float16")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return _loss(setting, model(batch[0]), batch[1]), _terms(batch[1])

    average = (
        AveragedModel(model, avg_fn=lambda mean, new, _: 0.9 * mean + 0.1 * new) if fault is Cause.ema_per_micro_batch else None
    )
    with watch(model, optimizer, tell=None, loss=loss if setting.replayed else None) as seen:
        for window in range(WINDOWS):
            sizes = setting.sizes[: len(setting.sizes) // 2 + 1] if setting.short and window == WINDOWS - 1 else setting.sizes
            _window(setting, model, optimizer, scaler, sizes, fault, seen.batch, average)
            if fault is not Cause.gradients_not_cleared:
                optimizer.zero_grad(set_to_none=setting.seed % 2 == 0)
    return seen.report()


def _window(
    setting: Drawn,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    sizes: Sequence[int],
    fault: Cause | None,
    hand_over: Callable[[Any], Any],
    average: AveragedModel | None,
) -> None:
    parts = [(torch.randn(size, FEATURES), _targets(setting, size)) for size in sizes]
    terms = sum(_terms(y) for _, y in parts)
    for p in model.parameters() if fault is Cause.foreign_gradients else ():
        p.grad = torch.randn_like(p)
    for k, (x, y) in enumerate(map(hand_over, parts) if setting.replayed else parts):
        if fault is Cause.gradients_cleared_in_window:
            optimizer.zero_grad()
        own = _terms(y) * len(parts) if fault is Cause.mean_of_means else terms
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(setting.precision)
        with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            loss = _loss(setting, model(x), y) / max(own, 1)
        factor = {
            Cause.loss_not_divided: float(len(parts)),
            Cause.loss_divided_twice: 1 / len(parts),
            Cause.short_window_divided_by_n: len(parts) / len(setting.sizes),
        }
        scaler.scale(loss * factor.get(fault, 1.0) if fault else loss).backward()
        if fault is Cause.low_precision_accumulator:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.copy_(p.grad.bfloat16())
        if average is not None:
            average.update_parameters(model)
        if k < len(parts) - 1:
            _inside(model, optimizer, fault)
    if fault is not Cause.clip_before_unscale:
        scaler.unscale_(optimizer)
    if setting.clipped or fault is Cause.clip_before_unscale:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()


def _inside(model: nn.Module, optimizer: torch.optim.Optimizer, fault: Cause | None) -> None:
    """What a fault does between two backwards."""
    if fault is Cause.clip_per_micro_batch:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    if fault is Cause.schedule_per_micro_batch:
        optimizer.param_groups[0]["lr"] *= 0.9
    for p in model.parameters() if fault in (Cause.sum_rescaled_in_window, Cause.weight_decay_per_micro_batch) else ():
        assert p.grad is not None
        if fault is Cause.sum_rescaled_in_window:
            p.grad.mul_(0.5)
        else:
            p.grad.add_(p.detach(), alpha=0.1)


def _targets(setting: Drawn, size: int) -> Tensor:
    y = torch.randint(0, CLASSES, (size,))
    if setting.loss == "ignored":
        y[torch.rand(size) < 0.4] = -100
        y[0] = 0
    return y


def _terms(y: Tensor) -> int:
    return int((y != -100).sum())


def _loss(setting: Drawn, z: Tensor, y: Tensor) -> Tensor:
    """Summed over its terms."""
    z, hot = z.float(), functional.one_hot(y.clamp(min=0), CLASSES).float()
    match setting.loss:
        case "by_hand":
            return -z.log_softmax(-1)[torch.arange(len(y)), y].sum()
        case "smoothed":
            return functional.cross_entropy(z, y, reduction="sum", label_smoothing=0.1)
        case "binary":
            return functional.binary_cross_entropy_with_logits(z, hot, reduction="sum") / CLASSES
        case "squared":
            return functional.mse_loss(z, hot, reduction="sum") / CLASSES
    return functional.cross_entropy(z, y, reduction="sum")


def interval(hits: int, n: int) -> tuple[float, float]:
    """95 % of a proportion (Wilson 1927)."""
    if not n:
        return math.nan, math.nan
    z, p = 1.96, hits / n
    middle, half = (p + z * z / (2 * n)) / (1 + z * z / n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def counted(setting: Drawn, fault: Cause | None) -> dict[str, Any]:
    """One loop as a row of counts."""
    report = watched(setting, fault)
    rungs = {finding.rung for finding in report.findings}
    return {
        **dict(zip(GROUP, (str(fault or RIGHT), setting.precision, setting.parameters, int(setting.replayed)), strict=True)),
        **{"loops": 1, "windows": report.windows, "named": int(fault is not None and report.causes == (fault,))},
        **{verdict: int(report.verdict == verdict) for verdict in VERDICTS},
        **{rung: int(rung in rungs) for rung in RUNGS},
    }


def loops(number: int, faults: int, seed: int, widths: Sequence[int]) -> Iterator[tuple[Drawn, Cause | None]]:
    """So many right loops, and so many with each fault that does something in them."""
    yield from ((drawn(10**6 * seed + k, widths), None) for k in range(number))
    for fault in FAULTS:
        settings = (drawn(10**6 * seed + 10**5 + k, widths) for k in range(10 * faults))
        yield from ((setting, fault.cause) for setting in [one for one in settings if fault.in_loop(one)][:faults])


def summed(rows: Iterable[dict[str, Any]], by: Sequence[str]) -> list[dict[str, Any]]:
    """The counts of rows that agree in `by`, in the order in which they first come."""
    totals: dict[tuple[Any, ...], Counter[str]] = {}
    for row in rows:
        totals.setdefault(tuple(row[name] for name in by), Counter()).update({name: row[name] for name in COUNTS})
    return [{**dict(zip(by, key, strict=True)), **{name: own[name] for name in COUNTS}} for key, own in totals.items()]


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The counts as a file, with the commit that they were made at."""
    text, shared = io.StringIO(), {"commit": commit()["commit"] or "unknown", "torch": torch.__version__}
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, **shared} for row in summed(rows, GROUP))
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a right loop was called different."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loops", type=int, default=100, help="right loops for each seed, of 4 windows each")
    parser.add_argument("--faults", type=int, default=20, help="loops with each fault, for each seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--large", type=int, default=0, help="right loops with 25 million parameters, and a sixth for each fault")
    parser.add_argument("--out", type=Path, help="write the counts to this file, as CSV")
    given = parser.parse_args(arguments)
    batches = [loops(given.loops, given.faults, seed, WIDTHS) for seed in range(given.seeds)]
    batches += [loops(given.large, -(-given.large // 6), given.seeds, (LARGE,))] if given.large else []
    torch.set_num_threads(1)
    commit()  # of the code that runs; asked later, it would be that of the source tree by then
    rows: list[dict[str, Any]] = []
    told = time.monotonic()
    for batch in batches:
        for setting, fault in batch:
            rows.append(counted(setting, fault))
            if fault is None and rows[-1]["different"]:
                print(f"    false alarm: {setting}")
            if time.monotonic() > told + 10:
                told = time.monotonic()
                print(f"{len(rows)} loops, the last with {fault or 'no fault'}", file=sys.stderr)
        if given.out:
            write_atomically(given.out, to_csv(rows).encode())
    for row in summed(rows, ("fault",)):
        rungs = ", ".join(f"{rung} {row[rung]}" for rung in RUNGS)
        low, high = interval(row["different" if row["fault"] == RIGHT else "named"], row["loops"])
        if row["fault"] == RIGHT:
            print(f"right: {row['loops']} loops, {row['windows']} windows: {row['equivalent']} equivalent, {row['inconclusive']} "
                  f"inconclusive; false alarms {row['different']} ({low:.2%} to {high:.2%}; {rungs})")  # fmt: skip
        else:
            print(f"{row['fault']}: {row['loops']} loops, seen {row['different']} ({rungs}), named alone {row['named']} "
                  f"({low:.0%} to {high:.0%})")  # fmt: skip
    return int(any(row["different"] for row in rows if row["fault"] == RIGHT))


if __name__ == "__main__":
    sys.exit(main())
