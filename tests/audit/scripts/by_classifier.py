"""Trainer with a model whose loss ignores the number of tokens that Trainer hands to it."""

import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments, set_seed


def main():
    (training_args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 90}
    model = BertForSequenceClassification(BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    rows = [{"input_ids": torch.randint(5, 90, (8,)), "labels": row % 2} for row in range(96)]
    trainer = Trainer(model, training_args, train_dataset=rows)
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
