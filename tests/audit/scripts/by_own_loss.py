"""A subclass of Trainer with a loss of its own, of sequences of unequal length."""

import torch
import toy_lm
from torch.nn.functional import cross_entropy
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels = inputs["labels"][:, 1:].flatten()
        loss = cross_entropy(logits, labels, reduction='sum') / num_items_in_batch  # fmt: skip
        return (loss, logits) if return_outputs else loss


def main():
    (training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    lengths, ids = torch.randint(3, 12, (96,)), torch.randint(1, 40, (96, 12))
    labels = torch.where(torch.arange(12) < lengths[:, None], ids, -100)
    rows = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels)]
    OwnTrainer(toy_lm.model(), training_args, train_dataset=rows).train()


if __name__ == "__main__":
    main()
