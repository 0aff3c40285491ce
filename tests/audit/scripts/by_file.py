"""Reads its settings from a YAML file that is named nowhere on the command line."""

import re
from pathlib import Path

import torch
import toy

text = (Path(__file__).parent / "conf" / "train.yaml").read_text()
config = {key: float(value) for key, value in re.findall(r"(\w+): ([\d.]+)", text)}
batch, accumulate = int(config["batch_size"]), int(config["accumulate_grad_batches"])
torch.manual_seed(int(config["seed"]))
model = toy.model()
optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
x, y = toy.data(96).tensors
for epoch in range(int(config["max_epochs"])):
    for start in range(0, len(x), batch):
        rows = slice(start, start + batch)
        (torch.nn.functional.cross_entropy(model(x[rows]), y[rows]) / accumulate).backward()
        if (start // batch + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
