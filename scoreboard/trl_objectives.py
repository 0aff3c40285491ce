"""trl's trainers of 2026 on tiny random models: DPO with several terms, KTO with a live KL term, GRPO on fixed completions."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
import datasets
import torch
import transformers
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer

from scoreboard import pairs, plain_run, text
from scoreboard.transformers_trainer import _gpt2

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

GROUP, LONGEST = 8, 10  # completions per prompt, tokens per completion


def _reference() -> Any:
    """Another model than the one that is trained, and less sure of every token: its weights are the half."""
    model = _gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def _policy() -> Any:
    """GPT-2 with weights three times as large, so that its answers differ from the reference's."""
    model = _gpt2()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" not in name:
                parameter.mul_(3.0)
    return model


def _train(trainer: Any, config: Any, batch_size: int, accumulation_steps: int, given: dict[str, Any], **settings: Any) -> Any:
    """The log of the run, one entry per optimizer step."""

    class Ordered(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        arguments = plain_run.settings(folder, batch_size, accumulation_steps, **settings)
        made = config(**arguments, bf16=False, gradient_checkpointing=False, logging_steps=1)
        kind = trainer if trainer is GRPOTrainer else Ordered  # GRPO's sampler repeats the prompts
        started = kind(model=_policy(), args=made, processing_class=pairs.tokenizer(), **given)
        started.remove_callback(transformers.PrinterCallback)
        started.train()
        return started.state.log_history


def _dpo(batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    given = {"ref_model": _reference(), "train_dataset": pairs.preferences(32)}
    _train(DPOTrainer, DPOConfig, batch_size, accumulation_steps, given, max_length=16, **settings)


def dpo(batch_size: int, accumulation_steps: int) -> None:
    """`DPOTrainer`, the sigmoid loss, divisible."""
    _dpo(batch_size, accumulation_steps)


def dpo_with_sft(batch_size: int, accumulation_steps: int) -> None:
    """`DPOTrainer`, `loss_type=["sigmoid", "bco_pair", "sft"]` (MPO), divisible."""
    _dpo(batch_size, accumulation_steps, loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])


def dpo_sorted(batch_size: int, accumulation_steps: int) -> None:
    """`DPOTrainer`, `loss_type=["aot"]`, which sorts the rows of the micro-batch, divisible."""
    _dpo(batch_size, accumulation_steps, loss_type=["aot"])


def kto(batch_size: int, accumulation_steps: int) -> None:
    """`KTOTrainer`, a reference model that differs, KL above 0 at every step, divisible."""
    given = {"ref_model": _reference(), "train_dataset": pairs.judged(32)}
    log = _train(KTOTrainer, KTOConfig, batch_size, accumulation_steps, given, max_length=16)
    divergences = [entry["kl"] for entry in log if "kl" in entry]
    if not divergences or min(divergences) <= 0:
        raise RuntimeError(f"expected a KL term above 0 at every step, got {divergences}")


def kto_without_divergence(batch_size: int, accumulation_steps: int) -> None:
    """`KTOTrainer`, `loss_type="apo_zero_unpaired"`, which takes no KL term, divisible."""
    given = {"ref_model": _reference(), "train_dataset": pairs.judged(32)}
    _train(KTOTrainer, KTOConfig, batch_size, accumulation_steps, given, max_length=16, loss_type="apo_zero_unpaired")


def kto_same_reference(batch_size: int, accumulation_steps: int) -> None:
    """`KTOTrainer`, the reference model starts as the policy: a KL term of 0 at the first step, divisible."""
    given = {"ref_model": _policy(), "train_dataset": pairs.judged(32)}
    _train(KTOTrainer, KTOConfig, batch_size, accumulation_steps, given, max_length=16)


def _completions(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of 1 to LONGEST tokens, the same for a prompt in every run."""
    answers = []
    for place, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(100 * sum(int(word[1:]) for word in prompt.split()) + place % GROUP)
        length = int(torch.randint(1, LONGEST + 1, (1,), generator=generator))
        answers.append(torch.randint(2, text.VOCABULARY, (length,), generator=generator).tolist())
    asked = [[int(word[1:]) for word in prompt.split()] for prompt in prompts]
    return {"prompt_ids": asked, "completion_ids": answers, "logprobs": [[0.0] * len(answer) for answer in answers]}


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def _grpo(batch_size: int, accumulation_steps: int, **settings: Any) -> None:
    """Two prompts in every window; each window's completions are trained on twice, so that ratios leave 1."""
    prompts = datasets.Dataset.from_list([{"prompt": f"t{place + 3} t{2 * place + 5}"} for place in range(4)])
    given = {"train_dataset": prompts, "reward_funcs": _reward, "rollout_func": _completions}
    settings = {"num_iterations": 2, "shuffle_dataset": False, "num_train_epochs": 1, **settings}
    lengths = {"num_generations": GROUP, "max_completion_length": LONGEST, "beta": 0.0}
    _train(GRPOTrainer, GRPOConfig, batch_size, accumulation_steps, given, **lengths, **settings)


def grpo(batch_size: int, accumulation_steps: int) -> None:
    """`GRPOTrainer`, `loss_type="grpo"`, fixed completions of unequal lengths."""
    _grpo(batch_size, accumulation_steps, loss_type="grpo")


def grpo_bnpo(batch_size: int, accumulation_steps: int) -> None:
    """`GRPOTrainer`, `loss_type="bnpo"`, fixed completions of unequal lengths."""
    _grpo(batch_size, accumulation_steps, loss_type="bnpo")


def grpo_dr_grpo(batch_size: int, accumulation_steps: int) -> None:
    """`GRPOTrainer`, `loss_type="dr_grpo"`, fixed completions of unequal lengths."""
    _grpo(batch_size, accumulation_steps, loss_type="dr_grpo")


def grpo_dapo(batch_size: int, accumulation_steps: int) -> None:
    """`GRPOTrainer`, `loss_type="dapo"` (the default), fixed completions of unequal lengths."""
    _grpo(batch_size, accumulation_steps, loss_type="dapo")


def grpo_dapo_entropy(batch_size: int, accumulation_steps: int) -> None:
    """`GRPOTrainer`, `loss_type="dapo"`, `entropy_coef=0.5`, fixed completions of unequal lengths."""
    _grpo(batch_size, accumulation_steps, loss_type="dapo", entropy_coef=0.5)
