"""argparse in main(), a loader with workers that augment, epochs, a schedule, a checkpoint at the end; sys.exit(main())."""

import argparse
import sys
from pathlib import Path

import torch
import toy
from torch.utils.data import DataLoader, default_collate


def jittered(rows):
    batch = default_collate(rows)
    return [batch[0] + 0.1 * torch.randn_like(batch[0]), *batch[1:]]


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", "-b", type=int, default=8)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default=Path(__file__).resolve().parent / "checkpoints")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    torch.manual_seed(42)
    model = toy.model()
    loader = DataLoader(toy.data(), batch_size=args.batch_size, shuffle=True, num_workers=2, collate_fn=jittered)
    windows = -(-len(loader) // args.gradient_accumulation_steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, windows * args.epochs)
    for epoch in range(args.epochs):
        for step, (x, y) in enumerate(loader, start=1):
            first = (step - 1) // args.gradient_accumulation_steps * args.gradient_accumulation_steps
            rows = min(len(loader.dataset) - first * args.batch_size, args.gradient_accumulation_steps * args.batch_size)
            loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / rows
            loss.backward()
            if step % args.gradient_accumulation_steps == 0 or step == len(loader):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        print(f"epoch {epoch}: {loss.item():.3f}", flush=True)
        Path(args.out).mkdir(exist_ok=True)
        torch.save(model.state_dict(), Path(args.out) / "last.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
