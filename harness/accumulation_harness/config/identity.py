"""The name of a trial: what a reader wants to see of it, and a hash of all its settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from accumulation_harness.config import Arms, Device, TrialConfig, name_of_target, to_dict


def identity(config: TrialConfig) -> str:
    """Name of a trial: what a reader wants to see, then 10 hex digits of the SHA-256 of the settings.

    `device` is to be resolved beforehand (`accumulation_harness.sweep.experiment.resolved`): here `auto` counts as `cpu`.
    """
    hashed = dataclasses.replace(
        config,
        device=Device.auto if config.device == Device.cpu else config.device,
        workload=_moved(config.workload),
        optimizer=_moved(config.optimizer),
        arms=Arms.auto,
    )
    digest = hashlib.sha256(json.dumps(to_dict(hashed), sort_keys=True).encode()).hexdigest()[:10]
    return f"{config.workload.label}-{config.norm}-{config.optimizer.label}-{config.precision}-seed{config.seed}-{digest}"


def _moved(own: Any) -> Any:
    """Settings whose target is known by its fingerprint: the folder that its file lies in is no part of a trial's identity."""
    return own if own.source is None else dataclasses.replace(own, target=name_of_target(own.target))
