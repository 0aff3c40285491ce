"""A subclass of Trainer with a loss of its own, of sequences of unequal length."""

import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels = inputs["labels"][:, 1:].flatten()
        loss = cross_entropy(logits, labels, reduction='sum') / num_items_in_batch  # fmt: skip
        return (loss, logits) if return_outputs else loss


def main():
    (training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    lengths, ids = torch.randint(3, 12, (96,)), torch.randint(1, 40, (96, 12))
    labels = torch.where(torch.arange(12) < lengths[:, None], ids, -100)
    rows = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels)]
    OwnTrainer(model, training_args, train_dataset=rows).train()


if __name__ == "__main__":
    main()
