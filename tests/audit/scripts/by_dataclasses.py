"""HfArgumentParser over dataclasses, token counts of unequal length, and a loop of its own."""

from dataclasses import dataclass, field

import torch
from transformers import HfArgumentParser, set_seed


@dataclass
class DataArguments:
    rows: int = field(default=96, metadata={"help": "sequences to train on"})


@dataclass
class TrainingArguments:
    per_device_train_batch_size: int = field(default=8)
    gradient_accumulation_steps: int = field(default=1)
    max_steps: int = field(default=-1)
    learning_rate: float = field(default=1e-2)
    seed: int = field(default=42)


def main():
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
    ids, lengths = torch.randint(1, 20, (data_args.rows, 7)), torch.randint(2, 7, (data_args.rows,))
    labels = torch.where(torch.arange(7) < lengths[:, None], ids.roll(-1, 1), -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training_args.learning_rate)
    size, num = training_args.per_device_train_batch_size, training_args.gradient_accumulation_steps
    micro_batches = torch.arange(data_args.rows).split(size)
    windows = [micro_batches[k : k + num] for k in range(0, len(micro_batches), num)]
    for step, window in enumerate(windows):
        if step == training_args.max_steps:
            break
        num_items_in_batch = sum((labels[rows] != -100).sum() for rows in window)
        for rows in window:
            logits = model(ids[rows]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[rows].flatten(), reduction="sum")
            (loss / num_items_in_batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
