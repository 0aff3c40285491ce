"""transformers `Trainer` on tiny random models: SGD and AdamW, clipping off and on, two epochs with a remainder.

`make trainer NAME=transformers` runs the newest release pinned in requirements/transformers.txt, `transformers-old` one of
October 2024, `transformers-446` and `-450` two of the releases between.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

from scoreboard import plain_run, text

transformers.logging.set_verbosity_error()
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": text.VOCABULARY}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **quiet, bos_token_id=1, eos_token_id=1))


def _bert(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=text.VOCABULARY, max_position_embeddings=16, **BERT, **QUIET, **more)
    return getattr(transformers, kind)(config)


def _llama(kind: str = "Llama", **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**BERT, "vocab_size": text.VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes, **more))


class Ordered(Trainer):
    """Samples in the order of the data set, in every epoch."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def _train(
    model: Any, data: list[Any], batch_size: int, accumulation_steps: int, trainer: type[Trainer] = Ordered, **settings: Any
) -> list[float]:
    """Losses as the Trainer logs them, one per optimizer step."""
    with tempfile.TemporaryDirectory() as folder:
        given = plain_run.settings(folder, batch_size, accumulation_steps, **{"lr_scheduler_type": "linear", **settings})
        arguments = TrainingArguments(**given, logging_steps=1, remove_unused_columns=False)
        started = trainer(model=model, args=arguments, train_dataset=data, data_collator=text.collate)  # type: ignore[arg-type]
        started.remove_callback(transformers.PrinterCallback)
        started.train()
        return [entry["loss"] for entry in started.state.log_history if "loss" in entry]


def causal_sgd(batch_size: int, accumulation_steps: int) -> list[float]:
    """Causal LM (GPT-2), unequal lengths, a remainder."""
    return _train(_gpt2(), text.causal(), batch_size, accumulation_steps)


def causal_divisible(batch_size: int, accumulation_steps: int) -> list[float]:
    """Causal LM (GPT-2), unequal lengths, divisible."""
    return _train(_gpt2(), text.causal(32), batch_size, accumulation_steps)


def causal_equal_lengths(batch_size: int, accumulation_steps: int) -> list[float]:
    """Causal LM (GPT-2), equal lengths, a remainder."""
    return _train(_gpt2(), text.causal(equal=True), batch_size, accumulation_steps)


def causal_adamw_clipped(batch_size: int, accumulation_steps: int) -> list[float]:
    """Causal LM (GPT-2), AdamW, clipping at 1, unequal lengths, a remainder."""
    return _train(
        _gpt2(), text.causal(), batch_size, accumulation_steps, optim="adamw_torch", learning_rate=1e-3, max_grad_norm=1.0
    )


def llama_sgd(batch_size: int, accumulation_steps: int) -> list[float]:
    """Causal LM (Llama), unequal lengths, a remainder."""
    return _train(_llama(), text.causal(), batch_size, accumulation_steps)


def llama_divisible(batch_size: int, accumulation_steps: int) -> list[float]:
    """Causal LM (Llama), unequal lengths, divisible."""
    return _train(_llama(), text.causal(32), batch_size, accumulation_steps)


def lora(batch_size: int, accumulation_steps: int) -> list[float]:
    """Causal LM (Llama) with an adapter of PEFT (LoRA), unequal lengths, a remainder."""
    import peft

    settings = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return _train(peft.get_peft_model(_llama(), peft.LoraConfig(**settings)), text.causal(), batch_size, accumulation_steps)


def experts_divisible(batch_size: int, accumulation_steps: int) -> list[float]:
    """Causal LM with a mixture of experts (Mixtral) and its load-balancing loss, divisible."""
    model = _llama("Mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1)
    return _train(model, text.causal(32), batch_size, accumulation_steps)


def masked_sgd(batch_size: int, accumulation_steps: int) -> list[float]:
    """Masked LM (BERT), unequal lengths, a remainder."""
    return _train(_bert("BertForMaskedLM"), text.masked(), batch_size, accumulation_steps)


def tokens_sgd(batch_size: int, accumulation_steps: int) -> list[float]:
    """Token classification (BERT), unequal lengths, a remainder."""
    return _train(_bert("BertForTokenClassification", num_labels=3), text.tagged(), batch_size, accumulation_steps)


def sequences_sgd(batch_size: int, accumulation_steps: int) -> list[float]:
    """Sequence classification (BERT), a remainder."""
    return _train(_bert("BertForSequenceClassification", num_labels=2), text.classified(), batch_size, accumulation_steps)


def sequences_divisible(batch_size: int, accumulation_steps: int) -> list[float]:
    """Sequence classification (BERT), divisible."""
    return _train(_bert("BertForSequenceClassification", num_labels=2), text.classified()[:32], batch_size, accumulation_steps)


def _declared(model: Any) -> Any:
    """Says that the model divides by no number of items of the whole window, whatever its signature looks like."""
    model.accepts_loss_kwargs = False
    return model


def masked_declared(batch_size: int, accumulation_steps: int) -> list[float]:
    """Masked LM (BERT) with `model.accepts_loss_kwargs = False`, unequal lengths, a remainder."""
    return _train(_declared(_bert("BertForMaskedLM")), text.masked(), batch_size, accumulation_steps)


def sequences_divisible_declared(batch_size: int, accumulation_steps: int) -> list[float]:
    """Sequence classification (BERT) with `model.accepts_loss_kwargs = False`, divisible."""
    model = _declared(_bert("BertForSequenceClassification", num_labels=2))
    return _train(model, text.classified()[:32], batch_size, accumulation_steps)


def sequences_declared(batch_size: int, accumulation_steps: int) -> list[float]:
    """Sequence classification (BERT) with `model.accepts_loss_kwargs = False`, a remainder."""
    model = _declared(_bert("BertForSequenceClassification", num_labels=2))
    return _train(model, text.classified(), batch_size, accumulation_steps)
