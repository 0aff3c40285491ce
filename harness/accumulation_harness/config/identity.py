"""The name of a trial: what a reader wants to see of it, and a hash of all its settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from accumulation_harness.config import Arms, Device, TrialConfig, to_dict


def identity(config: TrialConfig) -> str:
    """Name a trial: what a reader wants to see, then 10 hex digits of the SHA-256 of the settings.

    Two trials have the same name exactly if their settings are the same, but for `arms` and the choice of `auto` or `cpu`.

    Args:
        config: The settings. `device` is to be resolved beforehand (`accumulation_harness.sweep.experiment.resolved`): here
            `auto` counts as `cpu`.

    Returns:
        The name of the trial's folder in a store, `digits-none-adamw-float32-seed0-0123456789` say.
    """
    hashed = dataclasses.replace(
        config,
        device=Device.auto if config.device == Device.cpu else config.device,
        arms=Arms.auto,
    )
    digest = hashlib.sha256(json.dumps(to_dict(hashed), sort_keys=True).encode()).hexdigest()[:10]
    return f"{config.workload.label}-{config.norm}-{config.optimizer.label}-{config.precision}-seed{config.seed}-{digest}"
