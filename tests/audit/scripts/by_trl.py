"""A subclass of SFTTrainer with a loss of its own; the model is made in another file."""

import datasets
import torch
import toy_lm
from trl import SFTConfig, SFTTrainer, TrlParser


class OwnTrainer(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels = inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction='sum') / num_items_in_batch  # fmt: skip
        return (loss, logits) if return_outputs else loss


if __name__ == "__main__":
    (config,) = TrlParser((SFTConfig,)).parse_args_and_config()
    rows = datasets.Dataset.from_list(toy_lm.rows(96))
    OwnTrainer(model=toy_lm.model(), args=config, train_dataset=rows, processing_class=toy_lm.tokenizer()).train()
