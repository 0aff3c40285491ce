"""DeepSpeed's engine, with a configuration file as its launcher's users write it."""

import argparse
import os

import torch
import toy

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import deepspeed.ops

deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled for a processor that needs none of it
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
torch.manual_seed(0)
model, data = toy.model(), toy.data(96)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)
accumulate = engine.gradient_accumulation_steps()
for epoch in range(2):
    for x, y in torch.utils.data.DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu()):
        loss = torch.nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("checkpoints")
