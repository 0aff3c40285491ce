"""What the audits of Hugging Face's trainers, and of those built on them, set alike: plain SGD over two epochs, nothing saved."""

from __future__ import annotations

from typing import Any


def settings(folder: str, batch_size: int, accumulation_steps: int, **others: Any) -> dict[str, Any]:
    """Training arguments; `others` are added, or take the place of these."""
    plain = {
        "output_dir": folder,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "num_train_epochs": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    return plain | others
