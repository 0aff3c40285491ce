"""transformers `Trainer` on a tiny Wav2Vec2 with its CTC loss: `ctc_loss_reduction` of "sum" (the default) and of "mean"."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from scoreboard.transformers_trainer import _train

SAMPLES, LETTERS = 200, 8


def _model(reduction: str) -> Any:
    torch.manual_seed(0)
    quiet = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout", "layerdrop")
    config = transformers.Wav2Vec2Config(
        vocab_size=LETTERS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8,),
        conv_kernel=(10,), conv_stride=(5,), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        feat_extract_norm="layer", ctc_loss_reduction=reduction, pad_token_id=0, **dict.fromkeys(quiet, 0.0),
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def _rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        {
            "input_values": torch.randn(SAMPLES, generator=generator),
            "labels": torch.randint(1, LETTERS, (6,), generator=generator),
        }
        for _ in range(32)
    ]


def summed(batch_size: int, accumulation_steps: int) -> None:
    """`Wav2Vec2ForCTC` as it is configured by default: the losses of a micro-batch are added; equal lengths, divisible."""
    _ctc("sum", batch_size, accumulation_steps)


def averaged(batch_size: int, accumulation_steps: int) -> None:
    """`Wav2Vec2ForCTC` with `ctc_loss_reduction="mean"`; equal lengths, divisible."""
    _ctc("mean", batch_size, accumulation_steps)


def _ctc(reduction: str, batch_size: int, accumulation_steps: int) -> None:
    _train(_model(reduction), _rows(), batch_size, accumulation_steps, learning_rate=1e-3)
