"""An example of accelerate's kind: accumulate(), a prepared loader, a scheduler, clipping, evaluation and a tracker."""

import argparse

import torch
import toy
from accelerate import Accelerator
from accelerate.utils import set_seed


def training_function(args):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps, log_with="wandb")
    accelerator.init_trackers("example", init_kwargs={"wandb": {"mode": "offline"}})
    set_seed(args.seed)
    loader = torch.utils.data.DataLoader(toy.data(96), shuffle=True, batch_size=args.per_device_train_batch_size)
    model = toy.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 30)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(args.num_train_epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=epoch)
        accelerator.save_state("checkpoints/last")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    training_function(parser.parse_args())
