"""A script of run_clm's kind: TrainingArguments on the command line, and transformers' Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


def main():
    (training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = GPT2LMHeadModel(config)
    lengths = torch.randint(3, 12, (96,))
    rows = [torch.randint(1, 40, (int(n),)) for n in lengths]

    def collate(samples):
        ids = torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)
        ids = torch.nn.functional.pad(ids, (0, 12 - ids.shape[1]))
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    trainer = Trainer(model, training_args, train_dataset=[{"input_ids": r} for r in rows], data_collator=collate)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
