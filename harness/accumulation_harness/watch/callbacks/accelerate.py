"""Accelerate: `with watch_prepared(accelerator, model, optimizer) as seen:` around the loop, after `accelerator.prepare`."""

from __future__ import annotations

from functools import partial
from typing import Any

from accumulation_harness.watch.session import Watch, watch


def watch_prepared(accelerator: Any, model: Any, optimizer: Any, **options: Any) -> Watch:
    """Watch a model and an optimizer that `accelerator.prepare` has returned.

    Args:
        accelerator: Its trackers receive the metrics, `accumulation/*`, with the loop's own next row.
        model: The prepared model.
        optimizer: The prepared optimizer, or several.
        **options: Those of `watch`.

    Returns:
        The watch, a context manager around the training loop.

    Raises:
        ValueError: An argument cannot be watched.
    """
    if accelerator.trackers and "log" not in options:
        options["log"] = partial(accelerator.log, log_kwargs={"wandb": {"commit": False}})
    steps = accelerator.gradient_accumulation_steps
    return watch(accelerator.unwrap_model(model), optimizer, **{"accumulation_steps": steps, **options})
