"""Variables of the environment; the whole batch is given, and cut by the script."""

import os

import torch
import toy

BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "64"))
GRAD_ACCUM = int(os.environ.get("GRAD_ACCUM", "1"))
micro_batch = BATCH_SIZE // GRAD_ACCUM

model = toy.model()  # without a seed
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = toy.data(96).tensors
for epoch in range(int(os.environ.get("EPOCHS", "1000"))):
    for window in torch.randperm(len(x)).split(BATCH_SIZE):
        optimizer.zero_grad()
        for rows in window.split(micro_batch):
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            (loss / GRAD_ACCUM).backward()
        optimizer.step()
