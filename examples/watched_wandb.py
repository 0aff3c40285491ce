"""Watched runs in Weights & Biases, and the chart that shows them: `python examples/watched_wandb.py [FIGURE.svg]`.

Four runs of a small model are logged offline: right, with the mean of each micro-batch's own tokens, the same without a division
by N, and with gradients cleared inside the window from window 20 on. The chart is `watched_wandb.json`, which W&B draws in the
browser (a custom chart, docs/tracking.md). With `pip install vl-convert-python` it is drawn here, from the files of the runs.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import wandb
from torch import nn
from torch.nn import functional
from wandb.proto.wandb_internal_pb2 import Record

from accumulation_harness.watch import watch

CHART = Path(__file__).with_suffix(".json")
N, ROWS, LONGEST, WORDS = 4, 4, 16, 32
BLOCK, HEADER, WHOLE, LAST = 1 << 15, struct.Struct("<IHB"), 1, 4  # of W&B's log
RUNS = ("right", "own tokens", "not divided", "cleared")


def train(kind: str, run: wandb.Run, windows: int = 40) -> None:
    """Train one run, watched and logged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, WORDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.define_metric("accumulation/*", step_metric="accumulation/window")
    with watch(model, optimizer, log=run.log, tell=None):
        for step in range(windows):
            words = torch.randint(WORDS, (N, ROWS, LONGEST))
            lengths = torch.randint(3, LONGEST + 1, (N, ROWS, 1))
            labels = words.where(torch.arange(LONGEST) < lengths, -100)
            total = 0.0
            for k, (x, y) in enumerate(zip(words, labels, strict=True)):
                scores = model(x).flatten(0, 1)
                if kind in ("own tokens", "not divided"):
                    loss = functional.cross_entropy(scores, y.flatten()) / (N if kind == "own tokens" else 1)
                else:
                    loss = functional.cross_entropy(scores, y.flatten(), reduction="sum") / (labels >= 0).sum()
                if kind == "cleared" and step >= 20 and k == 2:
                    optimizer.zero_grad()
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": total}, step=step + 1)


def history(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of an offline run, out of the log that `wandb sync` uploads: records in blocks, in one piece or in several."""
    (path,) = folder.rglob("*.wandb")
    data, place, pieces = path.read_bytes(), len(":W&B") + 3, b""
    while place + HEADER.size <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER.size:
            place += left
            continue
        _, size, kind = HEADER.unpack_from(data, place)
        pieces += data[place + HEADER.size : place + HEADER.size + size]
        place += HEADER.size + size
        if kind in (WHOLE, LAST):
            record, pieces = Record.FromString(pieces), b""
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if row:
                yield row


def logged(folder: Path) -> list[dict[str, Any]]:
    """Make the runs, and return all rows with the name of their run, as W&B hands them to a chart."""
    for name in RUNS:
        own = folder / name
        own.mkdir()
        with wandb.init(mode="offline", dir=str(own), project="watched", name=name) as run:
            train(name, run)
    wandb.teardown()  # until then the end of a log may not be written
    return [{"name": name, **row} for name in RUNS for row in history(folder / name)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = logged(Path(folder))
    if sys.argv[1:]:
        import vl_convert

        chart = json.loads(CHART.read_text()) | {"data": {"values": found}}
        Path(sys.argv[1]).write_text(vl_convert.vegalite_to_svg(chart))
    else:
        print(f"{len(found)} rows; the last: {found[-1]}")
