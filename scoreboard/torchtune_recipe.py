"""torchtune's recipe `full_finetune_single_device` on a tiny model: its own `train`, handed what its `setup` would have made."""

from __future__ import annotations

import importlib.util
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torchtune.modules.loss import CEWithChunkedOutputLoss

from scoreboard import data


def _recipe() -> Any:
    """The class, from its file: the folder of recipes is in the wheel, and refuses to be imported."""
    path = Path(sysconfig.get_paths()["purelib"]) / "recipes/full_finetune_single_device.py"
    found = importlib.util.spec_from_file_location("full_finetune_single_device", path)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.FullFinetuneRecipeSingleDevice


class Chunked(torch.nn.Module):
    """The model as torchtune's are: logits in chunks of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.body = data.language_model()

    def forward(self, tokens: torch.Tensor, **_: Any) -> Any:
        return list(self.body(tokens).chunk(8, dim=1))


def _train(rows: torch.Tensor, batch_size: int, accumulation_steps: int, masked: int = 1) -> None:
    kind = _recipe()
    recipe = kind.__new__(kind)
    model = Chunked()
    labels = torch.where(rows == 0, -100, rows)
    labels[:, :masked] = -100
    parts = [
        {"tokens": part, "labels": kept} for part, kept in zip(rows.split(batch_size), labels.split(batch_size), strict=True)
    ]
    quiet = SimpleNamespace(start=lambda: None, stop=lambda: None, step=lambda: None)
    made = {
        "_model": model, "_optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "_loss_fn": CEWithChunkedOutputLoss(),
        "_gradient_accumulation_steps": accumulation_steps, "total_epochs": data.EPOCHS, "epochs_run": 0, "global_step": 0,
        "_dataloader": [{**part} for part in parts], "_steps_per_epoch": len(parts) // accumulation_steps,
        "_sampler": SimpleNamespace(set_epoch=lambda epoch: recipe.__dict__.update(_dataloader=[{**part} for part in parts])),
        "_profiler": quiet, "profiler_profile_memory": False, "profiler_wait_steps": 0, "profiler_warmup_steps": 0,
        "profiler_active_steps": 0, "_compile": False, "_optimizer_in_bwd": False, "_clip_grad_norm": None,
        "_lr_scheduler": None, "_device": torch.device("cpu"), "_log_every_n_steps": 10**9, "_log_peak_memory_stats": False,
        "max_steps_per_epoch": None, "activations_handling_ctx": nullcontext(), "save_checkpoint": lambda epoch: None,
        "ignore_labels_cache": torch.full((batch_size, 1), -100),
    }  # fmt: skip
    recipe.__dict__.update(made)
    recipe.train()


def unequal(batch_size: int, accumulation_steps: int) -> None:
    """Unequal lengths, the first token of each row masked as prompts are; divisible."""
    _train(data.sentences()[:32], batch_size, accumulation_steps)


def unequal_unmasked(batch_size: int, accumulation_steps: int) -> None:
    """Unequal lengths, every token a label, also the first, which no position predicts; divisible."""
    _train(data.sentences()[:32], batch_size, accumulation_steps, masked=0)
