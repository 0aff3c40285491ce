"""The objectives of reinforcement learning on language models, over fixed rollouts: GRPO, Dr. GRPO, BNPO, DAPO and PPO.

Groups of 8 completions of one prompt, of 0 to 9 tokens, whose rewards, old and reference log-probabilities are given. A window
of 16 holds two whole groups; micro-batches of 4 and of 1 cut them, and one may hold nothing but an empty completion. Each
objective is written with its paper's normaliser, taken over the window, and then with normalisers that see one micro-batch only.

GRPO: Shao et al. 2024 (DeepSeekMath), eq. 3. Dr. GRPO: Liu et al. 2025. DAPO: Yu et al. 2025, eq. 8. BNPO: what trl calls so.
PPO: Schulman et al. 2017, eq. 9, by tokens, as language models are trained with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from scoreboard import data

GROUP, PROMPT, LONGEST = 8, 2, 9
LOWER, UPPER, HIGHER = 0.2, 0.2, 0.28  # how far a ratio may go; `HIGHER` is DAPO's upper bound
KL_COEFFICIENT, VALUE_COEFFICIENT, ENTROPY_COEFFICIENT = 0.04, 0.5, 0.05


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What sampling has left: rows are completions, `mask` [rows, LONGEST] says which of their tokens exist."""

    tokens: Tensor  # [rows, PROMPT + LONGEST], padded with 0
    mask: Tensor
    rewards: Tensor  # [rows]
    old: Tensor  # log-probabilities [rows, LONGEST] under the policy that sampled
    reference: Tensor  # the same under the reference model
    values: Tensor  # [rows, LONGEST], as predicted when they were sampled

    def __getitem__(self, rows: Tensor) -> Rollouts:
        return Rollouts(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})


class Policy(nn.Module):
    """Next-token log-probabilities, their entropy and a value for each place of the completion."""

    def __init__(self) -> None:
        super().__init__()
        self.body = data.language_model()
        self.value = nn.Linear(data.VOCABULARY, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.body(tokens)[:, PROMPT - 1 : -1]
        chances = logits.log_softmax(-1)
        taken = chances.gather(-1, tokens[:, PROMPT:, None])[..., 0]
        return taken, -(chances.exp() * chances).sum(-1), self.value(logits)[..., 0]


def rollouts() -> Rollouts:
    """40 completions of 5 prompts; every seventh is empty."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.arange(data.SAMPLES)
    prompts = torch.randint(1, data.VOCABULARY, (data.SAMPLES // GROUP, PROMPT), generator=generator)[rows // GROUP]
    lengths = torch.randint(1, LONGEST + 1, (data.SAMPLES,), generator=generator) * (rows % 7 != 3)
    mask = (torch.arange(LONGEST) < lengths[:, None]).float()
    completions = torch.randint(1, data.VOCABULARY, (data.SAMPLES, LONGEST), generator=generator) * mask.long()
    tokens = torch.cat([prompts, completions], 1)
    with torch.no_grad():
        now, _, values = Policy()(tokens)
    noise = torch.randn(3, *now.shape, generator=generator) * 0.2
    rewards = torch.rand(data.SAMPLES, generator=generator)
    return Rollouts(tokens, mask, rewards, now + noise[0], now + noise[1], values + noise[2])


def _group_advantages(rewards: Tensor, *, divided: bool = True) -> Tensor:
    """(r - mean) / std over each group of the rows given; Dr. GRPO leaves the division out."""
    parts = []
    for group in rewards.split(GROUP):
        centred = group - group.mean()
        parts.append(centred / (group.std(unbiased=False) + 1e-4) if divided else centred)
    return torch.cat(parts)


def _clipped(taken: Tensor, part: Rollouts, advantages: Tensor, upper: float = UPPER) -> Tensor:
    """- min(ratio A, clip(ratio) A) for each token."""
    ratio = (taken - part.old).exp()
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - LOWER, 1 + upper) * advantages)


def _kl(taken: Tensor, part: Rollouts) -> Tensor:
    """The estimator of GRPO's eq. 4 for each token."""
    gap = part.reference - taken
    return gap.exp() - gap - 1


Objective = Callable[[Policy, Rollouts, Tensor, Rollouts, int], Tensor]  # (policy, part, its place in the window, window, N)


def _train(batch_size: int, accumulation_steps: int, objective: Objective) -> None:
    """Two epochs over the same rollouts, as all of these objectives allow; the last window of an epoch is one group."""
    held = rollouts()
    torch.manual_seed(1)
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for rows in torch.arange(data.SAMPLES).split(batch_size * accumulation_steps) * data.EPOCHS:
        places = torch.arange(len(rows)).split(batch_size)
        for place in places:
            objective(policy, held[rows[place]], place, held[rows], len(places)).backward()
        optimizer.step()
        optimizer.zero_grad()


# -- GRPO: a mean over each completion's tokens, then over completions --------------------------------------------------------


def _grpo_rows(policy: Policy, part: Rollouts, advantages: Tensor) -> Tensor:
    """[rows]: the mean over each completion's tokens; an empty one gives 0."""
    taken, _, _ = policy(part.tokens)
    losses = _clipped(taken, part, advantages) + KL_COEFFICIENT * _kl(taken, part)
    return (losses * part.mask).sum(1) / part.mask.sum(1).clamp(min=1)


def grpo(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written GRPO, divided by the completions of the window; advantages over whole groups."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        advantages = _group_advantages(window.rewards)[place]
        return _grpo_rows(policy, part, advantages).sum() / len(window.rewards)

    _train(batch_size, accumulation_steps, objective)


def grpo_added(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written GRPO, means over the micro-batch added up."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        return _grpo_rows(policy, part, _group_advantages(window.rewards)[place]).mean()

    _train(batch_size, accumulation_steps, objective)


def grpo_cut_groups(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written GRPO, advantages over the part of a group that is in the micro-batch."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        return _grpo_rows(policy, part, _group_advantages(part.rewards)).sum() / len(window.rewards)

    _train(batch_size, accumulation_steps, objective)


# -- Dr. GRPO: a sum over tokens, divided by a constant length and the completions --------------------------------------------


def _dr_grpo_sum(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts) -> Tensor:
    advantages = _group_advantages(window.rewards, divided=False)[place]
    return (_clipped(policy(part.tokens)[0], part, advantages) * part.mask).sum()


def dr_grpo(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written Dr. GRPO, divided by the longest length allowed and the completions of the window."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        return _dr_grpo_sum(policy, part, place, window) / (LONGEST * len(window.rewards))

    _train(batch_size, accumulation_steps, objective)


def dr_grpo_padded(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written Dr. GRPO, divided by the length to which the micro-batch is padded."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        longest = part.mask.sum(1).max().clamp(min=1)
        return _dr_grpo_sum(policy, part, place, window) / (longest * len(window.rewards))

    _train(batch_size, accumulation_steps, objective)


# -- BNPO and DAPO: a mean over all tokens -------------------------------------------------------------------------------------


def _token_sum(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, upper: float) -> Tensor:
    return (_clipped(policy(part.tokens)[0], part, _group_advantages(window.rewards)[place], upper) * part.mask).sum()


def dapo(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written DAPO, divided by the tokens of the window."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        return _token_sum(policy, part, place, window, HIGHER) / window.mask.sum()

    _train(batch_size, accumulation_steps, objective)


def dapo_by_completions(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written DAPO, means over the micro-batch's tokens weighed by completions."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        mean = _token_sum(policy, part, place, window, HIGHER) / part.mask.sum().clamp(min=1)
        return mean * len(part.rewards) / len(window.rewards)

    _train(batch_size, accumulation_steps, objective)


def bnpo(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written BNPO, the mean over the micro-batch's tokens, divided by N."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        return _token_sum(policy, part, place, window, UPPER) / part.mask.sum().clamp(min=1) / num_parts

    _train(batch_size, accumulation_steps, objective)


# -- PPO: clipped policy and value losses, and an entropy bonus ----------------------------------------------------------------


def _ppo(policy: Policy, part: Rollouts, advantages: Tensor, targets: Tensor, entropy_tokens: Tensor, tokens: Tensor) -> Tensor:
    """Policy and value losses divided by `tokens`, the entropy by `entropy_tokens`."""
    taken, entropy, values = policy(part.tokens)
    near = part.values + (values - part.values).clamp(-LOWER, LOWER)
    value_loss = torch.maximum((values - targets).square(), (near - targets).square()) / 2
    loss = (_clipped(taken, part, advantages) * part.mask).sum() / tokens
    loss = loss + VALUE_COEFFICIENT * (value_loss * part.mask).sum() / tokens
    return loss - ENTROPY_COEFFICIENT * (entropy * part.mask).sum() / entropy_tokens


def _advantages(part: Rollouts) -> Tensor:
    """[rows, LONGEST]: the reward, given at the end and not discounted, minus the value predicted."""
    return part.rewards[:, None] - part.values


def _whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    mean = (advantages * mask).sum() / mask.sum().clamp(min=1)
    variance = ((advantages - mean).square() * mask).sum() / mask.sum().clamp(min=1)
    return (advantages - mean) / (variance + 1e-8).sqrt()


def ppo(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written PPO, every term divided by the window's tokens; advantages whitened over the window."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        advantages = _whitened(_advantages(window), window.mask)[place]
        total = window.mask.sum()
        return _ppo(policy, part, advantages, part.rewards[:, None], total, total)

    _train(batch_size, accumulation_steps, objective)


def ppo_entropy(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written PPO, the entropy bonus a mean over the micro-batch's tokens, divided by N."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        advantages = _whitened(_advantages(window), window.mask)[place]
        own = part.mask.sum().clamp(min=1) * num_parts
        return _ppo(policy, part, advantages, part.rewards[:, None], own, window.mask.sum())

    _train(batch_size, accumulation_steps, objective)


def ppo_whitened(batch_size: int, accumulation_steps: int) -> None:
    """Hand-written PPO, advantages whitened over the micro-batch."""

    def objective(policy: Policy, part: Rollouts, place: Tensor, window: Rollouts, num_parts: int) -> Tensor:
        advantages = _whitened(_advantages(part), part.mask)
        total = window.mask.sum()
        return _ppo(policy, part, advantages, part.rewards[:, None], total, total)

    _train(batch_size, accumulation_steps, objective)
