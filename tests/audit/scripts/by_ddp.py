"""A script for torchrun: a group of processes, DistributedDataParallel, no_sync inside the window."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert rank == int(os.environ["RANK"])
torch.manual_seed(0)
model = DistributedDataParallel(toy.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = (part[rank::world] for part in toy.data(128).tensors)
for _ in range(2):
    for k, rows in enumerate(torch.arange(len(x)).split(args.batch_size), start=1):
        is_last = k % args.accumulate == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            (torch.nn.functional.cross_entropy(model(x[rows]), y[rows]) / args.accumulate).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        torch.save(model.state_dict(), "last.pt")
    dist.barrier()
dist.destroy_process_group()
