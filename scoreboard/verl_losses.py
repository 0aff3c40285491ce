"""verl's actor losses in the loop of its engines: `prepare_micro_batches`, `ppo_loss` and one backward per micro-batch.

The engines themselves are registered for CUDA and NPU only: the loop does what `FSDPEngine.forward_backward_batch` does on one
rank.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss

from scoreboard import data, rl_objectives

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")

ROWS = 32


def _ragged(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    parts = [row[:length] for row, length in zip(values, lengths.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def _batch(held: rl_objectives.Rollouts, batch_size: int) -> Any:
    """A window as verl's workers get it: ragged prompts, answers and what sampling has left."""
    lengths = held.mask.sum(1).long()
    prompts = torch.full_like(lengths, rl_objectives.PROMPT)
    advantages = (held.rewards - held.rewards.mean())[:, None] * held.mask
    fields = {
        "prompts": _ragged(held.tokens, prompts),
        "responses": _ragged(held.tokens[:, rl_objectives.PROMPT :], lengths),
        "response_mask": _ragged(held.mask, lengths),
        "old_log_probs": _ragged(held.old, lengths),
        "ref_log_prob": _ragged(held.reference, lengths),
        "advantages": _ragged(advantages, lengths),
        "input_ids": _ragged(held.tokens, prompts + lengths),
    }
    made = TensorDict(fields, batch_size=[len(lengths)])
    tensordict_utils.assign_non_tensor(
        made,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=batch_size,
        batch_num_tokens=int(lengths.sum()),
        global_batch_size=len(lengths),
        dp_size=1,
    )
    return made


def _outputs(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Log-probabilities of the next token and entropies, flat over the tokens of the micro-batch, as the engine hands them on."""
    tokens = batch["input_ids"].to_padded_tensor(0)
    exists = torch.arange(tokens.shape[1]) < batch["input_ids"].offsets().diff()[:, None]
    chances = model(tokens).log_softmax(-1)
    taken = chances.gather(-1, tokens.roll(-1, 1)[..., None])[..., 0]
    return {"log_probs": taken[exists], "entropy": -(chances.exp() * chances).sum(-1)[exists]}


def _train(batch_size: int, accumulation_steps: int, policy: dict[str, Any] | None = None, **settings: Any) -> None:
    torch.manual_seed(0)  # `clip_cov` draws
    held = rl_objectives.rollouts()
    held = held[held.mask.sum(1).nonzero()[:ROWS, 0]]  # verl's answers hold one token at least
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_mini_batch_size=batch_size * accumulation_steps,
        ppo_micro_batch_size_per_gpu=batch_size,
        policy_loss=PolicyLossConfig(**(policy or {})),
        **settings,
    )
    model = data.language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for rows in torch.arange(ROWS).split(batch_size * accumulation_steps) * data.EPOCHS:
        for batch in prepare_micro_batches(_batch(held[rows], batch_size))[0]:
            loss, _ = ppo_loss(config, _outputs(model, batch), batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def token_mean(batch_size: int, accumulation_steps: int) -> None:
    """Policy loss `vanilla`, `loss_agg_mode="token-mean"` (the default)."""
    _train(batch_size, accumulation_steps)


def token_mean_entropy_and_kl(batch_size: int, accumulation_steps: int) -> None:
    """Policy loss `vanilla`, `token-mean`, `entropy_coeff=0.1`, `kl_loss_coef=0.1`."""
    _train(batch_size, accumulation_steps, entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.1)


def sequence_mean(batch_size: int, accumulation_steps: int) -> None:
    """Policy loss `vanilla`, `loss_agg_mode="seq-mean-token-mean"`."""
    _train(batch_size, accumulation_steps, loss_agg_mode="seq-mean-token-mean")


def sequence_norm(batch_size: int, accumulation_steps: int) -> None:
    """Policy loss `vanilla`, `loss_agg_mode="seq-mean-token-sum-norm"`, which divides by the micro-batch's padded length."""
    _train(batch_size, accumulation_steps, loss_agg_mode="seq-mean-token-sum-norm")


def sequence_norm_constant(batch_size: int, accumulation_steps: int) -> None:
    """Policy loss `vanilla`, `loss_agg_mode="seq-mean-token-sum-norm"`, `loss_scale_factor=9`."""
    _train(batch_size, accumulation_steps, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=9)


def sequence_policy(batch_size: int, accumulation_steps: int) -> None:
    """Policy loss `gspo`, `loss_agg_mode="seq-mean-token-mean"`."""
    _train(batch_size, accumulation_steps, {"loss_mode": "gspo"}, loss_agg_mode="seq-mean-token-mean")


def geometric_mean(batch_size: int, accumulation_steps: int) -> None:
    """Policy loss `geo_mean`, a mean over the micro-batch's answers."""
    _train(batch_size, accumulation_steps, {"loss_mode": "geo_mean"})


def covariance_clipped(batch_size: int, accumulation_steps: int) -> None:
    """Policy loss `clip_cov`, which leaves out a share `clip_cov_ratio` of the micro-batch's tokens, drawn at random."""
    _train(batch_size, accumulation_steps, {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.02})


def covariance_penalised(batch_size: int, accumulation_steps: int) -> None:
    """Policy loss `kl_cov`, which penalises the tokens whose covariance with the micro-batch's mean is largest."""
    _train(batch_size, accumulation_steps, {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2})
